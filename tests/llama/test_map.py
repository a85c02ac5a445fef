"""The map at the head of llama.py: every kernel is there, and calls what stands beside it."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from types import CodeType

import pytest
import torch

import llama
import models.step
import models.today
from harness.model_shapes import MODEL_SHAPES
from neuron_cpu.core import Kernel


def told():
    """What each function of the map calls; a line without a function goes on with the last."""
    text = llama.__doc__.partition("phase by phase:\n\n")[2].partition("\n\nAxis letters")[0]
    found: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        name, words = re.fullmatch(r" {4}(\S*) +(.+)", line).groups()
        own = found.setdefault(name or [*found][-1], [])
        own += [
            w for w in re.findall(r"[\w.]+", words) if re.search("[._]", w) or hasattr(llama, w)
        ]
    return found


def called(tree, name):
    """Names that the body of a function or method has."""
    body: list[ast.AST] = [tree]
    for part in name.split("."):
        body = [node for node in body[0].body if getattr(node, "name", None) == part]
    names = {node.id for node in ast.walk(body[0]) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(body[0]) if isinstance(node, ast.Attribute)}


def test_the_map_is_true():
    kernels = {name for name, value in vars(llama).items() if isinstance(value, Kernel)}
    assert kernels <= set(told())
    tree = ast.parse(Path(llama.__file__).read_text(encoding="utf-8"))
    for name, callees in told().items():
        assert callees, name
        names = called(tree, name)
        for callee in callees:
            owner, _, method = callee.rpartition(".")
            assert hasattr(getattr(llama, owner) if owner else llama, method), callee
            assert method in names, (name, callee)


@pytest.mark.parametrize("module", [llama, models.today, models.step])
def test_what_comments_name_is_in_the_code(module):
    """The buffers and functions of examples, tables and docstrings are those of the code."""
    text, code, told = Path(module.__file__).read_text(encoding="utf-8"), set(), ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        code |= {token.string} if token.type == tokenize.NAME else set()
        told += token.string if token.type in (tokenize.COMMENT, tokenize.STRING) else ""
    named = set(re.findall(r"\b([a-z]\w*_(?:sb|psum|hbm))\b|\b([A-Za-z_]+)\(\)", told))
    assert named
    assert {buffer or function for buffer, function in named} <= code


# --- One place for each name ----------------------------------------------------------------------

FILES = {path.stem: path for path in Path(models.step.__file__).parent.glob("*.py")}
FILES["llama"] = Path(llama.__file__)
# why a name stands at the top of several files
UPLOADED = "models/qwen3_moe.py is uploaded alone"
ASKED = "NxDI's driver asks every model file for it"
OPERANDS = "the same kernel, with operands that llama.py's does not have"
TWICE = {
    **dict.fromkeys(("P_MAX", "MOVING_MAX", "FP32", "StateDict", "spans", "filled"), UPLOADED),
    **dict.fromkeys(("tile_of", "psum_of", "kernel_of", "decode_step_kernel"), UPLOADED),
    "__getattr__": UPLOADED,
    **dict.fromkeys(("LlamaInferenceConfig", "NeuronConfigNKI", "NeuronLlamaForCausalLM"), ASKED),
    **dict.fromkeys(("linear_kernel", "swiglu_mlp_kernel", "attention_prefill_kernel"), OPERANDS),
}


def defined(path):
    """The functions, classes and constants at the top of a file."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = getattr(node, "targets", [node])
        names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        known = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        names = [node.name] if known else names if isinstance(node, ast.Assign) else []
        found |= dict.fromkeys(names, node)
    return found


def test_a_name_stands_in_one_file():
    """What stands in two has a reason: one above, or the language. Such twins of llama.py and
    models/today.py hold tensors or call the language; functions on numbers are shared."""
    every = {name: defined(path) for name, path in FILES.items()}
    languages = re.compile(r"\b(nl|nisa)\.|NamedTuple|_sb\b|_psum\b|_hbm\b")
    twice, twins = set(), every["llama"].keys() & every["today"].keys()
    for name in {name for names in every.values() for name in names}:
        files = {file for file, names in every.items() if name in names}
        if len(files) > 1 and files != {"llama", "today"}:
            twice.add(name)
    assert twice == TWICE.keys()
    numbers = {
        name for name in twins - twice if not languages.search(ast.unparse(every["llama"][name]))
    }
    assert numbers == {"token_blocks", "project_qkv", "prompt_weights", "take_turns"}, (
        "their arguments or results are of classes that each language has of its own"
    )


# --- How much one opens to understand a decode step -----------------------------------------------


def opened(run):
    """Functions of llama.py that run, each with how deep."""
    stack: list[CodeType] = []
    found: dict[str, int] = {}

    def hook(frame, event, _):
        code = frame.f_code
        if code.co_filename != llama.__file__ or code.co_name.startswith("<"):
            return
        if event == "call":
            stack.append(code)
            owner = type(frame.f_locals.get("self")).__name__ if "self" in frame.f_locals else ""
            name = f"{owner}.{code.co_name}".lstrip(".")
            found[name] = max(found.get(name, 0), len(stack))
        elif event == "return" and stack and stack[-1] is code:
            stack.pop()

    sys.setprofile(hook)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_a_decode_step_opens_few_functions():
    """A property that names one number is no function to open; all are counted, too."""
    shape = MODEL_SHAPES["llama-3.2-1b"]
    heads, hidden = llama.HeadShape(16, 4, shape["head_dim"]), shape["hidden_size"]
    norm = llama.Norm(hidden, 1e-5)

    def meta(*sizes):
        return torch.empty(sizes, dtype=torch.bfloat16, device="meta")

    def weight(n, k):
        return meta(128, -(-n // 128) * -(-k // 128) * 128)

    def step():
        x, tables = (meta(hidden, 1), meta(hidden, 1), norm), (meta(128, 1), meta(128, 1))
        weights = weight(24 * 64, hidden), weight(hidden, 16 * 64)
        cache = meta(1, 4, 640, 64), meta(1, 4, 640, 64), meta(1, 640)
        llama.attention_decode_kernel.trace(*x, *weights, *tables, *cache, heads)
        llama.swiglu_mlp_kernel.trace(
            *x, weight(1024, hidden), weight(1024, hidden), weight(hidden, 1024)
        )
        llama.linear_kernel.trace(meta(hidden, 1), weight(8016, hidden), norm)

    found = opened(step)
    properties = {
        f"{owner}.{name}"
        for owner, kind in vars(llama).items()
        if isinstance(kind, type)
        for name, value in vars(kind).items()
        if isinstance(value, property)
    }
    assert len(found) <= 51 and max(found.values()) <= 10, sorted(found)
    assert len(found.keys() - properties) <= 45
