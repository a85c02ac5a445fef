"""What a cell of the matrix runs: an application of the submission or of the library's own Llama,
compiled and loaded, and its error against Hugging Face in fp32.

Runs in a process that has found the real libraries. The model has two layers and seeded weights.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import multiprocessing
import os
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from neuronx_distributed_inference.models import config as config_module
from neuronx_distributed_inference.models.config import NeuronConfig, OnDeviceSamplingConfig
from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from harness.session import speculation
from harness.session.adapters import numbered, room_for_adapters
from harness.session.chunks import PromptInChunks
from harness.settings import Adapters, Blocks, Speculation
from neuron_cpu import libraries
from tests.adapters import merge_adapter, write_adapter
from tests.tiny_model import write_tiny_model

PROMPT, STEPS, LENGTH, NEW = 24, 3, 64, 12
ENDS = range(PROMPT, PROMPT + STEPS + 1)  # of the prompt and of each step
IN_BLOCKS = 128  # tokens of a cache of blocks, which NxDI reads in 128 parts


class NotThere(Exception):
    """The release has no such option."""


@dataclass(frozen=True)
class Family:
    """A model of the library beside Llama.

    Attributes:
        name: what transformers and the library's folder call it.
        kind: the library's class.
        own: the submission that covers it, "" where there is none.
        config: of transformers, beside the sizes that all share.
    """

    name: str
    kind: str
    own: str = ""
    config: dict[str, Any] = field(default_factory=dict)


LLAMA = Family("llama", "NeuronLlamaForCausalLM", "llama")


@dataclass(frozen=True)
class Feature:
    """A row of the matrix.

    Attributes:
        model: changes of the checkpoint's configuration.
        settings: of NeuronConfig.
        ranks, batch: tensor-parallel degree, sequences.
        extended: the submission's other file has it.
        asks: further settings of NeuronConfig, which depend on the case.
        adapts: every sequence has an adapter.
        told: what runs, and returns the error.
        family: of the model.
        alone: takes one sequence at a time.
    """

    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    batch: int = 1
    extended: bool = False
    asks: Callable[[Case], dict[str, Any]] = lambda case: {}
    adapts: bool = False
    told: Callable[[Case], float] = lambda case: case.logits()
    family: Family = LLAMA
    alone: bool = False

    def beside(self, other):
        """Both at once. What runs is the other's, unless only this one has a way of its own."""
        plain = FEATURES["plain"]
        told = self.told if other.told is plain.told else other.told
        return Feature(
            self.model | other.model,
            self.settings | other.settings,
            max(self.ranks, other.ranks),
            1 if self.alone or other.alone else max(self.batch, other.batch),
            True,
            lambda case: self.asks(case) | other.asks(case),
            self.adapts or other.adapts,
            told,
            other.family if self.family is LLAMA else self.family,
            self.alone or other.alone,
        )


@dataclass
class Case:
    """A feature in a column, in a folder of its own."""

    feature: Feature
    column: str
    folder: Path

    def __post_init__(self):
        family, folder = self.feature.family, self.folder / "model"
        if self.column != "library" and not family.own:
            raise NotThere
        if family is LLAMA:
            self.model = checkpoint(folder, self.feature.model)
        else:
            changed = replace(family, config=family.config | self.feature.model)
            self.model = of_family(folder, changed)
        self.adapter: Path | None = None
        if self.feature.adapts:
            plain = AutoModelForCausalLM.from_pretrained(str(self.model), torch_dtype=torch.float32)
            self.adapter = write_adapter(self.folder / "adapter", plain)
        generator = torch.Generator().manual_seed(7)
        self.ids = torch.randint(3, 250, (self.feature.batch, PROMPT + STEPS), generator=generator)

    @property
    def kind(self):
        """The application's class."""
        family = self.feature.family
        module = "models.extended" if self.feature.extended else family.own
        if self.column != "library":
            name = vars(importlib.import_module(module))
            return name.get(family.kind) or name[LLAMA.kind]
        place = f"neuronx_distributed_inference.models.{family.name}.modeling_{family.name}"
        try:
            return getattr(importlib.import_module(place), family.kind)
        except ModuleNotFoundError as error:
            if not place.startswith(str(error.name)):
                raise
            raise NotThere from error

    def reference(self):
        model = AutoModelForCausalLM.from_pretrained(str(self.model), torch_dtype=torch.float32)
        if self.adapter is not None:
            merge_adapter(model, self.adapter)
        return model.eval()

    def inputs(self, application, rows):
        """What a call gets beside its tokens: the adapter's number for each row."""
        if self.adapter is None:
            return {}
        first = 0 if libraries.find().nxdi.startswith("0.1.") else 1  # it has no other
        return {"adapter_ids": numbered(application, [first] * rows).to(torch.int32)}

    def neuron_config(self, **more):
        """NotThere where the release leaves out what is asked for."""
        dtype = torch.float32 if self.column in ("fp32", "library") else torch.bfloat16
        given = {
            "tp_degree": self.feature.ranks,
            "batch_size": self.feature.batch,
            "max_context_length": LENGTH,
            "seq_len": LENGTH,
            "torch_dtype": dtype,
            "rpl_reduce_dtype": dtype,
        }
        asked = self.feature.settings | self.feature.asks(self) | more
        if self.adapter is not None:
            asked |= _adapters({"1": self.adapter}, self.feature.batch)
        if "kv_cache_quant" in asked and hasattr(config_module, "KVQuantizationConfig"):
            given["kv_quant_config"] = {}  # without it 0.8 and 0.9 ignore the option
        if self.column == "kernels":
            given["enable_nki"] = True
        config = self.kind.get_neuron_config_cls()(**{**given, **asked})
        kept = vars(config) | {"async": config.async_mode}
        lacking = [name for name in asked if asked[name] and not kept.get(name)]
        if lacking:
            raise NotThere(lacking[0])
        return config

    def application(self, config, model=None, draft=None, name="compiled"):
        """Compiled and loaded."""
        path = str(model or self.model)
        beside = {} if draft is None else {"fused_spec_config": draft}
        load = load_pretrained_config(path)
        whole = self.kind.get_config_cls()(config, load_config=load, **beside)
        if config.quantized:
            config.quantized_checkpoints_path = str(self.folder / f"{name}-quantised")
            Path(config.quantized_checkpoints_path).mkdir()
            self.kind.save_quantized_state_dict(path, whole)
        made = self.kind(path, whole)
        os.environ["BASE_COMPILE_WORK_DIR"] = str(self.folder / f"{name}-work") + os.sep
        made.compile(str(self.folder / name))
        made.load(str(self.folder / name))
        return made

    def logits(self, expected=None, adapters=(), **settings):
        """Of the prompt's last token and of each further one, which is given."""
        application = self.application(self.neuron_config(**settings))
        inputs = self.inputs(application, self.ids.shape[0])
        if adapters:
            inputs["adapter_ids"] = numbered(application, adapters).to(torch.int32)
        found = [self.call(application, end, **inputs) for end in ENDS]
        if expected is None:
            expected = self.expected()
        return relative(torch.stack(found, dim=1), expected)

    def expected(self):
        """Hugging Face's logits behind the prompt and each further token."""
        with torch.no_grad():
            logits: torch.Tensor = self.reference()(self.ids).logits
        return logits[:, PROMPT - 1 :]

    def call(self, application, end, **inputs):
        """The logits behind token `end`: of the prompt's call, or of a step that is given one."""
        batch = self.ids.shape[0]
        new = self.ids[:, :PROMPT] if end == PROMPT else self.ids[:, end - 1 : end]
        places = torch.arange(end - new.shape[1], end).expand(batch, -1)
        seen = max(PROMPT, end - 1)  # a decode step's mask has what is cached
        out = application(
            input_ids=new,
            attention_mask=torch.ones(batch, seen, dtype=torch.int64),
            position_ids=places.contiguous(),
            seq_ids=torch.arange(batch),
            **inputs,
        )
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits

    def apart(self, adapter, **options):
        """Of the tokens that an adapter generates: how far the logit of each lies at most below
        the best one, behind the same text, relative to the largest."""
        prompt = self.ids[:, :PROMPT]
        made = adapter.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **({} if self.adapter is None else {"adapter_ids": ["1"] * len(prompt)}),
            **options,
        )
        if made.shape[1] != PROMPT + NEW:
            raise ValueError(f"{made.shape[1] - PROMPT} tokens, expected {NEW}")
        with torch.no_grad():
            expected = self.reference()(made[:, :-1]).logits[:, PROMPT - 1 :]
        chosen = expected.gather(2, made[:, PROMPT:, None])[..., 0]
        return float((expected.max(dim=2).values - chosen).max() / expected.abs().max())


def relative(got, expected):
    """The largest error, of the largest logit expected."""
    return float((got - expected).abs().max() / expected.abs().max())


def checkpoint(folder, changes):
    """A seeded Llama of two layers in fp32."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2} | changes
    if "head_dim" in changes:
        heads["hidden_size"] = heads["num_attention_heads"] * changes["head_dim"]
    else:
        heads |= {"hidden_size": 64 * heads["num_attention_heads"], "head_dim": 64}
    write_tiny_model(folder, **heads, torch_dtype="float32")
    tensors = load_file(str(folder / "model.safetensors"))
    written(folder, {name: tensor.float() for name, tensor in tensors.items()})
    return folder


def of_family(folder, family):
    """Another model of transformers, of the same sizes; NotThere where this one has none."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    try:
        config = AutoConfig.for_model(family.name, **sizes | family.config)
    except ValueError as error:
        raise NotThere from error
    torch.manual_seed(0)
    config.torch_dtype = torch.float32
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    return folder


def written(folder, tensors):
    """The folder with other weights; transformers 4.45 asks for the metadata."""
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


# --- What a row runs, where it is more than logits ------------------------------------------------
def on_device(case, top_k=1, temperature=1.0, **settings):
    """Tokens that the graph has chosen."""
    draws = {"do_sample": True, "dynamic": True, "global_topk": 64} if top_k > 1 else {}
    settings["on_device_sampling_config"] = OnDeviceSamplingConfig(top_k=top_k, **draws)
    config = case.neuron_config(**settings)
    params = prepare_sampling_params(case.feature.batch, [top_k], [1.0], [temperature])
    return case.apart(PromptInChunks(case.application(config)), sampling_params=params)


def drawn(case):
    """The same, of eight, at a temperature at which the best one is all but certain."""
    return on_device(case, 8, 0.001)


def asynchronous(case):
    """The same, while the next step begins; NxDI 0.1 has the option by another name."""
    old = libraries.find().nxdi.startswith("0.1.")
    return on_device(case, **{"async" if old else "async_mode": True})


def disaggregated(case):
    """The prompt in one process, whose caches go by gloo to another one, which decodes. The library
    has no transport: the connector in aws-neuron/upstreaming-to-vllm calls the closed
    torch.classes.neuron.NeuronTransferEngine with the same tensors."""
    prefills = multiprocessing.get_context("fork").Process(target=_prefill, args=(case,))
    prefills.start()
    application, expected = case.application(case.neuron_config()), case.expected()
    link, first = _link(case, 1), torch.empty_like(expected[:, 0])
    for tensor in (first, *_caches(application)):
        link.recv([tensor.view(torch.uint8)], 0, 0).wait()
    prefills.join()
    found = [first, *(case.call(application, end) for end in ENDS[1:])]
    return relative(torch.stack(found, dim=1), expected)


def _prefill(case):
    """The process that takes the prompt."""
    application = case.application(case.neuron_config(), name="prefill")
    logits, link = case.call(application, PROMPT), _link(case, 0)
    for tensor in (logits, *_caches(application)):
        link.send([tensor.contiguous().view(torch.uint8)], 1, 0).wait()


def _link(case, rank):
    store = dist.FileStore(str(case.folder / "meet"), 2)
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=120))


def _caches(application):
    """Keys and values in the memory of all ranks."""
    ranks = application.traced_model.nxd_model.state
    return [own[name] for own in ranks for name in sorted(own)]


def of_one_byte(case):
    """Quantised weights, with a scale for each channel."""
    return {
        "quantized": True,
        "quantization_type": "per_channel_symmetric",
        "quantized_checkpoints_path": str(case.folder / "quantised"),
    }


def _adapters(folders, rows):
    """NeuronConfig's settings of adapters by name."""
    asked = Adapters(tuple(folders.items()), "1", 4).neuron_config()
    lora = asked["lora_config"]
    if libraries.find().nxdi.startswith("0.1."):
        (folder,) = list(folders.values())[-1:]
        content = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        targets = content["target_modules"]
        lora |= {"lora_ckpt_paths": [str(folder)], "target_modules": targets}
    lora |= room_for_adapters(len(folders), rows)
    return asked


def adapted(case):
    """The model itself in a batch with one adapter and another, each against its weights with the
    adapter's added."""
    numbers: Sequence[int] = (0, 1, 2)
    folders, expected = {}, []
    for number, ids in zip(numbers, case.ids, strict=True):
        reference = case.reference()
        if number:
            folder = write_adapter(case.folder / f"adapter-{number}", reference, seed=number)
            merge_adapter(reference, folder)
            folders[str(number)] = folder
        with torch.no_grad():
            expected.append(reference(ids[None]).logits[:, PROMPT - 1 :])
    if libraries.find().nxdi.startswith("0.1."):
        numbers = tuple(max(number - 1, 0) for number in numbers)  # it has no other
    return case.logits(torch.cat(expected), numbers, **_adapters(folders, len(numbers)))


def guessed(asked):
    """Several tokens a step, by the driver's loop."""

    def told(case):
        draft, found = None, asked
        settings = asked.neuron_config(LENGTH, None)
        if asked.draft_path is not None:
            folder = case.folder / "draft"
            write = head_of if asked.eagle else shallow
            draft = write(case.model, folder)
        if asked.fused:
            settings |= {"on_device_sampling_config": OnDeviceSamplingConfig(do_sample=False)}
            if hasattr(NeuronConfig(), "trace_tokengen_model"):
                settings["trace_tokengen_model"] = False
            config = case.neuron_config(**settings)
            model = case.application(config, draft=_draft_config(case, config, draft, asked))
            draft = None
        elif asked.tree:
            write_medusa_heads(case.model, asked.length - 1)
            sampling = OnDeviceSamplingConfig(do_sample=True, top_k=10)
            settings["on_device_sampling_config"] = sampling
            model = case.application(case.neuron_config(**settings))
        else:
            model = case.application(case.neuron_config(**settings))
            if draft is not None:
                plain = copy.copy(case)
                plain.adapter = None  # a draft has none
                draft = plain.application(plain.neuron_config(), draft, name="draft")
        if found.tree:
            return case.apart(speculation.Tree(model))
        return case.apart(speculation.adapter(found, model, draft))

    return told


def _draft_config(case, target, folder, asked):
    """What a fused target knows of its draft, as NxDI's demo has it."""
    draft = copy.deepcopy(target)
    draft.enable_fused_speculation = False
    draft.is_eagle_draft, draft.enable_eagle_draft_input_norm = asked.eagle, False
    if not asked.eagle:
        draft.speculation_length = 0
    load = load_pretrained_config(str(folder))
    config = case.kind.get_config_cls()(draft, load_config=load)
    return config_module.FusedSpecNeuronConfig(case.kind._model_cls, config, str(folder))


def shallow(model, folder):
    """The model without its last layer."""
    tensors = load_file(str(model / "model.safetensors"))
    return _with_one_layer(model, folder, tensors)


def head_of(model, folder):
    """An EAGLE head with the model's own layer, which reads token and state alike."""
    tensors = load_file(str(model / "model.safetensors"))
    del tensors["model.layers.0.input_layernorm.weight"]
    unit = torch.eye(tensors["lm_head.weight"].shape[1])
    tensors["model.fc.weight"] = torch.cat((unit / 2, unit), dim=1)
    return _with_one_layer(model, folder, tensors)


def _with_one_layer(model, folder, tensors):
    folder.mkdir()
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    content = json.dumps(config | {"num_hidden_layers": 1})
    (folder / "config.json").write_text(content, encoding="utf-8")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
    return written(folder, kept)


def write_medusa_heads(folder, heads):
    """Heads that guess a token again, as nothing is learnt."""
    output = load_file(str(folder / "model.safetensors"))["lm_head.weight"]
    size, state = output.shape[1], {}
    for head in range(heads):
        name = f"medusa_head_{head}"
        state[f"{name}.0.linear.weight"] = torch.zeros(size, size)
        state[f"{name}.0.linear.bias"] = torch.zeros(size)
        state[f"{name}.1.weight"] = output.clone()
    torch.save(state, folder / "medusa_heads.pt")


def in_blocks(asked, alone=False):
    """A cache of blocks: two sequences that share a prefix, or that share chunks.

    `alone` asks for the layout by itself, without either.
    """

    def told(case):
        batch = case.feature.batch
        settings = asked.neuron_config(batch, IN_BLOCKS, IN_BLOCKS - asked.size)
        if alone:
            settings = {name: settings[name] for name in settings if "block" in name}
        elif asked.chunks:
            module = importlib.import_module("neuronx_distributed_inference.models.config")
            made = getattr(module, "ChunkedPrefillConfig", None)
            if made is None:
                raise NotThere("chunked_prefill_config")
            settings["chunked_prefill_config"] = made(**settings["chunked_prefill_config"])
        chunk = asked.tiles[0] if asked.chunks else IN_BLOCKS - asked.size
        config = case.neuron_config(
            is_continuous_batching=True,
            ctx_batch_size=1,
            max_context_length=chunk,
            seq_len=IN_BLOCKS,
            **settings,
        )
        model = case.application(config)
        ids = case.ids.clone()
        ids[1, : asked.size] = ids[0, : asked.size]
        run = _in_chunks if asked.chunks else _behind_prefixes
        with torch.no_grad():
            expected = case.reference()(ids).logits[:, PROMPT - 1 :]
        return relative(run(case, model, ids, asked.size), expected)

    return told


def _places(spans, size):
    """NxDI's arguments for rows of (blocks, first new token, end)."""
    tables = [[*blocks, *[0] * (IN_BLOCKS // size - len(blocks))] for blocks, _, _ in spans]
    slots = [
        [blocks[place // size] * size + place % size for place in range(start, end)]
        for blocks, start, end in spans
    ]
    return {
        "block_table": torch.tensor(tables),
        "slot_mapping": torch.tensor(slots),
        "full_context_lens": torch.tensor([[end] for _, _, end in spans]),
        "computed_context_lens": torch.tensor([[start] for _, start, _ in spans]),
    }


def _behind_prefixes(case, model, ids, size):
    """The second sequence begins behind the first block, which is the first one's. NxDI takes the
    whole prompt and its positions, and slots of what is new."""
    each = IN_BLOCKS // size
    tables = [list(range(each)), [0, *range(each, 2 * each - 1)]]

    def call(tokens, spans, lines):
        last = torch.tensor([[end - 1] for _, _, end in spans])
        out = model(
            input_ids=tokens,
            position_ids=last if tokens.shape[1] == 1 else torch.arange(tokens.shape[1])[None],
            seq_ids=torch.tensor(lines),
            sampling_params=prepare_sampling_params(len(lines), [1], [1.0], [1.0]),
            **_places(spans, size),
            **case.inputs(model, len(lines)),
        )
        return out.logits[:, -1].float()

    first = [
        call(ids[row : row + 1, :PROMPT], [(tables[row], start, PROMPT)], [row])
        for row, start in enumerate((0, size))
    ]
    found = [torch.cat(first)]
    for end in range(PROMPT + 1, PROMPT + STEPS + 1):
        spans = [(table, end - 1, end) for table in tables]
        found.append(call(ids[:, end - 1 : end], spans, [0, 1]))
    return torch.stack(found, dim=1)


def _in_chunks(case, model, ids, size):
    """Both prompts in chunks that they share, then both tokens of each step in one."""
    each, half = IN_BLOCKS // size, PROMPT // 2
    tables = [list(range(each)), list(range(each, 2 * each))]

    def call(spans):
        tokens = torch.cat([ids[row, start:end] for row, start, end in spans])[None]
        places = torch.cat([torch.arange(start, end) for _, start, end in spans])[None]
        parts = [_places([(tables[row], start, end)], size) for row, start, end in spans]
        where = {name: torch.cat([p[name] for p in parts]) for name in parts[0] if name[0] != "s"}
        where["slot_mapping"] = torch.cat([p["slot_mapping"][0] for p in parts])
        for name in ("full_context_lens", "computed_context_lens"):
            where[name] = where[name].flatten()
        out = model(
            input_ids=tokens,
            position_ids=places,
            seq_ids=torch.zeros(1, dtype=torch.int64),
            sampling_params=prepare_sampling_params(1, [1], [1.0], [1.0]),
            **where,
            **case.inputs(model, 1),
        )
        return out.logits[0].float()

    call([(0, 0, half)])
    begun = call([(0, half, PROMPT), (1, 0, half)])
    whole = call([(1, half, PROMPT)])
    found = [torch.stack([begun[0], whole[0]])]
    for end in range(PROMPT + 1, PROMPT + STEPS + 1):
        found.append(call([(0, end - 1, end), (1, end - 1, end)]))
    return torch.stack(found, dim=1)


# --- Rows -----------------------------------------------------------------------------------------
OF_FOUR = {"num_attention_heads": 4, "num_key_value_heads": 2}
FOUR_EACH = {"num_attention_heads": 4, "num_key_value_heads": 4}
SOME = Path("draft")  # which a cell writes
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
TOKEN_TREE = ((0, (1, 2)), (1, (3,)), (2, (4,)))
BOTH = {"batch": 2, "extended": True}
EXPERTS = {
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "initial_context_length": 2048}
DBRX: dict[str, Any] = {
    **{"d_model": 256, "n_heads": 4, "n_layers": 2, "max_seq_len": 2048},
    "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
}
FAMILIES = {
    "Qwen2": Family("qwen2", "NeuronQwen2ForCausalLM", "llama"),
    "Qwen3": Family("qwen3", "NeuronQwen3ForCausalLM", "llama"),
    "Mixtral": Family("mixtral", "NeuronMixtralForCausalLM", "", {"num_local_experts": 4}),
    "Qwen3-MoE": Family(
        "qwen3_moe",
        "NeuronQwen3MoeForCausalLM",
        "models.qwen3_moe",
        EXPERTS | {"norm_topk_prob": True},
    ),
    "gpt-oss": Family("gpt_oss", "NeuronGptOssForCausalLM", "", GPT_OSS),
    "DBRX": Family("dbrx", "NeuronDbrxForCausalLM", "", DBRX),
}

FEATURES: dict[str, Feature] = {
    "plain": Feature(),
    "one rank": Feature(ranks=1),
    "batch of 2": Feature(batch=2),
    "fused QKV": Feature(settings={"fused_qkv": True}),
    "heads of 32": Feature({"head_dim": 32}, extended=True),
    "heads of 64": Feature({"head_dim": 64}),
    "heads of 80": Feature({"head_dim": 80}, extended=True),
    "heads of 96": Feature({"head_dim": 96}, extended=True),
    "heads of 128": Feature({"head_dim": 128}),
    "KV replication": Feature(OF_FOUR, ranks=4, extended=True),
    "sequence parallel": Feature(settings={"sequence_parallel_enabled": True}, extended=True),
    "vocabulary parallel": Feature(settings={"vocab_parallel": True}),
    "continuous batching": Feature(
        settings={"is_continuous_batching": True, "ctx_batch_size": 1}, batch=2
    ),
    "flash decoding": Feature(OF_FOUR, {"flash_decoding_enabled": True}, 4, extended=True),
    "context parallel": Feature(FOUR_EACH, {"cp_degree": 2}, 4, extended=True),
    "window": Feature(
        extended=True,
        family=Family("mistral", "NeuronMistralForCausalLM", "llama", {"sliding_window": 16}),
    ),
    "fp8 caches": Feature(settings={"kv_cache_quant": True}, extended=True),
    "int8": Feature(settings={"quantization_dtype": "int8"}, extended=True, asks=of_one_byte),
    "fp8": Feature(settings={"quantization_dtype": "f8e4m3"}, extended=True, asks=of_one_byte),
    "low-rank adapter": Feature(extended=True, adapts=True),
    "adapters of a batch": Feature(batch=3, extended=True, told=adapted),
    "blocks": Feature(**BOTH, told=in_blocks(Blocks(16, False), alone=True)),
    "prefix caching": Feature(**BOTH, told=in_blocks(Blocks(16, False))),
    "chunked prefill": Feature(**BOTH, told=in_blocks(Blocks(16, True, tiles=(128, 1024)))),
    "on-device sampling": Feature(told=on_device),
    "on-device draws": Feature(told=drawn),
    "async": Feature(told=asynchronous),
    "disaggregated": Feature(batch=2, told=disaggregated),
    "draft": Feature(extended=True, alone=True, told=guessed(Speculation("draft", 4, SOME))),
    "fused draft": Feature(
        extended=True, alone=True, told=guessed(Speculation("fused", 4, SOME, fused=True))
    ),
    "EAGLE": Feature(
        extended=True, told=guessed(Speculation("eagle", 4, SOME, fused=True, eagle=True))
    ),
    "token tree": Feature(
        extended=True,
        told=guessed(Speculation("eagle", 5, SOME, fused=True, eagle=True, token_tree=TOKEN_TREE)),
    ),
    "Medusa": Feature(
        {"vocab_size": 640}, extended=True, told=guessed(Speculation("medusa", 4, tree=TREE))
    ),
    "prompt lookup": Feature(extended=True, alone=True, told=guessed(Speculation("lookup", 4))),
    **{
        name: Feature(family=family, extended=family.own == "llama")
        for name, family in FAMILIES.items()
    },
}


# Rows that are crossed with each other, each pair in this order: what a later one runs counts.
CROSSED = (
    *("fused QKV", "KV replication", "vocabulary parallel", "sequence parallel", "flash decoding"),
    *("context parallel", "window", "fp8 caches", "int8", "fp8", "low-rank adapter"),
    *("continuous batching", "on-device sampling", "async", "prompt lookup", "draft"),
    *("fused draft", "prefix caching", "chunked prefill"),
)
ONE_OF_EACH = (
    *({"int8", "fp8"}, {"prompt lookup", "draft", "fused draft"}, {"on-device sampling", "async"}),
    {"prefix caching", "chunked prefill"},
)


def pairs():
    """The crosses: features that can be asked for at once, of which one at most runs in a way of
    its own (steps of several tokens over a cache of blocks, say, are the driver's)."""
    plain = FEATURES["plain"].told
    return [
        pair
        for pair in itertools.combinations(CROSSED, 2)
        if not any(set(pair) <= same for same in ONE_OF_EACH)
        and any(FEATURES[name].told is plain for name in pair)
    ]


def feature_of(row):
    """Of a row, or of two: "first, second"."""
    first, _, second = row.partition(", ")
    return FEATURES[first].beside(FEATURES[second]) if second else FEATURES[first]


def cell(feature, column, folder):
    """The error, or the first line of what was raised."""
    try:
        case = Case(feature_of(feature), column, folder)
        return f"{case.feature.told(case):.1e}"
    except NotThere:
        return "none"
    except Exception as raised:  # the cell is what the library says
        if os.environ.get("NEURON_CPU_DEBUG"):
            traceback.print_exc()
        cause: BaseException = raised
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = str(cause).strip().splitlines() or [""]
        told = re.sub(r"\S*/(?=\w+\.py\b)", "", lines[0])  # of a path the file's name
        return f"{type(cause).__name__}: {told[:300]}"
