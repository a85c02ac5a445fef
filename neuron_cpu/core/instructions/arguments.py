"""Checks on the arguments of ``nki.isa`` functions that several of them share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..device.errors import refuse, warn
from ..device.spec import Engine
from ..program import trace
from ..program.view import View
from .alu import BITWISE


def choose_engine(value: Any, what: str, allowed: tuple[Engine, ...]) -> Engine | None:
    if value is None or value == 0:
        return None
    if value not in allowed:
        names = " or ".join(e.value for e in allowed)
        raise refuse("sim_engine", f"{what} cannot run on {value}, expected {names}; drop engine=")
    return value


def tile(value: Any, what: str) -> View:
    """``value`` as a tile, or the refusal for anything else."""
    if isinstance(value, View):
        return value
    raise refuse(
        "sim_operand_type",
        f"{what} got {type(value).__name__}, expected a tensor; turn numbers into tiles with "
        "nisa.memset and index expressions with nisa.iota",
    )


def stretched(value: View, data: View, what: str) -> View:
    """A (P, 1) operand stretched over the free axes of ``data`` (zero stride)."""
    if value.shape[0] != data.shape[0]:
        raise refuse(
            "err_num_partition_mismatch",
            f"{what} {value.label()} has {value.shape[0]} partitions, expected {data.shape[0]} "
            f"like {data.label()}; slice it to the same partitions",
        )
    if value.free_size != 1:
        raise refuse(
            "sim_vector_operand",
            f"{what} {value.label()} has {value.free_size} elements per partition, expected 1; "
            "use tensor_tensor for operands of full shape",
        )
    flat = value if value.ndim == 2 else value.reshape((value.shape[0], 1))
    return flat.expand(data.shape)


def free_axes(axis: Any, ndim: int, what: str) -> tuple[int, ...]:
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple(sorted(int(a) + ndim if a < 0 else int(a) for a in axes))
    if 0 in axes or any(a >= ndim for a in axes):
        raise refuse(
            "sim_reduce_axis",
            f"{what} over axes {axes} of a tile of rank {ndim}, expected free axes 1 to "
            f"{ndim - 1}; sum over partitions with a matmul against ones",
        )
    return axes


def domain(op: str, views: tuple[View, ...]) -> dict[str, Any]:
    """{'bits': True} for bitwise operators, which need integer operands."""
    if op not in BITWISE:
        return {}
    for view in views:
        if not view.dt.is_int:
            raise refuse(
                "sim_bitwise_on_float",
                f"{op} got {view.label()}, expected an integer type; use view(nl.int32) for bits",
            )
    return {"bits": True}


def number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def newer(name: str, release: str) -> None:
    warn(
        "sim_newer_api",
        f"nisa.{name} needs SDK {release} or newer, expected functions of 2.21; the kernel does "
        "not compile there",
    )


def same_shape(what: str, *views: View) -> None:
    for view in views[1:]:
        if view.shape != views[0].shape:
            raise refuse(
                "sim_shape_mismatch",
                f"{what} got {views[0].label()} and {view.label()}, expected equal shapes; slice "
                "both alike",
            )


def flatten_free(x: torch.Tensor, free_axes: int) -> torch.Tensor:
    """[..., P, F...] -> [..., P, N]."""
    return x.flatten(-free_axes) if free_axes > 1 else x


def rows_only(data: View, mask: Any, what: str) -> View:
    """``data`` cut by a mask that selects whole rows or columns (instructions over a whole row)."""
    cut = trace.region(mask, data.shape) if mask is not None else None
    if cut is None:
        return data
    if not isinstance(cut, tuple):
        raise no_box(what, data)
    return data.slice_box(cut)


def no_box(what: str, data: View) -> Exception:
    return refuse(
        "sim_reduce_mask",
        f"mask of {what} is no box of {data.label()}, expected one bound per axis and at least "
        "one element; slice the operand instead",
    )
