"""The options of `main.py`, each declared once, and one run's settings made of them.

A topic is a class of options, and an option a field (`harness.declaration`): its type and default
are the settings', its modes, form and line of help the command line's. `Settings` adds what follows
from several options. The command line makes it whole; it is read everywhere and changed nowhere.
Names are the contest driver's, NxDI's (inference_demo.py), and transformers' for prompt lookup.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from harness.declaration import BOOL, ON_OR_OFF, Topic, option, port, tolerance_map
from harness.model_shapes import MODEL_SHAPES
from neuron_cpu.console.arguments import above_zero, at_least_zero, seed, share, whole
from neuron_cpu.sandbox.limits import default_memory_gib

# What the stand-in's baseline leaves in fp32 behind an operator: nothing, or what `ROUNDINGS` name
# (neuron_cpu/runtime/rounding.py).
FUSED, OPERATOR = "fused", "operator"
ROUNDINGS = (FUSED, "products", "elementwise")
DTYPES = ("bfloat16", "float16", "float32")
QUANTISED_AS = {"int8": "int8", "fp8": "f8e4m3"}  # --quantize -> NxDI's name

DEFAULT_SEQ_LEN = 128
# Some turns, longer ones are a wait on the stand-in; the least of the public flash attention.
LONGER_SEQ_LEN = 512
LONGEST_PREFILL = 2048  # tokens of one prefill graph unless asked for: beyond, chunks are faster
HUGGING_FACE_TOP_K = 50
SLOTS = 8  # answers at once: what the shipped kernels decode together in about the time of one
BLOCK = 32  # tokens, what NxDI's guide recommends

LOOKUP, DRAFT, FUSED_DRAFT, EAGLE, MEDUSA = "lookup", "draft", "fused", "eagle", "medusa"
# Who guesses: what followed the newest tokens where they stood before, a smaller model with the
# same vocabulary, the same in one graph with the target, an EAGLE head there, the model's own heads
METHODS = (LOOKUP, DRAFT, FUSED_DRAFT, EAGLE, MEDUSA)
DEFAULT_LENGTH = 5  # tokens of a step: more than 4 guesses are rarely all right
MEDUSA_FILE = "medusa_heads.pt"
DEFAULT_HEADS = 4
MEDUSA_CANDIDATES = 10  # of each head, in NxDI's trees (neuronx_distributed, medusa_utils.py)

PROFILE_FILES = "profile.json", "trace.json", "page.html"  # the second for ui.perfetto.dev

ATTENTION, NORM, MLP = "attention", "rmsnorm", "mlp"
PLACES = {
    ATTENTION: "of every layer, between its projections",
    NORM: "every module whose class ends in RMSNorm",
    MLP: "every module whose class ends in MLP",
}
LEAST_COSINE = 0.999  # of the token that is farthest off, in bf16

_EVERY = ("evaluate_all",)
EVALUATE = ("evaluate", "evaluate_single", *_EVERY)
_COMPARE = ("validate", *EVALUATE, "preflight")
_ANSWER = ("generate", *_COMPARE, "diff")
_GUESS = ("compile", "generate", "chat", "profile", *_COMPARE)
_RUN = ("compile", "generate", "chat", "serve", "profile", *_COMPARE)

# What an option needs: a property of the arguments, and how a refusal names it.
_ON_DEVICE = ("on_device_sampling", "--on-device-sampling")
_QUANTISED = ("quantises", "--quantized or --quantize; give one of them too")
_ADAPTED = ("lora_ckpt_path", "an adapter; give --lora-ckpt-path ID:FOLDER")
_EAGLE = ("eagle", "--enable-eagle-speculation")
_MEDUSA = ("medusa", "--is-medusa; give both")
_BATCHED = ("batches", "--is-continuous-batching; give it too")


def switch(help: str, modes: tuple[str, ...] | None = None, **more: Any) -> Any:
    """An option without a value, off by default."""
    return option(help, modes, default=False, **more)


def _dtype(help: str, default: str | None = None) -> Any:
    return option(help, default=default, choices=DTYPES, metavar="DTYPE")


def _cost(what: str) -> Any:
    return option(f"assumed cost: {what}", type=at_least_zero, metavar="US")


class Run(Topic, title="what runs"):
    mode: str  # --mode itself is the parser's
    contestants: list[str] = option(
        "submission: .py or module (several to compare)",
        flag="--llama",
        default=("llama",),
        metavar="FILE",
    )
    enable_nki: bool = switch("use the submission's kernels", **ON_OR_OFF)
    libraries: list[Path] | None = option(
        "checkouts of NxD and NxD Inference, instead of the imitation", metavar="DIR"
    )
    model_path: Path | None = option("folder of a model, or OWNER/NAME")
    compiled_model_path: Path | None = option("folder for compiled models (default: cache)")
    recompile: bool = switch("never reuse a compiled folder")
    debug: bool = switch("show tracebacks of refusals")


class Prompts(Topic, title="prompts and answers"):
    prompt_values: list[str] | None = option(
        "comma-separated list, quoted as in CSV; may be repeated",
        (*_ANSWER, "swap"),
        flag="--prompt",
        action="append",
        metavar="LIST",
    )
    prompt_file: Path | None = option("prompts verbatim, blank-line separated", (*_ANSWER, "swap"))
    system: str | None = option("what the model is to be", ("chat",), metavar="TEXT")
    raw: bool = switch("do not apply the chat template", _ANSWER)
    stream: bool = option("text as it comes", ("generate",), default=True, **ON_OR_OFF)
    max_new_tokens: int | None = option(
        "default: as many as --seq-len holds", ("generate", "chat", *_COMPARE)
    )
    pad_token_id: int | None = option(
        "fills rows that have ended", _ANSWER, type=whole, metavar="ID"
    )


class Sampling(Topic, title="how tokens are chosen", whole_in=("generate", "chat")):
    do_sample: bool | None = option("sample among the --top-k best tokens", **BOOL)
    top_k: int | None = option(f"1 is greedy (default: 1; {HUGGING_FACE_TOP_K} with --do-sample)")
    top_p: float = option(
        "sample among this probability mass", default=1.0, type=share, metavar="P"
    )
    temperature: float = option(
        "divides the logits; 0 is greedy", default=1.0, type=at_least_zero, metavar="T"
    )
    seed: int = option("of sampling (default: 0)", default=0, type=seed)
    on_device_sampling: bool = switch("sample in the graph")
    global_topk: int | None = option("candidates of on-device sampling", needs=_ON_DEVICE)
    dynamic: bool = switch("sampling parameters per call", needs=_ON_DEVICE)


class Evaluation(Topic, title="what counts as right and fast, and reports", modes=_EVERY):
    benchmark: bool = switch("measure speed in this mode too", ("generate", "validate"))
    runs: int | None = option(
        "timed runs (default: 20, 1 on the stand-in)",
        ("generate", "swap", "validate", *EVALUATE),
        needs=("measures", "--benchmark in this mode; give it too"),
    )
    base_latency: float | None = option(
        "baseline latency in ms",
        EVALUATE,
        type=above_zero,
        needs=("base_throughput", "--base-throughput; give it too"),
        metavar="MS",
    )
    base_throughput: float | None = option(
        "baseline tokens/s",
        EVALUATE,
        type=above_zero,
        needs=("base_latency", "--base-latency; give it too"),
    )
    judge: str | None = option(
        "whether a tie within one bf16 spacing passes (contest: no)",
        _COMPARE,
        choices=("ties", "contest"),
    )
    baseline_rounding: str = option(
        "of the stand-in: fused, products, elementwise or operator",
        _COMPARE,
        default=FUSED,
        choices=(*ROUNDINGS, OPERATOR),
        metavar="WHERE",
    )
    divergence_difference_tol: float = option(
        "logit gap up to which another token passes (0.001)",
        _COMPARE,
        default=0.001,
        type=at_least_zero,
        metavar="D",
    )
    tol_map: dict[int | None, tuple[float, float]] | None = option(
        "top-k: (absolute, relative tolerance); default: the contest's",
        _COMPARE,
        type=tolerance_map,
        metavar="DICT",
    )
    num_tokens_to_check: int | None = option("compare the first tokens only", _COMPARE)
    limit: int | None = option("the first prompts only")
    only: list[int] | None = option("prompts by number from 0", type=whole)
    resume: bool = switch("go on with a run")
    results_path: Path = option("folder of reports", default=Path("results"))
    record_baseline: bool = switch("write prompt_data.txt")
    contest: Path | None = option("clone of a contest: its prompts and base times")
    part: list[int] | None = option("of these prompts some alone, no report", type=whole)
    scheduler: str | None = option(
        "hand prompts to a Dask cluster: tcp://HOST:8786", metavar="ADDRESS"
    )


class Server(
    Topic, title=f"server (--batch-size answers at once, {SLOTS} by default)", modes=("serve",)
):
    host: str = option("to listen on (default: 127.0.0.1)", default="127.0.0.1", metavar="ADDRESS")
    port: int = option("default: 8000; 0: a free one", default=8000, type=port)
    api_key_file: Path | None = option("its first line is the key that requests must carry")
    max_waiting: int = option("answers in the queue, beyond which none is taken (64)", default=64)
    drain_seconds: int = option(
        "for answers that run when the server is to end (30)", default=30, metavar="S"
    )


class Swapping(
    Topic, title="a kernel in any causal LM or encoder of transformers", modes=("swap",)
):
    kernel: str | None = option("the kernel, or an adapter around it", metavar="FILE:NAME")
    at: str | None = option("what it replaces", choices=tuple(PLACES))
    layers: int | None = option("cut the model to N layers")
    least_cosine: float = option(
        f"to the reference in fp32, of every token ({LEAST_COSINE})",
        default=LEAST_COSINE,
        type=share,
        metavar="C",
    )


class Profile(Topic, title="estimates, and what they assume", modes=("profile",)):
    profile_model: str | None = option(
        f"shapes without weights: {', '.join(sorted(MODEL_SHAPES))}",
        ("profile", *_EVERY),
        choices=tuple(sorted(MODEL_SHAPES)),
        metavar="NAME",
    )
    saved_graphs: Path | None = option(
        "folder of model.save() of Transformers NeuronX, in place of a model", metavar="DIR"
    )
    profile_output: Path | None = option("folder for JSON, trace and page")
    dma_profile: str | None = option(
        "how DMA is timed (default: the calibrated one)", metavar="NAME"
    )
    kernel_launch_us: float | None = _cost("between two kernels of a graph")
    graph_launch_us: float | None = _cost("start of a graph")
    cache_update_us: float | None = _cost("start of an operator on a cache")
    logits_us: float | None = _cost("logits to the host")
    argmax_us: float | None = _cost("arg-maximum on the host")
    host_step_us: float | None = _cost("the rest of a step on the host")
    collective_us: float | None = _cost("start of a collective")
    collective_gb_per_s: float | None = option(
        "assumed rate of a collective", type=above_zero, metavar="GB"
    )


class Lengths(Topic, title="the model's lengths and graphs", whole_in=()):
    seq_len: int | None = option(
        f"prompt and new tokens ({DEFAULT_SEQ_LEN}; chat, serve, swap: {LONGER_SEQ_LEN})"
    )
    max_context_length: int | None = option(
        f"of a prompt's first part (--seq-len, {LONGEST_PREFILL} at most)"
    )
    prefill_chunk: int | None = option(
        "tokens of a longer prompt fed at a time (what a graph holds)"
    )
    max_length: int | None = option("must equal --seq-len")
    batch_size: int | None = option("default: the number of prompts, at most 8")
    padding_side: str = option("default: right", default="right", choices=("right", "left"))
    enable_bucketing: bool = option(
        "graphs for several lengths (default: true)", default=True, **BOOL
    )
    context_encoding_buckets: list[int] | None = option("prefill lengths")
    token_generation_buckets: list[int] | None = option("decode lengths")
    torch_dtype: str = _dtype("default: bfloat16", "bfloat16")
    fused_qkv: bool = switch("one weight for the three projections")
    output_logits: bool = switch("graphs return the logits, too")
    is_continuous_batching: bool | None = option("rows of a batch are requests that come and go")
    ctx_batch_size: int | None = option(
        "prompts of one prefill (default with it: 1)", needs=_BATCHED
    )
    apply_seq_ids_mask: bool | None = option(
        "requests left out keep their cache (NxDI 0.4 and later)", needs=_BATCHED
    )
    async_mode: bool | None = option(
        "begin a step before the last tokens come (with --libraries)", needs=_ON_DEVICE
    )


class Ranks(Topic, title="cores that share the model", whole_in=()):
    tp_degree: int | None = option("ranks to shard over (default: 2 where it divides the heads)")
    rpl_reduce_dtype: str | None = _dtype("of the all-reduce")
    vocab_parallel: bool = switch("shard the embedding by vocabulary")
    sequence_parallel_enabled: bool = switch("shard the prompt between the blocks of a layer")
    flash_decoding_enabled: bool = switch("ranks share a KV head's positions (with --libraries)")


class Quantisation(
    Topic, title="weights and caches of one byte (names of NxDI's inference_demo)", whole_in=()
):
    quantize: str | None = option(
        "one byte a weight, a scale a channel; checkpoint in the cache", choices=tuple(QUANTISED_AS)
    )
    quantized: bool = switch("quantised weights")
    quantized_checkpoints_path: Path | None = option(
        "of --quantized: folder or file, made if missing", needs=_QUANTISED
    )
    quantization_type: str | None = option(
        "default: per_tensor; per_channel with --quantize",
        needs=_QUANTISED,
        choices=("per_tensor_symmetric", "per_channel_symmetric"),
        metavar="TYPE",
    )
    quantization_dtype: str = option(
        "default: int8", default="int8", choices=(*QUANTISED_AS.values(), "f8e5m2")
    )
    modules_to_not_convert_file: Path | None = option(
        "modules left in float", needs=_QUANTISED, metavar="JSON"
    )
    kv_cache_quant: bool = switch("keys and values in fp8")


class Guesses(
    Topic, title="several tokens a step, one prompt at a time", modes=_GUESS, whole_in=()
):
    speculate: str | None = option(", ".join(METHODS), choices=METHODS, metavar="METHOD")
    prompt_lookup_num_tokens: int | None = option("guess what followed the newest tokens earlier")
    draft_model_path: Path | None = option("folder of a smaller model, which guesses")
    speculation_length: int | None = option(
        f"tokens of a step, guesses and one ({DEFAULT_LENGTH})", metavar="K"
    )
    enable_fused_speculation: bool = switch("draft and target in one graph (with --libraries)")


class LowRank(Topic, title="adapters (LoRA; with --libraries)", modes=_RUN, whole_in=()):
    lora_ckpt_path: list[str] | None = option(
        "an adapter as PEFT saves it, and its name; may be repeated",
        action="append",
        metavar="ID:FOLDER",
    )
    adapter_id: str | None = option(
        "which of them answers (default: none)",
        ("generate", "chat", *_COMPARE),
        metavar="ID",
        needs=_ADAPTED,
    )
    max_lora_rank: int | None = option("default: the adapters' largest", needs=_ADAPTED)


class Paged(
    Topic,
    title="cache of blocks (NxDI 0.4 and later, with --libraries)",
    modes=("compile", "serve", "profile"),
    whole_in=("serve",),
):
    is_block_kv_layout: bool | None = option(
        "implied by the other two, of which there is one", also=("--enable-block-kv-layout",)
    )
    is_prefix_caching: bool | None = option(
        "prompts begin with what others have cached", also=("--enable-prefix-caching",)
    )
    is_chunked_prefill: bool | None = option(
        "prompts in parts, beside steps (with --libraries)", also=("--enable-chunked-prefill",)
    )
    pa_block_size: int | None = option(f"tokens of a block (default: {BLOCK})")
    pa_num_blocks: int | None = option("default: --seq-len for each of --batch-size")
    kernel_q_tile_size: int | None = option("queries of a chunk's tile (default: the whole chunk)")
    kernel_kv_tile_size: int | None = option("cached tokens of a chunk's tile (default: 1024)")
    prefix_buckets: list[int] | None = option(
        "lengths of cached prefixes, beside 0 (powers of two from 128)"
    )


class Process(Topic, title="the submission's process", whole_in=()):
    isolate: bool = option(
        "run the submission in a process of its own (off: for debuggers)", default=True, **ON_OR_OFF
    )
    require_isolation: bool = switch("refuse to run where it cannot be confined")
    memory_limit: float = option(
        "memory it may use (default: three quarters of the machine's)",
        type=above_zero,
        default=default_memory_gib(),
        metavar="GIB",
    )
    cpu_limit: int = option(
        "processor time it may use (default: 10 hours)", default=36_000, metavar="S"
    )
    time_limit: float = option(
        "for one compile, load or generation (default: 1 hour)",
        default=3600.0,
        type=above_zero,
        metavar="S",
    )


class Experiments(
    Topic, title="demonstrations, with --libraries (docs/speculation.md)", modes=_GUESS, whole_in=()
):
    cp_degree: int | None = option(
        "parts of a prompt, each for tp / cp ranks (NxDI 0.4 and later)", ()
    )
    enable_eagle_speculation: bool = switch("an EAGLE head is the draft")
    enable_eagle_draft_input_norm: bool = switch(
        "the EAGLE head's layer has a norm in front", needs=_EAGLE
    )
    token_tree_json: Path | None = option(
        "of an EAGLE head's guesses: children of each node", needs=_EAGLE, metavar="FILE"
    )
    is_medusa: bool = switch(f"heads from {MEDUSA_FILE}")
    num_medusa_heads: int | None = option(f"default: {DEFAULT_HEADS}", needs=_MEDUSA)
    medusa_tree_json: Path | None = option(
        "list of paths (default: 15 paths)", needs=_MEDUSA, metavar="FILE"
    )
    medusa_speculation_length: int | None = option("paths of the tree, and 1", needs=_MEDUSA)


TOPICS: dict[str, type[Topic]] = {
    "run": Run,
    "prompts": Prompts,
    "sampling": Sampling,
    "evaluation": Evaluation,
    "server": Server,
    "swap": Swapping,
    "profile": Profile,
    "model": Lengths,
    "ranks": Ranks,
    "quantisation": Quantisation,
    "speculation": Guesses,
    "adapters": LowRank,
    "blocks": Paged,
    "process": Process,
    "experiments": Experiments,
}


class Arguments(
    Experiments,
    Process,
    Paged,
    LowRank,
    Guesses,
    Quantisation,
    Ranks,
    Lengths,
    Profile,
    Swapping,
    Server,
    Evaluation,
    Sampling,
    Prompts,
    Run,
):
    """The command line's words, each read by itself; None means "not given"."""

    @property
    def quantises(self) -> bool:
        """Whether weights are to be quantised."""
        return self.quantized or self.quantize is not None

    @property
    def eagle(self) -> bool:
        """Whether an EAGLE head is to guess."""
        return self.enable_eagle_speculation or self.speculate == EAGLE

    @property
    def medusa(self) -> bool:
        """Whether the model's own heads are to guess."""
        return self.is_medusa or self.speculate == MEDUSA

    @property
    def measures(self) -> bool:
        """Whether speed is measured."""
        return self.benchmark or self.mode not in ("generate", "validate")

    @property
    def batches(self) -> bool:
        """Whether requests come and go, as in a server and over a cache of blocks."""
        in_blocks = self.is_prefix_caching or self.is_chunked_prefill
        return bool(self.is_continuous_batching or in_blocks) or self.mode == "serve"

    @property
    def default_seq_len(self) -> int:
        """The length of the cache where nobody says one."""
        return LONGER_SEQ_LEN if self.mode in ("chat", "serve", "swap") else DEFAULT_SEQ_LEN


# What of the settings goes into NeuronConfig, by its own names.
_NEURON_CONFIG = (
    *{field.name for topic in (Lengths, Ranks) for field in fields(topic)} - {"prefill_chunk"},
    "cp_degree",
)


@dataclass(frozen=True)
class Speculation:
    """Several tokens a step: guesses of the next ones, which one call of the model checks.

    Attributes:
        method: who guesses, one of `METHODS`.
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
    draft_path: Path | None = None
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
    def own_draft(self) -> Path | None:
        """The folder of a draft model that is an application of its own."""
        return None if self.fused else self.draft_path

    def neuron_config(self, seq_len: int, buckets: list[int] | None) -> dict[str, Any]:
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
    rank: int | None = None

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
    number: int | None = None
    prefixes: tuple[int, ...] = ()
    tiles: tuple[int, int] = (128, 1024)

    def count(self, batch_size: int, seq_len: int) -> int:
        """The number of blocks of the cache; with chunks nobody owns the last slot."""
        return self.number or (batch_size * -(-seq_len // self.size) + (1 if self.chunks else 0))

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
class Swap:
    """A kernel in the place of a part of any model.

    Attributes:
        source, name: the file, and what in it is called.
        at: what it replaces, one of `PLACES`.
        layers: of a model that is cut; None: all.
        least_cosine: to the reference, that every token must reach.
    """

    source: Path
    name: str
    at: str
    layers: int | None
    least_cosine: float


class Settings(Arguments):
    """What the arguments mean together; `dataclasses.replace` makes variants.

    None means "not given": the model, the mode or the SDK decides.
    """

    llama: str = ""  # the first of `contestants`: module name or path
    prompts: tuple[str, ...] = ()  # empty where the model is to choose the default one
    prompt_notes: tuple[str, ...] = ()  # one line for each --prompt value that was split
    given: tuple[str, ...] = ()  # the words of the command line
    asked_seq_len: int | None = None  # --seq-len where it was given
    asked_max_context_length: int | None = None  # --max-context-length where it was given
    seq_len: int = DEFAULT_SEQ_LEN
    max_context_length: int = DEFAULT_SEQ_LEN  # of one prefill graph
    batch_size: int = 1
    do_sample: bool = False
    top_k: int = 1  # 1 is greedy
    judge: str = "ties"  # or "contest": what passes as accurate
    quantization_type: str = "per_tensor_symmetric"
    modules_to_not_convert: list[str] | None = None
    speculation: Speculation | None = None  # None: one token a step
    adapters: Adapters | None = None
    blocks: Blocks | None = None  # None: a cache of lines
    swap: Swap | None = None  # in the mode of that name

    def neuron_config(self) -> dict[str, Any]:
        """Fields of NeuronConfig by its own names; None values left out."""
        values = {name: getattr(self, name) for name in _NEURON_CONFIG}
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

    def of_baseline(self) -> "Settings":
        """The settings of the SDK's own Llama. Scores and preflight compare with a float model, as
        a contest does; `validate` and `diff` compare with a model that is quantised in the same
        way."""
        if self.mode in ("validate", "diff"):
            return self
        return self.in_float()

    def in_float(self) -> "Settings":
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

    def whole_prefill(self) -> "Settings":
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

    def on_device_sampling_config(self) -> dict[str, Any] | None:
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
    def whole_because(self) -> str | None:
        """The option that keeps prompts from being fed in chunks; None where no option does."""
        reasons = {
            "--padding-side left": self.padding_side == "left",
            "several tokens a step": self.speculation is not None,
            "--mode serve, which has --is-chunked-prefill": self.mode == "serve",
            "a cache of blocks, which has --is-chunked-prefill": self.blocks is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    @property
    def samples(self) -> bool:
        """False: every token is the best one."""
        return self.do_sample and self.top_k != 1
