"""TensorE: matrix products, transposes and microscaled operands.

Sources: aws-neuron-sdk v2.21.1, general/nki/api/nki/isa/__init__.py (nc_matmul, nc_transpose: tile
limits, types, cycles), general/nki/arch/trainium_inferentia2_arch.rst (LoadStationary and
MultiplyMoving; PSUM accumulates in fp32).
"""

import functools
import math

import ml_dtypes
import numpy as np
import torch

from ..device.dtypes import (
    FLOAT4_E2M1FN_X4,
    FLOAT8_E4M3FN_X4,
    FLOAT8_E5M2_X4,
    FLOAT32,
    DType,
    Tensors,
)
from ..device.errors import refuse, warn
from ..device.spec import CORE, Engine
from ..program import trace
from ..program.accumulation import Groups
from ..program.attributes import Attrs, constants
from ..program.program import Instruction
from ..program.view import View, called
from .entry import FOUR_BYTE_FLOATS, PSUM, SBUF, OpSpec, check_free_size, flat, wide_stride


# --- products -------------------------------------------------------------------------------------
@constants
class MatmulAttrs(Attrs):
    """``start`` and ``accumulate`` of the base decide whether PSUM's content stays.

    Attributes:
        is_transpose: the moving operand is an identity, so the product moves data.
        double_row: half of a product that takes two rows of fp8 at once (NeuronCore-v3).
        stationary_onezero, moving_onezero: the operand holds ones and zeros only.
    """

    is_transpose: bool = False
    double_row: bool = False
    stationary_onezero: bool = False
    moving_onezero: bool = False


def check_operands(stationary: View, moving: View, dst: View | None = None) -> None:
    """Refuse sizes that TensorE does not take, and operands that share no contraction."""
    limit = CORE.stationary_free_max
    if stationary.free_size > limit:
        turned = moving.free_size <= limit
        mend = ", each with a tile of its own for rows {part} of the product"
        mend += ", or give it as moving= and the other as stationary=: dst is turned" * turned
        check_free_size("nc_matmul stationary", stationary, limit, mend)
    into = ", and the same of the result"
    check_free_size("nc_matmul moving", moving, CORE.moving_free_max, into)
    if stationary.shape[0] != moving.shape[0]:
        told = f"for {called(stationary)} @ {called(moving)} transpose {called(stationary)}"
        fits = dst is not None and dst.shape[0] == stationary.free_size
        if fits and stationary.shape[0] == moving.free_size:
            told = f"dst has the columns of {called(stationary)}: transpose {called(moving)}"
        elif stationary.shape == (1, moving.shape[0]):
            told = f"make {called(stationary)} {stationary.shape[::-1]}, or transpose it"
        raise refuse(
            "err_num_partition_mismatch",
            f"nc_matmul contracts {stationary.label()} with {moving.label()}, expected equal "
            f"partition counts, got {stationary.shape[0]} and {moving.shape[0]}; contract over "
            f"partitions of both: {told} first (nisa.nc_transpose)",
        )


def _matmul_rules(i: Instruction) -> None:
    stationary, moving = i.src
    check_operands(stationary, moving)
    floats = [view.dt for view in i.src if view.dt.is_float] or [FLOAT32]
    for view in i.src:
        if not view.dt.is_float:
            raise refuse(
                "sim_matmul_type",
                f"nc_matmul got {view.label()}, expected a floating-point type; give a tile of "
                f"its values (with their scale) in {floats[0]}, nl.copy({called(view)}, "
                f"dtype=nl.{floats[0]})",
            )
    if (stationary.dt.name in FOUR_BYTE_FLOATS) != (moving.dt.name in FOUR_BYTE_FLOATS):
        small, wide = sorted(i.src, key=lambda view: view.dt.itemsize)
        raise refuse(
            "sim_matmul_mixed_types",
            f"nc_matmul mixes {stationary.dt} with {moving.dt}, expected both of 4 bytes or both "
            f"narrower; make {called(small)} with dtype=nl.{wide.dt} where its source is of it, or "
            f"round the other, nl.copy({called(wide)}, dtype=nl.{small.dt})",
        )
    attrs, narrow = MatmulAttrs.of(i), stationary.dt.itemsize == moving.dt.itemsize == 1
    if attrs.double_row and not (narrow and CORE.number >= 3):
        raise refuse(
            "sim_double_row",
            f"nc_matmul takes two rows at once of {stationary.dt} and {moving.dt}, expected fp8 "
            "on gen3 and later; cast them, or leave out double_row",
        )
    out = i.dst[0]
    # NeuronCore-v4 also rounds sums to bf16 (ISA32, nc_matmul)
    fits = out.dt is FLOAT32 or (CORE.number >= 4 and out.dt.name == "bfloat16")
    if not fits and not attrs.is_transpose:
        raise refuse(
            "sim_matmul_output_type",
            f"nc_matmul writes {out.label()}, expected float32: PSUM accumulates in fp32; make "
            f"{called(out)} with dtype=nl.float32, and cast while copying to SBUF",
        )


def _matmul_cycles(i: Instruction) -> float:
    """Loading the stationary operand overlaps with the product before, so the longer one counts."""
    stationary, moving = i.src
    load = math.ceil(stationary.free_size / 4)  # LoadStationary runs up to 4 times faster (arch)
    load *= 2 if wide_stride(stationary) else 1
    stream = moving.free_size * (2 if wide_stride(moving) else 1)
    attrs = MatmulAttrs.of(i)
    rate: float = 4 if stationary.dt.name in FOUR_BYTE_FLOATS else 1  # fp32 takes four passes
    if rate == 4 and (attrs.stationary_onezero or attrs.moving_onezero or attrs.is_transpose):
        rate = 2  # ones and zeros, and the identity of a transpose, have no low half
    if attrs.double_row:
        rate = rate / 2
    return rate * max(load, CORE.min_ii, stream)


NC_MATMUL = OpSpec(
    "nc_matmul",
    "matmul",
    MatmulAttrs,
    None,
    _matmul_cycles,
    engine=Engine.TENSOR,
    reads=(SBUF,),
    writes=(PSUM,),
    rules=_matmul_rules,
    same_partitions=False,
    box_mend="mask the operands in their subscripts instead",
    multiplies=True,
    macs=lambda i: i.src[0].shape[0] * i.src[0].free_size * i.src[1].free_size,
    moves=lambda i: MatmulAttrs.of(i).is_transpose,
    note="out[M, N] = stationary[K, M].T @ moving[K, N], accumulated in fp32 in PSUM",
    operands=(2, 2),
)


def collapsed(view: View) -> View:
    """The view with one free axis, where its strides allow that."""
    if len(view.shape) == 2 or view.paxis:
        return view
    flat = view.flattened()
    return view if flat is None else flat


@functools.cache
def matmul_attrs(transpose: bool, stationary_onezero: bool, moving_onezero: bool) -> MatmulAttrs:
    """One object for equal attributes: programs are matmuls for the most part."""
    return MatmulAttrs(
        is_transpose=transpose, stationary_onezero=stationary_onezero, moving_onezero=moving_onezero
    )


def multiply_into(
    dst: View, stationary: View, moving: View, attrs: MatmulAttrs, accumulate: bool | None = None
) -> Instruction:
    """Record a product straight into ``dst`` [M, N] @ PSUM.

    Args:
        accumulate: True adds to what ``dst`` holds, False overwrites it; None overwrites with the
            first product into a region and adds with the later ones.
    """
    storage = dst.storage
    if storage.groups is None:  # made without an initial value
        storage.groups = Groups(storage.size, zeroed=False)
    if dst.by_data is not None:  # anywhere, and ``accumulate`` is given
        storage.groups.written(View.whole(storage), by_matmul=True)
        attrs = attrs.grouped(False) if accumulate else attrs
    elif accumulate is False:
        storage.groups.written(dst, by_matmul=True)
    else:
        attrs = attrs.grouped(storage.groups.begin(dst) and accumulate is None)
    return trace.current("nisa.nc_matmul").emit(NC_MATMUL, (dst,), (stationary, moving), attrs)


# --- transposes -----------------------------------------------------------------------------------
@constants
class TransposeAttrs(Attrs):
    """Attributes of a transpose on TensorE or VectorE.

    Attributes:
        free_axes: free axes of the operand, which become the result's partitions together.
    """

    free_axes: int = 1


@functools.cache
def transpose_attrs(engine: Engine | None, raw: bool, free_axes: int) -> TransposeAttrs:
    """One object for equal attributes."""
    return TransposeAttrs(engine=engine, raw=raw, free_axes=free_axes)


def _on_vector(i: Instruction) -> bool:
    return i.attrs.engine is Engine.VECTOR


def _transpose(attrs: TransposeAttrs, xs: Tensors) -> torch.Tensor:
    return flat(xs[0], attrs.free_axes).transpose(-1, -2)


def check_block(data: View) -> None:
    """Refuse to turn more than 128 x 128 at once."""
    limit = CORE.partitions
    for size in (data.shape[0], data.free_size):
        if size > limit:
            raise refuse(
                "err_size_of_dimension_exceed_arch_limit",
                f"nc_transpose of {data.label()} has an axis of {size}, expected at most {limit}; "
                f"transpose in blocks, {called(data)}[0:{min(limit, data.shape[0])}, "
                f"i * {limit}:(i + 1) * {limit}], each into a dst of its own",
            )


def _transpose_rules(i: Instruction) -> None:
    data, out = i.src[0], i.dst[0]
    check_block(data)
    if _on_vector(i):
        _large_on_vector(data)
        return
    if data.storage.buffer != SBUF:
        raise refuse(
            "err_unsupported_memory",
            f"nc_transpose on TensorE got {data.label()}, expected sbuf; copy it to SBUF first",
        )
    if out.storage.buffer != PSUM:
        raise refuse(
            "err_unsupported_memory",
            f"nc_transpose on TensorE writes {out.label()}, expected psum; assign the result to a "
            "PSUM tile and copy it",
        )


def _large_on_vector(data: View) -> None:
    """VectorE transposes 32 x 32; larger ones the compiler takes apart (a public kernel ran so)."""
    limit = CORE.vector_transpose_max
    if data.shape[0] > limit or data.free_size > limit:
        warn(
            "sim_vector_transpose_size",
            f"nc_transpose of {data.label()} on VectorE takes {data.shape[0]} x {data.free_size}, "
            f"expected at most {limit} x {limit}: the compiler takes it apart or moves it; "
            "transpose in blocks",
        )


def _transpose_cycles(i: Instruction) -> float:
    data = i.src[0]
    if _on_vector(i):
        side = CORE.vector_transpose_max
        blocks = math.ceil(data.shape[0] / side) * math.ceil(data.free_size / side)
        return blocks * max(CORE.min_ii, min(side, data.free_size))
    rate = 4 if data.dt.name in FOUR_BYTE_FLOATS else 1
    # the docstring's max(P, min(64, F)); fp32 takes four passes as in a product
    return rate * max(data.shape[0], min(64, data.free_size), CORE.min_ii)


def _transpose_macs(i: Instruction) -> int:
    """On TensorE a product with the identity of as many rows as the data has partitions."""
    data = i.src[0]
    return 0 if _on_vector(i) else data.shape[0] * data.shape[0] * data.free_size


NC_TRANSPOSE = OpSpec(
    "nc_transpose",
    "transpose",
    TransposeAttrs,
    _transpose,
    _transpose_cycles,
    engine=Engine.TENSOR,
    rules=_transpose_rules,
    same_partitions=False,
    box_mend="mask whole rows or columns",
    macs=_transpose_macs,
    moves=lambda i: True,
    note="TensorE: 128 x 128, SBUF to PSUM, finite values only; VectorE: 32 x 32",
    engines=(Engine.TENSOR, Engine.VECTOR),
)


# --- microscaled operands (NeuronCore-v4): products and quantisation ------------------------------
# Four values of fp8 or fp4 stand in one packed element; groups of 8 partitions and the 4 values of
# an element share a scale, a power of two of 8 bits. Sources: aws-neuron-sdk v2.32.0,
# nki/api/nki/isa (nc_matmul_mx, quantize_mx), nki/deep-dives/mxfp-matmul.rst.
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


def _scaled(raw: torch.Tensor, dt: DType, parts: Tensors) -> torch.Tensor:
    """Values [P, F, 4] times their groups' scales."""
    values, rows = unpacked(raw, dt), torch.cat(parts, -2).to(torch.int64)
    factor = torch.where(rows == 255, torch.nan, torch.exp2((rows - BIAS).double())).float()
    return values * factor.repeat_interleave(GROUP, dim=-2)[..., None]


@constants
class MicroscaledAttrs(Attrs):
    """Attributes of a microscaled product.

    Attributes:
        types: of the stationary and the moving operand.
        add: the product is added to the last operand, which is the destination.
    """

    types: tuple[DType, DType]
    add: bool = False


def _product(attrs: MicroscaledAttrs, xs: Tensors) -> torch.Tensor:
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


@constants
class QuantizeAttrs(Attrs):
    """Attributes of a quantisation.

    Attributes:
        type: of the packed elements.
        doubled: the scale is twice that of the OCP sample code (since SDK 2.31).
    """

    type: DType
    doubled: bool = True


def _quantize(attrs: QuantizeAttrs, xs: Tensors) -> Tensors:
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
