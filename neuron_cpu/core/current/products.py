"""``nki.isa``: TensorE."""

from typing import Any

import numpy as np

from ..device.dtypes import BFLOAT16, PACKED, UINT8
from ..device.errors import refuse, warn
from ..device.release import DOUBLED_SCALES, nki_since
from ..device.spec import CORE, Engine
from ..device.target import needs
from ..instructions import tensor_engine
from ..instructions.arguments import flag
from ..instructions.copies import MEMSET, FillAttrs
from ..instructions.recorder import record
from ..program import trace
from ..program.accumulation import Groups
from ..program.regions import window
from ..program.view import View, called
from .operands import NkiInstruction, choose, engine, isa, matmul_perf_mode, put


@isa(
    tensor_engine.NC_MATMUL,
    keywords={"accumulate": "2.29"},
    former={"is_moving_zero": "is_moving_onezero"},
)
def nc_matmul(
    dst: View,
    stationary: View,
    moving: View,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: Any = (),
    tile_size: Any = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
) -> NkiInstruction:
    """``dst[M, N] = stationary[K, M].T @ moving[K, N]``, SBUF times SBUF into PSUM, in fp32.

    ``accumulate``: False overwrites, True adds; None overwrites where no product has written yet
    and adds elsewhere. K, M <= 128; N <= 512, on gen4 as much as PSUM takes.
    """
    what, asked = "nc_matmul", accumulate is not None
    if accumulate is not None:
        accumulate = flag(accumulate, f"{what} accumulate")
    if perf_mode is not matmul_perf_mode.none:
        return _double_rows(dst, stationary, moving, accumulate)
    stationary, moving = tensor_engine.collapsed(stationary), tensor_engine.collapsed(moving)
    dst = _product_of(dst, stationary, moving)
    if tile_position or tile_size:
        _check_array_tile(tile_position, tile_size, stationary, moving)
        _warn_of_columns(dst, tile_position, tile_size)
    if "float8_e4m3fn" in (stationary.dt.name, moving.dt.name):
        needs("float8_e4m3fn on TensorE", 4)
    _check_bank(dst)
    storage = dst.storage
    if dst.dt is BFLOAT16 and not is_transpose:
        warn(
            "sim_rounded_sums",
            f"nc_matmul sums in {dst.label()}: sources leave open how the hardware rounds there "
            "(to nearest, or at random), expected float32; here to nearest even",
        )
    if dst.by_data is not None and accumulate is None:
        raise refuse(
            "sim_accumulation_region",
            f"nc_matmul into {dst.label()}, a part that data place, with accumulate left open, "
            "expected True or False: what has been written there is not known while building; "
            "say accumulate=False in the first product, True in those after it",
        )
    if accumulate is None:
        _warn_of_loop(dst)
    groups = storage.groups
    if groups is not None and accumulate is not False and not groups.goes_on(dst):
        if accumulate is None:
            accumulate = _begun(dst, groups)
        elif groups.holds_other(dst):
            _warn_of_start(dst)
        if accumulate and dst.by_data is None and groups.missing(dst) is not None:
            groups.written(dst, by_matmul=True)  # undefined there; values show who looks
    attrs = tensor_engine.matmul_attrs(
        flag(is_transpose, "is_transpose"),
        flag(is_stationary_onezero, "is_stationary_onezero"),
        flag(is_moving_onezero, "is_moving_onezero"),
    )
    made = tensor_engine.multiply_into(dst, stationary, moving, attrs, accumulate)
    if made.attrs.accumulate and (asked or CORE.number == 2) and dst.by_data is None:
        _warn_of_sums(dst)
    return NkiInstruction(made)


def _product_of(dst: View, left: View, right: View) -> View:
    """``dst`` as [M, N]."""
    shape = (left.free_size, right.free_size)
    if dst.shape == shape:
        return dst
    tensor_engine.check_operands(left, right, dst)
    columns = shape[1]
    part = f"[:, i * {columns}:(i + 1) * {columns}] of {called(dst)}"
    use = f"write {part}" if dst.shape[0] == shape[0] and dst.free_size > columns else "give that"
    _check_size(
        f"nc_matmul of stationary {left.label()} and moving {right.label()}",
        dst,
        shape,
        f", as partitions are summed over; {use} as dst, or where another axis is to be summed "
        "over, transpose both operands first (nisa.nc_transpose)",
    )
    return tensor_engine.collapsed(dst)


def _check_size(what: str, dst: View, shape: tuple[int, int], mend: str) -> None:
    if dst.shape[0] != shape[0] or dst.free_size != shape[1]:
        raise refuse(
            "sim_shape_mismatch",
            f"{what} into {dst.label()}, expected a dst of shape {shape}{mend}",
        )


def _check_bank(dst: View) -> None:
    """A product goes to one bank (trainium_inferentia2_arch.rst); NeuronCore-v4's are longer."""
    storage, bank = dst.storage, CORE.psum_bank_bytes
    if storage.tile_bytes <= bank or CORE.number > 3 or dst.by_data is not None:
        return
    if storage.buffer != "psum" or dst.free_size > CORE.moving_free_max:  # refused elsewhere
        return
    first = dst.offset % storage.free_size
    last = first + sum((n - 1) * s for n, s in zip(dst.shape[1:], dst.strides[1:]))
    item = dst.dt.itemsize
    if first * item // bank != ((last + 1) * item - 1) // bank:
        raise refuse(
            "sim_psum_bank",
            f"a product writes elements {first} to {last} of each partition of {dst.label()}, "
            f"expected one bank of PSUM, {bank // item} elements from a multiple of that; split it "
            "where the bank ends",
        )


def _begun(dst: View, groups: Groups) -> bool | None:
    """The meaning of ``accumulate=None`` for a region:

    None as long as the rule of ``Groups`` holds. Where products have covered a region in part, the
    rest is filled with zeros first, so that one instruction adds to both parts (a tracker by
    regions since 0.6, release notes).
    """
    if groups.holds_other(dst):
        if not groups.only_zeros:
            _warn_of_start(dst)
        return True
    missing = groups.missing(dst)
    if missing is None:
        return None
    record(MEMSET, (dst,), (), FillAttrs(value=0, mask=missing))
    groups.written(dst, by_matmul=True)
    return True


def _warn_of_start(dst: View) -> None:
    warn(
        "sim_accumulation_start",
        f"nc_matmul accumulates onto {dst.label()}, which no product has written last, "
        "expected content of products: sources leave open what the hardware adds to; leave "
        "accumulate= out and what was written before, so that the first product overwrites",
    )


def _warn_of_sums(dst: View) -> None:
    """Of several sums in one tensor, one after another or in turns, all but the last lost their
    first product on a trn1 with SDK 2.32 (foxl-ai/kiln, docs/neuron-notes.md) and, where kernels
    say ``accumulate``, on a trn2 with SDK 2.34 (mega-trainium, megakernel/symnki_poc). Left open,
    it is right on that trn2: AWS's MLP and projections have such sums.
    """
    groups = dst.storage.groups
    if groups is not None and groups.sums_beside(dst):
        warn(
            "sim_sums_share_tensor",
            f"nc_matmul adds to {dst.label()}, and products add to another part of that tensor, "
            "too: on a trn1 with SDK 2.32 and a trn2 with 2.34 all such sums but the last lost "
            "their first product, expected one sum a tensor; make one in nl.psum for each",
        )


def _warn_of_loop(dst: View) -> None:
    """An instruction of a device loop is built once, with one flag for all iterations."""
    frame = trace.current("nc_matmul").frame
    while frame is not None and frame is not dst.storage.frame:
        if frame.loop.kind == "sequential" and frame.loop.n > 1:
            warn(
                "sim_accumulation_loop",
                f"nc_matmul into {dst.label()} in a device loop leaves accumulate open: sources do "
                "not say what that means in later iterations, expected True or False; here the "
                "first iteration overwrites and later ones add",
            )
            return
        frame = frame.parent


def _warn_of_columns(dst: View, position: Any, size: Any) -> None:
    """AWS's library uses parts of the columns, and places results behind them.

    The list of parameters forbids parts; devices ran the library.
    """
    if size[1] < CORE.partitions and dst.start_partition != position[1]:
        warn(
            "sim_array_tile_place",
            f"nc_matmul in columns {position[1]} to {position[1] + size[1]} of TensorE writes "
            f"{dst.label()} at partition {dst.start_partition}, expected partition {position[1]}: "
            "whether another works is not stated; slice the dst there",
        )


def _check_array_tile(position: Any, size: Any, left: View, right: View) -> None:
    """Rows and columns of TensorE that the product takes."""
    least = CORE.array_tile_min
    sizes = [n for n in (32, 64, 128) if n >= least]
    if not position or not size or any(n not in sizes for n in size):
        raise refuse(
            "sim_array_tile",
            f"nc_matmul with tile_position={position}, tile_size={size}, expected both, with rows "
            f"and columns of {sizes} on {CORE.name}; leave both out for the whole array",
        )
    if any(at % n or at + n > CORE.partitions for at, n in zip(position, size)):
        raise refuse(
            "sim_array_tile",
            f"nc_matmul with tile_position={position}, tile_size={size}, expected positions that "
            "are multiples of the size; write (0, 0) for the first tile",
        )
    if left.shape[0] > size[0] or left.free_size > size[1]:
        raise refuse(
            "sim_array_tile",
            f"nc_matmul of {left.label()} in a tile of {size}, expected at most {size[0]} rows and "
            f"{size[1]} columns; slice it, or take a larger tile_size",
        )


def _double_rows(dst: View, left: View, right: View, accumulate: bool | None) -> NkiInstruction:
    """fp8 operands [K, 2, M] and [K, 2, N]: the contraction runs over K and the pairs.

    Recorded as the products of the two halves, each at twice the rate.
    """
    needs("nc_matmul(perf_mode=double_row)", 3)
    for view in (left, right):
        if view.ndim != 3 or view.shape[1] != 2 or not view.dt.name.startswith("float8"):
            raise refuse(
                "sim_double_row",
                f"nc_matmul with double_row of {view.label()}, expected fp8 of shape [K, 2, F]; "
                "reshape it, or leave "
                "perf_mode out",
            )
    _check_bank(dst)
    first, second = ((_half(left, k), _half(right, k)) for k in range(2))
    attrs = tensor_engine.MatmulAttrs(double_row=True)
    dst = _product_of(dst, *first)
    if accumulate is None and dst.storage.groups is not None:
        accumulate = _begun(dst, dst.storage.groups)
    tensor_engine.multiply_into(dst, *first, attrs, accumulate)
    return NkiInstruction(tensor_engine.multiply_into(dst, *second, attrs, True))


def _half(view: View, k: int) -> View:
    box = (slice(0, view.shape[0]), slice(k, k + 1), slice(0, view.shape[2]))
    return view.slice_box(box).reshape((view.shape[0], view.shape[2]))


@isa(tensor_engine.NC_MATMUL_MX, keywords={"accumulate": "2.29"})
def nc_matmul_mx(
    dst: View,
    stationary: View,
    moving: View,
    stationary_scale: View,
    moving_scale: View,
    tile_position: Any = None,
    tile_size: Any = None,
    accumulate: bool | None = None,
) -> NkiInstruction:
    """``stationary.T @ moving`` of packed elements [P, M], [P, N] with their scales; gen4.

    The contraction runs over 4 P values; a scale stands for 8 partitions and 4 values.
    """
    what = "nc_matmul_mx"
    scales = [
        _scales(s, d, what) for s, d in ((stationary_scale, stationary), (moving_scale, moving))
    ]
    if (
        stationary.shape[0] != moving.shape[0]
        or stationary.shape[0] % 32
        or stationary.free_size > CORE.partitions
    ):
        raise refuse(
            "sim_microscaled",
            f"{what} of {stationary.label()} with {moving.label()}, expected equal multiples of 32 "
            "partitions and at most 128 stationary columns; slice both to them",
        )
    views = [_packed_tile(v, what) for v in (stationary, moving)]
    dst = _product_of(dst, *views)
    groups = dst.storage.groups
    if accumulate is None and groups is not None:
        begun = _begun(dst, groups)
        accumulate = begun if begun is not None else not groups.begin(dst)
    if groups is not None:
        groups.written(dst, by_matmul=True)
    attrs = tensor_engine.MicroscaledAttrs(
        types=(stationary.dt, moving.dt), add=bool(accumulate), raw=True
    )
    parts = [p for s in scales for p in tensor_engine.scale_parts(s, stationary.shape[0])]
    src = (*views, *parts, *((dst,) if accumulate else ()))
    made = record(tensor_engine.NC_MATMUL_MX, (dst,), src, attrs)
    assert made is not None
    if groups is not None:
        groups.written(dst, by_matmul=True)
    return NkiInstruction(made)


def _packed_tile(view: View, what: str) -> View:
    if view.dt not in PACKED:
        raise refuse(
            "sim_microscaled",
            f"{what} got {view.label()}, expected a packed type such as nl.float8_e4m3fn_x4; "
            "make it with nisa.quantize_mx",
        )
    return view.reshape((view.shape[0], view.free_size))


def _scales(scale: View, data: View, what: str) -> View:
    """The scale tile of an operand: a byte for each 8 partitions and packed element."""
    rows = tensor_engine.scale_extent(data.shape[0])
    if scale.dt.itemsize != 1 or scale.free_size != data.free_size or scale.shape[0] < rows:
        raise refuse(
            "sim_microscaled",
            f"{what} with scales {scale.label()} for {data.label()}, expected uint8 or "
            f"float8_e8m0fnu of at least {rows} partitions with {data.free_size} columns; give "
            "those that "
            "nisa.quantize_mx wrote",
        )
    if (
        data.shape[0] <= CORE.quadrant_partitions
        and scale.start_partition % CORE.quadrant_partitions
    ):
        warn(
            "sim_scale_packing",
            f"{what} with scales {scale.label()} at partition {scale.start_partition} for "
            f"{data.label()}: sources leave open how scales of up to 32 partitions share a "
            "quadrant, expected scales at the start of one; here the given rows count",
        )
    return scale.bitcast(UINT8).reshape((scale.shape[0], scale.free_size))


@isa(tensor_engine.QUANTIZE_MX)
def quantize_mx(dst: View, src: View, dst_scale: View) -> NkiInstruction:
    """16-bit floats [P, F] to packed fp8 [P, F / 4] and their scales; gen4."""
    what = "quantize_mx"
    if dst.dt not in tensor_engine.EXPONENTS or src.dt.itemsize != 2 or not src.dt.is_float:
        raise refuse(
            "sim_microscaled",
            f"{what} of {src.label()} into {dst.label()}, expected bf16 or fp16 into "
            "float8_e4m3fn_x4 or float8_e5m2_x4; make dst of nl.float8_e4m3fn_x4",
        )
    if src.shape[0] % 32 or (src.shape[0], src.free_size) != (dst.shape[0], 4 * dst.free_size):
        raise refuse(
            "sim_microscaled",
            f"{what} of {src.label()} into {dst.label()}, expected a multiple of 32 "
            "partitions in both and four times as many columns; pad the source with nisa.memset",
        )
    scales = _scales(dst_scale, dst, what)
    flat = src.reshape((src.shape[0], src.free_size))
    attrs = tensor_engine.QuantizeAttrs(type=dst.dt, raw=True, doubled=nki_since(DOUBLED_SCALES))
    parts = tensor_engine.scale_parts(scales, src.shape[0])
    _fill_beside(scales, parts)
    return put(tensor_engine.QUANTIZE_MX, (_packed_tile(dst, what), *parts), (flat,), attrs)


def _fill_beside(scale: View, parts: tuple[View, ...]) -> None:
    """Fill rows of a scale tile that a quantisation leaves with zeros, unless they are written.

    Sources do not say what they hold; two tests of AWS's library (mxfp_load, quantize_to_mx) store
    whole tiles and expect zeros.
    """
    tracer, storage = trace.current("quantize_mx"), scale.storage
    known, written = tracer.scales.get(storage.id, (0, np.zeros(storage.size, bool)))
    instructions = tracer.program.instructions
    for instruction in instructions[known:]:
        for view in instruction.dst:
            if view.storage is storage:
                window(written, view)[...] = True
    tracer.scales[storage.id] = len(instructions), written
    used = np.zeros(storage.size, bool)
    for part in parts:
        window(used, part)[...] = True
    beside = ~(window(written, scale) | window(used, scale))
    if beside.any():  # from partition 0 on, where engines may begin, whatever the scales' first row
        start = scale.start_partition
        shape = (start + scale.shape[0], scale.shape[1])
        first = scale.offset - start * storage.free_size
        rows = scale._with(first, shape, scale.strides, None, None)
        mask = np.concatenate([np.zeros((start, shape[1]), bool), beside])
        record(MEMSET, (rows,), (), FillAttrs(value=0, mask=mask))


@isa(tensor_engine.NC_TRANSPOSE)
def nc_transpose(dst: View, data: View, engine: engine = engine.unknown) -> NkiInstruction:
    """(P, F...) to (F, P). TensorE: SBUF to PSUM, 128 x 128; VectorE: 32 x 32, SBUF or PSUM.

    By default the engine follows from the destination. On gen2 TensorE writes fp32.
    """
    what = "nc_transpose"
    data = tensor_engine.collapsed(data)
    choice = choose(engine, what, tensor_engine.NC_TRANSPOSE.engines)
    if choice is None:
        choice = Engine.TENSOR if dst.storage.buffer == "psum" else Engine.VECTOR
    shape = (data.free_size, data.shape[0])
    if dst.shape != shape:
        tensor_engine.check_block(data)
        _check_size(f"{what} of {data.label()}", dst, shape, "; make it with nl.ndarray")
        dst = dst.reshape(shape)
    _check_transposed_type(dst, data, choice)
    vector = Engine.VECTOR if choice is Engine.VECTOR else None
    attrs = tensor_engine.transpose_attrs(vector, dst.dt is data.dt, data.ndim - 1)
    return put(tensor_engine.NC_TRANSPOSE, (dst,), (data,), attrs)


def _check_transposed_type(target: View, source: View, choice: Engine) -> None:
    """Results have the data's type; TensorE of gen2 writes fp32, as every product there."""
    fp32_psum = choice is Engine.TENSOR and target.dt.name == "float32"
    if target.dt is source.dt and (CORE.number > 2 or choice is Engine.VECTOR):
        return
    if fp32_psum and (CORE.number == 2 or source.dt is target.dt):
        return
    wanted = "float32" if CORE.number == 2 and choice is Engine.TENSOR else source.dt
    warn(
        "sim_transpose_type",
        f"nc_transpose of {source.label()} into {target.label()} on {choice.value} of {CORE.name}, "
        f"expected dst of {wanted}; make {called(target)} with dtype=nl.{wanted}",
    )
