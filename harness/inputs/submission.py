"""The submission: one Python file, found by module name or path, and imported alone."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Optional

from harness.errors import UserError
from neuron_cpu.hints import hint

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# model_type of config.json -> the class that the driver runs
MODEL_CLASSES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "NeuronLlamaForCausalLM"),
    "mixtral": "NeuronMixtralForCausalLM",
}
# the same of the SDK's own models: module and class
BASELINES = {
    name: (
        f"neuronx_distributed_inference.models.{name}.modeling_{name}",
        f"Neuron{word}ForCausalLM",
    )
    for name, word in (
        ("llama", "Llama"),
        ("mistral", "Mistral"),
        ("mixtral", "Mixtral"),
        ("qwen2", "Qwen2"),
        ("qwen3", "Qwen3"),
    )
}


def find(name: str) -> Path:
    """The file that `--llama` names: a path to a .py file, or a module name.

    A module is looked for in the current folder and then beside main.py.
    """
    if name.endswith(".py") or "/" in name:
        path = Path(name)
        with contextlib.suppress(RuntimeError):  # a home folder that nobody has
            path = path.expanduser()
        if "\0" in name or not path.is_file():
            raise UserError(
                f"The submission {name} does not exist or is not a file; give --llama the path of "
                "a .py file."
            )
        return path.resolve()
    if "\0" in name or not all(name.split(".")):
        raise UserError(
            f"--llama {name!r} is no module name, expected one such as llama, or the path of a .py "
            "file; correct it."
        )
    relative = Path(*name.split(".")).with_suffix(".py")
    roots = list(dict.fromkeys((Path.cwd(), REPOSITORY)))
    for root in roots:
        if (root / relative).is_file():
            return (root / relative).resolve()
    raise UserError(
        f"The submission {name!r} is not there: expected {relative} in "
        f"{' or '.join(map(str, roots))}; give --llama a module name or the path of a .py file."
    )


def load(path: Path, model_type: str) -> ModuleType:
    """Import the file under its stem; a UserError says where it raised or what it lacks."""
    module = imported(path)
    if not hasattr(module, MODEL_CLASSES[model_type]):
        raise UserError(
            f"The submission {path} does not define {MODEL_CLASSES[model_type]}, which the driver "
            f"runs for a model of type {model_type!r}."
        )
    return module


def imported(path: Path) -> ModuleType:
    """Any file of somebody else's, imported under its stem."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"The submission {path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    # Kernels are inspected through sys.modules while they are traced.
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"The submission {where(error, path)}.") from error
    return module


def line_of(error: BaseException, path: Path) -> Optional[int]:
    """The innermost line of `path` in the error's traceback; None where it did not pass there."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    return lines[-1] if lines else None


def where(error: BaseException, path: Path) -> str:
    """`<file>, line N, raised Type: message`; the caller's sentence ends with its own full stop."""
    line = line_of(error, path)
    place = f"{path}, line {line}," if line else f"Code outside of {path}"
    return f"{place} {raised(error)}"


def raised(error: BaseException) -> str:
    """`raised Type: message`, in one line and without a full stop."""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    lines = message.strip().splitlines()
    told = lines[0].rstrip(".") if lines else "(no message)"
    advice = hint(error)
    return f"raised {type(error).__name__}: {told}" + (f" ({advice})" if advice else "")


def kernel_lines(path: Path) -> dict[str, int]:
    """Function name -> line of its definition; empty where the file is no Python any more."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return {}
    return {node.name: node.lineno for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
