"""One run's settings: made whole by the command line, read everywhere, changed nowhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

# What the stand-in's baseline leaves in fp32 behind an operator: nothing, or what `ROUNDINGS` name
# (neuron_cpu/runtime/rounding.py).
FUSED, OPERATOR = "fused", "operator"
ROUNDINGS = (FUSED, "products", "elementwise")
MEDUSA_CANDIDATES = 10  # of each head, in NxDI's trees (neuronx_distributed, medusa_utils.py)
# What of the settings goes into NeuronConfig, by its own names.
_NEURON_CONFIG = (
    "batch_size padding_side seq_len max_context_length torch_dtype rpl_reduce_dtype "
    "output_logits vocab_parallel fused_qkv sequence_parallel_enabled flash_decoding_enabled "
    "enable_bucketing "
    "context_encoding_buckets token_generation_buckets tp_degree cp_degree "
    "is_continuous_batching ctx_batch_size apply_seq_ids_mask async_mode"
)


@dataclass(frozen=True)
class Speculation:
    """Several tokens a step: guesses of the next ones, which one call of the model checks.

    Attributes:
        method: who guesses, one of `harness.inputs.speculation.METHODS`.
        length: tokens of a call, the newest one and its guesses.
        draft_path: folder of the model that guesses, where there is one.
        fused: draft and target are one graph, which needs a cache with room for a whole step.
        eagle: the draft is an EAGLE head.
        eagle_input_norm: its layer has a norm in front.
        tree: of Medusa's guesses, each the path to a node: which candidate of the first head, of
            the second one, and so on.
        token_tree: of an EAGLE head's guesses, the children of each node that has some.
    """

    method: str
    length: int
    draft_path: Optional[Path] = None
    fused: bool = False
    eagle: bool = False
    eagle_input_norm: bool = False
    tree: tuple[tuple[int, ...], ...] = ()
    token_tree: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def submodel(self) -> str:
        """NxDI's tag of the graph that a step runs."""
        if self.tree:
            return "medusa_speculation_model"
        return "fused_speculation_model" if self.fused else "speculation_model"

    @property
    def gives_logits(self) -> bool:
        """Whether graphs have logits beside their tokens. In NxDI 0.1 to 0.7 a fused draft that is
        no EAGLE head counts its outputs wrong with them, and no graph of a token tree can be traced
        with them (models/model_base.py: _context_encoding_forward, _eagle_tree_token_gen_forward).
        """
        if self.fused:
            return self.eagle and not self.token_tree
        return not self.tree

    @property
    def most(self) -> int:
        """Tokens that a step may give: of a tree of nodes as many as it has levels."""
        levels = {0: 1}
        for node, own in self.token_tree:  # in their order, so parents come first
            levels.update((child, levels[node] + 1) for child in own)
        return max(levels.values()) if self.token_tree else self.length

    @property
    def own_draft(self) -> Optional[Path]:
        """The folder of a draft model that is an application of its own."""
        return None if self.fused else self.draft_path

    def neuron_config(self, seq_len: int, buckets: Optional[list[int]]) -> dict[str, Any]:
        """Fields of NeuronConfig by its own names, for prompts and answers of `seq_len` tokens."""
        if self.tree:
            return {
                "is_medusa": True,
                "num_medusa_heads": self.length - 1,
                "medusa_speculation_length": 1 + len(self.tree),
                "medusa_tree": [list(path) for path in self.tree],
            }
        values: dict[str, Any] = {"speculation_length": self.length}
        if not self.fused:
            return values
        longest = -(-(seq_len + self.length) // 64) * 64  # kernels take caches in whole tiles
        values.update(max_length=longest, enable_fused_speculation=True)
        values["output_logits"] = self.gives_logits
        values["enable_eagle_speculation"] = self.eagle
        if self.token_tree:
            values["token_tree_config"] = {
                str(node): [str(child) for child in own] for node, own in self.token_tree
            }
        if buckets is not None:
            values["token_generation_buckets"] = [*buckets[:-1], longest]
        return values


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters that are loaded beside the model.

    Attributes:
        paths: name and folder, in the order of their numbers, from 1 on.
        chosen: the one that answers where a request names none; "0" is the model itself.
        rank: room for it in each layer; None: the largest of the adapters.
    """

    paths: tuple[tuple[str, Path], ...]
    chosen: str
    rank: Optional[int] = None

    def neuron_config(self) -> dict[str, Any]:
        """Fields of NeuronConfig by its own names."""
        folders = {name: str(path) for name, path in self.paths}
        # the checkpoints raise a rank that is too small
        config = {"max_loras": len(folders), "max_lora_rank": self.rank or 1}
        return {"lora_config": {**config, "lora_ckpt_paths": folders}}


@dataclass(frozen=True)
class Blocks:
    """A cache of blocks, in the place of a line for each sequence.

    Attributes:
        size: tokens of a block.
        chunks: prompts come in parts that several sequences share; else they share prefixes.
        number: of blocks; None: enough for all sequences at their longest.
        prefixes: lengths of cached prefixes that graphs read; empty: powers of two.
        tiles: queries and cached keys of a chunk's tile.
    """

    size: int
    chunks: bool
    number: Optional[int] = None
    prefixes: tuple[int, ...] = ()
    tiles: tuple[int, int] = (128, 1024)

    def count(self, batch_size: int, seq_len: int) -> int:
        """The number of blocks of the cache; with chunks nobody owns the last slot."""
        most = batch_size * -(-seq_len // self.size) + (1 if self.chunks else 0)
        return self.number or most

    def neuron_config(self, batch_size: int, seq_len: int, prompt: int) -> dict[str, Any]:
        """Fields of NeuronConfig by its own names, for prompts of at most `prompt` tokens."""
        values: dict[str, Any] = {
            "is_block_kv_layout": True,
            "pa_block_size": self.size,
            "pa_num_blocks": self.count(batch_size, seq_len),
        }
        if self.chunks:
            names = ("kernel_q_tile_size", "kernel_kv_tile_size")
            sizes = dict(zip(names, self.tiles, strict=True))
            return values | {"chunked_prefill_config": {"max_num_seqs": batch_size, **sizes}}
        powers = [2**n for n in range(7, 32) if 2**n < prompt and 2**n % self.size == 0]
        return values | {
            "is_prefix_caching": True,
            "prefix_buckets": list(self.prefixes) or [*powers, prompt],
        }


@dataclass(frozen=True)
class Serving:
    """Limits and access of the HTTP server.

    Attributes:
        api_key_file: whose first line every request must carry; None where everybody may ask.
        max_waiting: answers in the queue.
        drain_seconds: for answers that run when the server is to end.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Optional[Path] = None
    max_waiting: int = 64
    drain_seconds: int = 30


@dataclass(frozen=True)
class Swap:
    """A kernel in the place of a part of any model.

    Attributes:
        source, name: the file, and what in it is called.
        at: what it replaces, one of `harness.inputs.swap.PLACES`.
        layers: of a model that is cut; None: all.
        least_cosine: to the reference, that every token must reach.
    """

    source: Path
    name: str
    at: str
    layers: Optional[int]
    least_cosine: float


@dataclass(frozen=True)
class Settings:
    """The command line's arguments with defaults; `dataclasses.replace` makes variants.

    None means "not given": the model, the mode or the SDK decides.
    """

    mode: str
    llama: str  # submission: module name or path
    contestants: tuple[str, ...]  # all submissions that are compared, the first one included
    enable_nki: bool
    libraries: Optional[list[Path]]  # checkouts of NxD and NxD Inference
    model_path: Optional[Path]
    compiled_model_path: Optional[Path]
    recompile: bool
    clear: tuple[str, ...]  # folders of the cache, or "all"
    debug: bool

    # the submission's process
    isolate: bool
    require_isolation: bool
    memory_limit: float  # GiB
    cpu_limit: int  # seconds of processor time
    time_limit: float  # seconds for one compile, load or generation

    # generation
    prompts: tuple[str, ...]  # empty where the model is to choose the default one
    prompt_notes: tuple[str, ...]  # one line for each --prompt value that was split
    given: tuple[str, ...]  # the words of the command line that --mode diff takes, too
    system: Optional[str]  # of a chat
    raw: bool
    stream: bool
    max_new_tokens: Optional[int]
    do_sample: bool
    top_k: int  # 1 is greedy
    top_p: float
    temperature: float
    seed: int
    pad_token_id: Optional[int]
    on_device_sampling: bool
    global_topk: Optional[int]
    dynamic: bool
    speculation: Optional[Speculation]  # None: one token a step

    serving: Optional[Serving]  # in the mode that serves
    adapters: Optional[Adapters]
    blocks: Optional[Blocks]  # None: a cache of lines

    # evaluation
    base_latency: Optional[float]  # ms
    base_throughput: Optional[float]  # tokens/s
    benchmark: bool
    judge: str  # "ties" or "contest": what passes as accurate
    baseline_rounding: str  # OPERATOR, or one of ROUNDINGS
    rounding: Optional[str]  # one of ROUNDINGS, where boundaries of kernels are looked at
    divergence_difference_tol: float
    tol_map: Optional[dict[Optional[int], tuple[float, float]]]  # top-k: (absolute, relative)
    num_tokens_to_check: Optional[int]
    runs: Optional[int]
    limit: Optional[int]
    only: Optional[tuple[int, ...]]
    resume: bool
    results_path: Path
    record_baseline: bool
    contest: Optional[Path]  # its prompts.txt, and its base times for the platform

    # model
    torch_dtype: str
    rpl_reduce_dtype: Optional[str]
    batch_size: int
    is_continuous_batching: Optional[bool]
    ctx_batch_size: Optional[int]  # prompts of one prefill graph
    apply_seq_ids_mask: Optional[bool]
    async_mode: Optional[bool]  # the next step begins before the last one's tokens are looked at
    padding_side: str
    asked_seq_len: Optional[int]  # --seq-len where it was given
    seq_len: int
    asked_max_context_length: Optional[int]  # --max-context-length where it was given
    max_context_length: int  # of one prefill graph
    prefill_chunk: Optional[int]  # tokens of a longer prompt that are fed at a time
    output_logits: bool
    vocab_parallel: bool
    fused_qkv: bool
    sequence_parallel_enabled: bool
    flash_decoding_enabled: bool
    cp_degree: Optional[int]
    enable_bucketing: bool
    context_encoding_buckets: Optional[list[int]]
    token_generation_buckets: Optional[list[int]]
    tp_degree: Optional[int]

    # quantisation, by NxDI's names
    quantized: bool
    quantized_checkpoints_path: Optional[Path]  # None: in the cache
    quantization_type: str
    quantization_dtype: str
    modules_to_not_convert: Optional[list[str]]
    kv_cache_quant: bool
    swap: Optional[Swap]  # of `--mode swap`

    # profile
    profile_model: Optional[str]
    profile_bucket: Optional[list[int]]
    dma_profile: Optional[str]
    schedule: Optional[str]
    profile_top: int
    profile_output: Optional[Path]
    kernel_launch_us: Optional[float]
    graph_launch_us: Optional[float]
    cache_update_us: Optional[float]
    logits_us: Optional[float]
    argmax_us: Optional[float]
    host_step_us: Optional[float]
    collective_us: Optional[float]
    collective_gb_per_s: Optional[float]

    def neuron_config(self) -> dict[str, Any]:
        """Fields of NeuronConfig by its own names; None values left out."""
        values = {name: getattr(self, name) for name in _NEURON_CONFIG.split()}
        values["max_length"] = self.seq_len
        if self.prefill_chunk:
            values.update(speculation_length=self.prefill_chunk, prompt_in_chunks=True)
        if self.speculation is not None:
            buckets = self.token_generation_buckets
            values.update(self.speculation.neuron_config(self.seq_len, buckets))
        if self.adapters is not None:
            values.update(self.adapters.neuron_config())
        if self.blocks is not None:
            sizes = self.batch_size, self.seq_len, self.max_context_length
            values.update(self.blocks.neuron_config(*sizes))
        values |= self._quantisation()
        return {name: value for name, value in values.items() if value is not None}

    @property
    def adapter_folders(self) -> dict[str, Path]:
        """The adapters' folders by name, in the order of their numbers."""
        return dict(self.adapters.paths) if self.adapters is not None else {}

    def _quantisation(self) -> dict[str, Any]:
        """Options of quantisation; none without it, so that the SDK's defaults stand."""
        values: dict[str, Any] = {"kv_cache_quant": True} if self.kv_cache_quant else {}
        if self.quantized:
            names = "quantized quantization_type quantization_dtype modules_to_not_convert"
            values |= {name: getattr(self, name) for name in names.split()}
            values["quantized_checkpoints_path"] = str(self.quantized_checkpoints_path)
        return values

    def of_baseline(self) -> Settings:
        """The settings of the SDK's own Llama. Scores and preflight compare with a float model, as
        a contest does; `validate` and `diff` compare with a model that is quantised in the same
        way."""
        if self.mode in ("validate", "diff"):
            return self
        return self.in_float()

    def in_float(self) -> Settings:
        """The same without quantisation; NxDI quantises no draft model."""
        return replace(self, quantized=False, kv_cache_quant=False)

    @property
    def quantised_words(self) -> str:
        """The quantised parts in words, for reports; empty where nothing is quantised."""
        parts = []
        if self.quantized:
            each = "channel" if self.quantization_type.startswith("per_channel") else "tensor"
            parts.append(f"{self.quantization_dtype} weights, one scale a {each}")
        if self.kv_cache_quant:
            parts.append("keys and values in fp8")
        return "; ".join(parts)

    def whole_prefill(self) -> Settings:
        """The same with prefill graphs for prompts of any length that fits the cache."""
        buckets = self.context_encoding_buckets
        if buckets is not None:
            buckets = sorted({*buckets, self.seq_len})
        return replace(
            self,
            max_context_length=self.seq_len,
            prefill_chunk=None,
            context_encoding_buckets=buckets,
        )

    def on_device_sampling_config(self) -> Optional[dict[str, Any]]:
        """Fields of OnDeviceSamplingConfig, or None where tokens are sampled on the host."""
        if self.speculation is not None and self.speculation.tree:
            return {"do_sample": True, "top_k": MEDUSA_CANDIDATES}
        if self.speculation is not None and self.speculation.fused:
            return {"do_sample": False}  # the driver chooses among the target's logits
        if not self.on_device_sampling:
            return None
        names = ("do_sample", "top_k", "top_p", "temperature", "dynamic", "global_topk")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def takes_chunks(self) -> bool:
        """Whether prompts may be fed in chunks: a cache padded on the left moves on each token,
        the graph of several tokens has one number of them, which guesses may need, and a chunk
        fills its batch with rows that would hit the lines of other requests; a cache of blocks
        has a way of its own."""
        return self.whole_because is None

    @property
    def whole_because(self) -> Optional[str]:
        """The option that keeps prompts from being fed in chunks; None where no option does."""
        reasons = {
            "--padding-side left": self.padding_side == "left",
            "several tokens a step": self.speculation is not None,
            "--mode serve, which has --is-chunked-prefill": self.serving is not None,
            "a cache of blocks, which has --is-chunked-prefill": self.blocks is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    @property
    def samples(self) -> bool:
        """False: every token is the best one."""
        return self.do_sample and self.top_k != 1
