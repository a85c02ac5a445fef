"""VectorE: arithmetic, reductions, scans and statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..device.dtypes import promote, to_dtype
from ..device.errors import refuse, warn
from ..device.spec import GEN2, Engine
from ..program import trace
from ..program.index import is_integer
from ..program.program import Instruction
from ..program.view import View
from . import operators
from .alu import ARITHMETIC, BITWISE, REDUCTIONS, alu, reduce_last
from .arguments import choose_engine, domain, free_axes, number, same_shape, stretched, tile
from .entry import (
    MIN_II,
    ON_CHIP,
    PSUM,
    OpSpec,
    check_free_size,
    define,
    free_elements,
    refuse_psum,
    refuse_two_psum,
    streaming,
    stride_factor,
)
from .recorder import with_reduction


def _tensor_reduce(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    x = xs[0]
    if "order" in attrs:  # middle axes moved last
        lead = x.ndim - len(attrs["order"])
        x = x.permute(*range(lead), *(lead + a for a in attrs["order"]))
    total = reduce_last(attrs["op"], x, attrs["axes"])
    return -total if attrs.get("negate") else total


def _reduce_cycles(i: Instruction) -> float:
    n = i.src[0].free_size
    both_bf16 = i.src[0].dt.name == i.dst[0].dt.name == "bfloat16"
    fast = both_bf16 and i.attrs["op"] in ("add", "maximum")
    return max(MIN_II, (n / 2 if fast else n) * stride_factor(i))


TENSOR_REDUCE = define(
    "tensor_reduce", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="reduce",
    compute=_tensor_reduce, cycles=_reduce_cycles,
    note="over the last free axes; N/2 cycles for bf16 add and max",
)  # fmt: skip


def tensor_reduce(
    op: Any,
    data: Any,
    axis: Any,
    *,
    mask: Any = None,
    dtype: Any = None,
    negate: bool = False,
    keepdims: bool = False,
) -> View:
    """Reduce free axes in fp32: [P, F...] -> [P, rest...], at least rank 2. ``negate`` is free."""
    source = tile(data, "tensor_reduce")
    name = operators.name_of(op)
    if name not in REDUCTIONS:
        raise refuse(
            "sim_reduce_operator",
            f"tensor_reduce with operator '{name}', expected one of "
            f"{', '.join(sorted(REDUCTIONS))}",
        )
    axes = free_axes(axis, source.ndim, "tensor_reduce")
    kept = [a for a in range(source.ndim) if a not in axes]
    attrs: dict[str, Any] = {"op": name, "axes": len(axes), **domain(name, (source,))}
    if negate:
        attrs["negate"] = True
    trailing = axes == tuple(range(source.ndim - len(axes), source.ndim))
    if not trailing:
        attrs["order"] = (*kept, *axes)
        warn(
            "sim_reduce_middle_axis",
            f"tensor_reduce over axes {axes} of {source.label()}: sources disagree whether axes "
            "that are not the last ones work on SDK 2.21; present the reduced axis last",
        )
    dt = source.dt if dtype is None else to_dtype(dtype)
    return _reduced(source, axes, kept, dt, attrs, mask, keepdims)


def _reduced(source, axes, kept, dt, attrs, mask, keepdims):
    tracer = trace.current("nisa.tensor_reduce")
    cut = trace.region(mask, source.shape) if mask is not None else None
    if keepdims:
        shape = tuple(1 if a in axes else s for a, s in enumerate(source.shape))
    else:
        shape = tuple(source.shape[a] for a in kept)
        shape += (1,) * (2 - len(shape))
    fresh = tracer.storage(shape, dt, "sbuf")
    out = tracer.whole(fresh)
    dst = out
    if cut is trace.EMPTY:
        return out
    if isinstance(cut, tuple):
        source = source.slice_box(cut)
        if keepdims:
            box = tuple(slice(0, 1) if a in axes else cut[a] for a in range(len(cut)))
        else:
            box = (*(cut[a] for a in kept), *(slice(0, 1) for _ in range(2 - len(kept))))
        dst = out.slice_box(box)
    elif cut is not None:
        raise refuse(
            "sim_reduce_mask",
            "mask of a reduction is no box, expected one bound per axis; fill the masked elements "
            "with the neutral value first",
        )
    fresh.producer = tracer.emit(TENSOR_REDUCE, (dst,), (source,), attrs)
    return out


def _tensor_tensor(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    return alu(attrs["op"], xs[0], xs[1])


def _tensor_tensor_rules(i: Instruction) -> None:
    refuse_two_psum(i, i.src[0], i.src[1])
    if i.attrs["op"] == "power":
        refuse_psum(i, "tensor_tensor(power) on GpSimdE")


def _tensor_tensor_cycles(i: Instruction) -> float:
    n = i.dst[0].free_size
    one_psum = PSUM in (i.src[0].storage.buffer, i.src[1].storage.buffer)
    all_bf16 = all(v.dt.name == "bfloat16" for v in (*i.src, *i.dst))
    fast = one_psum or (all_bf16 and i.attrs["op"] in ("add", "multiply", "subtract"))
    return max(MIN_II, (n if fast else 2 * n) * stride_factor(i))


TENSOR_TENSOR = define(
    "tensor_tensor", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="elementwise",
    compute=_tensor_tensor, cycles=_tensor_tensor_cycles, rules=_tensor_tensor_rules,
    note="equal shapes; 2N cycles unless one operand is in PSUM or all are bf16",
)  # fmt: skip


def tensor_tensor(
    data1: Any, data2: Any, op: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None
) -> View:
    """``data1 op data2`` of equal shapes; not both in PSUM. VectorE (power: GpSimdE)."""
    a, b = tile(data1, "tensor_tensor"), tile(data2, "tensor_tensor")
    name = operators.name_of(op)
    a, b = _equal_shapes(a, b)
    if name not in BITWISE and name not in ARITHMETIC:
        raise refuse(
            "sim_unknown_operator",
            f"tensor_tensor with operator '{name}', expected an ALU operator; functions such as "
            "exp run on ScalarE with nisa.activation, division is a reciprocal and a product",
        )
    attrs: dict[str, Any] = {"op": name, **domain(name, (a, b))}
    if name == "power":
        attrs["engine"] = Engine.GPSIMD
    choice = choose_engine(engine, "tensor_tensor", (Engine.VECTOR, Engine.GPSIMD))
    if choice:
        attrs["engine"] = choice
    dt = promote(a.dt, b.dt) if dtype is None else to_dtype(dtype)
    tracer = trace.current("nisa.tensor_tensor")
    return tracer.result(TENSOR_TENSOR, a.shape, dt, (a, b), attrs, mask)


def _equal_shapes(a: View, b: View) -> tuple[View, View]:
    if a.shape == b.shape:
        return a, b
    if a.shape[0] != b.shape[0]:
        raise refuse(
            "err_num_partition_mismatch",
            f"tensor_tensor got {a.label()} and {b.label()}, expected equal partition counts; "
            "slice both to the same partitions",
        )
    if a.free_size == b.free_size:
        return a, b.reshape(a.shape)
    raise refuse(
        "sim_shape_mismatch",
        f"tensor_tensor got {a.label()} and {b.label()}, expected equal shapes; use tensor_scalar "
        "for (P, 1) vectors",
    )


class LoopReduction:
    """Result of ``nl.loop_reduce``, waiting for the tile it is combined into."""

    def __init__(self, value: View, op: str, mask: Any) -> None:
        self.value, self.op, self.mask = value, op, mask

    def into(self, view: View) -> None:
        """Record ``view = view op value`` in place."""
        value = self.value if self.value.shape == view.shape else self.value.reshape(view.shape)
        cut = trace.region(self.mask, view.shape) if self.mask is not None else None
        if cut is trace.EMPTY:
            return
        attrs: dict[str, Any] = {"op": self.op}
        if isinstance(cut, tuple):
            view, value = view.slice_box(cut), value.slice_box(cut)
        elif cut is not None:
            attrs["mask"] = cut
        tracer = trace.current("nl.loop_reduce")
        tracer.emit(TENSOR_TENSOR, (view,), (view, value), attrs)


def _tensor_scalar(attrs: dict[str, Any], xs: list[torch.Tensor]) -> Any:
    x = xs[0]
    for k in ("0", "1"):
        op = attrs.get("op" + k)
        if op is None:
            continue
        at = attrs.get("at" + k)
        other = attrs["value" + k] if at is None else xs[at]
        if not isinstance(other, torch.Tensor):
            other = torch.tensor(other, dtype=x.dtype)
        x = alu(op, other, x) if attrs.get("reverse" + k) else alu(op, x, other)
    if "reduce_axes" not in attrs:
        return x
    total = reduce_last(attrs["reduce_op"], x, attrs["reduce_axes"])
    return x, total.reshape(*total.shape, *attrs["reduce_pad"])


TENSOR_SCALAR = define(
    "tensor_scalar", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="elementwise",
    compute=_tensor_scalar,
    cycles=lambda i: streaming(extra=MIN_II if "reduce_axes" in i.attrs else 0)(i),
    note="(data op0 operand0) op1 operand1 with constants or (P, 1) vectors",
    aliases=("tensor_scalar_reduce",),
)  # fmt: skip


def _operand(k: str, op: Any, value: Any, reverse: bool, src: list[View]) -> dict[str, Any]:
    """Attributes of one step of tensor_scalar; vectors are appended to ``src``."""
    attrs: dict[str, Any] = {"op" + k: operators.name_of(op)}
    if isinstance(value, View):
        attrs["at" + k] = len(src)
        src.append(stretched(value, src[0], "operand" + k))
    elif is_integer(value) or isinstance(value, (float, np.floating, bool)):
        attrs["value" + k] = number(value)
    else:
        raise refuse(
            "sim_operand_type",
            f"tensor_scalar operand{k} of type {type(value).__name__}, expected a number or a "
            "(P, 1) tile",
        )
    if reverse:
        attrs["reverse" + k] = True
    return attrs


def _step_classes(attrs: dict[str, Any], src: list[View], what: str) -> dict[str, Any]:
    names = [attrs[k] for k in ("op0", "op1") if k in attrs]
    bits = [n in BITWISE for n in names]
    if any(bits) and not all(bits):
        raise refuse(
            "sim_mixed_operator_classes",
            f"{what} joins {' and '.join(names)}, expected both bitwise or both arithmetic; use "
            "two instructions",
        )
    for name in names:
        if name not in BITWISE and name not in ARITHMETIC:
            raise refuse(
                "sim_unknown_operator",
                f"{what} with operator '{name}', expected an ALU operator; functions such as exp "
                "run on ScalarE with nisa.activation, division is a reciprocal and a product",
            )
    return domain(names[0], tuple(src)) if bits and bits[0] else {}


def tensor_scalar(
    data: Any,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    *,
    dtype: Any = None,
    mask: Any = None,
    engine: Any = None,
) -> View:
    """``(data op0 operand0) op1 operand1``; operands are numbers or (P, 1) tiles. One or two steps
    cost the same. Result has data's type unless ``dtype`` is given."""
    src = [tile(data, "tensor_scalar")]
    attrs = _operand("0", op0, operand0, reverse0, src)
    if op1 is not None:
        attrs |= _operand("1", op1, operand1, reverse1, src)
    attrs |= _step_classes(attrs, src, "tensor_scalar")
    choice = choose_engine(engine, "tensor_scalar", (Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD))
    if choice:
        attrs["engine"] = choice
    dt = src[0].dt if dtype is None else to_dtype(dtype)
    tracer = trace.current("nisa.tensor_scalar")
    return tracer.result(TENSOR_SCALAR, src[0].shape, dt, tuple(src), attrs, mask)


def tensor_scalar_reduce(
    *,
    data: Any,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: Any,
    reverse0: bool = False,
    dtype: Any = None,
    mask: Any = None,
) -> View:
    """``data op0 operand0``, and ``reduce_res`` [P, 1] its reduction over all free axes."""
    src = [tile(data, "tensor_scalar_reduce")]
    if reverse0:
        raise refuse(
            "sim_unsupported_reverse",
            "tensor_scalar_reduce with reverse0=True, expected False: SDK 2.21 does not support it",
        )
    attrs = _operand("0", op0, operand0, False, src)
    attrs |= _step_classes(attrs, src, "tensor_scalar_reduce")
    dt = src[0].dt if dtype is None else to_dtype(dtype)
    return with_reduction(
        trace.current("nisa.tensor_scalar_reduce"), TENSOR_SCALAR, src[0], src, attrs, dt,
        reduce_op, reduce_res, mask,
    )  # fmt: skip


def _scalar_tensor_tensor_cycles(i: Instruction) -> float:
    n = i.dst[0].free_size
    types = {i.src[0].dt.name, i.src[1].dt.name}
    steps = (i.attrs["op0"], i.attrs["op1"])
    fast = types == {"bfloat16"} and steps == ("subtract", "multiply") and n % 2 == 0
    return max(MIN_II, n if fast else 2 * n)


def _two_tensors_rules(i: Instruction) -> None:
    refuse_two_psum(i, i.src[0], i.src[1])


SCALAR_TENSOR_TENSOR = define(
    "scalar_tensor_tensor", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP,
    flow="elementwise", compute=_tensor_scalar, cycles=_scalar_tensor_tensor_cycles,
    rules=_two_tensors_rules,
    note="(data op0 scalar or vector) op1 tensor; 2N cycles",
)  # fmt: skip


def scalar_tensor_tensor(
    *,
    data: Any,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    dtype: Any = None,
    mask: Any = None,
) -> View:
    """``(data op0 operand0) op1 operand1``: operand0 a number or [P, 1], operand1 of data's shape.

    ``data``, ``operand1`` [P, N] @ SBUF|PSUM, not both in PSUM; ``reverse`` swaps arguments.
    """
    first = tile(data, "scalar_tensor_tensor")
    second = tile(operand1, "scalar_tensor_tensor")
    if first.shape[0] != second.shape[0]:
        raise refuse(
            "err_num_partition_mismatch",
            f"scalar_tensor_tensor got {first.label()} and {second.label()}, expected equal "
            "partition counts; slice both to the same partitions",
        )
    same_shape("scalar_tensor_tensor", first, second)
    src = [first, second]
    attrs = _operand("0", op0, operand0, reverse0, src)
    attrs |= {"op1": operators.name_of(op1), "at1": 1}
    if reverse1:
        attrs["reverse1"] = True
    attrs |= _step_classes(attrs, src, "scalar_tensor_tensor")
    dt = first.dt if dtype is None else to_dtype(dtype)
    tracer = trace.current("nisa.scalar_tensor_tensor")
    return tracer.result(SCALAR_TENSOR_TENSOR, first.shape, dt, tuple(src), attrs, mask)


def _scan(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    """One ALU step pair per column, each on the fp32 value of the column before."""
    state: Any = xs[2][..., 0] if attrs.get("initial_at") else torch.tensor(attrs["initial"])
    columns = []
    for a, b in zip(xs[0].unbind(-1), xs[1].unbind(-1)):
        step = alu(attrs["op0"], state, a) if attrs.get("reverse0") else alu(attrs["op0"], a, state)
        state = alu(attrs["op1"], b, step) if attrs.get("reverse1") else alu(attrs["op1"], step, b)
        columns.append(state)
    return torch.stack(columns, -1)


def _scan_rules(i: Instruction) -> None:
    refuse_two_psum(i, i.src[0], i.src[1])


TENSOR_TENSOR_SCAN = define(
    "tensor_tensor_scan", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="scan",
    compute=_scan, cycles=streaming(2.0), rules=_scan_rules,
    note="result[i] = (data0[i] op0 result[i - 1]) op1 data1[i] along the free axis",
)  # fmt: skip


def tensor_tensor_scan(
    data0: Any,
    data1: Any,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> View:
    """``r[i] = (data0[i] op0 r[i-1]) op1 data1[i]`` along the free axis, carried in fp32.

    ``data0``, ``data1`` [P, N] @ SBUF|PSUM, not both in PSUM; ``initial`` a number or a [P, 1]
    tile; ``reverse`` swaps the arguments of its operator. Arithmetic operators only.
    """
    a, b = tile(data0, "tensor_tensor_scan"), tile(data1, "tensor_tensor_scan")
    if a.ndim != 2 or a.shape != b.shape:
        raise refuse(
            "sim_scan_shape",
            f"tensor_tensor_scan got {a.label()} and {b.label()}, expected equal 2-D shapes; "
            "reshape both to (P, N)",
        )
    names = [operators.name_of(op) for op in (op0, op1)]
    for name in names:
        if name not in ARITHMETIC:
            raise refuse(
                "sim_unknown_operator",
                f"tensor_tensor_scan with operator '{name}', expected an arithmetic ALU operator",
            )
    attrs: dict[str, Any] = {"op0": names[0], "op1": names[1]}
    src = [a, b]
    if isinstance(initial, View):
        attrs["initial_at"] = len(src)
        src.append(stretched(initial, a, "initial"))
    else:
        attrs["initial"] = float(initial)
    attrs |= {k: True for k, on in (("reverse0", reverse0), ("reverse1", reverse1)) if on}
    dt = promote(a.dt, b.dt) if dtype is None else to_dtype(dtype)
    tracer = trace.current("nisa.tensor_tensor_scan")
    return tracer.result(TENSOR_TENSOR_SCAN, a.shape, dt, tuple(src), attrs, mask)


def _bn_stats(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    flat = xs[0].flatten(-attrs["free_axes"])
    parts = []
    for half in (flat[..., 0::2], flat[..., 1::2]):  # NeuronCore keeps even and odd positions apart
        count = half.shape[-1]
        mean = half.sum(-1) / max(count, 1)
        spread = ((half - mean[..., None]) ** 2).sum(-1)
        parts += [torch.full_like(mean, count), mean, spread]
    return torch.stack(parts, -1)


def _bn_stats_rules(i: Instruction) -> None:
    check_free_size("bn_stats", i.src[0], i.src[0].free_size, GEN2.bn_stats_free_max)


BN_STATS = define(
    "bn_stats", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="all",
    compute=_bn_stats, cycles=streaming(), rules=_bn_stats_rules,
    note="count, mean and variance * count of the even elements, then of the odd ones",
)  # fmt: skip


def bn_stats(data: Any, *, mask: Any = None, dtype: Any = None) -> View:
    """Statistics of each partition's N <= 512 elements -> [P, 6]: count, mean and variance * count
    of the elements at even positions, then of those at odd ones. Input to ``bn_aggr``."""
    return _statistics(BN_STATS, tile(data, "bn_stats"), 6, dtype, mask)


def _bn_aggr(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    flat = xs[0].flatten(-attrs["free_axes"])
    count, mean, spread = flat[..., 0::3], flat[..., 1::3], flat[..., 2::3]
    total = count.sum(-1)
    overall = (count * mean).sum(-1) / total
    around = (spread + count * (mean - overall[..., None]) ** 2).sum(-1) / total
    return torch.stack([overall, around], -1)


def _bn_aggr_rules(i: Instruction) -> None:
    if i.src[0].free_size % 3:
        raise refuse(
            "sim_bn_aggr_size",
            f"bn_aggr got {i.src[0].label()} with {i.src[0].free_size} elements per partition, "
            "expected a multiple of 3: count, mean and variance * count of each group",
        )


BN_AGGR = define(
    "bn_aggr", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="all",
    compute=_bn_aggr, cycles=streaming(13 / 3), rules=_bn_aggr_rules,
    note="mean and population variance from the columns of bn_stats",
)  # fmt: skip


def bn_aggr(data: Any, *, mask: Any = None, dtype: Any = None) -> View:
    """Mean and population variance [P, 2] from the columns of ``bn_stats`` ([P, 3 k])."""
    return _statistics(BN_AGGR, tile(data, "bn_aggr"), 2, dtype, mask)


def _statistics(op: OpSpec, data: View, columns: int, dtype: Any, mask: Any) -> View:
    """Record an instruction that turns the free axes into a few columns."""
    tracer = trace.current(f"nisa.{op.name}")
    dt = data.dt if dtype is None else to_dtype(dtype)
    fresh = tracer.storage((data.shape[0], columns), dt, "sbuf")
    out = tracer.whole(fresh)
    dst = out
    cut = trace.region(mask, data.shape) if mask is not None else None
    if cut is trace.EMPTY:
        return out
    if isinstance(cut, tuple):
        data = data.slice_box(cut)
        dst = out.slice_box((cut[0], slice(0, columns)))
    elif cut is not None:
        raise refuse(
            "sim_reduce_mask",
            f"mask of {op.name} is no box, expected one bound per axis; mask whole rows or columns",
        )
    fresh.producer = tracer.emit(op, (dst,), (data,), {"free_axes": data.ndim - 1})
    return out


def _reciprocal(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.reciprocal(xs[0])


def _reciprocal_cycles(i: Instruction) -> float:
    n = free_elements(i) * stride_factor(i)
    return max(MIN_II, n if i.op.engine_of(i) is Engine.SCALAR else 8 * n)


RECIPROCAL = define(
    "reciprocal", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="elementwise",
    compute=_reciprocal, cycles=_reciprocal_cycles, note="VectorE 8N cycles, ScalarE N",
)  # fmt: skip


def reciprocal(data: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None) -> View:
    """``1 / data``. VectorE (more exact, 8N cycles) or ScalarE."""
    source = tile(data, "reciprocal")
    choice = choose_engine(engine, "reciprocal", (Engine.VECTOR, Engine.SCALAR))
    attrs: dict[str, Any] = {"engine": choice} if choice else {}
    dt = source.dt if dtype is None else to_dtype(dtype)
    tracer = trace.current("nisa.reciprocal")
    return tracer.result(RECIPROCAL, source.shape, dt, (source,), attrs, mask)
