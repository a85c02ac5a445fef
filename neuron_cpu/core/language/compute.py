"""``nki.isa``: arithmetic, reductions, scans, statistics and activations.

Sources: aws-neuron-sdk v2.21.1, general/nki/api/nki/isa/__init__.py; v2.22.0 for ``reduce_cmd``.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..device.dtypes import FLOAT32, INT32, Shape, promote
from ..device.errors import refuse, warn
from ..device.release import INTEGERS_ASKED_OF_GPSIMD, INTEGERS_ON_GPSIMD, since
from ..device.spec import Engine
from ..instructions.alu import REDUCTIONS
from ..instructions.arguments import (
    check_operator,
    check_reduction,
    check_second,
    flag,
    fp32,
    free_axes,
    on_bits,
    stretched,
)
from ..instructions.arguments import reduce_cmd as commands
from ..instructions.entry import PSUM, SBUF, OpSpec
from ..instructions.gpsimd import PARTITION_REDUCE, PartitionReduceAttrs
from ..instructions.recorder import ALIKE, ROWS, record
from ..instructions.scalar import ACTIVATION, activation_operands, without_copied_bias
from ..instructions.vector import (
    BN_AGGR,
    BN_STATS,
    RECIPROCAL,
    SCALAR_TENSOR_TENSOR,
    SIGN,
    TENSOR_REDUCE,
    TENSOR_SCALAR,
    TENSOR_TENSOR,
    TENSOR_TENSOR_SCAN,
    WORDS,
    BinaryAttrs,
    ReduceAttrs,
    StatisticsAttrs,
    Step,
    StepsAttrs,
    binary_attrs,
    of_bits,
    scanning,
    step,
)
from ..program import regions, trace
from ..program.attributes import Attrs
from ..program.regions import window
from ..program.view import View
from .copies import copy_into, initial_fill
from .operands import (
    choose_engine,
    fresh,
    isa,
    name_of,
    reduction_target,
    result_type,
    same_shape,
    tile,
)

INTEGER_OPERATORS = ("add", "subtract", "multiply")


@isa(TENSOR_TENSOR)
def tensor_tensor(
    data1: View, data2: View, op: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None
) -> View:
    """``data1 op data2`` of equal shapes; not both in PSUM. VectorE (power: GpSimdE).

    Tiles of 32-bit integers are added, subtracted and multiplied in fp32, since SDK 2.26 exactly by
    GpSimdE unless one lies in PSUM (v2.26.0, nki.isa).
    Free axes of size 1 are stretched, with a warning: the documentation asks for equal shapes, but
    course kernels with published utilisation (SDK 2.26) and AWS's own reference add (P, 1) tiles.
    """
    name = name_of(op)
    data1, data2 = _equal_shapes(data1, data2)
    check_operator(name, "tensor_tensor")
    bits = on_bits(name, (data1, data2))
    choice = choose_engine(engine, "tensor_tensor", TENSOR_TENSOR.engines)
    if choice is None and name == "power":
        choice = Engine.GPSIMD
    sign = 0
    if dtype is None and _exact_integers(name, choice, data1, data2):
        choice, bits, sign = Engine.GPSIMD, True, SIGN if data1.dt is INT32 else 0
    attrs = binary_attrs(name, choice, bits, sign)
    dt = result_type(dtype, promote(data1.dt, data2.dt))
    return fresh(TENSOR_TENSOR, (data1, data2), attrs, dt, mask)


def _exact_integers(name: str, choice: Engine | None, a: View, b: View) -> bool:
    """Whether GpSimdE computes 32-bit integers: if named, and since 2.26 by default."""
    asked = choice is Engine.GPSIMD and name != "subtract" and since(INTEGERS_ASKED_OF_GPSIMD)
    alone = choice is not Engine.VECTOR and since(INTEGERS_ON_GPSIMD)
    in_sbuf = PSUM not in (a.storage.buffer, b.storage.buffer)
    wide = a.dt in WORDS and b.dt in WORDS and name in INTEGER_OPERATORS
    return wide and in_sbuf and (asked or alone)


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
        made = narrow.widened(wide.shape)
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


@dataclass(eq=False)
class LoopReduction:
    """Result of ``nl.loop_reduce``, waiting for the tile it is combined into."""

    value: View
    op: str
    mask: Any

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
        record(
            TENSOR_TENSOR, (view,), (view, value), binary_attrs(self.op, None, False, 0), self.mask
        )

    def _begun(self, view: View) -> bool:
        """True where an instruction has written some of ``view``.

        Asked first is where `nl.full` has filled its tile, then the latest ones.
        """
        instructions = trace.current("nl.loop_reduce").program.instructions
        storage, end = view.storage, len(instructions)
        filled = min(storage.birth + view.blocks().start, end)
        latest = range(end - 1, storage.birth - 1, -1)
        written: np.ndarray | None = None  # a map of the storage, which few tiles need
        for k in itertools.chain(range(end)[filled : filled + 1], latest):
            for dst in instructions[k].dst:
                if dst.storage is not storage:
                    continue
                if dst.key() == view.key():
                    return True
                if written is None:
                    written = np.zeros(storage.size, bool)
                window(written, dst)[...] = True
                if window(written, view).any():
                    return True
        return False


def _step(what: str, op: Any, value: Any, reverse: Any, src: list[View]) -> Step:
    """One step of the ALU on ``src[0]``; a vector is appended to ``src``."""
    code = name_of(op)
    check_operator(code, what)
    return step(what, code, value, reverse, src)


@isa(TENSOR_SCALAR)
def tensor_scalar(
    data: View,
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
    src = [data]
    steps: tuple[Step, ...] = (_step("tensor_scalar operand0", op0, operand0, reverse0, src),)
    check_second(op1, operand1, reverse1, "tensor_scalar")
    if op1 is not None:
        steps += (_step("tensor_scalar operand1", op1, operand1, reverse1, src),)
    bits = of_bits("tensor_scalar", steps, src)
    choice = choose_engine(engine, "tensor_scalar", TENSOR_SCALAR.engines)
    attrs = StepsAttrs(engine=choice, bits=bits, steps=steps)
    return fresh(TENSOR_SCALAR, tuple(src), attrs, dtype, mask)


@isa(TENSOR_SCALAR)
def tensor_scalar_reduce(
    *,
    data: View,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: Any,
    reverse0: bool = False,
    dtype: Any = None,
    mask: Any = None,
) -> View:
    """``data op0 operand0``, and ``reduce_res`` [P, 1] its reduction over all free axes."""
    if reverse0:
        raise refuse(
            "sim_unsupported_reverse",
            "tensor_scalar_reduce with reverse0=True, expected False: SDK 2.21 does not support it"
            "; use nisa.tensor_scalar with it, then nisa.tensor_reduce",
        )
    src = [data]
    steps = (_step("tensor_scalar operand0", op0, operand0, False, src),)
    attrs = StepsAttrs(
        bits=of_bits("tensor_scalar_reduce", steps, src),
        steps=steps,
        reduce_axes=data.ndim - 1,
        reduce_op="add" if reduce_op is None else name_of(reduce_op),
    )
    total = reduction_target(reduce_res, data, "tensor_scalar_reduce")
    axes = (ALIKE, ROWS, *(ALIKE for _ in src))
    return fresh(TENSOR_SCALAR, tuple(src), attrs, dtype, mask, axes=axes, also=(total,))


@isa(SCALAR_TENSOR_TENSOR)
def scalar_tensor_tensor(
    *,
    data: View,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: View,
    reverse0: bool = False,
    reverse1: bool = False,
    dtype: Any = None,
    mask: Any = None,
) -> View:
    """``(data op0 operand0) op1 operand1``: operand0 a number or [P, 1], operand1 of data's shape.

    ``data``, ``operand1`` [P, N] @ SBUF|PSUM, not both in PSUM; ``reverse`` swaps arguments.
    """
    if data.shape[0] != operand1.shape[0]:
        raise refuse(
            "err_num_partition_mismatch",
            f"scalar_tensor_tensor got {data.label()} and {operand1.label()}, expected equal "
            "partition counts; slice both to the same partitions",
        )
    same_shape("scalar_tensor_tensor", data, operand1)
    src = [data, operand1]
    steps = (
        _step("tensor_scalar operand0", op0, operand0, reverse0, src),
        Step(name_of(op1), at=1, reverse=flag(reverse1, "reverse1")),
    )
    check_operator(steps[1].op, "scalar_tensor_tensor")
    attrs = StepsAttrs(bits=of_bits("scalar_tensor_tensor", steps, src), steps=steps)
    return fresh(SCALAR_TENSOR_TENSOR, tuple(src), attrs, dtype, mask)


@isa(RECIPROCAL)
def reciprocal(data: View, *, dtype: Any = None, mask: Any = None, engine: Any = None) -> View:
    """``1 / data``. VectorE (more exact, 8N cycles) or ScalarE."""
    choice = choose_engine(engine, "reciprocal", RECIPROCAL.engines)
    return fresh(RECIPROCAL, (data,), Attrs(engine=choice), dtype, mask)


@isa(TENSOR_REDUCE)
def tensor_reduce(
    op: Any,
    data: View,
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
    name = name_of(op)
    check_reduction(name, "tensor_reduce", REDUCTIONS)
    axes = free_axes(axis, data.ndim, "tensor_reduce")
    kept = [a for a in range(data.ndim) if a not in axes]
    bits = on_bits(name, (data,))
    order = None
    if axes != tuple(range(data.ndim - len(axes), data.ndim)):
        order = (*kept, *axes)
        warn(
            "sim_reduce_middle_axis",
            f"tensor_reduce over axes {axes} of {data.label()}: sources disagree whether axes "
            "that are not the last ones work on SDK 2.21; present the reduced axis last",
        )
    # the mask's axis that each axis of the result comes from; None for those of size 1
    left: list[int | None] = [*kept, *[None] * (2 - len(kept))]
    if keepdims:
        left = [None if a in axes else a for a in range(data.ndim)]
    shape = tuple(1 if a is None else data.shape[a] for a in left)
    attrs = ReduceAttrs(bits=bits, op=name, axes=len(axes), order=order, negate=bool(negate))
    keep = None if mask is None else regions.region(mask, data.shape)
    if isinstance(keep, np.ndarray):
        _check_boxes(data, shape, left, keep)
    return fresh(TENSOR_REDUCE, (data,), attrs, dtype, mask, shape, (tuple(left), ALIKE))


def _check_boxes(source: View, shape: Shape, left: list[int | None], keep: np.ndarray) -> None:
    """Refuse boxes of ``keep`` that share a result, each of which becomes a reduction of its own:
    windows at an edge share none."""
    boxes = list(regions.boxes(keep))
    hits = np.zeros(shape, int)
    for box in boxes:
        hits[tuple(slice(0, 1) if a is None else box[a] for a in left)] += 1
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


@isa(TENSOR_TENSOR_SCAN)
def tensor_tensor_scan(
    data0: View,
    data1: View,
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
    if data0.ndim != 2 or data0.shape != data1.shape:
        raise refuse(
            "sim_scan_shape",
            f"tensor_tensor_scan got {data0.label()} and {data1.label()}, expected equal 2-D "
            "shapes; reshape both to (P, N)",
        )
    ops = name_of(op0), name_of(op1)
    src, attrs = scanning(data0, data1, initial, ops, (reverse0, reverse1))
    dt = result_type(dtype, promote(data0.dt, data1.dt))
    return fresh(TENSOR_TENSOR_SCAN, src, attrs, dt, mask)


@isa(BN_STATS)
def bn_stats(data: View, *, mask: Any = None, dtype: Any = None) -> View:
    """Statistics of each partition's N <= 512 elements -> [P, 6]: count, mean and variance * count
    of the elements at even positions, then at odd positions. Input to ``bn_aggr``."""
    return _statistics(BN_STATS, data, 6, dtype, mask)


@isa(BN_AGGR)
def bn_aggr(data: View, *, mask: Any = None, dtype: Any = None) -> View:
    """Mean and population variance [P, 2] from the columns of ``bn_stats`` ([P, 3 k])."""
    return _statistics(BN_AGGR, data, 2, dtype, mask)


def _statistics(op: OpSpec, data: View, columns: int, dtype: Any, mask: Any) -> View:
    """Record an instruction that turns the free axes into a few columns."""
    attrs = StatisticsAttrs(free_axes=data.ndim - 1)
    return fresh(op, (data,), attrs, dtype, mask, (data.shape[0], columns), (ROWS, ALIKE))


@isa(ACTIVATION)
def activation(
    op: Any,
    data: View,
    *,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = None,
    mask: Any = None,
    dtype: Any = None,
) -> View:
    """``op(data * scale + bias)`` in fp32 on ScalarE.

    ``data`` [P, F...] @ SBUF|PSUM, ``scale`` a number or fp32 [P, 1], ``bias`` [P, 1] of
    fp32/fp16/bf16. Result has data's shape and type unless ``dtype`` is given. ``reduce_cmd``
    (SDK 2.22) adds the sums over the free axes to registers that outlive the instruction;
    ``reduce_res`` [P, 1] then receives the registers.
    """
    src, attrs = without_copied_bias(
        *activation_operands(name_of(op), data, bias, scale, constants=False)
    )
    tracer = trace.current("nisa.activation")
    program = tracer.program
    if program.direct_allocation and bias is None and not program.today:
        raise refuse(
            "err_bias_tensor_must_be_specified_in_allocation",
            "activation without bias under direct allocation needs a hidden zero tile, expected "
            "bias=; pass a zeroed (P, 1) tile",
        )

    def into(total: View | None) -> View:
        """The activation, with the sums over the free axes in ``total``."""
        if total is None:
            return fresh(ACTIVATION, src, attrs, dtype, mask)
        name = "add" if reduce_op is None else name_of(reduce_op)
        if name != "add":
            raise refuse(
                "sim_activation_reduce_op",
                f"activation_reduce with reduce_op '{name}', expected add on NeuronCore-v2; use "
                "nisa.tensor_reduce",
            )
        summing = replace(attrs, reduce_axes=data.ndim - 1)
        axes = (ALIKE, ROWS, *(ALIKE for _ in src))
        return fresh(ACTIVATION, src, summing, dtype, mask, axes=axes, also=(total,))

    if reduce_cmd is not None:
        return _running_sums(tracer, data, into, reduce_res, reduce_cmd)
    if reduce_res is None:
        return into(None)
    return into(reduction_target(reduce_res, data, "activation"))


def _running_sums(
    tracer: trace.Tracer,
    data: View,
    into: Callable[[View | None], View],
    reduce_res: Any,
    command: commands,
) -> View:
    """``activation`` with ``reduce_cmd``: a hidden [P, 1] fp32 tile stands for the registers.

    The registers outlive the iteration of a loop in which they were last reset, so the tile's scope
    grows to the innermost loop body that holds all its uses.
    """
    warn(
        "sim_newer_api",
        "activation(reduce_cmd=) needs SDK 2.22 or newer, and a device's compiler computed twice "
        "what it sums over several instructions (Jerry2423/kda-for-trainium 90770f2, "
        "gqa_full_v7b_fused_rowsum); use activation_reduce",
    )

    def column() -> View:
        return tracer.whole(tracer.storage((data.shape[0], 1), FLOAT32, SBUF))

    if command in (commands.reset, commands.reset_reduce):
        tracer.sums = None
    elif tracer.sums is not None:
        _bring_into_scope(tracer, tracer.sums)
    part = None if command in (commands.idle, commands.reset) else column()
    result = into(part)
    recorded = len(tracer.program.instructions)
    if part is not None and result.storage.producer is not None:  # else its mask selects nothing
        if tracer.sums is None:
            tracer.sums = part
        else:
            sums = (tracer.sums,)
            record(TENSOR_TENSOR, sums, (*sums, part), BinaryAttrs(op="add"))
    if reduce_res is not None:
        if tracer.sums is None:
            raise refuse(
                "sim_reduce_registers",
                "activation reads sums into reduce_res that no instruction made, expected "
                "reduce_cmd.reset_reduce before; start with "
                "reduce_cmd=nisa.reduce_cmd.reset_reduce",
            )
        copy_into(tile(reduce_res, "activation reduce_res"), tracer.sums)
    result.storage.followers = len(tracer.program.instructions) - recorded
    return result


def _bring_into_scope(tracer: trace.Tracer, sums: View) -> None:
    """Let the loop around the current iteration own the tile, if an earlier iteration made it."""
    around = {None, *(tracer.frame.path() if tracer.frame is not None else ())}
    storage = sums.storage
    while storage.frame is not None and storage.frame not in around:
        storage.frame = storage.frame.parent


@isa(ACTIVATION)
def activation_reduce(
    op: Any,
    data: View,
    *,
    reduce_op: Any,
    reduce_res: Any,
    bias: Any = None,
    scale: Any = 1.0,
    mask: Any = None,
    dtype: Any = None,
) -> View:
    """Do what ``activation`` does; ``reduce_res`` [P, 1] receives the sum over the free axes."""
    return activation(
        op,
        data,
        bias=bias,
        scale=scale,
        reduce_op=reduce_op,
        reduce_res=reduce_res,
        mask=mask,
        dtype=dtype,
    )


@isa(PARTITION_REDUCE)
def tensor_partition_reduce(op: Any, data: View, *, mask: Any = None, dtype: Any = None) -> View:
    """Reduce the partition axis: [P, F...] -> [1, F...]; add, max, bitwise_or, bitwise_and."""
    name = name_of(op)
    allowed = ("add", "maximum", "bitwise_or", "bitwise_and")
    check_reduction(name, "tensor_partition_reduce", allowed)
    attrs = PartitionReduceAttrs(bits=on_bits(name, (data,)), op=name, ndim=data.ndim)
    cuts = ((None, *range(1, data.ndim)), ALIKE)
    return fresh(PARTITION_REDUCE, (data,), attrs, dtype, mask, (1, *data.shape[1:]), cuts)
