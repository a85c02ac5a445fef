"""ScalarE: activation functions, with sums over the free axes.

Sources: aws-neuron-sdk v2.21.1, general/nki/api/nki/isa/__init__.py (activation,
activation_reduce: operand types, cycles); v2.22.0 for ``reduce_cmd``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..device.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..device.errors import refuse, type_name, warn
from ..device.spec import Engine
from ..program import trace
from ..program.attributes import Attrs, among
from ..program.program import Instruction
from ..program.view import View
from . import operators
from .activations import ACTIVATION_RANGES, ACTIVATIONS, check_range, no_activation
from .alu import reduce_last
from .arguments import isa, reduction_target, result_type, stretched, tile
from .constants import reduce_cmd as commands
from .copies import copy_into
from .entry import SBUF, OpSpec, streaming_with_sums
from .recorder import ALIKE, ROWS, fresh, record
from .vector import TENSOR_TENSOR, BinaryAttrs, StepsAttrs, steps_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ActivationAttrs(Attrs):
    """Attributes of a function of the scaled and shifted data.

    Attributes:
        op: name of the function.
        scale: constant factor of the data, where no operand is.
        bias: constant summand of the data, where no operand is.
        scale_at, bias_at: which operand is the factor or the summand of the data, if one is.
    """

    op: str = among(ACTIVATIONS)
    scale: float = 1.0
    bias: float = 0.0
    scale_at: int | None = None
    bias_at: int | None = None


def _activation(attrs: ActivationAttrs, xs: list[torch.Tensor]) -> Any:
    x = xs[0]
    if attrs.scale_at is not None:
        x = x * xs[attrs.scale_at]
    elif attrs.scale != 1.0:
        x = x * attrs.scale
    if attrs.bias_at is not None:
        x = x + xs[attrs.bias_at]
    elif attrs.bias != 0.0:
        x = x + attrs.bias
    check_range(attrs.op, x, attrs.mask)
    y = ACTIVATIONS[attrs.op](x)
    if not attrs.reduce_axes:
        return y
    # summed before the cast to the output type: the text implies the fp32 pipeline value
    return y, y.sum(dim=tuple(range(-attrs.reduce_axes, 0)))


def _activation_rules(i: Instruction) -> None:
    op = ActivationAttrs.of(i).op
    if op not in ACTIVATIONS:
        raise no_activation(op)


ACTIVATION = OpSpec(
    "activation",
    "elementwise",
    ActivationAttrs,
    _activation,
    streaming_with_sums,
    engine=Engine.SCALAR,
    limited=lambda attrs: attrs.op in ACTIVATION_RANGES,
    rules=_activation_rules,
    note="op(data * scale + bias) in fp32; optionally the sum over the free axes",
    operands=(1, 3),
    results=2,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Activation2Attrs(StepsAttrs):
    """Attributes of a function of two steps on the data.

    Attributes:
        op: name of the function.
        slope: of prelu below zero.
    """

    op: str = among({*ACTIVATIONS, "prelu"})
    slope: float = 0.0


REDUCED = {  # reductions by magnitude; the others are the ALU's
    "abs_max": lambda y: y.gather(-1, y.abs().argmax(-1, keepdim=True))[..., 0],
    "abs_min": lambda y: y.gather(-1, y.abs().argmin(-1, keepdim=True))[..., 0],
}


def _activation2(attrs: Activation2Attrs, xs: list[torch.Tensor]) -> Any:
    x = steps_of(replace(attrs, reduce_axes=0), xs)
    check_range(attrs.op, x, attrs.mask)
    prelu = attrs.op == "prelu"
    y = torch.where(x > 0, x, attrs.slope * x) if prelu else ACTIVATIONS[attrs.op](x)
    if not attrs.reduce_axes:
        return y
    if attrs.reduce_op in REDUCED:
        return y, REDUCED[attrs.reduce_op](y.flatten(-attrs.reduce_axes))
    return y, reduce_last(attrs.reduce_op, y, attrs.reduce_axes)


ACTIVATION2 = OpSpec(
    "activate2",
    "elementwise",
    Activation2Attrs,
    _activation2,
    streaming_with_sums,
    engine=Engine.SCALAR,
    limited=lambda attrs: attrs.op in ACTIVATION_RANGES,
    note="NeuronCore-v4: op((data op0 imm0) op1 imm1), with more reductions",
    operands=(1, 3),
    results=2,
    generation=4,
)

BIAS_TYPES = (FLOAT32, FLOAT16, BFLOAT16)


def activation_operands(
    op: Any, data: View, bias: Any = None, scale: Any = 1.0
) -> tuple[tuple[View, ...], ActivationAttrs]:
    """Sources and attributes of ``op(data * scale + bias)``.

    Args:
        bias: [P, 1] of fp32, fp16 or bf16, or None.
        scale: a number or fp32 [P, 1].
    """
    src = [data]
    factor, scale_at, bias_at = 1.0, None, None
    if isinstance(scale, View):
        _check_scale(scale, data)
        scale_at = len(src)
        src.append(stretched(scale, data, "scale"))
    elif isinstance(scale, (int, float, np.number)) and not isinstance(scale, bool):
        factor = float(np.float32(scale))
    else:
        raise refuse(
            "err_activation_scale_invalid_type",
            f"activation scale of type {type_name(scale)}, expected a number or an fp32 tile",
        )
    if bias is not None:
        if not isinstance(bias, View) or bias.dt not in BIAS_TYPES:
            got = bias.label() if isinstance(bias, View) else type(bias).__name__
            raise refuse(
                "err_activation_bias_invalid_type",
                f"activation bias is {got}, expected a ({data.shape[0]}, 1) tile of fp32, fp16 or "
                "bf16: this core takes no constant bias; make one with nisa.memset",
            )
        bias_at = len(src)
        src.append(stretched(bias, data, "bias"))
    name = operators.name_of(op)
    attrs = ActivationAttrs(op=name, scale=factor, scale_at=scale_at, bias_at=bias_at)
    return tuple(src), attrs


def _check_scale(scale: View, data: View) -> None:
    if scale.dt is not FLOAT32:
        raise refuse(
            "err_activation_scale_invalid_type",
            f"activation scale {scale.label()}, expected a number or an fp32 tile; cast it",
        )
    if scale.free_size != 1 or scale.shape[0] != data.shape[0]:
        raise refuse(
            "err_activation_scale_scalar_or_vector",
            f"activation scale {scale.label()} for data {data.label()}, expected a number or "
            f"shape ({data.shape[0]}, 1); multiply by a whole tile with nl.multiply",
        )


@isa(ACTIVATION)
def activation(
    op: Any,
    data: Any,
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
    source = tile(data, "activation")
    src, attrs = activation_operands(op, source, bias, scale)
    dt = result_type(dtype, source.dt)
    tracer = trace.current("nisa.activation")
    if tracer.program.direct_allocation and bias is None:
        raise refuse(
            "err_bias_tensor_must_be_specified_in_allocation",
            "activation without bias under direct allocation needs a hidden zero tile, expected "
            "bias=; pass a zeroed (P, 1) tile",
        )

    def into(total: View | None) -> View:
        """The activation, with the sums over the free axes in ``total``."""
        if total is None:
            return fresh(ACTIVATION, source.shape, dt, src, attrs, mask)
        _check_reduce_op(reduce_op)
        summing = replace(attrs, reduce_axes=source.ndim - 1)
        axes = (ALIKE, ROWS, *(ALIKE for _ in src))
        return fresh(ACTIVATION, source.shape, dt, src, summing, mask, axes=axes, also=(total,))

    if reduce_cmd is not None:
        return _running_sums(tracer, source, into, reduce_res, reduce_cmd)
    if reduce_res is None:
        return into(None)
    return into(reduction_target(reduce_res, source, "activation"))


def _check_reduce_op(reduce_op: Any) -> None:
    name = "add" if reduce_op is None else operators.name_of(reduce_op)
    if name != "add":
        raise refuse(
            "sim_activation_reduce_op",
            f"activation_reduce with reduce_op '{name}', expected add on NeuronCore-v2; use "
            "nisa.tensor_reduce",
        )


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
                "reduce_cmd.reset_reduce before; start the reduction with it",
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
    data: Any,
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
