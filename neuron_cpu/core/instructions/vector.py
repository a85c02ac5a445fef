"""VectorE: arithmetic, reductions, scans and statistics.

Source: aws-neuron-sdk v2.21.1, general/nki/api/nki/isa/__init__.py (operand rules, cycles).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..device.dtypes import INT32, UINT32, DType, promote
from ..device.errors import refuse, type_name, warn
from ..device.release import INTEGERS_ASKED_OF_GPSIMD, INTEGERS_ON_GPSIMD, since
from ..device.spec import CORE, Engine
from ..program import masks, trace
from ..program.attributes import Attrs, among
from ..program.index import is_integer
from ..program.program import Instruction
from ..program.regions import window
from ..program.view import View
from . import operators
from .alu import ARITHMETIC, BITWISE, COMPARISONS, OPERATORS, REDUCTIONS, alu, reduce_last
from .arguments import (
    check_operator,
    choose_engine,
    free_axes,
    isa,
    number,
    on_bits,
    reduction_target,
    result_type,
    same_shape,
    stretched,
    tile,
)
from .constants import fp32
from .copies import initial_fill
from .entry import (
    MANY,
    PSUM,
    SBUF,
    OpSpec,
    check_free_size,
    flat,
    one_psum_operand,
    streaming,
    streaming_with_sums,
    stride_factor,
)
from .recorder import ALIKE, ROWS, fresh, record

WORDS = (INT32, UINT32)
SIGN = 1 << 31
INTEGER_OPERATORS = ("add", "subtract", "multiply")


# --- two tensors ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class BinaryAttrs(Attrs):
    """Attributes of one ALU operator on two tensors.

    Attributes:
        op: ALU operator.
        sign: the sign bit of operands whose bits are computed with exactly; 0 for unsigned ones.
    """

    op: str = among(OPERATORS)
    sign: int = among((0, SIGN), 0)


def _tensor_tensor(attrs: BinaryAttrs, xs: list[torch.Tensor]) -> torch.Tensor:
    if attrs.sign:  # bit patterns as the numbers they stand for
        xs = [(x ^ attrs.sign) - attrs.sign for x in xs]
    return alu(attrs.op, xs[0], xs[1])


def _tensor_tensor_cycles(i: Instruction) -> float:
    """N with an operand in PSUM or all in bf16, for some operators; else 2N (docstring)."""
    n = i.dst[0].free_size
    one_psum = PSUM in (i.src[0].storage.buffer, i.src[1].storage.buffer)
    all_bf16 = all(v.dt.name == "bfloat16" for v in (*i.src, *i.dst))
    fast = one_psum or (all_bf16 and BinaryAttrs.of(i).op in ("add", "multiply", "subtract"))
    return max(CORE.min_ii, (n if fast else 2 * n) * stride_factor(i))


TENSOR_TENSOR = OpSpec(
    "tensor_tensor",
    "elementwise",
    BinaryAttrs,
    _tensor_tensor,
    _tensor_tensor_cycles,
    rules=one_psum_operand,
    updates=lambda i: (BinaryAttrs.of(i).op, i.src),
    note="equal shapes; 2N cycles unless one operand is in PSUM or all are bf16",
    engines=(Engine.VECTOR, Engine.GPSIMD),
    operands=(2, 2),
    tiles=2,
    fp32_integers=True,
)


@isa(TENSOR_TENSOR)
def tensor_tensor(
    data1: Any, data2: Any, op: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None
) -> View:
    """``data1 op data2`` of equal shapes; not both in PSUM. VectorE (power: GpSimdE).

    Tiles of 32-bit integers are added, subtracted and multiplied in fp32, since SDK 2.26 exactly by
    GpSimdE unless one lies in PSUM (v2.26.0, nki.isa).
    Free axes of size 1 are stretched, with a warning: the documentation asks for equal shapes, but
    course kernels with published utilisation (SDK 2.26) and AWS's own reference add (P, 1) tiles.
    """
    a, b = tile(data1, "tensor_tensor"), tile(data2, "tensor_tensor")
    name = operators.name_of(op)
    a, b = _equal_shapes(a, b)
    check_operator(name, "tensor_tensor")
    bits = on_bits(name, (a, b))
    choice = choose_engine(engine, "tensor_tensor", TENSOR_TENSOR.engines)
    if choice is None and name == "power":
        choice = Engine.GPSIMD
    sign = 0
    if dtype is None and _exact_integers(name, choice, a, b):
        choice, bits, sign = Engine.GPSIMD, True, SIGN if a.dt is INT32 else 0
    attrs = binary_attrs(name, choice, bits, sign)
    dt = result_type(dtype, promote(a.dt, b.dt))
    return fresh(TENSOR_TENSOR, a.shape, dt, (a, b), attrs, mask)


def _exact_integers(name: str, choice: Engine | None, a: View, b: View) -> bool:
    """Whether GpSimdE computes 32-bit integers: if named, and since 2.26 by default."""
    asked = choice is Engine.GPSIMD and name != "subtract" and since(INTEGERS_ASKED_OF_GPSIMD)
    alone = choice is not Engine.VECTOR and since(INTEGERS_ON_GPSIMD)
    in_sbuf = PSUM not in (a.storage.buffer, b.storage.buffer)
    wide = a.dt in WORDS and b.dt in WORDS and name in INTEGER_OPERATORS
    return wide and in_sbuf and (asked or alone)


@functools.cache
def binary_attrs(op: str, engine: Engine | None, bits: bool, sign: int) -> BinaryAttrs:
    """One object for equal attributes."""
    return BinaryAttrs(engine=engine, bits=bits, op=op, sign=sign)


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
    wide, narrow = (a, b) if a.free_size > b.free_size else (b, a)
    both = f"tensor_tensor got {a.label()} and {b.label()}, expected equal shapes"
    if narrow.free_size == 1:
        made = stretched(narrow, wide, "tensor_tensor operand")
    elif narrow.ndim == wide.ndim and all(n in (1, w) for n, w in zip(narrow.shape, wide.shape)):
        made = narrow.expand(wide.shape)
    else:
        raise refuse("sim_shape_mismatch", f"{both}; slice them to the same free axes")
    warn(
        "sim_stretched_operand",
        f"{both}; use tensor_scalar for (P, 1) vectors: only releases from 2.26 on are known to "
        "stretch them",
    )
    return (wide, made) if wide is a else (made, wide)


# a op neutral = a; the extremes of fp32, which saturate to those of a narrower type
NEUTRAL = {"add": 0.0, "multiply": 1.0, "maximum": fp32.min, "minimum": fp32.max}


class LoopReduction:
    """Result of ``nl.loop_reduce``, waiting for the tile it is combined into."""

    def __init__(self, value: View, op: str, mask: Any) -> None:
        self.value, self.op, self.mask = value, op, mask

    def into(self, view: View) -> None:
        """Record ``view = view op value`` in place.

        The target needs no initial value: a tile that nothing has written yet begins as the
        operator's neutral element, filled in where the tile was made.
        """
        value = self.value if self.value.shape == view.shape else self.value.reshape(view.shape)
        storage = view.storage
        if storage.initial is None and self.op in NEUTRAL and not self._begun(view):
            storage.initial = NEUTRAL[self.op]
            machine = trace.current("nl.loop_reduce").machine
            if machine is not None:
                machine.run(initial_fill(storage))
        record(TENSOR_TENSOR, (view,), (view, value), BinaryAttrs(op=self.op), self.mask)

    def _begun(self, view: View) -> bool:
        """True where an instruction has written some of ``view``.

        Asked first is where `nl.full` has filled its tile, then the latest ones.
        """
        instructions = trace.current("nl.loop_reduce").program.instructions
        storage, end = view.storage, len(instructions)
        written = np.zeros(storage.size, bool)
        filled = min(storage.birth + view.blocks().start, end)
        for k in (*range(end)[filled : filled + 1], *range(end - 1, storage.birth - 1, -1)):
            for dst in instructions[k].dst:
                if dst.storage is storage:
                    window(written, dst)[...] = True
                    if window(written, view).any():
                        return True
        return False


def _combine(attrs: BinaryAttrs, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    total = xs[0]
    for part in xs[1:]:
        total = alu(attrs.op, total, part)
    return [total] * len(xs)


ALL_REDUCE = OpSpec(
    "all_reduce",
    "meeting",
    BinaryAttrs,
    _combine,
    lambda i: (len(i.src) - 1) * streaming(2.0)(i),
    writes=(SBUF,),
    note="nl.all_reduce: one tensor_tensor for each further grid instance",
    operands=(1, MANY),
    results=MANY,
)


# --- a tensor and constants or vectors ------------------------------------------------------------
AFFINE = frozenset({"multiply", "add", "subtract"})  # steps that are a scale and a bias


class Step(NamedTuple):
    """One step of the ALU on the data.

    Attributes:
        op: ALU operator.
        value: the other argument, where it is a constant.
        at: which operand it is otherwise.
        reverse: the other argument comes first.
    """

    op: str
    value: float | int | bool | None = None
    at: int | None = None
    reverse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class StepsAttrs(Attrs):
    """Attributes of ALU steps on the data.

    Attributes:
        steps: one or two, in order.
        reduce_op: operator of the second result.
    """

    steps: tuple[Step, ...]
    reduce_op: str = among({*REDUCTIONS, "abs_max", "abs_min"}, "add")

    def misfit(self) -> str:
        if not 0 <= len(self.steps) <= 2 or any(step.op not in OPERATORS for step in self.steps):
            return f"steps {self.steps}, expected at most two of the ALU's operators"
        return Attrs.misfit(self)


def steps_of(attrs: StepsAttrs, xs: list[torch.Tensor]) -> Any:
    """The result of the steps on the first operand, and its reduction if wanted."""
    x = xs[0]
    for step in attrs.steps:
        other = xs[step.at] if step.at is not None else torch.tensor(step.value, dtype=x.dtype)
        x = alu(step.op, other, x) if step.reverse else alu(step.op, x, other)
    if not attrs.reduce_axes:
        return x
    return x, reduce_last(attrs.reduce_op, x, attrs.reduce_axes)


def _step_updates(i: Instruction) -> tuple[str, tuple[View, ...]] | None:
    """One step without a second result is an update of its data."""
    attrs = StepsAttrs.of(i)
    if len(attrs.steps) > 1 or attrs.reduce_axes:
        return None
    return attrs.steps[0].op, i.src[:1]


def _is_affine(i: Instruction) -> bool:
    """Whether ScalarE can do the steps: it computes scale times data plus bias.

    A published profile of a kernel that names no engine for such instructions has both engines at
    work (docs/cost_model.md).
    """
    attrs = StepsAttrs.of(i)
    return not attrs.reduce_axes and all(step.op in AFFINE for step in attrs.steps)


TENSOR_SCALAR = OpSpec(
    "tensor_scalar",
    "elementwise",
    StepsAttrs,
    steps_of,
    streaming_with_sums,
    updates=_step_updates,
    serves_as_well=Engine.SCALAR,
    serves_if=_is_affine,
    note="(data op0 operand0) op1 operand1 with constants or (P, 1) vectors",
    engines=(Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD),
    operands=(1, 3),
    results=2,
    tiles=1,
    fp32_integers=True,
)


def _step(what: str, op: Any, value: Any, reverse: bool, src: list[View]) -> Step:
    """One step of tensor_scalar; a vector is appended to ``src``."""
    name = operators.name_of(op)
    if isinstance(value, View):
        src.append(stretched(value, src[0], what))
        return Step(name, at=len(src) - 1, reverse=bool(reverse))
    if is_integer(value) or isinstance(value, (float, np.floating, bool)):
        return Step(name, number(value), reverse=bool(reverse))
    raise refuse(
        "sim_operand_type",
        f"tensor_scalar {what} of type {type_name(value)}, expected a number or (P, 1) tile",
    )


def one_class(what: str, steps: tuple[Step, ...]) -> bool:
    """Whether the steps are bitwise; refuses a mixture."""
    bits = [step.op in BITWISE for step in steps]
    if any(bits) != all(bits):
        raise refuse(
            "sim_mixed_operator_classes",
            f"{what} joins {' and '.join(step.op for step in steps)}, expected both bitwise or "
            "both arithmetic; use two instructions",
        )
    return bits[0]


def _steps_on_bits(what: str, steps: tuple[Step, ...], src: list[View]) -> bool:
    """Whether the steps are bitwise; refuses a mixture, and values that are no operator."""
    one_class(what, steps)
    for step in steps:
        check_operator(step.op, what)
    return on_bits(steps[0].op, src)


@isa(TENSOR_SCALAR)
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
    steps: tuple[Step, ...] = (_step("operand0", op0, operand0, reverse0, src),)
    if op1 is not None:
        steps += (_step("operand1", op1, operand1, reverse1, src),)
    bits = _steps_on_bits("tensor_scalar", steps, src)
    choice = choose_engine(engine, "tensor_scalar", TENSOR_SCALAR.engines)
    attrs = StepsAttrs(engine=choice, bits=bits, steps=steps)
    dt = result_type(dtype, src[0].dt)
    return fresh(TENSOR_SCALAR, src[0].shape, dt, tuple(src), attrs, mask)


@isa(TENSOR_SCALAR)
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
    source = tile(data, "tensor_scalar_reduce")
    if reverse0:
        raise refuse(
            "sim_unsupported_reverse",
            "tensor_scalar_reduce with reverse0=True, expected False: SDK 2.21 does not support it",
        )
    src = [source]
    steps = (_step("operand0", op0, operand0, False, src),)
    attrs = StepsAttrs(
        bits=_steps_on_bits("tensor_scalar_reduce", steps, src),
        steps=steps,
        reduce_axes=source.ndim - 1,
        reduce_op="add" if reduce_op is None else operators.name_of(reduce_op),
    )
    total = reduction_target(reduce_res, source, "tensor_scalar_reduce")
    dt = result_type(dtype, source.dt)
    axes = (ALIKE, ROWS, *(ALIKE for _ in src))
    return fresh(TENSOR_SCALAR, source.shape, dt, tuple(src), attrs, mask, axes=axes, also=(total,))


def _scalar_tensor_tensor_cycles(i: Instruction) -> float:
    """2N, but N for (bf16 - x) * bf16 over an even number of elements (docstring)."""
    n = i.dst[0].free_size
    types = {i.src[0].dt.name, i.src[1].dt.name}
    steps = [step.op for step in StepsAttrs.of(i).steps]
    fast = types == {"bfloat16"} and steps == ["subtract", "multiply"] and n % 2 == 0
    return max(CORE.min_ii, n if fast else 2 * n)


SCALAR_TENSOR_TENSOR = OpSpec(
    "scalar_tensor_tensor",
    "elementwise",
    StepsAttrs,
    steps_of,
    _scalar_tensor_tensor_cycles,
    rules=one_psum_operand,
    note="(data op0 scalar or vector) op1 tensor; 2N cycles",
    operands=(2, 3),
    results=2,
    tiles=2,
    fp32_integers=True,
)


@isa(SCALAR_TENSOR_TENSOR)
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
    steps = (
        _step("operand0", op0, operand0, reverse0, src),
        Step(operators.name_of(op1), at=1, reverse=bool(reverse1)),
    )
    attrs = StepsAttrs(bits=_steps_on_bits("scalar_tensor_tensor", steps, src), steps=steps)
    dt = result_type(dtype, first.dt)
    return fresh(SCALAR_TENSOR_TENSOR, first.shape, dt, tuple(src), attrs, mask)


def _reciprocal_cycles(i: Instruction) -> float:
    """8N on VectorE, whose result is the more exact one, N on ScalarE (docstring)."""
    return streaming(1.0 if i.op.engine_of(i) is Engine.SCALAR else 8.0)(i)


RECIPROCAL = OpSpec(
    "reciprocal",
    "elementwise",
    Attrs,
    lambda _, xs: torch.reciprocal(xs[0]),
    _reciprocal_cycles,
    serves_as_well=Engine.SCALAR,
    serves_if=lambda _: CORE.number == 2,
    cycles_there=streaming(),
    note="VectorE 8N cycles, ScalarE N",
    engines=(Engine.VECTOR, Engine.SCALAR),
    rate=8 / 6,
)


@isa(RECIPROCAL)
def reciprocal(data: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None) -> View:
    """``1 / data``. VectorE (more exact, 8N cycles) or ScalarE."""
    source = tile(data, "reciprocal")
    choice = choose_engine(engine, "reciprocal", RECIPROCAL.engines)
    dt = result_type(dtype, source.dt)
    return fresh(RECIPROCAL, source.shape, dt, (source,), Attrs(engine=choice), mask)


# --- reductions -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ReduceAttrs(Attrs):
    """Attributes of a reduction of free axes.

    Attributes:
        op: ALU operator.
        axes: how many axes are reduced.
        order: all axes with the reduced ones moved last, where they are not.
        negate: the result is negated, at no cost.
    """

    op: str = among(REDUCTIONS)
    axes: int
    order: tuple[int, ...] | None = None
    negate: bool = False


def _tensor_reduce(attrs: ReduceAttrs, xs: list[torch.Tensor]) -> torch.Tensor:
    x = xs[0]
    if attrs.order is not None:
        lead = x.ndim - len(attrs.order)
        x = x.permute(*range(lead), *(lead + a for a in attrs.order))
    total = reduce_last(attrs.op, x, attrs.axes)
    return -total if attrs.negate else total


def _reduce_cycles(i: Instruction) -> float:
    """Sums and maxima of bf16 into bf16 take two elements a cycle (docstring)."""
    n = i.src[0].free_size
    both_bf16 = i.src[0].dt.name == i.dst[0].dt.name == "bfloat16"
    fast = both_bf16 and ReduceAttrs.of(i).op in ("add", "maximum")
    return max(CORE.min_ii, (n / 2 if fast else n) * stride_factor(i))


TENSOR_REDUCE = OpSpec(
    "tensor_reduce",
    "reduce",
    ReduceAttrs,
    _tensor_reduce,
    _reduce_cycles,
    box_mend="fill the masked elements with the neutral value first",
    note="over the last free axes; N/2 cycles for bf16 add and max",
    fp32_integers=True,
)


@isa(TENSOR_REDUCE)
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
    """Reduce free axes in fp32: [P, F...] -> [P, rest...], at least rank 2. ``negate`` is free.

    A mask that is no box, as of windows that reach over an edge, becomes a reduction for each box,
    with a warning.
    """
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
    bits = on_bits(name, (source,))
    order = None
    if axes != tuple(range(source.ndim - len(axes), source.ndim)):
        order = (*kept, *axes)
        warn(
            "sim_reduce_middle_axis",
            f"tensor_reduce over axes {axes} of {source.label()}: sources disagree whether axes "
            "that are not the last ones work on SDK 2.21; present the reduced axis last",
        )
    # the mask's axis that each axis of the result comes from; None for those of size 1
    left: list[int | None] = [*kept, *[None] * (2 - len(kept))]
    if keepdims:
        left = [None if a in axes else a for a in range(source.ndim)]
    shape = tuple(1 if a is None else source.shape[a] for a in left)
    attrs = ReduceAttrs(bits=bits, op=name, axes=len(axes), order=order, negate=bool(negate))
    dt = result_type(dtype, source.dt)
    keep = None if mask is None else masks.region(mask, source.shape)
    if isinstance(keep, np.ndarray):
        return _reduce_boxes(source, shape, left, dt, attrs, keep)
    cuts = (tuple(left), ALIKE)
    return fresh(TENSOR_REDUCE, shape, dt, (source,), attrs, mask, source.shape, cuts)


def _reduce_boxes(
    source: View,
    shape: tuple[int, ...],
    left: list[int | None],
    dt: DType,
    attrs: ReduceAttrs,
    keep: np.ndarray,
) -> View:
    """A reduction for each box of ``keep``, which must give each result one: windows at an edge."""
    boxes = list(masks.boxes(keep))
    targets = [tuple(slice(0, 1) if a is None else box[a] for a in left) for box in boxes]
    hits = np.zeros(shape, int)
    for target in targets:
        hits[target] += 1
    if hits.max() > 1:
        raise refuse(
            "sim_reduce_mask",
            f"mask of tensor_reduce of {source.label()} leaves several boxes of one result, "
            "expected one bound per axis; fill the masked elements with the neutral value first",
        )
    warn(
        "sim_reduce_mask_parts",
        f"mask of tensor_reduce of {source.label()} is no box, expected one bound per axis: it "
        f"becomes {len(boxes)} instructions; fill the masked elements with the neutral value first",
    )
    tracer = trace.current("nisa.tensor_reduce")
    out = tracer.whole(tracer.storage(shape, dt, SBUF))
    out.storage.parts = targets
    for box, target in zip(boxes, targets):
        record(TENSOR_REDUCE, (out.slice_box(target),), (source.slice_box(box),), attrs)
    return out


# --- scan -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ScanAttrs(Attrs):
    """Attributes of a scan along the free axis.

    Attributes:
        op0, op1: ALU operators; reverse0, reverse1 swap their arguments.
        initial: value before the first column, where no operand is.
        free_axes: axes that it runs along, row by row.
    """

    op0: str = among(ARITHMETIC)
    op1: str = among(ARITHMETIC)
    reverse0: bool = False
    reverse1: bool = False
    initial: float = 0.0
    free_axes: int = 1


def _scan(attrs: ScanAttrs, xs: list[torch.Tensor]) -> torch.Tensor:
    """One pair of ALU steps per column, each on the fp32 value of the column before."""
    rows = [flat(x, attrs.free_axes) for x in xs]
    state: Any = rows[2][..., 0] if len(xs) > 2 else torch.tensor(attrs.initial)
    columns = []
    for a, b in zip(rows[0].unbind(-1), rows[1].unbind(-1)):
        step = alu(attrs.op0, state, a) if attrs.reverse0 else alu(attrs.op0, a, state)
        state = alu(attrs.op1, b, step) if attrs.reverse1 else alu(attrs.op1, step, b)
        columns.append(state)
    return torch.stack(columns, -1).reshape(xs[0].shape)


TENSOR_TENSOR_SCAN = OpSpec(
    "tensor_tensor_scan",
    "scan",
    ScanAttrs,
    _scan,
    streaming(2.0),
    rules=one_psum_operand,
    note="result[i] = (data0[i] op0 result[i - 1]) op1 data1[i] along the free axis",
    operands=(2, 3),
)


@isa(TENSOR_TENSOR_SCAN)
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
    src, start = [a, b], 0.0
    if isinstance(initial, View):
        src.append(stretched(initial, a, "initial"))
    else:
        start = float(initial)
    attrs = ScanAttrs(
        op0=names[0], op1=names[1], reverse0=bool(reverse0), reverse1=bool(reverse1), initial=start
    )
    dt = result_type(dtype, promote(a.dt, b.dt))
    return fresh(TENSOR_TENSOR_SCAN, a.shape, dt, tuple(src), attrs, mask)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CumulativeAttrs(Attrs):
    """Attributes of a running reduction along the free axis.

    Attributes:
        step: what happens to each element first.
        op: operator that joins it with the result before.
        initial: the result before the first column, where no operand is.
        free_axes: axes that it runs along, row by row.
    """

    step: Step
    op: str = among(ARITHMETIC)
    initial: float = 0.0
    free_axes: int = 1

    def misfit(self) -> str:
        if self.step.op not in OPERATORS:
            return f"step {self.step}, expected an operator of the ALU"
        return Attrs.misfit(self)


def _cumulative(attrs: CumulativeAttrs, xs: list[torch.Tensor]) -> torch.Tensor:
    """One step per column, each on the fp32 result of the column before."""
    operand = torch.tensor(attrs.step.value, dtype=xs[0].dtype)
    moved = alu(attrs.step.op, flat(xs[0], attrs.free_axes), operand)
    state: Any = xs[1][..., 0] if len(xs) > 1 else torch.tensor(attrs.initial)
    columns = []
    for column in moved.unbind(-1):
        state = alu(attrs.op, column, state)
        columns.append(state)
    return torch.stack(columns, -1).reshape(xs[0].shape)


CUMULATIVE = OpSpec(
    "tensor_scalar_cumulative",
    "scan",
    CumulativeAttrs,
    _cumulative,
    streaming(2.0),
    note="SDK 2.29: result[i] = (x[i] op0 constant) op1 result[i - 1]; 2N like a scan",
    operands=(1, 2),
    published=False,
)


# --- exponential ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ExponentialAttrs(Attrs):
    """Attributes of an exponential on VectorE.

    Attributes:
        shift: what is subtracted first, where no operand is.
    """

    shift: float = 0.0


def _exponential(attrs: ExponentialAttrs, xs: list[torch.Tensor]) -> Any:
    y = torch.exp(xs[0] - (xs[1] if len(xs) > 1 else attrs.shift))
    return (y, reduce_last("add", y, attrs.reduce_axes)) if attrs.reduce_axes else y


EXPONENTIAL = OpSpec(
    "exponential",
    "elementwise",
    ExponentialAttrs,
    _exponential,
    streaming(0.25),
    note="NeuronCore-v4: exp(x - maximum), four times ScalarE's rate",
    operands=(1, 2),
    results=2,
    generation=4,
)


# --- range select ---------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RangeAttrs(Attrs):
    """Attributes of a choice by column number between two bounds of each partition.

    Attributes:
        ops: comparisons of the number with the first and the second bound.
        first: number of the first column.
        on_false: what elements become that are not chosen.
        free_axes: free axes of the operand.
    """

    ops: tuple[str, str] = among(COMPARISONS)
    first: float
    on_false: float
    free_axes: int


def _range_select(attrs: RangeAttrs, xs: list[torch.Tensor]) -> Any:
    columns = xs[0].shape[-attrs.free_axes :]
    count = int(np.prod(columns))
    number = (attrs.first + torch.arange(count, dtype=torch.float32)).reshape(columns)
    inside = [alu(op, number, bound) != 0 for op, bound in zip(attrs.ops, xs[1:])]
    values = torch.where(inside[0] & inside[1], xs[0], torch.tensor(attrs.on_false))
    if not attrs.reduce_axes:
        return values
    return values, reduce_last("maximum", values, attrs.reduce_axes)


RANGE_SELECT = OpSpec(
    "range_select",
    "elementwise",
    RangeAttrs,
    _range_select,
    streaming_with_sums,
    note="NeuronCore-v3: keeps columns between two bounds, optionally the row maximum",
    operands=(3, 3),
    results=2,
    generation=3,
    compares="reduction",
)


# --- statistics -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class StatisticsAttrs(Attrs):
    """Attributes of the statistics of each partition.

    Attributes:
        free_axes: free axes of the operand.
    """

    free_axes: int


def _bn_stats(attrs: StatisticsAttrs, xs: list[torch.Tensor]) -> torch.Tensor:
    elements = flat(xs[0], attrs.free_axes)
    parts = []
    # NeuronCore keeps even and odd positions apart
    for half in (elements[..., 0::2], elements[..., 1::2]):
        count = half.shape[-1]
        mean = half.sum(-1) / max(count, 1)
        spread = ((half - mean[..., None]) ** 2).sum(-1)
        parts += [torch.full_like(mean, count), mean, spread]
    return torch.stack(parts, -1)


def _bn_aggr(attrs: StatisticsAttrs, xs: list[torch.Tensor]) -> torch.Tensor:
    triples = flat(xs[0], attrs.free_axes)
    count, mean, spread = triples[..., 0::3], triples[..., 1::3], triples[..., 2::3]
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


def _define_statistics(
    name: str, compute: Callable, cycles: Callable, rules: Callable, note: str
) -> OpSpec:
    return OpSpec(
        name,
        "all",
        StatisticsAttrs,
        compute,
        cycles,
        rules=rules,
        box_mend="mask whole rows or columns",
        note=note,
    )


BN_STATS = _define_statistics(
    "bn_stats",
    _bn_stats,
    streaming(),
    lambda i: check_free_size("bn_stats", i.src[0], CORE.bn_stats_free_max),
    "count, mean and variance * count of the even elements, then of the odd ones",
)
BN_AGGR = _define_statistics(
    "bn_aggr",
    _bn_aggr,
    streaming(13 / 3),  # 13 cycles for each triple
    _bn_aggr_rules,
    "mean and population variance from the columns of bn_stats",
)


@isa(BN_STATS)
def bn_stats(data: Any, *, mask: Any = None, dtype: Any = None) -> View:
    """Statistics of each partition's N <= 512 elements -> [P, 6]: count, mean and variance * count
    of the elements at even positions, then at odd positions. Input to ``bn_aggr``."""
    return _statistics(BN_STATS, tile(data, "bn_stats"), 6, dtype, mask)


@isa(BN_AGGR)
def bn_aggr(data: Any, *, mask: Any = None, dtype: Any = None) -> View:
    """Mean and population variance [P, 2] from the columns of ``bn_stats`` ([P, 3 k])."""
    return _statistics(BN_AGGR, tile(data, "bn_aggr"), 2, dtype, mask)


def _statistics(op: OpSpec, data: View, columns: int, dtype: Any, mask: Any) -> View:
    """Record an instruction that turns the free axes into a few columns."""
    attrs = StatisticsAttrs(free_axes=data.ndim - 1)
    shape, dt = (data.shape[0], columns), result_type(dtype, data.dt)
    return fresh(op, shape, dt, (data,), attrs, mask, data.shape, (ROWS, ALIKE))
