"""``nki.isa``: arithmetic, reductions, scans and activations."""

import math
from typing import Any

from ..device.dtypes import INT32, Shape
from ..device.errors import refuse, warn
from ..device.release import REAL_AXES, nki_since
from ..device.spec import CORE, Engine
from ..instructions import scalar, vector
from ..instructions.alu import ACTIVATIONS, BITWISE, REDUCTIONS, no_activation
from ..instructions.arguments import (
    check_reduction,
    check_second,
    column,
    flag,
    free_axes,
    on_bits,
    real,
    wholes,
)
from ..instructions.gpsimd import PARTITION_REDUCE, PartitionReduceAttrs
from ..instructions.vector import of_bits
from ..program.attributes import Attrs
from ..program.view import View, called
from .accumulators import SCALAR, VECTOR, Reduction, keep_result, reducing, running
from .operands import (
    UNARY,
    NkiInstruction,
    alike,
    choose,
    engine,
    isa,
    operator,
    put,
    reduce_cmd,
    step,
    tensor,
    token,
)

INEXACT = ("mod", "fmod", "divide")  # no instruction of the hardware computes them on integers


# --- two tensors ----------------------------------------------------------------------------------
@isa(vector.TENSOR_TENSOR)
def tensor_tensor(
    dst: View, data1: View, data2: View, op: Any, engine: engine = engine.unknown
) -> NkiInstruction:
    """``data1 op data2``, not both in PSUM; fp32 on VectorE.

    Operands of 32-bit integers are computed with exactly on GpSimdE, unless one lies in PSUM or the
    kernel asks for VectorE. ``nl.power`` runs on GpSimdE.
    """
    what = "tensor_tensor"
    dst, data1, data2 = alike(what, dst, data1, data2)
    code = operator(op, what)
    choice = choose(engine, what, vector.TENSOR_TENSOR.engines)
    exact = data1.dt in vector.WORDS and data2.dt in vector.WORDS and choice is not Engine.VECTOR
    if exact:
        in_psum = "psum" in (data1.storage.buffer, data2.storage.buffer, dst.storage.buffer)
        exact = not in_psum and code not in (*BITWISE, *INEXACT)
    if code == "power" or exact:
        choice = choice or Engine.GPSIMD
    elif choice is Engine.GPSIMD and CORE.number == 2:
        warn(  # NCC_IXCG965 of SDK 2.32 for trn1 (foxl-ai/kiln, docs/neuron-notes.md)
            "sim_engine_operators",
            f"tensor_tensor with {code} on {choice.value} of {CORE.name}: the compiler of SDK 2.32 "
            "refused fp32 operands there, expected VectorE; leave the engine open",
        )
    bits = exact or on_bits(code, (data1, data2, dst))
    sign = vector.SIGN if exact and data1.dt is INT32 else 0
    attrs = vector.binary_attrs(code, choice, bits, sign)
    return put(vector.TENSOR_TENSOR, (dst,), (data1, data2), attrs)


# --- a tensor and numbers or vectors --------------------------------------------------------------
@isa(vector.TENSOR_SCALAR)
def tensor_scalar(
    dst: View,
    data: View,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: engine = engine.unknown,
) -> NkiInstruction:
    """``(data op0 operand0) op1 operand1`` with numbers or (P, 1) fp32 tiles, in one pass."""
    what = "tensor_scalar"
    dst, data = alike(what, dst, data)
    src = [data]
    first = operator(op0, what)
    steps: tuple[vector.Step, ...] = (step(f"{what} operand0", first, operand0, reverse0, src),)
    check_second(op1, operand1, reverse1, what)
    if op1 is not None:
        steps += (step(f"{what} operand1", operator(op1, what), operand1, reverse1, src),)
    choice = choose(engine, what, vector.TENSOR_SCALAR.engines)
    if first == "rsqrt" and choice is None:
        choice = Engine.GPSIMD
    _warn_of_engine(choice, [s.op for s in steps])
    attrs = vector.StepsAttrs(engine=choice, bits=of_bits(what, steps, [*src, dst]), steps=steps)
    if first in UNARY and data.dt.is_int and not attrs.bits:
        warn(
            "sim_unary_integers",
            f"tensor_scalar with nl.{first} of {data.label()}: sources leave open which types a "
            "unary operator takes, expected floats; here it is computed in fp32",
            advice=True,
        )
    return put(vector.TENSOR_SCALAR, (dst,), tuple(src), attrs)


def _warn_of_engine(choice: Engine | None, ops: list[str]) -> None:
    """GpSimdE has the root alone, ScalarE products and sums from gen3 on, and the rest on gen4."""
    if choice is Engine.GPSIMD:
        wrong = ops != ["rsqrt"]
    else:
        few = CORE.number > 2 and ops in (["multiply"], ["add"], ["multiply", "add"])
        wrong = choice is Engine.SCALAR and CORE.number < 4 and not few
    if wrong and choice is not None:
        warn(
            "sim_engine_operators",
            f"tensor_scalar with {' and '.join(ops)} on {choice.value} of {CORE.name}, expected "
            "rsqrt alone on GpSimdE, and from gen3 on multiply, add or both on ScalarE; leave the "
            "engine open",
        )


@isa(
    vector.SCALAR_TENSOR_TENSOR,
    keywords=dict.fromkeys(("reduce_cmd", "reduce_op", "reduce_res"), "2.33"),
)
def scalar_tensor_tensor(
    dst: View,
    data: View,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: View,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_op: Any = ...,
    reduce_res: Any = None,
) -> NkiInstruction:
    """``(data op0 operand0) op1 operand1``: operand0 a number or (P, 1), operand1 a whole tile.

    Tiles of any type, computed with in fp32 (aws-neuron-sdk v2.32.0, nki.isa). With ``reduce_op``
    the result is reduced over all free axes, too (SDK 2.33): ``reduce_res`` (P, 1) receives it.
    """
    what = "scalar_tensor_tensor"
    dst, data, operand1 = alike(what, dst, data, operand1)
    src = [data, operand1]
    steps = (
        step(f"{what} operand0", operator(op0, what), operand0, reverse0, src, exact=False),
        vector.Step(operator(op1, what), at=1, reverse=flag(reverse1, "reverse1")),
    )
    if reduce_op is ...:
        if reduce_res is not None:
            raise refuse(
                "sim_reduce_operator",
                f"{what} got reduce_res without reduce_op, expected both; name the operator",
            )
        attrs = vector.StepsAttrs(bits=of_bits(what, steps, [*src, dst]), steps=steps)
        return put(vector.SCALAR_TENSOR_TENSOR, (dst,), tuple(src), attrs)
    how = Reduction(VECTOR, operator(reduce_op, what), data.shape[0], what)
    attrs = _reduced_steps(how, steps, src)
    return reducing(
        how, reduce_cmd, reduce_res, vector.SCALAR_TENSOR_TENSOR, dst, tuple(src), attrs
    )


def _reduced_steps(
    how: Reduction, steps: tuple[vector.Step, ...], src: list[View]
) -> vector.StepsAttrs:
    """Attributes of steps whose result is reduced."""
    bits = of_bits(how.what, steps, src)
    check_reduction(how.op, how.what, ("add", "multiply", "maximum", "minimum"))
    return vector.StepsAttrs(bits=bits, steps=steps, reduce_op=how.op)


@isa(
    vector.TENSOR_SCALAR,
    keywords={"reduce_cmd": "2.30", "reduce_init": "2.30", "reduce_res_negate": "2.32"},
)
def tensor_scalar_reduce(
    dst: View,
    data: View,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: Any = None,
    reverse0: bool = False,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
) -> NkiInstruction:
    """``dst = data op0 operand0``, and ``reduce_res`` (P, 1) its reduction over all free axes."""
    what = "tensor_scalar_reduce"
    dst, data = alike(what, dst, data)
    if reverse0:
        raise refuse(
            "sim_unsupported_reverse",
            f"{what} with reverse0=True, expected False; "
            "use nisa.tensor_scalar with it, then nisa.tensor_reduce",
        )
    sums = [] if reduce_res is None else [tensor(reduce_res, what)]
    for view in [one for one in (data, *sums) if not one.dt.is_float][:1]:
        warn(
            "sim_reduced_integers",
            f"{what} got {view.label()}, expected floats as data and reduce_res; "
            "copy to float32 with nisa.tensor_copy",
        )
    src = [data]
    steps = (step(f"{what} operand0", operator(op0, what), operand0, False, src),)
    initial = 0.0 if reduce_init is None else real(reduce_init, f"{what} reduce_init")
    how = Reduction(VECTOR, operator(reduce_op, what), data.shape[0], what, initial)
    attrs = _reduced_steps(how, steps, src)
    made = reducing(how, reduce_cmd, reduce_res, vector.TENSOR_SCALAR, dst, tuple(src), attrs)
    if reduce_res_negate and reduce_res is not None:  # the read-out alone
        minus = vector.StepsAttrs(steps=(vector.Step("multiply", -1.0),))
        total = tensor(reduce_res, what)
        put(vector.TENSOR_SCALAR, (total,), (total,), minus)
    return made


@isa(vector.RECIPROCAL)
def reciprocal(dst: View, data: View) -> NkiInstruction:
    """``1 / data`` on VectorE, which is more exact and slower than ScalarE's."""
    dst, data = alike("reciprocal", dst, data)
    return put(vector.RECIPROCAL, (dst,), (data,), Attrs(engine=Engine.VECTOR))


@isa(vector.TENSOR_TENSOR_SCAN)
def tensor_tensor_scan(
    dst: View,
    data0: View,
    data1: View,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
) -> NkiInstruction:
    """``r[i] = (data0[i] op0 r[i-1]) op1 data1[i]`` along the free axes, carried in fp32."""
    what = "tensor_tensor_scan"
    dst, data0, data1 = _in_rows(*alike(what, dst, data0, data1))
    ops = operator(op0, what), operator(op1, what)
    src, attrs = vector.scanning(data0, data1, initial, ops, (reverse0, reverse1))
    return put(vector.TENSOR_TENSOR_SCAN, (dst,), src, attrs)


@isa(vector.CUMULATIVE)
def tensor_scalar_cumulative(
    dst: View,
    src: View,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
) -> NkiInstruction:
    """``reg = op1(op0(x, imm0), reg)`` for every element in turn, each written to ``dst``."""
    what = "tensor_scalar_cumulative"
    dst, src = _in_rows(*alike(what, dst, src))
    code = operator(op1, what)
    check_reduction(code, what, ("add", "subtract", "multiply", "maximum", "minimum"))
    how = Reduction(VECTOR, code, src.shape[0], what)
    start, initial = running(how, reduce_cmd, imm1)
    views = (src,) if start is None else (src, start)
    attrs = vector.CumulativeAttrs(
        step=vector.Step(operator(op0, what), real(imm0, f"{what} imm0")),
        op=code,
        initial=initial,
        free_axes=src.ndim - 1,
    )
    made = put(vector.CUMULATIVE, (dst,), views, attrs)
    last = dst.slice_box((slice(0, dst.shape[0]), *(slice(n - 1, n) for n in dst.shape[1:])))
    keep_result(how, made, last.reshape((dst.shape[0], 1)))
    return made


def _in_rows(*views: View) -> tuple[View, ...]:
    """The views with one free axis each, where the strides of all allow that."""
    rows = [row for view in views if (row := view.flattened()) is not None]
    return tuple(rows) if len(rows) == len(views) else views


# --- reductions -----------------------------------------------------------------------------------
@isa(vector.TENSOR_REDUCE)
def tensor_reduce(
    dst: View, op: Any, data: View, axis: Any, negate: bool = False, keepdims: bool = False
) -> NkiInstruction:
    """The last free axes of ``data`` reduced in fp32; ``negate`` costs nothing."""
    what = "tensor_reduce"
    code = operator(op, what)
    check_reduction(code, what, tuple(REDUCTIONS))
    listed = isinstance(axis, (tuple, list))
    axes = free_axes(wholes(axis if listed else [axis], f"{what} axis"), data.ndim, what)
    if axes == (1,) and not nki_since(REAL_AXES):
        axes = (data.ndim - 1,)
    last = tuple(range(data.ndim - len(axes), data.ndim))
    if axes != last:
        order = (*(axis for axis in range(data.ndim) if axis not in axes), *axes)
        raise refuse(
            "sim_reduce_axis",
            f"{what} over axes {axes} of {data.label()}, expected the last free axes, one after "
            f"the other; write data={called(data)}.permute({order}), axis={last}",
        )
    kept = data.shape[: data.ndim - len(axes)]
    shape = kept if len(kept) > 1 else (*kept, 1)
    dst = _shaped(what, dst, data, shape)
    bits = on_bits(code, (data, dst))
    attrs = vector.ReduceAttrs(bits=bits, op=code, axes=len(axes), negate=flag(negate, "negate"))
    return put(vector.TENSOR_REDUCE, (dst,), (data,), attrs)


def _shaped(what: str, target: View, source: View, shape: Shape) -> View:
    """The destination in the shape of its result."""
    if target.shape == shape:
        return target
    count = math.prod(shape[1:])
    if target.shape[0] != shape[0] or target.free_size != count:
        raise refuse(
            "sim_shape_mismatch",
            f"{what} of {source.label()} into {target.label()}, expected a dst of {shape[0]} "
            f"partitions with {count} elements each; make it of shape {(shape[0], count)}",
        )
    return target.reshape(shape)


@isa(PARTITION_REDUCE)
def tensor_partition_reduce(dst: View, op: Any, data: View) -> NkiInstruction:
    """(P, F...) reduced over its partitions to (1, F...) on GpSimdE."""
    what = "tensor_partition_reduce"
    code = token(op, what)
    check_reduction(code, what, ("add", "average", "maximum", "bitwise_or", "bitwise_and"))
    if code == "average":
        warn(
            "sim_average",
            f"{what} of {data.label()} with nl.average: its meaning is not stated, expected "
            "nl.add; here it is the sum over the partitions divided by their number",
        )
    if CORE.number > 3 or (data.dt.is_int and data.dt.itemsize == 4 and CORE.number == 3):
        warn(
            "sim_partition_reduce",
            f"{what} of {data.label()} on {CORE.name}, expected gen2, or floats on gen3; take a "
            "product with ones, or a transpose and nisa.tensor_reduce",
        )
    dst = _shaped(what, dst, data, (1, *data.shape[1:]))
    attrs = PartitionReduceAttrs(
        bits=code in BITWISE and on_bits(code, (data, dst)), op=code, ndim=data.ndim
    )
    return put(PARTITION_REDUCE, (dst,), (data,), attrs)


@isa(vector.BN_STATS)
def bn_stats(dst: View, data: View) -> NkiInstruction:
    """Count, mean, variance * count of even elements, then of odd ones: (P, 6), N <= 512."""
    return _statistics(vector.BN_STATS, dst, data, 6)


@isa(vector.BN_AGGR)
def bn_aggr(dst: View, data: View) -> NkiInstruction:
    """Mean and population variance (P, 2) from the triples of ``bn_stats``."""
    return _statistics(vector.BN_AGGR, dst, data, 2)


def _statistics(op: Any, dst: View, data: View, columns: int) -> NkiInstruction:
    dst = _shaped(op.name, dst, data, (data.shape[0], columns))
    return put(op, (dst,), (data,), vector.StatisticsAttrs(free_axes=data.ndim - 1))


# --- activations ----------------------------------------------------------------------------------
@isa(scalar.ACTIVATION)
def activation(
    dst: View,
    op: Any,
    data: View,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
) -> NkiInstruction:
    """``op(data * scale + bias)`` in fp32 on ScalarE, with sums per partition in its registers.

    ``scale`` a number or (P, 1) fp32; ``bias`` (P, 1), from gen3 on also a number.
    """
    what = "activation"
    dst, data = alike(what, dst, data)
    code = token(op, what)
    constants = CORE.number >= 3 or code == "copy"
    src, attrs = scalar.activation_operands(code, data, bias, scale, constants)
    if code == "reciprocal" and bias is not None and not constants:
        raise refuse(
            "sim_newer_core",
            "activation(nl.reciprocal) with a bias on gen2, expected none; "
            "add it first with nisa.tensor_scalar",
        )
    src, attrs = scalar.without_copied_bias(src, attrs)
    if reduce_op is not None:
        check_reduction(operator(reduce_op, what), what, ("add",))
    if reduce_cmd is _IDLE and reduce_res is None:
        return put(scalar.ACTIVATION, (dst,), src, attrs)
    how = Reduction(SCALAR, "add", data.shape[0], what)
    return reducing(how, reduce_cmd, reduce_res, scalar.ACTIVATION, dst, src, attrs)


_IDLE = reduce_cmd.idle


@isa(scalar.ACTIVATION)
def activation_reduce(
    dst: View,
    op: Any,
    data: View,
    reduce_op: Any,
    reduce_res: Any,
    bias: Any = None,
    scale: Any = 1.0,
) -> NkiInstruction:
    """``activation`` whose sums over the free axes go to ``reduce_res`` (P, 1)."""
    return activation(dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd.reset_reduce)


@isa(scalar.ACTIVATION2, came="2.30")
def activate2(
    dst: View,
    op: Any,
    data: View,
    imm0: Any,
    imm1: Any,
    op0: Any,
    op1: Any,
    relu_param: float = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
) -> NkiInstruction:
    """``op((data op0 imm0) op1 imm1)`` on ScalarE of gen4."""
    what = "activate2"
    dst, data = alike(what, dst, data)
    code, src = token(op, what), [data]
    if code not in ACTIVATIONS and code != "prelu":
        raise no_activation(code)
    codes = tuple(token(o, what) for o in (op0, op1))
    if codes not in STEP_PAIRS:
        raise refuse(
            "sim_unknown_operator",
            f"{what} with op0 nl.{codes[0]}, op1 nl.{codes[1]}, expected one of "
            f"{', '.join(map(' and '.join, STEP_PAIRS))}; take two instructions for others",
        )
    steps = tuple(
        step(f"{what} imm{k}", o, imm, reverse, src)
        for k, (o, imm, reverse) in enumerate(zip(codes, (imm0, imm1), (reverse0, reverse1)))
        if o != "bypass"
    )
    join = "add" if reduce_op is None else operator(reduce_op, what)
    check_reduction(join, what, ("add", "maximum", "minimum", "abs_max", "abs_min"))
    slope = real(relu_param, f"{what} relu_param")
    attrs = scalar.Activation2Attrs(op=code, steps=steps, slope=slope, reduce_op=join)
    how = Reduction(SCALAR, join, data.shape[0], what)
    return reducing(how, reduce_cmd, reduce_res, scalar.ACTIVATION2, dst, tuple(src), attrs)


STEP_PAIRS = (
    ("multiply", "add"),
    ("multiply", "subtract"),
    ("multiply", "bypass"),
    ("add", "bypass"),
    ("subtract", "bypass"),
    ("bypass", "bypass"),
)


@isa(vector.EXPONENTIAL)
def exponential(
    dst: View,
    src: View,
    max_value: Any = 0.0,
    reduce_res: Any = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_init: float = 0.0,
) -> NkiInstruction:
    """``exp(src - max_value)`` with running sums on VectorE of gen4."""
    what = "exponential"
    dst, src = alike(what, dst, src)
    views = [src]
    shift = 0.0
    if isinstance(max_value, View):
        views.append(column(max_value, src, f"{what} max_value"))
    else:
        shift = real(max_value, f"{what} max_value")
    how = Reduction(VECTOR, "add", src.shape[0], what, real(reduce_init, f"{what} reduce_init"))
    attrs = vector.ExponentialAttrs(shift=shift)
    return reducing(how, reduce_cmd, reduce_res, vector.EXPONENTIAL, dst, tuple(views), attrs)
