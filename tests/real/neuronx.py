"""Transformers NeuronX, unmodified, over the stand-in: the features of its developer guide.

`python tests/real/neuronx.py PUBLIC` (make transformers-neuronx PUBLIC=DIR) takes the package from
a clone of aws-neuron/transformers-neuronx below PUBLIC. Each row is a feature of the guide, on
seeded models of two layers in fp32, in a process of its own. Text and logits are compared with
Hugging Face's.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import multiprocessing
import operator
import os
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.real import page  # noqa: E402

VOCABULARY, PROMPT, LENGTH, POSITIONS = 96, 7, 32, 64
# No greedy text here has the token that ends one: its treatment differs between families.
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 94, "pad_token_id": 0}
LLAMA = SIZES | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
GPT = SIZES | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
OPT = {
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 64,
}
NEOX = LLAMA | {"num_attention_heads": 4}
# family: configuration's class, its settings, the class of the package
FAMILIES = {
    "Llama": ("LlamaConfig", LLAMA, "LlamaForSampling"),
    "Mistral": ("MistralConfig", LLAMA | {"sliding_window": None}, "MistralForSampling"),
    "Mixtral": ("MixtralConfig", LLAMA | {"sliding_window": None}, "MixtralForSampling"),
    "GPT2": ("GPT2Config", GPT, "GPT2ForSamplingWithContextBroadcasting"),
    "OPT": ("OPTConfig", SIZES | OPT, "OPTForSampling"),
    "Bloom": ("BloomConfig", GPT | {"hidden_size": 64}, "BloomForSampling"),
    "GPT2 by tokens": ("GPT2Config", GPT, "gpt2.model.GPT2ForSampling"),
    "GPTJ": ("GPTJConfig", GPT | {"rotary_dim": 8}, "GPTJForSampling"),
    "GPTNeoX": ("GPTNeoXConfig", NEOX, "GPTNeoXForSampling"),
}
SETTINGS: dict[str, Any] = {"batch_size": 1, "tp_degree": 2}
SETTINGS |= {"n_positions": POSITIONS, "amp": "f32"}
VERSION = "__version__ = '0.13.x'"  # of 1ade6d7
LIMIT_SECONDS = 600  # of one row
RIGHT, OWN, CLOSED, WRONG = "right", "the package's own", "closed", "wrong"
ROWS: dict[str, tuple[str, Callable[[], str]]] = {}


def row(name, outcome=RIGHT):
    """Make a function the row of a feature: it says what was found, or raises.

    Args:
        outcome: what it means that nothing is raised; OWN where the function shows that the package
            itself computes something else than Hugging Face, CLOSED that it calls a closed kernel.
    """

    def add(function):
        ROWS[name] = (outcome, function)
        return function

    return add


# --- models and comparisons -----------------------------------------------------------------------
@functools.cache
def hugging_face(family, **changes):
    """A seeded model of a family and its folder."""
    import torch
    import transformers

    kind, settings, _ = FAMILIES[family]
    torch.manual_seed(1)
    config = getattr(transformers, kind)(**{**settings, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # far from ties, which rounding would decide
        torch.nn.init.normal_(parameter, std=0.15) if parameter.dim() > 1 else None
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    return model, folder


def neuron(family, ready=True, changes=None, **options):
    """The package's model of it, compiled where `ready`."""
    import transformers_neuronx

    folder = hugging_face(family, **(changes or {}))[1]
    settings = SETTINGS | options
    kind = operator.attrgetter(FAMILIES[family][2])(transformers_neuronx)
    made = kind.from_pretrained(folder, **settings)
    if ready:
        made.to_neuron()
    return made


def config(**options):
    """Options as a NeuronConfig in which they are given."""
    from transformers_neuronx import NeuronConfig

    return NeuronConfig(**options)


def prompt(batch=1, length=PROMPT):
    import torch

    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))


def greedy(model, ids, length=LENGTH):
    """Hugging Face's greedy tokens."""
    return model.generate(
        ids,
        max_length=length,
        do_sample=False,
        pad_token_id=0,
        attention_mask=ids.new_ones(ids.shape),
    )


def same(got, want):
    """How many tokens are equal; every one has to be."""
    if want.shape[1] != LENGTH:
        raise AssertionError(f"Hugging Face's text ends after {want.shape[1]} tokens")
    equal = int((got == want).sum()) if got.shape == want.shape else 0
    if equal != want.numel():
        raise AssertionError(f"{equal} of {want.numel()} tokens are those of Hugging Face")
    return f"{equal} of {want.numel()} tokens"


def text(family, changes=None, batch=1, **options):
    """Greedy text of a model with these options."""
    model = neuron(family, changes=changes, batch_size=batch, **options)
    want = greedy(hugging_face(family, **(changes or {}))[0], prompt(batch))
    return same(model.sample(prompt(batch), sequence_length=LENGTH, top_k=1), want)


def logits(family, limit=1e-5, **options):
    """The largest difference of a prompt's last logits."""
    import torch

    model = neuron(family, **options)
    ids = prompt()
    got = model(ids, torch.arange(PROMPT, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    want = hugging_face(family)[0](ids).logits[:, -1]
    error = float((got.reshape(-1)[:VOCABULARY] - want).abs().max() / want.abs().max())
    if error > limit:
        raise AssertionError(f"logits are {error:.1e} of the largest apart, at most {limit:.0e}")
    return f"logits {error:.0e} apart"


# --- the guide's features -------------------------------------------------------------------------
@row("Checkpoints of Hugging Face")
def _families():
    return "; ".join(f"{family}: {text(family)}" for family in FAMILIES if family != "GPTJ")


@row("GPT-J", OWN)
def _first_key():
    """Text is that of Hugging Face's model in which each token sees the first key alone.

    A graph of one token has row 0 alone, and GPT-J's mask keeps keys up to the number of the row,
    not up to its position (hlo.py, decoder_attention_mask_legacy, line 1070).
    """
    import torch

    model, ids = hugging_face("GPTJ")[0], prompt()
    got = neuron("GPTJ").sample(ids, sequence_length=LENGTH, top_k=1)
    if torch.equal(got, greedy(model, ids)):
        raise AssertionError("the text is that of Hugging Face, expected another")
    while ids.shape[1] < LENGTH:
        mask = torch.full([1, 1, ids.shape[1], ids.shape[1]], torch.finfo(torch.float32).min)
        mask[..., 0] = 0
        scores = model(ids, attention_mask=mask).logits[:, -1]
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], dim=1)
    return f"each token sees the first key alone (hlo.py, line 1070); so limited: {same(got, ids)}"


@row("Decoders in HLO")
def _hlo():
    return "; ".join(f"{name}: {logits(name)}" for name in ("Llama", "GPT2", "OPT"))


@row("Tensor parallelism")
def _parallel():
    return "; ".join(f"degree {degree}: {text('Llama', tp_degree=degree)}" for degree in (1, 2, 4))


@row("Compile-time configurations")
def _configurations():
    parts = [text("Llama", batch=2), text("Llama", context_length_estimate=32)]
    rounded = [logits("Llama", 0.05, amp=amp) for amp in ("bf16", "f16")]
    return "; ".join(["batch 2", *parts, *rounded])


@row("Choice of the model's class")
def _auto():
    from transformers_neuronx import NeuronAutoModelForCausalLM

    found = []
    for family in ("GPT2", "Llama"):
        model, folder = hugging_face(family)
        made = NeuronAutoModelForCausalLM.from_pretrained(folder, n_positions=POSITIONS)
        made.to_neuron()
        found.append(same(made.sample(prompt(), LENGTH, top_k=1), greedy(model, prompt())))
    return "; ".join(found)


@row("generate() of Hugging Face")
def _generate():
    import torch
    from transformers_neuronx import HuggingFaceGenerationModelAdapter

    model = hugging_face("GPT2")[0]
    adapter = HuggingFaceGenerationModelAdapter(model.config, neuron("GPT2"))
    options = {"max_length": LENGTH, "pad_token_id": 0, "attention_mask": torch.ones(1, PROMPT)}
    found = []
    for more in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7}):
        torch.manual_seed(5)
        got = adapter.generate(prompt(), **options, **more)
        torch.manual_seed(5)
        found.append(same(got, model.generate(prompt(), **options, **more)))
    return "greedy and sampled: " + "; ".join(found)


@row("int8 weight storage")
def _int8():
    from transformers_neuronx import QuantizationConfig

    found = []
    for family in ("GPT2", "Llama"):
        quant = QuantizationConfig(quant_dtype="s8", dequant_dtype="f32")
        found.append(f"{family}: {logits(family, 0.05, neuron_config=config(quant=quant))}")
    return "; ".join(found)


@row("Parallel context encoding")
def _context():
    one = text("GPT2", context_length_estimate=16)
    model = neuron("GPT2", prompt_batch_size=1, batch_size=3, context_length_estimate=16)
    got = model.sample(prompt(), sequence_length=LENGTH, top_k=1)
    many = same(got, greedy(hugging_face("GPT2")[0], prompt()).expand(3, -1))
    return f"{one}; one prompt to 3 rows: {many}"


@row("Saving and loading")
def _saving():
    found = []
    for family, options in (("GPT2", {}), ("Llama", {"on_device_embedding": True})):
        model, folder = hugging_face(family)
        settings = {"neuron_config": config(**options)}
        with tempfile.TemporaryDirectory() as saved:
            neuron(family, **settings).save(saved, sharded_weights=bool(options))
            again = type(neuron(family, ready=False)).from_pretrained(
                saved if options else folder,
                **settings,
                batch_size=1,
                tp_degree=2,
                n_positions=POSITIONS,
                amp="f32",
            )
            again.load(saved)
            again.to_neuron()
        got = again.sample(prompt(), sequence_length=LENGTH, top_k=1)
        found.append(same(got, greedy(model, prompt())))
    return f"compiled: {found[0]}; with sharded weights: {found[1]}"


@row("Compiling on a CPU")
def _cpu():
    settings = {"neuron_config": config(on_device_embedding=True)}
    with tempfile.TemporaryDirectory() as saved:
        made = neuron("Llama", ready=False, **settings)
        made.cpu_compile()
        made.save(saved)
        again = neuron("Llama", ready=False, **settings)
        again.load(saved)
        again.to_neuron()
    want = greedy(hugging_face("Llama")[0], prompt())
    return same(again.sample(prompt(), sequence_length=LENGTH, top_k=1), want)


@row("Number of compiling workers")
def _workers():
    return text("Llama", neuron_config=config(compilation_worker_count=1))


@row("Grouped-query attention")
def _grouped():
    from transformers_neuronx import GQA

    found = []
    for kind, heads, batch in (
        (GQA.SHARD_OVER_HEADS, 4, 1),
        (GQA.SHARD_OVER_BATCH, 2, 4),
        (GQA.REPLICATED_HEADS, 2, 1),
        (GQA.ALL_GATHER_HEADS, 2, 1),
    ):
        settings = {"neuron_config": config(group_query_attention=kind), "tp_degree": 4}
        if kind == GQA.SHARD_OVER_BATCH:
            # Its split of several tokens takes rows of [tokens x batch], not of the batch
            # (layers/attention.py, line 143), so a prompt is read token by token.
            settings["context_length_estimate"] = 0
        equal = text("Llama", {"num_key_value_heads": heads}, batch, **settings)
        found.append(f"{kind.name}: {equal}")
    return "; ".join(found)


@row("Filter of repeated n-grams")
def _ngrams():
    model = hugging_face("Llama")[0]
    got = neuron("Llama").sample(prompt(), LENGTH, top_k=1, no_repeat_ngram_size=2)
    return same(got, model.generate(prompt(), max_length=LENGTH, no_repeat_ngram_size=2))


def _on_device(batch=1, **options):
    from transformers_neuronx import GenerationConfig

    options = {"max_length": POSITIONS, "do_sample": True} | options
    return neuron(
        "Llama",
        batch_size=batch,
        neuron_config=config(on_device_generation=GenerationConfig(**options)),
    )


@row("On-device sampling")
def _sampling():
    want = greedy(hugging_face("Llama")[0], prompt())
    equal = same(_on_device(do_sample=False).sample(prompt(), LENGTH), want)
    drawn = _on_device(top_k=10, top_p=0.9, temperature=0.9).sample(prompt(), LENGTH)
    if drawn.shape != want.shape or bool((drawn >= VOCABULARY).any()):
        raise AssertionError(f"drawn {drawn}")
    return f"greedy: {equal}; drawn of the ten likeliest, sums by a kernel of NKI"


@row("Top-K and changing parameters")
def _top_k():
    from transformers_neuronx import GenerationConfig

    options = {"dynamic": True, "per_batch_line": True, "global_top_k": 16}
    rows = {"top_k": [1, 1], "top_p": [1.0, 1.0], "top_p_min_tokens": [1, 1]}
    rows |= {"temperature": [1.0, 1.0]}
    model = _on_device(2, **options, **rows)
    want = greedy(hugging_face("Llama")[0], prompt(2))
    equal = same(model.sample(prompt(2), LENGTH), want)
    changed = GenerationConfig(max_length=POSITIONS, do_sample=True, **options, **rows)
    changed.top_k, changed.temperature = [1, 8], [1.0, 2.0]
    model.update_generation_config(changed)
    got = model.sample(prompt(2), LENGTH)
    if bool((got[1] == want[1]).all()):
        raise AssertionError("the second row did not change with its parameters")
    return f"{equal}; then row 1 drawn anew, row 0: {same(got[:1], want[:1])}"


@row("Several models at once")
def _several():
    models = {family: neuron(family) for family in ("Llama", "GPT2")}
    found = []
    for family, model in models.items():
        got = model.sample(prompt(), sequence_length=LENGTH, top_k=1)
        found.append(same(got, greedy(hugging_face(family)[0], prompt())))
    return "; ".join(found)


@row("Streamer")
def _streamer():
    from transformers.generation.streamers import BaseStreamer

    class Seen(BaseStreamer):
        def __init__(self):
            self.tokens: list[Any] = []
            self.ended = 0

        def put(self, value):
            self.tokens.append(value)

        def end(self):
            self.ended += 1

    seen = Seen()
    got = neuron("Mistral").sample(prompt(), sequence_length=LENGTH, top_k=1, streamer=seen)
    equal = same(got, greedy(hugging_face("Mistral")[0], prompt()))
    if len(seen.tokens) != LENGTH - PROMPT or seen.ended != 1:
        raise AssertionError(f"{len(seen.tokens)} calls of put, {seen.ended} of end")
    return f"{equal}; {len(seen.tokens)} calls"


@row("Stopping criteria")
def _stopping():
    import torch
    from transformers_neuronx.stopping_criteria import StoppingCriteria, StoppingCriteriaList

    class After(StoppingCriteria):
        """Stops after 20 tokens; the package shows it the prompt each time."""

        length = PROMPT

        def __call__(self, input_ids, scores, **_):
            self.length += 1
            return self.length == 20

    criteria = StoppingCriteriaList([After()])
    got = neuron("Mistral").sample(
        prompt(), sequence_length=LENGTH, top_k=1, stopping_criteria_list=criteria
    )
    want = greedy(hugging_face("Mistral")[0], prompt())
    if got.shape[1] != 20:
        raise AssertionError(f"stopped after {got.shape[1]} tokens, expected 20")
    padded = torch.cat([got, want[:, 20:]], dim=1)
    return f"stopped after 20; {same(padded, want)}"


@row("Speculative sampling")
def _speculative():
    from transformers_neuronx.fused_speculation import FusedSpeculativeDecoder

    options = _fused_options()
    draft = neuron("Llama", changes={"num_hidden_layers": 1}, neuron_config=config(**options))
    target = neuron("Llama", neuron_config=config(**options))
    return f"fused: {_guessed(FusedSpeculativeDecoder(draft, target, 4))}"


def _fused_options():
    """What both models of a fused graph need."""
    from transformers_neuronx import GenerationConfig

    return {
        "padding_side": "right",
        "attention_layout": "BSH",
        "collectives_layout": "BSH",
        "on_device_embedding": True,
        "on_device_generation": GenerationConfig(top_k=1, do_sample=False),
    }


def _guessed(decoder):
    """The target's greedy text, several tokens a step."""
    import torch

    decoder.to_neuron()
    mask = torch.ones_like(prompt())
    got, *_ = decoder.sample(input_ids=prompt(), attention_mask=mask, sequence_length=LENGTH)
    return same(got, greedy(hugging_face("Llama")[0], prompt()))


@row("EAGLE speculation")
def _eagle():
    import transformers_neuronx
    from transformers_neuronx.eagle_speculation import EagleSpeculativeDecoder

    head = _eagle_head(Path(hugging_face("Llama", num_hidden_layers=1)[1]))
    found = []
    for name, tree in {
        "chain": {0: [1], 1: [2], 2: [3]},
        "tree": {0: [1, 2], 1: [3], 2: [4]},
    }.items():
        draft = transformers_neuronx.LlamaForSampling.from_pretrained(
            head, **SETTINGS, neuron_config=config(is_eagle_draft=True, **_fused_options())
        )
        draft.to_neuron()
        options = config(is_eagle_target=True, **_fused_options())
        target = neuron("Llama", neuron_config=options)
        decoder = EagleSpeculativeDecoder(draft, target, token_tree=tree, greedy=True)
        found.append(f"{name}: {_guessed(decoder)}")
    return "; ".join(found)


def _eagle_head(model):
    """The folder of a seeded head: one layer, behind a layer that joins token and hidden state."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = Path(tempfile.mkdtemp())
    read = json.loads((model / "config.json").read_text(encoding="utf-8"))
    content = json.dumps(read | {"is_eagle": True, "bias": False})
    (folder / "config.json").write_text(content, encoding="utf-8")
    weights = load_file(model / "model.safetensors")
    size = read["hidden_size"]
    weights["model.fc.weight"] = 0.15 * torch.randn(size, 2 * size)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@row("Fused weights of Q, K and V")
def _fused():
    return text("Llama", neuron_config=config(fuse_qkv=True))


@row("Layout of attention")
def _layout():
    found = []
    for options in (
        {"attention_layout": "BSH"},
        {"attention_layout": "BSH", "collectives_layout": "BSH", "fuse_qkv": True},
    ):
        found.append(text("Llama", neuron_config=config(**options)))
    return "; ".join(found)


@row("Buckets")
def _buckets():
    return text("Llama", n_positions=[16, 24, 64], context_length_estimate=[8, 16])


@row("Flash decoding")
def _flash():
    options = {"shard_over_sequence": True}
    changes = {"num_key_value_heads": 2}
    found = []
    for more in ({}, {"duplicate_q_weight_sos": True}):
        settings = {"neuron_config": config(**options, **more), "tp_degree": 4}
        found.append(text("Llama", changes, **settings))
    return "; ".join(found)


@row("Weight tiling")
def _tiling():
    import numpy

    numpy.product = numpy.prod  # type: ignore[attr-defined]  # the package calls numpy 1's name
    tiles = {
        "Llama": {"hidden_size": 256, "intermediate_size": 512},
        "GPT2": {"n_embd": 256},
        "OPT": {"hidden_size": 256, "ffn_dim": 512, "word_embed_proj_dim": 256},
    }
    found = [
        f"{family}: {text(family, sizes, neuron_config=config(weight_tiling=True))}"
        for family, sizes in tiles.items()
    ]
    return f"with numpy 1's `product`; {'; '.join(found)}"


@row("Flash attention", CLOSED)
def _flash_attention():
    changes = {"num_hidden_layers": 1, "max_position_embeddings": 8192}
    try:
        neuron("Llama", changes=changes, n_positions=[4096], context_length_estimate=[4096])
    except NotImplementedError as error:
        if "attention_isa_kernel is a closed kernel" in str(error):
            return "prompts of 4,096 tokens call attention_isa_kernel, which is refused by name"
        raise
    raise AssertionError("a prompt of 4,096 tokens runs, expected a closed kernel")


@row("Continuous batching")
def _continuous():
    import torch
    from transformers_neuronx import ContinuousBatchingConfig

    batching = ContinuousBatchingConfig(batch_size_for_shared_caches=2)
    model = neuron(
        "Llama",
        batch_size=2,
        n_positions=[POSITIONS],
        context_length_estimate=[16],
        neuron_config=config(continuous_batching=batching),
    )
    want = greedy(hugging_face("Llama")[0], prompt(2))
    rows = [list(ids) for ids in prompt(2).tolist()]
    for place, ids in enumerate(prompt(2)):
        positions = torch.arange(PROMPT)[None]
        out = model(ids[None], cache_ids=positions, start_ids=torch.tensor([place]))
        rows[place].append(int(out.reshape(-1)[:VOCABULARY].argmax()))
    for step in range(PROMPT, LENGTH - 1):
        last = torch.tensor([[ids[-1]] for ids in rows])
        positions = torch.full((2, 1), step)
        out = model(last, cache_ids=positions, start_ids=torch.arange(2))
        for ids, scores in zip(rows, out.reshape(2, -1)):
            ids.append(int(scores[:VOCABULARY].argmax()))
    return same(torch.tensor(rows), want)


# Features that have no meaning here, or are not of Transformers NeuronX's own program.
WITHOUT = {
    "Persistent cache": "nothing is kept: a graph compiles for a CPU in seconds",
    "Several instances (TP, PP)": "no meaning: all ranks are in one process",
}


# --- the runs -------------------------------------------------------------------------------------
def _inside(public, name, answer):
    """One row, in its own process."""
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import neuron_cpu

    neuron_cpu.ensure_sdk()
    sys.path.insert(0, str(public / "transformers-neuronx" / "src"))
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        with torch.inference_mode():
            outcome, function = ROWS[name]
            answer.send((outcome, function()))
    except Exception as error:
        traceback.print_exc()
        answer.send((WRONG, f"{type(error).__name__}: {error}".splitlines()[0][:160]))


def measure(public, name):
    """(an outcome; what was found)."""
    context = multiprocessing.get_context("fork")  # the package compiles in forks, too
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_inside, args=(public, name, theirs))
    process.start()
    theirs.close()
    try:
        found: tuple[str, str] = mine.recv()
    except EOFError:
        found = (WRONG, f"the process ended with {process.exitcode}")
    process.join()
    return found


def as_list(table):
    """Features, outcomes and what was found, as wide as a page is."""
    return "\n".join(
        textwrap.fill(
            f"- {name}: {outcome}; {found}", 118, subsequent_indent="  ", break_on_hyphens=False
        )
        for name, outcome, found in table
    )


def main():
    """Run the rows and print the table; 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("public", type=Path)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--write", action="store_true", help=f"the table into {page.PAGE.name}")
    options = parser.parse_args()
    if options.write and options.rows != list(ROWS):
        parser.error("--write takes every row, got --rows; leave one of them out.")
    file = options.public / "transformers-neuronx" / "src" / "transformers_neuronx" / "version.py"
    found = file.read_text(encoding="utf-8") if file.is_file() else "none"
    if VERSION not in found:
        parser.error(
            f"{file} has version {found.strip().splitlines()[-1]}, expected {VERSION}; clone "
            "aws-neuron/transformers-neuronx at 1ade6d7 there."
        )
    table = []
    for name in options.rows:
        began = time.monotonic()
        table.append((name, *measure(options.public, name)))
        print(f"{name} ({time.monotonic() - began:.0f} s): {table[-1][1]}", file=sys.stderr)
    table += [(name, "none", why) for name, why in WITHOUT.items()]
    shown = as_list(table)
    print(shown)
    if options.write:
        page.put("neuronx", shown)
    return int(any(outcome == WRONG for _, outcome, _ in table))


if __name__ == "__main__":
    sys.exit(main())
