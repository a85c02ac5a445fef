"""The submission: one Python file, found by module name or path, and imported alone."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from harness.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL_CLASS = "NeuronLlamaForCausalLM"


def find(name: str) -> Path:
    """The file that `--llama` names: a path to a .py file, or a module name.

    A module is looked for in the current folder and then beside main.py.
    """
    if name.endswith(".py") or "/" in name:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"The submission {name} does not exist or is not a file.")
        return path.resolve()
    relative = Path(*name.split(".")).with_suffix(".py")
    for root in (Path.cwd(), REPOSITORY):
        if (root / relative).is_file():
            return (root / relative).resolve()
    raise UserError(f"The submission {name!r} is neither in {Path.cwd()} nor in {REPOSITORY}.")


def load(path: Path) -> ModuleType:
    """Import the file under its stem; a UserError says where it raised or what it lacks."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"The submission {path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    # Kernels are inspected through sys.modules while they are traced.
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"The submission {where(error, path)}.") from error
    if not hasattr(module, MODEL_CLASS):
        raise UserError(f"The submission {path} does not define {MODEL_CLASS}.")
    return module


def where(error: BaseException, path: Path) -> str:
    """`<file>, line N raised Type: message`, with the innermost line of `path` in the traceback."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == path
    ]
    line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    place = f"{path}, line {line}," if line else f"{path}"
    message = str(error).strip().splitlines()
    told = (
        message[0].rstrip(".") if message else "(no message)"
    )  # the caller's sentence ends itself
    return f"{place} raised {type(error).__name__}: {told}"
