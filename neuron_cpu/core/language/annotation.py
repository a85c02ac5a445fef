"""Tensor annotations of kernels: declared shapes are checked, mutable parameters may be written.

``x: nt.tensor[128, 512]`` on a parameter or a local variable states its shape
(err_annotation_shape_mismatch, aws-neuron-sdk v2.21.1, nki.errors.rst); ``x: nt.mutable_tensor`` on
a parameter lets the kernel store into it, and then it must be returned (v2.24,
err_mutable_parameter_not_returned). Python does not keep the annotations of local variables, so
they are read from the source and compared with the variables when the function returns.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch

from ..device.dtypes import Shape, host_dtype, to_dtype
from ..device.errors import refuse
from ..program import source


class mutable:
    """Marks a parameter that the kernel updates in place: ``nt.tensor[nt.mutable]``."""


class tensor:
    """Annotation ``nt.tensor`` or ``nt.tensor[sizes]``.

    ``nt.tensor[[sizes], dtype]`` also stands for an argument of a kernel that is only timed.
    """

    sizes: Shape | None = None
    dtype: Any = None

    def __class_getitem__(cls, given: Any) -> type:
        parts = given if isinstance(given, tuple) else (given,)
        if parts[-1] is mutable:  # nt.tensor[nt.mutable]
            return mutable_tensor.__class_getitem__(parts[:-1]) if parts[1:] else mutable_tensor
        listed = bool(parts) and isinstance(parts[0], (list, tuple))
        sizes, dtype = (parts[0], *parts[1:], None)[:2] if listed else (parts, None)
        name = f"{cls.__name__}[{', '.join(map(str, parts))}]"
        return type(name, (cls,), {"sizes": tuple(int(s) for s in sizes), "dtype": dtype})


def placeholder(value: Any) -> Any:
    """A meta tensor for ``nt.tensor[[sizes], dtype]``; any other argument unchanged."""
    if not isinstance(value, type) or not issubclass(value, tensor):
        return value
    if value.sizes is None or value.dtype is None:
        return value
    return torch.empty(value.sizes, dtype=host_dtype(to_dtype(value.dtype)), device="meta")


class mutable_tensor(tensor):
    """Annotation of a parameter that the kernel updates in place and returns."""


def parameters(function: Any) -> dict[str, type[tensor]]:
    """Annotated tensor parameters of a kernel function."""
    found = {}
    for name, written in getattr(function, "__annotations__", {}).items():
        kind = written
        if isinstance(written, str):  # from __future__ import annotations
            kind = _evaluated(written, source.names_of(function))
        if isinstance(kind, type) and issubclass(kind, tensor):
            found[name] = kind
    return found


def _evaluated(expression: str, names: dict[str, Any]) -> Any:
    try:
        return eval(expression, names)  # the kernel author's own annotation
    except Exception:  # an annotation for other tools
        return None


def check_shape(kind: type[tensor], name: str, shape: Shape, place: str) -> None:
    """Refuse a tensor whose shape is not the annotated one."""
    if kind.sizes is not None and kind.sizes != tuple(shape):
        raise refuse(
            "err_annotation_shape_mismatch",
            f"'{name}' has shape {tuple(shape)}, expected {kind.sizes} as annotated; correct the "
            "annotation or the tensor",
            place,
        )


@contextmanager
def checked_locals(function: Callable, kernel: str) -> Iterator[None]:
    """Compare annotated local variables with their annotations whenever a function returns."""
    watched = _watched(function)
    if not watched:
        yield
        return
    # Local variables exist only while the function runs, and the profiler is called at its return.
    before = sys.getprofile()

    def on_event(frame: FrameType, event: str, result: Any) -> None:
        if event == "return" and result is not None and frame.f_code in watched:
            _compare(frame, watched[frame.f_code], kernel)

    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(before)


Annotated = list[tuple[str, str, int]]  # variable, annotation, line
_annotated: dict[CodeType, dict[CodeType, Annotated]] = {}


def _watched(function: Callable) -> dict[CodeType, Annotated]:
    """Annotated local variables of the kernel and of the functions of its module that it calls."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    if code not in _annotated:
        found = {}
        for one, _ in source.reachable(function):
            local = [
                (node.target.id, ast.unparse(node.annotation), node.lineno)
                for node in source.nodes_of(source.tree_of(one))
                if isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and "tensor" in ast.unparse(node.annotation)
            ]
            if local:
                found[one.__code__] = local
        _annotated[code] = found
    return _annotated[code]


def _compare(frame: FrameType, annotated: Annotated, kernel: str) -> None:
    known = {**frame.f_globals, **frame.f_locals}
    for name, expression, line in annotated:
        kind, shape = _evaluated(expression, known), getattr(known.get(name), "shape", None)
        if isinstance(kind, type) and issubclass(kind, tensor) and shape is not None:
            check_shape(kind, name, shape, f"{kernel} ({frame.f_code.co_filename}:{line})")
