"""ScalarE: activation functions, with sums over the free axes.

Sources: aws-neuron-sdk v2.21.1, general/nki/api/nki/isa/__init__.py (activation,
activation_reduce: operand types, cycles); v2.22.0 for ``reduce_cmd``.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..device.dtypes import BFLOAT16, FLOAT16, FLOAT32, Tensors
from ..device.errors import refuse, type_name, warn
from ..device.refusals import defect, language
from ..device.spec import CORE, Engine
from ..program import trace
from ..program.attributes import Attrs, among, constants
from ..program.program import Instruction
from ..program.view import View, called
from .alu import ACTIVATION_RANGES, ACTIVATIONS, check_range, no_activation, reduce_last
from .arguments import as_column, no_number, number, stretched
from .entry import OpSpec, streaming_with_sums
from .vector import StepsAttrs, steps_of


@constants
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


def without_copied_bias(
    src: Sequence[View], attrs: ActivationAttrs
) -> tuple[tuple[View, ...], ActivationAttrs]:
    """The operands without a tile that nl.copy leaves out on gen2, with a warning everywhere.

    The compiler of SDK 2.32 refuses such a tile there, zeros too, and adds a constant.
    """
    if attrs.op != "copy" or attrs.bias_at is None:
        return tuple(src), attrs
    refused = CORE.number == 2 and language() == "nki"
    if not refused and trace.current("activation").is_zero(src[attrs.bias_at]):
        return tuple(src), attrs
    known = defect("1296")
    told = known.told() if known else "a trn1 left it out (aws-neuron-sdk 1296)"
    warn("sim_copy_bias", f"activation(op=nl.copy) with a bias: {told}")
    if CORE.number > 2:
        return tuple(src), attrs
    kept = tuple(view for k, view in enumerate(src) if k != attrs.bias_at)
    return kept, replace(attrs, bias=0.0, bias_at=None)


def _activation(attrs: ActivationAttrs, xs: Tensors) -> Any:
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
    # in an order that does not depend on where the elements lie: merged loops have other strides
    return y, y.contiguous().sum(dim=tuple(range(-attrs.reduce_axes, 0)))


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


@constants
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


def _activation2(attrs: Activation2Attrs, xs: Tensors) -> Any:
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
    op: str, data: View, bias: Any, scale: Any, constants: bool
) -> tuple[tuple[View, ...], ActivationAttrs]:
    """Sources and attributes of ``op(data * scale + bias)``.

    Args:
        bias: [P, 1] of fp32, fp16 or bf16, None, or a number where the core takes ``constants``.
        scale: a number or fp32 [P, 1].
    """
    if op not in ACTIVATIONS:
        raise no_activation(op)
    src = [data]
    factor, shift = 1.0, 0.0
    scale_at = bias_at = None
    scale, bias = number(scale), number(bias)
    if isinstance(scale, View):
        _check_scale(scale, data)
        src.append(stretched(scale, data, "activation scale"))
        scale_at = 1
    elif isinstance(scale, (int, float)) and not isinstance(scale, bool):
        factor = float(np.float32(scale))
    else:
        raise refuse(
            "err_activation_scale_invalid_type",
            f"activation scale of type {type_name(scale)}, expected a number or an fp32 tile; "
            + no_number(scale),
        )
    if isinstance(bias, View) and bias.dt in BIAS_TYPES:
        src.append(stretched(bias, data, "activation bias"))
        bias_at = len(src) - 1
    elif constants and isinstance(bias, (int, float)):
        shift = float(bias)
    elif bias is not None:
        got = bias.label() if isinstance(bias, View) else type(bias).__name__
        raise refuse(
            "err_activation_bias_invalid_type",
            f"activation bias is {got}, expected a ({data.shape[0]}, 1) tile of fp32, fp16 or bf16"
            + ("" if constants else ": this core takes no constant bias")
            + "; "
            + (
                f"copy {called(bias)} into such a tile with nisa.tensor_copy"
                if isinstance(bias, View)
                else no_number(bias)
                if constants
                else "make one with nisa.memset"
            ),
        )
    return tuple(src), _activation_attrs(op, factor, shift, scale_at, bias_at)


@functools.lru_cache(4096)
def _activation_attrs(
    op: str, scale: float, bias: float, scale_at: int | None, bias_at: int | None
) -> ActivationAttrs:
    return ActivationAttrs(op=op, scale=scale, bias=bias, scale_at=scale_at, bias_at=bias_at)


def _check_scale(scale: View, data: View) -> None:
    if scale.dt is not FLOAT32:
        raise refuse(
            "err_activation_scale_invalid_type",
            f"activation scale {scale.label()}, expected a number or an fp32 tile; copy "
            f"{called(scale)} into such a tile with nisa.tensor_copy",
        )
    if scale.free_size != 1 or scale.shape[0] != data.shape[0]:
        raise refuse(
            "err_activation_scale_scalar_or_vector",
            f"activation scale {scale.label()} for data {data.label()}, expected a number or "
            f"shape ({data.shape[0]}, 1); {as_column(scale, data)}",
        )
