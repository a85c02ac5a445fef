"""Microscaled operands (NeuronCore-v4): products and quantisation.

Four values of fp8 or fp4 stand in one packed element; groups of 8 partitions and the 4 values of an
element share a scale, a power of two of 8 bits. Sources: aws-neuron-sdk v2.32.0, nki/api/nki/isa
(nc_matmul_mx, quantize_mx), nki/deep-dives/mxfp-matmul.rst.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from ..device.dtypes import FLOAT4_E2M1FN_X4, FLOAT8_E4M3FN_X4, FLOAT8_E5M2_X4, DType
from ..device.spec import CORE, Engine
from ..program.attributes import Attrs
from ..program.view import View
from .entry import PSUM, SBUF, OpSpec

GROUP = 8  # partitions that share a scale
VALUES = 4  # of one packed element
QUADRANT_ROWS = 4  # scale rows that a quadrant of 32 partitions needs
BIAS = 127
ELEMENTS: dict[DType, np.dtype] = {
    FLOAT8_E4M3FN_X4: np.dtype(ml_dtypes.float8_e4m3fn),
    FLOAT8_E5M2_X4: np.dtype(ml_dtypes.float8_e5m2),
}
LARGEST = {FLOAT8_E4M3FN_X4: 448.0, FLOAT8_E5M2_X4: 57344.0, FLOAT4_E2M1FN_X4: 6.0}
EXPONENTS = {FLOAT8_E4M3FN_X4: 8, FLOAT8_E5M2_X4: 15}  # of the largest element


def unpacked(raw: torch.Tensor, dt: DType) -> torch.Tensor:
    """Packed elements [..., F] as fp32 values [..., F, 4], the lowest bits first."""
    if dt is FLOAT4_E2M1FN_X4:
        nibbles = (raw[..., None].to(torch.int64) >> torch.arange(0, 16, 4)) & 15
        table = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        return torch.from_numpy(table)[nibbles]
    numbers = raw.contiguous().numpy().view(ELEMENTS[dt]).astype(np.float32)
    return torch.from_numpy(numbers).reshape(*raw.shape, VALUES)


def packed(values: torch.Tensor, dt: DType) -> torch.Tensor:
    """fp32 values [..., 4] rounded and packed, the lowest bits first; too large ones saturate.

    So AWS's library has it (mx_torch_common.quantize_to_mx), whose tests ran on devices.
    """
    values = values.clamp(-LARGEST[dt], LARGEST[dt])
    if dt is FLOAT4_E2M1FN_X4:
        codes = values.contiguous().numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        bits = (codes.astype(np.uint16) & 15) << np.arange(0, 16, 4, dtype=np.uint16)
        return torch.from_numpy(bits.sum(-1, dtype=np.uint16).view(np.int16))
    host = values.contiguous().numpy().astype(ELEMENTS[dt])
    return torch.from_numpy(host.view(np.int32)[..., 0].copy())


def scale_parts(scale: View, partitions: int) -> tuple[View, ...]:
    """The rows of a scale tile that the groups of partitions use, in order.

    Up to 32 partitions they lie side by side, beyond that in the first rows of each quadrant.
    """
    quadrant = CORE.quadrant_partitions
    if partitions <= quadrant:
        return (_rows(scale, 0, partitions // GROUP),)
    return tuple(_rows(scale, start, QUADRANT_ROWS) for start in range(0, partitions, quadrant))


def scale_extent(partitions: int) -> int:
    """Partitions that a scale tile has at least."""
    quadrant = CORE.quadrant_partitions
    if partitions <= quadrant:
        return partitions // GROUP
    return partitions - quadrant + QUADRANT_ROWS


def _rows(scale: View, start: int, count: int) -> View:
    return scale.slice_box((slice(start, start + count), slice(0, scale.shape[1])))


def _scaled(raw: torch.Tensor, dt: DType, parts: list[torch.Tensor]) -> torch.Tensor:
    """Values [P, F, 4] times their groups' scales."""
    values, rows = unpacked(raw, dt), torch.cat(parts, -2).to(torch.int64)
    factor = torch.where(rows == 255, torch.nan, torch.exp2((rows - BIAS).double())).float()
    return values * factor.repeat_interleave(GROUP, dim=-2)[..., None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MicroscaledAttrs(Attrs):
    """Attributes of a microscaled product.

    Attributes:
        types: of the stationary and the moving operand.
        add: the product is added to the last operand, which is the destination.
    """

    types: tuple[DType, DType]
    add: bool = False


def _product(attrs: MicroscaledAttrs, xs: list[torch.Tensor]) -> torch.Tensor:
    scales = xs[2 : len(xs) - attrs.add]
    half = len(scales) // 2
    left = _scaled(xs[0], attrs.types[0], scales[:half]).movedim(-1, -2).flatten(-3, -2)
    right = _scaled(xs[1], attrs.types[1], scales[half:]).movedim(-1, -2).flatten(-3, -2)
    values = torch.matmul(left.transpose(-1, -2), right)
    return values + xs[-1].to(torch.float32) if attrs.add else values


NC_MATMUL_MX = OpSpec(
    "nc_matmul_mx",
    "all",
    MicroscaledAttrs,
    _product,
    lambda i: max(CORE.min_ii, i.src[1].free_size),  # as bf16's, of four times the rows (ARCH4)
    engine=Engine.TENSOR,
    writes=(PSUM,),
    same_partitions=False,
    macs=lambda i: i.src[0].shape[0] * VALUES * i.src[0].free_size * i.src[1].free_size,
    note="NeuronCore-v4: products of packed fp8 or fp4 with a scale for each 8 x 4 values",
    operands=(4, 11),
    generation=4,
    scaled=True,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class QuantizeAttrs(Attrs):
    """Attributes of a quantisation.

    Attributes:
        type: of the packed elements.
        doubled: the scale is twice that of the OCP sample code (since SDK 2.31).
    """

    type: DType
    doubled: bool = True


def _quantize(attrs: QuantizeAttrs, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    x = xs[0].to(torch.float32)
    lead, (rows, width) = x.shape[:-2], x.shape[-2:]
    groups = x.reshape(*lead, rows // GROUP, GROUP, width // VALUES, VALUES)
    most = groups.abs().amax((-3, -1))
    exponent = torch.floor(torch.log2(most)) - (EXPONENTS[attrs.type] - attrs.doubled)
    biased = torch.where(most > 0, exponent + BIAS, torch.zeros_like(most)).clamp(0, 254)
    shrunk = groups * torch.exp2(BIAS - biased.double()).float()[..., None, :, None]
    elements = packed(shrunk.reshape(*lead, rows, width // VALUES, VALUES), attrs.type)
    return [elements, *biased.split(min(QUADRANT_ROWS, biased.shape[-2]), -2)]


QUANTIZE_MX = OpSpec(
    "quantize_mx",
    "first",
    QuantizeAttrs,
    _quantize,
    lambda i: max(CORE.min_ii, i.src[0].free_size / 4),
    reads=(SBUF,),
    writes=(SBUF,),
    same_partitions=False,
    note="NeuronCore-v4: 16-bit floats to packed fp8, four elements a cycle",
    results=5,
    generation=4,
    scaled=True,
)
