"""Kernels and their arguments, as command lines name them: FILE:KERNEL, 128x512:bf16, 2x8."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..hints import hint

SHORT_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "f32": "float32",
    "fp32": "float32",
    "i8": "int8",
    "i32": "int32",
    "u8": "uint8",
    "u32": "uint32",
}
PIPED_WIDTH = 180  # columns of a table that goes to a file
TENSOR = re.compile(r"(\d+(?:x\d+)*):(\w+)")


def declare(parser: argparse.ArgumentParser) -> None:
    """The options of every command that traces a kernel."""
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="[NAME=]VALUE",
        help="argument in order: a tensor as 128x512:bf16, or a Python literal; repeat",
    )
    parser.add_argument("--grid", help="launch grid, for example 4 or 2x8")


def declare_kernel(parser: argparse.ArgumentParser) -> None:
    """The kernel that a command is about."""
    parser.add_argument(
        "kernel", metavar="FILE:KERNEL", help="Python file and kernel function in it"
    )


def parse_value(text: str) -> Any:
    """A meta tensor for ``128x512:bf16``, a Python literal otherwise.

    Raises:
        UsageError: it is neither.
    """
    import torch

    match = TENSOR.fullmatch(text)
    if match:
        shape = tuple(int(n) for n in match[1].split("x"))
        name = SHORT_DTYPES.get(match[2], match[2])
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(
                f"--arg {text} names dtype '{match[2]}', expected one such as bf16, float32 or "
                "int32; correct the part after the colon."
            )
        try:
            return torch.empty(shape, dtype=dtype, device="meta")
        except (RuntimeError, TypeError, ValueError):
            raise UsageError(
                f"--arg {text} names no shape that a tensor can have, expected sizes whose product "
                "fits 64 bits; correct the part before the colon."
            ) from None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise UsageError(
            f"--arg {text} is neither a tensor nor a Python literal, expected for example "
            "128x512:bf16, 1e-5, True or \"'text'\"; quote strings."
        ) from None


def parse_arguments(texts: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of the kernel."""
    positional, named = [], {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals and name.isidentifier():
            named[name] = parse_value(value)
        else:
            positional.append(parse_value(text))
    return positional, named


def parse_grid(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise UsageError(f"--grid {text}, expected positive sizes such as 4 or 2x8; correct it.")
    return tuple(int(n) for n in text.split("x"))


def load_kernel(target: str) -> Any:
    """The kernel that ``FILE:KERNEL`` names.

    Raises:
        UsageError: no such file, it cannot be imported, or it has no such kernel.
    """
    from ..core import Kernel

    path_text, colon, name = target.rpartition(":")
    if not colon or not name:
        raise UsageError(f"'{target}' names no kernel, expected FILE:KERNEL; add ':' and its name.")
    path = Path(path_text)
    module = _import(path)
    found = getattr(module, name, None)
    if isinstance(found, Kernel):
        return found
    if isinstance(found, types.FunctionType):
        return Kernel(found)
    known = sorted(k for k, v in vars(module).items() if isinstance(v, Kernel))
    raise UsageError(
        f"{path} has no kernel '{name}', expected one of {', '.join(known) or 'none: it has none'};"
        " name one of those."
    )


def _import(path: Path) -> types.ModuleType:
    if "\0" in str(path) or not path.is_file():
        raise UsageError(f"kernel file {path} does not exist, expected a Python file; correct it.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"kernel file {path} is no Python file, expected a name ending in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"kernel file {path} cannot be imported ({type(error).__name__}: {error}), expected a "
            "module that imports without a device; mend it first."
        ) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def trace(kernel: Any, args: argparse.Namespace) -> Any:
    """The verified Program of the kernel for the arguments of the command line."""
    from ..core import NkiError

    positional, named = parse_arguments(args.arg)
    grid = parse_grid(args.grid)
    launched = kernel[grid] if grid else kernel
    try:
        return launched.trace(*positional, **named)
    except NkiError:
        raise
    except (Exception, SystemExit) as error:
        place = _line_of_kernel(error, args.kernel)
        if place:
            raise UsageError(
                f"kernel {kernel.name} raises {type(error).__name__} at {place}: "
                f"{error or 'no message'}; {hint(error) or 'mend that line'}"
            ) from error
        raise UsageError(
            f"kernel {kernel.name} does not trace with these arguments ({type(error).__name__}: "
            f"{error}), expected shapes and constants that it accepts; correct --arg."
        ) from error


def _line_of_kernel(error: BaseException, target: str) -> str:
    """FILE:LINE of the innermost frame in the kernel's file; empty where it did not get there."""
    path = Path(target.rpartition(":")[0]).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
    return f"{path}:{lines[-1]}" if lines else ""
