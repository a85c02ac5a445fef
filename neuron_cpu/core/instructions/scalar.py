"""ScalarE: activation functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..device.dtypes import BFLOAT16, FLOAT16, FLOAT32, to_dtype
from ..device.errors import refuse, warn
from ..device.spec import Engine
from ..program import trace
from ..program.program import Instruction
from ..program.view import View
from . import operators
from .activations import ACTIVATIONS, check_range
from .arguments import stretched, tile
from .constants import reduce_cmd
from .copies import copy_into
from .entry import MIN_II, ON_CHIP, define, streaming
from .recorder import with_reduction
from .vector import TENSOR_TENSOR


def _activation(attrs: dict[str, Any], xs: list[torch.Tensor]) -> Any:
    x = xs[0]
    scale = xs[attrs["scale_at"]] if "scale_at" in attrs else attrs.get("scale", 1.0)
    if isinstance(scale, torch.Tensor) or scale != 1.0:
        x = x * scale
    if "bias_at" in attrs:
        x = x + xs[attrs["bias_at"]]
    check_range(attrs["op"], x)
    y = ACTIVATIONS[attrs["op"]](x)
    if "reduce_axes" not in attrs:
        return y
    # summed before the cast to the output type: the text implies the fp32 pipeline value
    total = y.sum(dim=tuple(range(-attrs["reduce_axes"], 0)))
    return y, total.reshape(*total.shape, *attrs["reduce_pad"])


def _activation_rules(i: Instruction) -> None:
    op = i.attrs["op"]
    if op not in ACTIVATIONS:
        raise refuse(
            "sim_activation_function",
            f"activation function '{op}' does not exist on ScalarE, expected one of "
            f"{', '.join(sorted(ACTIVATIONS))}; compose it from those (cos(x) = sin(x + pi/2))",
        )


ACTIVATION = define(
    "activation", engine=Engine.SCALAR, reads=ON_CHIP, writes=ON_CHIP, flow="elementwise",
    compute=_activation, rules=_activation_rules,
    cycles=lambda i: streaming(extra=MIN_II if "reduce_axes" in i.attrs else 0)(i),
    note="op(data * scale + bias) in fp32; optionally the sum over the free axes",
    aliases=("activation_reduce",),
)  # fmt: skip
_BIAS_TYPES = (FLOAT32, FLOAT16, BFLOAT16)


def _scale_and_bias(data: View, bias: Any, scale: Any) -> tuple[list[View], dict[str, Any]]:
    src = [data]
    attrs: dict[str, Any] = {}
    if isinstance(scale, View):
        if scale.dt is not FLOAT32:
            raise refuse(
                "err_activation_scale_invalid_type",
                f"activation scale {scale.label()}, expected a number or an fp32 tile; cast it",
            )
        if scale.free_size != 1 or scale.shape[0] != data.shape[0]:
            raise refuse(
                "err_activation_scale_scalar_or_vector",
                f"activation scale {scale.label()} for data {data.label()}, expected a number or "
                f"shape ({data.shape[0]}, 1)",
            )
        attrs["scale_at"] = len(src)
        src.append(stretched(scale, data, "scale"))
    elif isinstance(scale, (int, float, np.number)) and not isinstance(scale, bool):
        if float(scale) != 1.0:
            attrs["scale"] = float(np.float32(scale))
    else:
        raise refuse(
            "err_activation_scale_invalid_type",
            f"activation scale of type {type(scale).__name__}, expected a number or an fp32 tile",
        )
    if bias is not None:
        if not isinstance(bias, View) or bias.dt not in _BIAS_TYPES:
            got = bias.label() if isinstance(bias, View) else type(bias).__name__
            raise refuse(
                "err_activation_bias_invalid_type",
                f"activation bias is {got}, expected a ({data.shape[0]}, 1) tile of fp32, fp16 or "
                "bf16: this core takes no constant bias; make one with nisa.memset",
            )
        attrs["bias_at"] = len(src)
        src.append(stretched(bias, data, "bias"))
    return src, attrs


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
    src, attrs = _scale_and_bias(source, bias, scale)
    attrs["op"] = operators.name_of(op)
    tracer = trace.current("nisa.activation")
    dt = source.dt if dtype is None else to_dtype(dtype)
    if tracer.program.direct_allocation and bias is None:
        raise refuse(
            "err_bias_tensor_must_be_specified_in_allocation",
            "activation without bias under direct allocation needs a hidden zero tile, expected "
            "bias=; pass a zeroed (P, 1) tile",
        )
    if reduce_cmd is not None:
        return _running_sums(
            tracer, source, src, attrs, dt, reduce_op, reduce_res, reduce_cmd, mask
        )
    if reduce_res is None:
        return tracer.result(ACTIVATION, source.shape, dt, tuple(src), attrs, mask)
    return with_reduction(tracer, ACTIVATION, source, src, attrs, dt, reduce_op, reduce_res, mask)


def _running_sums(tracer, data, src, attrs, dt, reduce_op, reduce_res, command, mask):
    """``activation`` with ``reduce_cmd``: the registers are a hidden [P, 1] fp32 tile."""
    warn("sim_newer_api", "activation(reduce_cmd=) needs SDK 2.22 or newer; use activation_reduce")
    before = None if command in (reduce_cmd.reset, reduce_cmd.reset_reduce) else tracer.sums
    if command in (reduce_cmd.idle, reduce_cmd.reset):
        tracer.sums = before
        result = tracer.result(ACTIVATION, data.shape, dt, tuple(src), attrs, mask)
    else:
        registers = tracer.whole(tracer.storage((data.shape[0], 1), FLOAT32, "sbuf"))
        result = with_reduction(
            tracer, ACTIVATION, data, src, attrs, dt, reduce_op, registers, mask
        )
        if before is not None:
            add = {"op": "add"}
            tracer.emit(TENSOR_TENSOR, (registers,), (registers, before), add)
        tracer.sums = registers
    if reduce_res is not None:
        if tracer.sums is None:
            raise refuse(
                "sim_reduce_registers",
                "activation reads sums into reduce_res that no instruction made, expected "
                "reduce_cmd.reset_reduce before; start the reduction with it",
            )
        copy_into(tile(reduce_res, "activation reduce_res"), tracer.sums)
    return result


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
    """As ``activation``; ``reduce_res`` [P, 1] receives the sum over the free axes."""
    return activation(
        op, data, bias=bias, scale=scale, reduce_op=reduce_op, reduce_res=reduce_res, mask=mask,
        dtype=dtype,
    )  # fmt: skip
