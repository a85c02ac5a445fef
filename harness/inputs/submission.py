"""The submission: a Python file, found by module name or path, and what it imports beside it."""

import ast
import contextlib
import hashlib
import sys
from pathlib import Path
from types import ModuleType

from harness.errors import UserError
from harness.inputs import schema
from neuron_cpu.console.hints import hint
from neuron_cpu.sandbox import foreign
from neuron_cpu.sandbox.neighbours import REPOSITORY, files, root_of, tree

# This project's llama.py, and the file that runs where it says that it does not cover something
BEYOND = {REPOSITORY / "llama.py": REPOSITORY / "models" / "extended.py"}
OWN_MODULES = "llama", "models.extended", "models.qwen3_moe", "models.step"
# model_type of config.json -> the class that the driver runs
MODEL_CLASSES = dict.fromkeys(schema.FORMS, "NeuronLlamaForCausalLM")
MODEL_CLASSES["qwen3_moe"] = "NeuronQwen3MoeForCausalLM"
# the same of the SDK's own models: module and class; of a family that has none, models/extended.py
# without kernels
_EXTENDED = "models.extended", "NeuronLlamaForCausalLM"
BASELINES = dict.fromkeys(schema.FORMS, _EXTENDED)
BASELINES |= {
    name: (
        f"neuronx_distributed_inference.models.{name}.modeling_{name}",
        f"Neuron{word}ForCausalLM",
    )
    for name, word in (
        ("llama", "Llama"),
        ("mistral", "Mistral"),
        ("qwen2", "Qwen2"),
        ("qwen3", "Qwen3"),
        ("qwen3_moe", "Qwen3Moe"),
    )
}


def find(name: str) -> Path:
    """The file that `--llama` names: a path to a .py file, or a module name.

    A module is looked for in the current folder and then beside main.py.
    """
    if name.endswith(".py") or "/" in name or "\0" not in name and Path(name).is_dir():
        path = Path(name)
        with contextlib.suppress(RuntimeError):  # a home folder that nobody has
            path = path.expanduser()
        if "\0" in name or not path.is_file():
            raise UserError(
                f"The submission {name} does not exist or is not a file, expected the path of a "
                f".py file; {foreign.meant(path)}."
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
        f"{' or '.join(map(str, roots))}; give --llama a module name, of this project "
        f"{', '.join(OWN_MODULES)}, or the path of a .py file."
    )


def baseline_file(model_type: str) -> Path | None:
    """The file of this project that is the baseline; None where the SDK has a model of the type."""
    return BEYOND[REPOSITORY / "llama.py"] if BASELINES[model_type] == _EXTENDED else None


def module_name(path: Path) -> str:
    """The name that a file has when it is imported from its root."""
    parts = path.relative_to(root_of(path)).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(path: Path) -> dict[str, bytes]:
    """Their texts, by their places below the submission's root."""
    return {str(file.relative_to(root_of(path))): file.read_bytes() for file in files(path)}


def digest(path: Path) -> str:
    """A hash of all of them."""
    texts = sources(path)
    whole = hashlib.sha256(texts.pop(str(path.relative_to(root_of(path)))))
    for name, text in texts.items():
        whole.update(b"\0" + name.encode() + b"\0" + hashlib.sha256(text).digest())
    return whole.hexdigest()


def load(path: Path, model_type: str) -> ModuleType:
    """Import the file under its stem; a UserError says where it raised, or which name it lacks."""
    module = imported(path)
    name = MODEL_CLASSES[model_type]
    if not hasattr(getattr(module, name, None), "get_neuron_config_cls"):
        what = "defines no application of NxDI as" if hasattr(module, name) else "does not define"
        raise _without_class(path, what, model_type)
    return module


def check_named(path: Path, model_type: str) -> None:
    """Refuse, before anything long, a file whose text cannot define the driver's class."""
    ways = (MODEL_CLASSES[model_type].encode(), b"import *", b"globals", b"exec", b"setattr")
    if not any(way in text for text in sources(path).values() for way in ways):
        try:
            ast.parse(path.read_bytes(), str(path))
        except (SyntaxError, ValueError) as error:
            raise UserError(f"The submission {where(error, path)}.") from error
        raise _without_class(path, "does not define", model_type)


def _without_class(path: Path, what: str, model_type: str) -> UserError:
    return UserError(
        f"The submission {path} {what} {MODEL_CLASSES[model_type]}, which the driver runs for a "
        f"model of type {model_type!r}; begin with a copy of llama.py."
    )


def imported(path: Path) -> ModuleType:
    """Import a stranger's file by its name below its root. The root comes first on the path, so
    that it finds its own files, as a script does."""
    foreign.put_first(root_of(path))
    for file in files(path)[1:]:
        known = getattr(sys.modules.get(module_name(file)), "__file__", None)
        if known is not None and Path(known).resolve() != file.resolve():
            del sys.modules[module_name(file)]  # of another submission
    try:
        return foreign.imported(path, module_name(path))
    except (Exception, SystemExit) as error:
        raise UserError(f"The submission {where(error, path)}.") from error


def place_of(error: BaseException, path: Path) -> tuple[str, int] | None:
    """(file, line): the innermost of the submission's own files in the error's traceback; None
    where it did not pass there."""
    return foreign.place_of(error, [*map(str, files(path))])


def where(error: BaseException, path: Path) -> str:
    """`<file>, line N, raised Type: message`; the caller's sentence ends with its own full stop."""
    found = place_of(error, path)
    place = f"{found[0]}, line {found[1]}," if found else f"Code outside of {path}"
    return f"{place} {raised(error)}"


def raised(error: BaseException) -> str:
    """`raised Type: message`, in one line and without a full stop."""
    lines = (error.msg if isinstance(error, SyntaxError) else str(error)).strip().splitlines()
    told = lines[0].rstrip(".") if lines else "(no message)"
    advice = hint(error)
    return f"raised {type(error).__name__}: {told}" + (f" ({advice})" if advice else "")


def kernel_places(path: Path) -> dict[str, str]:
    """Function name -> FILE:LINE of its definition; empty where files are no Python."""
    return {
        node.name: f"{file.name}:{node.lineno}"
        for file in reversed(files(path))
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef)
    }
