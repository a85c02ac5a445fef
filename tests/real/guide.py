"""The Python blocks of NxD Inference's feature guide, each as it stands, over the real libraries.

`python tests/real/guide.py PUBLIC` (make real PUBLIC=DIR) takes the guide from a clone of
aws-neuron-sdk below PUBLIC, beside both libraries' clones. Every block runs in a process of its
own. Names that a block leaves to its reader are given to it; its paths are folders of seeded models
of two layers, and its degrees, lengths and buckets are made small. Where a block makes a
configuration and no model, the model is compiled with it. A cell says how many of the tokens that a
model then generates are those of Hugging Face in fp32, or what the block ended in.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from neuron_cpu.sandbox.run_script import HookTaken  # noqa: E402
from tests.real import page, releases  # noqa: E402
from tests.real.alone import alone  # noqa: E402

GUIDE = "aws-neuron-sdk/libraries/nxd-inference/developer_guides/feature-guide.rst"
RELEASES = ("0.6", "0.9")
TOKENS, LENGTH = 8, 128
PROMPT = "I believe the meaning of life is"
LIMIT_SECONDS = 900  # of one block
# What the guide's machines have more of: the largest value here of each keyword, buckets' too.
SMALL = {"tp_degree": 2, "seq_len": LENGTH, "max_length": LENGTH, "max_context_length": LENGTH}
BUCKETS = ("context_encoding_buckets", "token_generation_buckets", "prefix_buckets")
# Parts that a block takes from other pages, which it calls by name.
TREE = "medusa_mc_sim_7b_63.json"


def blocks(guide):
    """(section and line, text) of every block of Python."""
    lines, section = guide.splitlines(), ""
    for number, line in enumerate(lines):
        if number and re.fullmatch(r"[-=~^]{4,}", line) and lines[number - 1].strip():
            section = lines[number - 1].strip()
        if line.strip() != "::":
            continue
        body = []
        for each in lines[number + 1 :]:
            if each.strip() and not each.startswith(" "):
                break
            body.append(each)
        text = textwrap.dedent("\n".join(body)).strip()
        if "import " in text or " = " in text or ".compile(" in text:
            yield f"{section} ({number + 1})", text


# --- in the process of a release ------------------------------------------------------------------
def inside(guide, done):
    """A line of JSON with all rows, then one for each block."""
    import neuron_cpu

    neuron_cpu.ensure_sdk()
    sys.meta_path.insert(0, HookTaken())  # as for a script of `neuron_cpu run`
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no cell
    found = list(blocks(guide.read_text(encoding="utf-8")))
    print(json.dumps([name for name, _ in found]), file=out, flush=True)
    for name, text in found:
        if name not in done:
            told = alone(LIMIT_SECONDS, _block, text)
            print(json.dumps([name, "outcome", *told]), file=out, flush=True)
    return 0


def _block(text):
    folder = str(Path.cwd())
    try:
        return _run(text, Path(folder))
    except Exception as error:  # the outcome is what a reader sees
        if os.environ.get("NEURON_CPU_DEBUG"):
            traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first[:240]}".replace(folder, "FOLDER")


def _run(text, folder):
    given = _of_the_reader(folder)
    os.environ["BASE_COMPILE_WORK_DIR"] = f"{folder / 'work'}{os.sep}"
    text = re.sub(r'"([^"\n]*Llama[^"\n]*|[^"\n]*EAGLE[^"\n]*)"', _path_in(folder), text)
    with _small(given["NeuronConfig"]):
        given["config"] = _config(given, given["NeuronConfig"]())
        if re.search(r"\bmodel\b", text) and not re.search(r"^model =", text, re.MULTILINE):
            given["model"] = _loaded(given, given["config"], folder)
        exec(compile(text, "guide", "exec"), given)
        model = given["model"]
        if model is None and given["neuron_config"] is None:
            return "runs"
        if model is None:
            model = _loaded(given, _config(given, given["neuron_config"]), folder)
        if not getattr(model, "is_loaded_to_neuron", False):
            model.compile(str(folder / "made"))
            model.load(str(folder / "made"))
        return _tokens(model, given)


def _config(given, neuron_config):
    load = given["load_pretrained_config"](given["model_path"])
    return given["LlamaInferenceConfig"](neuron_config, load_config=load)


def _loaded(given, config, folder):
    """The seeded model, compiled and loaded."""
    model = given["NeuronLlamaForCausalLM"](given["model_path"], config)
    model.compile(str(folder / "given"))
    model.load(str(folder / "given"))
    return model


def _of_the_reader(folder):
    """Names that blocks take from blocks before them, or leave to their reader."""
    import torch
    from neuronx_distributed_inference.models import config as config_module
    from neuronx_distributed_inference.models.llama import modeling_llama
    from neuronx_distributed_inference.modules import lora_serving
    from neuronx_distributed_inference.utils import hf_adapter
    from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

    from tests.adapters import write_adapter
    from tests.tiny_model import write_tiny_model

    model = str(write_tiny_model(folder / "model"))
    whole = LlamaForCausalLM.from_pretrained(model, torch_dtype=torch.float32)
    adapter = write_adapter(folder / "one", whole)
    (folder / "lora.json").write_text(
        json.dumps({"lora-ckpt-dir": str(folder), "lora-ckpt-paths": {"one": adapter.name}})
    )
    (folder / TREE).write_text(json.dumps([[0], [1], [0, 0]]))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    return {
        **vars(config_module),
        "NeuronLlamaForCausalLM": modeling_llama.NeuronLlamaForCausalLM,
        "LlamaInferenceConfig": modeling_llama.LlamaInferenceConfig,
        "LoraServingConfig": lora_serving.LoraServingConfig,
        "load_pretrained_config": hf_adapter.load_pretrained_config,
        **{"torch": torch, "json": json, "tokenizer": tokenizer, "prompts": [PROMPT]},
        **{"generation_config": GenerationConfig(pad_token_id=0), "kwargs": {}},
        **{"model_path": model, "compiled_model_path": str(folder / "compiled")},
        **{"seeded": model, "adapter": adapter, "model": None, "neuron_config": None},
        **{"max_loras": 2, "max_cpu_loras": 2, "batch_size": 1, "dynamic_multi_lora": False},
        **{"quantized": False, "lora_ckpt_json": str(folder / "lora.json")},
    }


def _path_in(folder):
    """A path of the guide as one here: what is read is a seeded model."""

    def path(found):
        name = folder / found[1].strip("/").replace("/", "-")
        if "neuron_models" not in found[1] and "quantized" not in found[1] and not name.exists():
            name.symlink_to(folder / "model")
        return f'"{name}"'

    return path


@contextlib.contextmanager
def _small(kind):
    """NeuronConfig with a model's length and degree that fit two layers on a CPU."""
    own = kind.__init__

    def made(self, **given):
        asked = {"seq_len": LENGTH, "torch_dtype": "float32", **given}
        for name, most in SMALL.items():
            if name in asked:
                asked[name] = min(asked[name], most)
        for name in BUCKETS:
            if name in asked:
                asked[name] = sorted({min(bucket, LENGTH) for bucket in asked[name]})
        own(self, **asked)

    with mock.patch.object(kind, "__init__", made):
        yield


def _tokens(model, given):
    """How many tokens of a greedy text are those of Hugging Face."""
    import torch
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter
    from transformers import LlamaForCausalLM

    from tests.adapters import merge_adapter

    inputs = given["tokenizer"]([PROMPT] * model.neuron_config.batch_size, return_tensors="pt")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    options = {"do_sample": False, "top_k": 1, "max_new_tokens": TOKENS, "pad_token_id": 0}
    adapter = HuggingFaceGenerationAdapter(model)
    made = adapter.generate(ids, attention_mask=mask, eos_token_id=None, **options)
    reference = LlamaForCausalLM.from_pretrained(given["seeded"], torch_dtype=torch.float32)
    if model.neuron_config.lora_config is not None:  # from 0.7 on number 0 is the first adapter
        merge_adapter(reference, given["adapter"])
    expected = reference.generate(ids, attention_mask=mask, eos_token_id=None, **options)
    same = (made[:, ids.shape[1] :] == expected[:, ids.shape[1] :]).int().cumprod(1).sum(1).min()
    return f"{int(same)} of {TOKENS} tokens"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("public", type=Path, help="folder of the three clones")
    parser.add_argument("--releases", nargs="+", default=RELEASES)
    parser.add_argument("--write", action="store_true", help=f"the table into {page.PAGE.name}")
    parser.add_argument("--resume", action="store_true", help="leave out what this tree found")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        return inside(asked.public / GUIDE, json.loads(asked.inside))
    for name in asked.releases:
        done = json.dumps(list(page.done(page.GUIDE).get(name, {})) if asked.resume else [])
        command = [sys.executable, "-W", "ignore", __file__, str(asked.public), "--inside", done]
        environment = releases.environment(releases.RELEASES[name], asked.public)
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            page.keep_rows(page.GUIDE, json.loads(run.stdout.readline()))
            for line in run.stdout:
                page.keep(page.GUIDE, name, *json.loads(line))
    page.end(page.GUIDE, asked.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
