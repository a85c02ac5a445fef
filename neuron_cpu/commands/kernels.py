"""Kernels and their arguments, as command lines name them: FILE:KERNEL, 128x512:bf16, 2x8."""

import argparse
import ast
import contextlib
import functools
import json
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..console import terminal
from ..console.arguments import positive
from ..console.hints import hint
from ..environment import variable
from ..errors import UsageError, nearest
from ..files import write_text_atomically
from ..sandbox import foreign, limits

PIPED_WIDTH = 180  # columns of a table that goes to a file
STANDARD_OUTPUT = Path("-")
REFERENCES = ("ref", "golden", "expected")  # how names of references begin
TARGET = "NEURON_PLATFORM_TARGET_OVERRIDE"  # core/device/target.py, which is imported late


def declare_time_limit(parser: argparse.ArgumentParser) -> None:
    """The option of every command that runs the user's kernel in its own process."""
    parser.add_argument(
        "--time-limit",
        type=positive,
        default=600,
        metavar="SECONDS",
        help="of processor time, after which a kernel that does not end is ended (600)",
    )


@contextmanager
def bounded(args: argparse.Namespace) -> Iterator[None]:
    """The body runs the user's own file: it ends, and leaves memory for this process to say why."""
    try:
        with limits.bounded(args.time_limit, int(limits.default_memory_gib() * 2**30)):
            yield
    except TimeoutError as error:  # outside of the kernel's own lines
        raise UsageError(
            f"{args.kernel} takes longer than {args.time_limit} s of processor time, expected "
            "less; give it more with --time-limit."
        ) from error


def declare(parser: argparse.ArgumentParser) -> None:
    """The options of every command that traces a kernel."""
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="[NAME=]VALUE",
        help="argument in order: a tensor as 128x512:bf16, a Python literal, or @NAME for an "
        "object of the file; repeat",
    )
    parser.add_argument("--grid", help="launch grid, for example 4 or 2x8")
    parser.add_argument(
        "--target",
        metavar="CHIP",
        choices=("trn1", "inf2", "trn2", "trn3"),
        help="chip that the kernel is built for: trn1, inf2, trn2 or trn3 (default: what "
        f"{TARGET} says, else trn1 for neuronxcc.nki and trn3 for nki)",
    )


def targeted(args: argparse.Namespace) -> AbstractContextManager[None]:
    """The body builds kernels for the chip of the command line."""
    asked = getattr(args, "target", None)
    return nullcontext() if asked is None else variable(TARGET, asked)


def declare_files(parser: Any, **files: str) -> None:
    """Options that name files: each with what the command does with it."""
    for name, help in files.items():
        if name == "json":
            help += "; - for standard output, which then has nothing else"
            quiet = "print nothing but errors: the exit status and files say the rest"
            parser.add_argument("--quiet", action="store_true", help=quiet)
        kind = functools.partial(_written, ".html" if name == "html" else ".json")
        parser.add_argument(f"--{name}", type=kind, metavar="PATH", help=help)


def _written(suffix: str, text: str) -> Path:
    """A file that a command writes: no source, which it would be in the place of."""
    path = Path(text)
    if path.suffix in (".py", ".ipynb") or path.is_dir():
        what, mend = "source", Path(f"{text.rpartition('.')[0]}{suffix}")
        if path.is_dir():
            what, mend = "folder", path / f"report{suffix}"
        raise argparse.ArgumentTypeError(
            f"expected a file to write, got the {what} {text}; write {mend}"
        )
    return path


def output(args: argparse.Namespace) -> Any:
    """Where a command that has --json and --quiet prints its tables."""
    elsewhere = sys.stderr if args.json == STANDARD_OUTPUT else None
    return terminal.output(PIPED_WIDTH, elsewhere, args.quiet)


def write_json(args: argparse.Namespace, console: Any, content: Any, what: str = "figures") -> None:
    """Write what --json asks for, if it is given."""
    if args.json is None:
        return
    text = json.dumps(content, indent=1, default=str)
    if args.json == STANDARD_OUTPUT:
        print(text)
        return
    write_text_atomically(args.json, text)
    console.print(f"{what}: {args.json}")


def named(text: str) -> str:
    """FILE:NAME, also of FILE::NAME, as pytest has it, and of FILE.py/NAME."""
    text = text.replace("::", ":").replace(".py/", ".py:")
    if call := re.fullmatch(r"(.*\.py:\w+)(?:\[(.*?)\])?(?:\(.*\))?", text):
        name, grid = call.groups()
        if name != text:
            told = f"{name} --grid {grid.replace(', ', 'x')}" if grid else name
            raise argparse.ArgumentTypeError(
                f"expected FILE:KERNEL, got {text}; write {told} and each argument behind --arg"
            )
    return text


def declare_reference(parser: Any, help: str) -> None:
    """The function that a kernel is held against."""
    parser.add_argument("--ref", type=named, metavar="FILE:FUNCTION", help=help)
    parser.add_argument(
        "--ref-library", choices=("numpy", "torch"), help="what --ref computes with (by its code)"
    )


def declare_kernel(parser: argparse.ArgumentParser) -> None:
    """The kernel that a command is about, and how it is called."""
    parser.add_argument(
        "kernel", type=named, metavar="FILE:KERNEL", help="Python file and kernel function in it"
    )
    declare(parser)


def declare_isolation(parser: argparse.ArgumentParser) -> None:
    """The option of commands that run strangers' files."""
    parser.add_argument(
        "--require-isolation", action="store_true", help="refuse where files cannot be confined"
    )


def confined(args: argparse.Namespace) -> None:
    """Say which parts of the sandbox are missing here.

    Raises:
        UsageError: --require-isolation forbids it.
    """
    lacking = limits.missing()
    if lacking and args.require_isolation:
        raise UsageError(
            f"--require-isolation: a stranger's file is not confined here ({lacking}); use a Linux "
            "that has both, or leave it out for files that you trust."
        )
    if lacking:
        print(f"A stranger's file is not confined as it should be: {lacking}.", file=sys.stderr)


def case_of(args: argparse.Namespace) -> Any:
    """The arguments of the command line: tensors have shapes, perhaps limits, no data.

    Raises:
        UsageError: a text is no argument, or names no object of the kernel's file.
    """
    from ..judge import cases

    return cases.parse_case(args.arg).resolved(objects(args.kernel))


def parse_grid(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        sizes = [size for size in re.findall(r"\d+", text) if int(size)]
        raise UsageError(
            f"--grid {text}, expected positive sizes such as 4 or 2x8; write --grid "
            f"{'x'.join(sizes) or 2}."
        )
    return tuple(int(n) for n in text.split("x"))


def _loaded(target: str, what: str) -> tuple[Path, str, types.ModuleType]:
    """The parts of ``FILE:NAME``, and the file as a module."""
    path, _, name = target.rpartition(":")
    module = path.isidentifier() and not Path(path).exists()
    if not path or not name or module:
        mend = _completed(f"{path}.{name}" if module and name else target, what)
        raise UsageError(f"'{target}' names no {what}, expected FILE:{what.upper()}; {mend}.")
    return Path(path), name, _import(Path(path))


def _completed(target: str, what: str) -> str:
    """What to write for a file alone, or for a name with a dot before it."""
    file, _, name = target.rstrip(":").rpartition(".")
    path = Path(f"{file}.py")
    if not path.exists():
        known = [
            p for p in foreign.python_files(Path()) if target in [n.name for n in _functions(p)]
        ]
        mend = " or ".join(f"{p}:{target}" for p in known[:3]) or f"one that calls {target}"
        return f"{foreign.meant(path)}, with ':' and its name" if name == "py" else f"write {mend}"
    if name != "py":
        return f"write {path}:{name}"
    names = [n.name for n in _functions(path) if _decorated(n) == (what == "kernel")]
    return f"write {' or '.join(f'{path}:{name}' for name in names) or f'one into {path}'}"


def _functions(path: Path) -> list[ast.FunctionDef]:
    """The functions of a file, none where it is no Python."""
    with contextlib.suppress(SyntaxError, ValueError, OSError):
        return [n for n in ast.parse(path.read_bytes()).body if isinstance(n, ast.FunctionDef)]
    return []


def parameters(target: str) -> list[str]:
    """The names of the parameters of FILE:KERNEL, none of other texts."""
    path, _, name = target.rpartition(":")
    return [a.arg for n in _functions(Path(path)) if n.name == name for a in n.args.args]


def _decorated(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def example(path: Path, kernel: str) -> str:
    """Arguments of ``check`` that judge a kernel of the file: the one named, or its last. Tensors
    have shapes to replace; the reference is a function that is called one."""
    functions = _functions(path)
    kernels = [n for n in functions if n.name == kernel or not kernel and _decorated(n)]
    if not kernels:
        return f"{path}:KERNEL --arg 128x512:f32 --ref FILE:FUNCTION"
    called = kernels[-1]
    words = [f"{path}:{called.name}"]
    needed = [a.arg for a in called.args.args]
    needed = needed[: len(needed) - len(called.args.defaults)]
    words += [_likely(called, name).strip() for name in needed]
    references = [n.name for n in functions if n.name.startswith(REFERENCES)]
    words.append(f"--ref {path}:{references[-1]}" if references else "--ref FILE:FUNCTION")
    return " ".join(words)


def _likely(function: ast.FunctionDef, name: str) -> str:
    """An argument of a kernel: a tensor where it is loaded, copied, or asked for a shape or a part;
    else a number."""
    given: list[ast.AST] = []
    for node in ast.walk(function):
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            given.append(node.value)
        elif isinstance(node, ast.Call) and re.search("load|copy", ast.unparse(node.func)):
            given += [*node.args, *(one.value for one in node.keywords)]
    taken = any(isinstance(node, ast.Name) and node.id == name for node in given)
    return f" --arg {name}={'128x512:f32' if taken else '1e-6'}"


def _fitting(kernel: Any, case: Any, name: str) -> str:
    """A tensor of a parameter with which a kernel is traced."""
    from ..judge import verdict
    from ..judge.cases import Spec

    for spec in (one for one in case.positional if isinstance(one, Spec)):
        rows, last = spec.shape[:-1], spec.shape[-1:]
        for shape in ((1, *last), spec.shape, last, (*rows, 1)):
            other = Spec(shape, spec.dtype)
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                verdict.traced(kernel, replace(case, named=(*case.named, (name, other))), ())
                return str(other)
    return "128x512:f32"


def load_kernel(target: str) -> Any:
    """The kernel that ``FILE:KERNEL`` names.

    Raises:
        UsageError: no such file, it cannot be imported, or it has no such kernel.
    """
    from ..core import Kernel
    from ..judge import verdict

    path, name, module = _loaded(target, "kernel")
    found = getattr(module, name, None)
    if kernel := jitted(found):
        return kernel
    if isinstance(found, types.FunctionType):
        if not handed_on(name, [path]):
            print(
                f"{target} has no @nki.jit: the command takes it as if it had one; write @nki.jit "
                "above it.",
                file=sys.stderr,
            )
        return verdict.kernel_of(module, name)
    known = sorted(k for k, v in vars(module).items() if isinstance(v, Kernel))
    mend = f"write {' or '.join(f'{path}:{one}' for one in known)}" if known else "write one"
    body = ast.parse(Path(path).read_bytes()).body
    classes = [n for n in body if isinstance(n, ast.ClassDef)]
    holders = [n.name for n in classes if f"def {name}(" in ast.unparse(n)]
    mend = f"move it out of class {holders[0]}, without self" if holders else mend
    raise UsageError(
        f"{path} has no kernel '{name}', expected a function at its top below @nki.jit; {mend}."
    )


def jitted(found: Any) -> Any:
    """The kernel that a name of a file holds, perhaps decorated once more; None of others."""
    from ..core import Kernel

    while not isinstance(found, Kernel) and hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found if isinstance(found, Kernel) else None


def handed_on(name: str, files: Sequence[Any]) -> bool:
    """Whether one of the files gives a function to a call, as in nki.jit(kernel)(x)."""
    given = re.compile(rf"\([\w.\s]*\b{name}\s*[,)]")
    return any(given.search(Path(file).read_text("utf-8")) for file in files)


def objects(target: str) -> Mapping[str, Any]:
    """The names that a loaded kernel's file defines and imports."""
    return vars(sys.modules[_name(Path(target.rpartition(":")[0]))])


def label(target: str, other: str = "") -> str:
    """A kernel's name among others: its file without folders.

    Args:
        other: the kernel that it stands beside; the same name twice is told apart.
    """
    name = Path(target).name
    return f"{name} (baseline)" if other and name == Path(other).name else name


def load_function(target: str) -> Callable:
    """The Python function that ``FILE:FUNCTION`` names: a reference.

    Raises:
        UsageError: no such file, it cannot be imported, or it has no such function.
    """
    path, name, module = _loaded(target, "function")
    found = getattr(module, name, None)
    if not callable(found) or jitted(found):
        known = [key for key, one in vars(module).items() if isinstance(one, types.FunctionType)]
        kernel = " that is no kernel" * callable(found)
        likely = [one for one in known if one.startswith(REFERENCES)]
        mend = nearest(name, known, [*(f"write {one}" for one in likely), "correct it"][0])
        if kernel and likely:
            mend = f"write {target} first, and --ref {path}:{likely[0]}"
        raise UsageError(
            f"{path} has no function '{name}'{kernel}, expected one of "
            f"{', '.join(known) or 'none'}; {mend}."
        )
    return found


def check_file(path: Path) -> None:
    """Refuse a kernel's file that is none."""
    if "\0" in str(path) or not path.is_file():
        lacks = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(f"file {path} {lacks}, expected a Python file; {foreign.meant(path)}.")
    if path.suffix != ".py":
        notebook = path.suffix == ".ipynb"
        mend = "rename it if it is one, or " + foreign.meant(path.parent)
        mend = f"write jupyter nbconvert --to python {path}" if notebook else mend
        raise UsageError(f"file {path} is no Python file, expected a name in .py; {mend}.")


def _name(path: Path) -> str:
    """A name of the file's module under which nobody else looks for one."""
    return f"{path.stem} of {path.resolve().parent}"


def _import(path: Path) -> types.ModuleType:
    check_file(path)
    foreign.put_last(path.resolve().parent)
    try:
        return foreign.imported(path, _name(path))
    except KeyboardInterrupt as error:
        raise _interrupted(error, path) from error
    except (Exception, SystemExit) as error:
        place = _line_of(error, path)
        said = f"kernel file {place or path} cannot be imported"
        if "; " in _words(error):
            raise UsageError(f"{said}: {_words(error)}") from error
        raise UsageError(
            f"{said} ({_said(error)}), expected a module that imports without a device; "
            f"{hint(error) or 'mend it first'}."
        ) from error


def trace(kernel: Any, args: argparse.Namespace, seed: int = 0) -> Any:
    """The verified Program of the kernel for the arguments of the command line; one whose control
    flow is data is traced with values inside of the limits that they name.

    Args:
        seed: of the values that decide control flow.
    """
    from ..judge import verdict

    case, grid = case_of(args), parse_grid(args.grid)
    with told_as_usage(kernel, args.kernel):
        return verdict.traced(kernel, case, grid, seed=seed)


@contextmanager
def told_as_usage(kernel: Any, target: str, case: Any = None) -> Iterator[None]:
    """Turn an error of a kernel's Python body into a UsageError with the line of its file; an
    argument that the case lacks is one with which the kernel is traced."""
    from ..core import NkiError
    from ..core.language.specialisation import WrongArguments

    path = Path(target.rpartition(":")[0])
    try:
        yield
    except (NkiError, UsageError):
        raise
    except WrongArguments as error:
        said, _, mend = str(error).rpartition(" [")[0].rpartition("; ")
        if lacking := re.fullmatch(r"pass (\w+( and \w+)*)", mend):
            called = [n for n in _functions(path) if n.name == kernel.name]
            some = [_likely(called[0], n) for n in lacking[1].split(" and ")]
            if case is not None and len(some) == 1:
                some = [some[0].replace("128x512:f32", _fitting(kernel, case, lacking[1]))]
            mend = "add" + "".join(some)
        elif not re.match(r"write |cast|leave", mend):
            mend = (
                "give each as --arg, 128x512:bf16 or a constant, or all of a call in quotes behind "
                "--case"
            )
        raise UsageError(f"{said}; {re.sub('^cast .*', 'write its type as f32', mend)}.") from error
    except KeyboardInterrupt as error:
        raise _interrupted(error, path) from error
    except (Exception, SystemExit) as error:
        place = _line_of(error, path)
        if isinstance(error, (TimeoutError, MemoryError)):
            where = f" and is at {place}" if place else ""
            raise UsageError(
                f"kernel {kernel.name} does not come to its end ({error or 'no memory left'})"
                f"{where}, expected less work; look for loops that are too long, or give it more "
                "with --time-limit."
            ) from error
        if place:
            words = _words(error) or "no message"
            mend = "" if "; " in words else f"; {hint(error) or 'mend that line'}"
            raise UsageError(
                f"kernel {kernel.name} raises {type(error).__name__} at {place}: {words}{mend}"
            ) from error
        raise UsageError(
            f"kernel {kernel.name} does not trace with these arguments ({_said(error)}), expected "
            "shapes and constants that it accepts; correct --arg."
        ) from error


def _said(error: BaseException) -> str:
    """`TypeError: what it says`, or the type alone."""
    return ": ".join(filter(None, (type(error).__name__, _words(error))))


def _words(error: BaseException) -> str:
    """The words of an error; `exit()` has None."""
    return "" if isinstance(error, SystemExit) and error.code is None else str(error)


def _interrupted(error: KeyboardInterrupt, path: Path) -> KeyboardInterrupt:
    """Ctrl-C, with the line of the file that was running."""
    place = _line_of(error, path)
    return KeyboardInterrupt(*([f"in {place}"] if place else []))


def _line_of(error: BaseException, path: Path) -> str:
    """FILE:LINE of the innermost frame in a file; empty where it did not get there."""
    found = foreign.place_of(error, (str(path), str(path.resolve())))
    return f"{path.resolve()}:{found[1]}" if found else ""
