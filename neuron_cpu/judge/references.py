"""A reference is a numpy or PyTorch function: run in float64, and in its arguments' types."""

import contextlib
import functools
import inspect
import math
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..core import Kernel
from ..core.device import dtypes
from ..core.language.specialisation import to_numpy, to_torch
from ..errors import UsageError
from ..sandbox.foreign import place_of

LIBRARIES = ("numpy", "torch")


class Reference:
    """The right answer to a kernel: a function of the same arguments.

    Args:
        function: takes tensors (or arrays) and constants as the kernel does, returns one result or
            several.
        library: "numpy" or "torch", what the function computes with; found in its code by default.
        outputs: makes a kernel's results comparable (`comparable`); they are compared as they are
            without one.
    """

    def __init__(
        self, function: Callable, library: str | None = None, outputs: Callable | None = None
    ) -> None:
        self.function, self.outputs = function, outputs
        self.name = getattr(function, "__name__", "")
        if isinstance(function, Kernel) or not callable(function):
            mend = "give its name without a call there, arguments behind it"
            if hasattr(function, "shape"):
                mend = "give the function that computes it, without a call there"
            kernel = ", and a second kernel as baseline" * isinstance(function, Kernel)
            raise UsageError(
                f"the reference {self.name}{' ' * bool(self.name)}is a {type(function).__name__}, "
                f"expected a function of numpy or PyTorch; {mend}{kernel}."
            )
        self.library, self.guessed = library or library_of(function), library is None
        self.label = "the reference" if self.name == "reference" else f"reference {self.name}"
        self.asked: list[str] = []  # the kernel's parameters
        self.types: list[str] = []  # names of those that the last call returned, "" of no tensor

    def check_order(self, kernel: Callable) -> None:
        """Refuse a function that has the kernel's parameters in another order."""
        try:
            taken = inspect.signature(kernel)
            theirs, own = [*taken.parameters], [*inspect.signature(self.function).parameters]
        except (TypeError, ValueError):  # of C
            return
        empty = inspect.Parameter.empty
        self.asked = [str(one.replace(annotation=empty)) for one in taken.parameters.values()]
        if own != theirs and sorted(own) == sorted(theirs):
            raise UsageError(
                f"{self.label} takes {', '.join(own)}, expected the kernel's order, in "
                f"which arguments come; write def {self.name}({', '.join(theirs)})."
            )

    def exact(self, positional: Sequence[Any], named: dict[str, Any]) -> list[torch.Tensor]:
        """Results for floating-point arguments widened to float64; NaN for what overflows there.

        Raises:
            UsageError: the function fails, or returns something else than tensors.
        """
        try:
            overflows: list[str] = []
            with np.errstate(
                all="ignore", over="call", call=lambda said, _: overflows.append(said)
            ):
                found = self._run(
                    [_wide(v) for v in positional], {k: _wide(v) for k, v in named.items()}
                )
            # such as log1p(exp(x)) from 710 on, which a kernel may well compute
            return [one.masked_fill(one.isinf(), math.nan) for one in found] if overflows else found
        except (Exception, SystemExit) as error:
            if self.guessed:
                before, self.guessed = self.library, False
                (self.library,) = {*LIBRARIES} - {before}
                with contextlib.suppress(UsageError):
                    return self.exact(positional, named)
                self.library = before
            file = getattr(getattr(self.function, "__code__", None), "co_filename", "")
            at = place_of(error, (file,))
            apart = re.search("broadcast|must match", str(error))
            keep = "keep axes that it reduces (keepdims=True), " * bool(apart)
            mend = f"{keep}mend it, or name its library with --ref-library"
            if isinstance(error, TypeError) and " argument" in str(error):
                mend = self._lacking(len(positional), named)
            raise UsageError(
                f"{self.label} fails on float64 arguments of {self.library}"
                f"{f' at {at[0]}:{at[1]}' if at else ''} ({type(error).__name__}: "
                f"{str(error).strip()}), expected a function of the kernel's arguments; "
                f"{mend}."
            ) from error

    def wraps(self, positional: Sequence[Any], named: dict[str, Any]) -> list[str]:
        """A sentence where results are others once whole numbers of few bits are widened."""
        found = [self.plain(positional, named)]
        wide = [_wide(v, True) for v in positional], {k: _wide(v, True) for k, v in named.items()}
        found.append(self.plain(*wide))
        pairs = zip(*(one or [] for one in found))
        close = functools.partial(torch.allclose, rtol=0.01, atol=0.01, equal_nan=True)
        if all(a.shape == b.shape and close(a, b) for a, b in pairs):  # of other roundings
            return []
        return [
            f"{self.label} gives other numbers where its whole numbers have 64 bits: its "
            "arithmetic wraps; write .astype(np.int32) or .int() on them there"
        ]

    def _lacking(self, count: int, named: dict[str, Any]) -> str:
        """The mend where `count` arguments and the named ones are not what the function takes."""
        with contextlib.suppress(TypeError, ValueError):  # of C
            rest = list(inspect.signature(self.function).parameters.values())[count:]
            left = [one.name for one in rest if one.default is one.empty and one.name not in named]
            if left:
                line = self.function.__code__.co_firstlineno
                return f"give {' and '.join(left)} a default in line {line}, or take it out"
        if self.asked:
            return f"write def {self.name}({', '.join(self.asked)}), and use all of them in it"
        return "give a function of the kernel's parameters"

    def plain(self, positional: Sequence[Any], named: dict[str, Any]) -> list[torch.Tensor] | None:
        """Results in the arguments' own types; None where the library cannot compute in them."""
        try:
            with np.errstate(all="ignore"):
                return self._run(positional, named)
        except (Exception, SystemExit):
            return None

    def widened(self, value: Any) -> Any:
        """An argument as the function takes it for exact results."""
        return (_array if self.library == "numpy" else _copy)(_wide(value))

    def _run(self, positional: Sequence[Any], named: dict[str, Any]) -> list[torch.Tensor]:
        # Copies: a function that works in place changes nothing of the kernel's arguments.
        pass_on = _array if self.library == "numpy" else _copy
        found = self.function(
            *map(pass_on, positional), **{k: pass_on(v) for k, v in named.items()}
        )
        results = found if isinstance(found, (tuple, list)) else [found]
        if any(one is None for one in results):
            raise TypeError("it returns None: a return is missing")
        if isinstance(found, dict):
            raise TypeError("it returns a dict: return its values as a tuple")
        self.types = [str(getattr(r, "dtype", "")).removeprefix("torch.") for r in results]
        return [_tensor(value) for value in results]


def comparable(
    function: Callable,
    got: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    arguments: Sequence[Any],
) -> list[torch.Tensor]:
    """What of a kernel's results is compared with a reference's, in float64.

    Args:
        function: takes the kernel's results and the reference's as tuples of float64 arrays (one of
            them as it is) and, where it has more parameters, the call's arguments; returns what is
            compared with the reference's, as many. So indices may differ where values are equal,
            and rows of a set may be sorted.

    Raises:
        UsageError: it fails, or returns another number of results.
    """
    try:
        arrays = [tuple(t.numpy() for t in some) for some in (got, exact)]
        more = len(inspect.signature(function).parameters) - len(arrays)
        found = function(
            *(one[0] if len(one) == 1 else one for one in arrays),
            *(_array(_wide(value)) for value in arguments[: max(0, more)]),
        )
        several = list(found) if isinstance(found, (tuple, list)) else [found]
        made = [torch.from_numpy(np.array(value, np.float64)) for value in several]
        if len(made) != len(got):
            raise ValueError(f"{len(made)} results of {len(got)}")
        given, asked, shapes = ([(*one.shape,) for one in some] for some in (got, exact, made))
        if given == asked != shapes:
            raise ValueError(
                f"it returns shapes {shapes}, expected {asked}: return what of the kernel is "
                "compared with each of the reference's results"
            )
        return made
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"outputs {function.__name__} fails ({type(error).__name__}: {error}), expected a "
            "function of the kernel's and the reference's results; mend it."
        ) from error


def library_of(function: Callable) -> str:
    """The library of a function, torch or numpy, by the names in its code and its callees'.

    Where it names neither, by what its file imports; where that leaves it open, by the names of
    arguments (numpy's axis and keepdims). PyTorch where all do: its functions take what
    torch.Tensor has as methods.
    """
    modules = set(_modules(function, set()))
    if not modules & set(LIBRARIES):
        function = inspect.unwrap(function)
        named = getattr(function, "__globals__", {}).values()
        modules = {one.__name__ for one in named if isinstance(one, types.ModuleType)}
        consts = getattr(getattr(function, "__code__", None), "co_consts", ())
        words = {word for names in consts if isinstance(names, tuple) for word in names}
        if ("numpy" in modules) == ("torch" in modules) and words & {"axis", "keepdims", "ddof"}:
            return "numpy"
    return "numpy" if "numpy" in modules and "torch" not in modules else "torch"


def _modules(function: Any, seen: set[int]) -> Iterator[str]:
    """Top-level modules to which a function, and functions of its file that it calls, refer."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None or id(code) in seen:
        return
    seen.add(id(code))
    pending = [code]
    while pending:
        code = pending.pop()
        pending += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for name in code.co_names:
            found = function.__globals__.get(name)
            if isinstance(found, types.FunctionType) and found.__module__ == function.__module__:
                yield from _modules(found, seen)
            elif found is not None or name in LIBRARIES:  # an import inside of the function
                module = getattr(found, "__module__", None) or getattr(found, "__name__", name)
                yield str(module).partition(".")[0]


def _wide(value: Any, whole: bool = False) -> Any:
    """A tensor of floating-point numbers in float64, or one of `whole` numbers in int64."""
    if not isinstance(value, torch.Tensor) or value.dtype.is_floating_point == whole:
        return value
    return value.to(torch.int64 if whole else torch.float64)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _array(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype in (torch.float64, torch.int64):
        return value.clone().numpy()
    return to_numpy(value.clone(), dtypes.to_dtype(value.dtype))


def _tensor(value: Any) -> torch.Tensor:
    """A result as a float64 tensor, integers that float64 holds included."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(torch.float64)
    array = np.asarray(value)
    if array.dtype.kind in "fiub" and array.dtype.itemsize == 8 or array.dtype.kind == "b":
        return torch.from_numpy(np.array(array, np.float64))
    return to_torch(array.reshape(-1)).to(torch.float64).reshape(array.shape)
