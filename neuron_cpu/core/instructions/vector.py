"""VectorE: arithmetic, reductions, scans and statistics.

Source: aws-neuron-sdk v2.21.1, general/nki/api/nki/isa/__init__.py (operand rules, cycles).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..device.dtypes import INT32, UINT32, Shape, Tensors
from ..device.errors import refuse, type_name
from ..device.spec import CORE, Engine
from ..program.attributes import Attrs, among, constants
from ..program.index import is_integer
from ..program.program import Instruction
from ..program.view import View
from .alu import (
    ARITHMETIC,
    BITWISE,
    COMPARISONS,
    OPERATORS,
    REDUCTIONS,
    added_in_order,
    alu,
    reduce_last,
)
from .arguments import (
    check_comparison,
    check_reduction,
    column,
    flag,
    fp32,
    no_number,
    number,
    on_bits,
    real,
    stretched,
)
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

WORDS = (INT32, UINT32)
SIGN = 1 << 31


# --- two tensors ----------------------------------------------------------------------------------
@constants
class BinaryAttrs(Attrs):
    """Attributes of one ALU operator on two tensors.

    Attributes:
        op: ALU operator.
        sign: the sign bit of operands whose bits are computed with exactly; 0 for unsigned ones.
    """

    op: str = among(OPERATORS)
    sign: int = among((0, SIGN), default=0)


def _tensor_tensor(attrs: BinaryAttrs, xs: Tensors) -> torch.Tensor:
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
)


@functools.cache
def binary_attrs(op: str, engine: Engine | None, bits: bool, sign: int) -> BinaryAttrs:
    """One object for equal attributes."""
    return BinaryAttrs(engine=engine, bits=bits, op=op, sign=sign)


def _combine(attrs: BinaryAttrs, xs: Tensors) -> Tensors:
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


@constants
class StepsAttrs(Attrs):
    """Attributes of ALU steps on the data.

    Attributes:
        steps: one or two, in order.
        reduce_op: operator of the second result.
    """

    steps: tuple[Step, ...]
    reduce_op: str = among({*REDUCTIONS, "abs_max", "abs_min"}, default="add")

    def misfit(self) -> str:
        if not 0 <= len(self.steps) <= 2 or any(step.op not in OPERATORS for step in self.steps):
            return f"steps {self.steps}, expected at most two of the ALU's operators"
        return Attrs.misfit(self)


def steps_of(attrs: StepsAttrs, xs: Tensors) -> Any:
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
)


def step(
    what: str, op: str, value: Any, reverse: Any, src: list[View], exact: bool = False
) -> Step:
    """One step of the ALU on ``src[0]``; a vector is appended to ``src``, of fp32 if ``exact``."""
    if isinstance(value, View):
        src.append(column(value, src[0], what, exact=exact and op not in BITWISE))
        return Step(op, at=len(src) - 1, reverse=flag(reverse, "reverse"))
    value = number(value)
    if isinstance(value, (int, float)):
        return Step(op, value, reverse=flag(reverse, "reverse"))
    raise refuse(
        "sim_operand_type",
        f"{what} of type {type_name(value)}, expected a number or a (P, 1) "
        + f"{'float32 tile' if exact else 'tile'}; {no_number(value)}",
    )


def of_bits(what: str, steps: tuple[Step, ...], views: list[View]) -> bool:
    """Whether the steps are bitwise; refuses a mixture, and bits joined with a fraction."""
    bits = [step.op in BITWISE for step in steps]
    if any(bits) != all(bits):
        raise refuse(
            "sim_mixed_operator_classes",
            f"{what} joins {' and '.join(step.op for step in steps)}, expected both bitwise or "
            "both arithmetic; use two instructions",
        )
    for one in steps:
        if bits[0] and one.at is None and not is_integer(one.value):
            raise refuse(
                "sim_bitwise_on_float",
                f"{what} joins bits with {one.value!r}, expected an integer; "
                "write a whole number, 1 and not 1.0",
            )
    return on_bits(steps[0].op, views)


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
)


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


# --- reductions -----------------------------------------------------------------------------------
@constants
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
    order: Shape | None = None
    negate: bool = False


def _tensor_reduce(attrs: ReduceAttrs, xs: Tensors) -> torch.Tensor:
    x = xs[0]
    if attrs.order is not None:
        lead = x.ndim - len(attrs.order)
        x = x.permute(*range(lead), *(lead + a for a in attrs.order))
    in_order = attrs.op == "add" and x.dtype is torch.float32
    total = added_in_order(x, attrs.axes) if in_order else reduce_last(attrs.op, x, attrs.axes)
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
    note="over the last free axes; N/2 cycles for bf16 add and max",
)


# --- scan -----------------------------------------------------------------------------------------
@constants
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


def scanning(
    a: View, b: View, initial: Any, ops: tuple[str, str], reverse: tuple[Any, Any]
) -> tuple[tuple[View, ...], ScanAttrs]:
    """Sources and checked attributes of a scan of ``a`` and ``b``."""
    what = "tensor_tensor_scan"
    for op in ops:
        check_reduction(op, what, ARITHMETIC)
    src: tuple[View, ...] = (a, b)
    start = 0.0
    if isinstance(initial, View):
        src += (stretched(initial, a, f"{what} initial"),)
    else:
        start = real(initial, f"{what} initial")
    first, second = (flag(one, "reverse") for one in reverse)
    attrs = ScanAttrs(
        op0=ops[0], op1=ops[1], reverse0=first, reverse1=second, initial=start, free_axes=a.ndim - 1
    )
    return src, attrs


def _scan(attrs: ScanAttrs, xs: Tensors) -> torch.Tensor:
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


@constants
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


def _cumulative(attrs: CumulativeAttrs, xs: Tensors) -> torch.Tensor:
    """One step per column, each on the fp32 result of the column before."""
    operand = torch.tensor(attrs.step.value, dtype=xs[0].dtype)
    moved = alu(attrs.step.op, flat(xs[0], attrs.free_axes), operand)
    state: Any = xs[1][..., 0] if len(xs) > 1 else torch.tensor(attrs.initial)
    columns = []
    for one in moved.unbind(-1):
        state = alu(attrs.op, one, state)
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
@constants
class ExponentialAttrs(Attrs):
    """Attributes of an exponential on VectorE.

    Attributes:
        shift: what is subtracted first, where no operand is.
    """

    shift: float = 0.0


def _exponential(attrs: ExponentialAttrs, xs: Tensors) -> Any:
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
@constants
class RangeAttrs(Attrs):
    """Attributes of a choice by column number between two bounds of each partition.

    Attributes:
        ops: comparisons of the number with the first and the second bound.
        first: number of the first column.
        on_false: what elements become that are not chosen.
        free_axes: free axes of the operand.
    """

    ops: tuple[str, ...] = among(COMPARISONS)
    first: float
    on_false: float
    free_axes: int


def ranging(
    data: View, ops: tuple[str, ...], first: float, on_false: float, reduce_op: str
) -> RangeAttrs:
    """The checked attributes of a range_select of ``data``."""
    what = "range_select"
    for op in ops:
        check_comparison(op, what)
    # written with fewer digits it is still that number in fp32
    if np.float32(on_false) != np.float32(fp32.min) or reduce_op != "maximum":
        raise refuse(
            "sim_range_select",
            f"{what} with on_false_value={on_false}, reduce_op={reduce_op}, expected the least "
            "fp32 number and nl.maximum; leave both out",
        )
    return RangeAttrs(ops=ops, first=first, on_false=fp32.min, free_axes=data.ndim - 1)


def _range_select(attrs: RangeAttrs, xs: Tensors) -> Any:
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
@constants
class StatisticsAttrs(Attrs):
    """Attributes of the statistics of each partition.

    Attributes:
        free_axes: free axes of the operand.
    """

    free_axes: int


def _bn_stats(attrs: StatisticsAttrs, xs: Tensors) -> torch.Tensor:
    elements = flat(xs[0], attrs.free_axes)
    parts = []
    # NeuronCore keeps even and odd positions apart
    for half in (elements[..., 0::2], elements[..., 1::2]):
        count = half.shape[-1]
        mean = half.sum(-1) / max(count, 1)
        spread = ((half - mean[..., None]) ** 2).sum(-1)
        parts += [torch.full_like(mean, count), mean, spread]
    return torch.stack(parts, -1)


def _bn_aggr(attrs: StatisticsAttrs, xs: Tensors) -> torch.Tensor:
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
            "expected a multiple of 3: count, mean and variance * count of each group; "
            "give it what nisa.bn_stats wrote",
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


_JOINED = ", each into 6 columns of dst, [:, i * 6:(i + 1) * 6], and join them by nisa.bn_aggr"
BN_STATS = _define_statistics(
    "bn_stats",
    _bn_stats,
    streaming(),
    lambda i: check_free_size("bn_stats", i.src[0], CORE.bn_stats_free_max, _JOINED),
    "count, mean and variance * count of the even elements, then of the odd ones",
)
BN_AGGR = _define_statistics(
    "bn_aggr",
    _bn_aggr,
    streaming(13 / 3),  # 13 cycles for each triple
    _bn_aggr_rules,
    "mean and population variance from the columns of bn_stats",
)
