"""``nki.isa``: one function per device instruction, recorded into the active Program.

Signatures are those of SDK 2.21 (aws-neuron-sdk v2.21.1, general/nki/api/nki/isa/__init__.py), with
the keywords that 2.22 to 2.26 added. Every function returns its result tile; assigning it
(``dst[...] = nisa.op(...)``) places the result in ``dst``.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any

import numpy as np

from ..device.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType, promote, to_dtype
from ..device.errors import refuse, warn
from ..device.spec import Engine
from ..language.tensor import Tensor, compose
from ..program import trace
from ..program.index import Index, Mask, is_integer
from ..program.program import Frame, Instruction, Source, Storage
from . import operators, table

unknown_engine = None
tensor_engine = Engine.TENSOR
vector_engine = Engine.VECTOR
scalar_engine = Engine.SCALAR
gpsimd_engine = Engine.GPSIMD
dma_engine = Engine.DMA


class engine:
    """``nisa.engine`` of SDK 2.22: the same choices as attributes."""

    unknown = None
    tensor = Engine.TENSOR
    vector = Engine.VECTOR
    scalar = Engine.SCALAR
    gpsimd = Engine.GPSIMD
    dma = Engine.DMA
    sync = Engine.DMA


class nc_version(IntEnum):
    """NeuronCore generations, in order."""

    gen2 = 2
    gen3 = 3


class reduce_cmd(Enum):
    """What an instruction does with ScalarE's running sums (SDK 2.22)."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3


class dge_mode(Enum):
    """Where DMA descriptors are made (SDK 2.23); NeuronCore-v2 has no hardware for it."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What an indirect DMA does with rows out of bounds (SDK 2.23)."""

    error = 0
    skip = 1


class fp32:
    """Range of fp32 (SDK 2.23)."""

    min = float(np.finfo(np.float32).min)
    max = float(np.finfo(np.float32).max)


def get_nc_version() -> nc_version:
    """Generation that kernels are traced for: NeuronCore-v2."""
    return nc_version.gen2


# --- helpers --------------------------------------------------------------------------------------
def _engine(value: Any, what: str, allowed: tuple[Engine, ...]) -> Engine | None:
    if value is None or value == 0:
        return None
    if value not in allowed:
        names = " or ".join(e.value for e in allowed)
        raise refuse("sim_engine", f"{what} cannot run on {value}, expected {names}; drop engine=")
    return value


def tile(value: Any, what: str) -> Tensor:
    """``value`` as a tile, or the refusal for anything else."""
    if isinstance(value, Tensor):
        return value
    raise refuse(
        "sim_operand_type",
        f"{what} got {type(value).__name__}, expected a tensor; turn numbers into tiles with "
        "nisa.memset and index expressions with nisa.iota",
    )


def vector(value: Tensor, data: Tensor, what: str) -> Tensor:
    """A (P, 1) operand stretched over the free axes of ``data`` (zero stride)."""
    if value.shape[0] != data.shape[0]:
        raise refuse(
            "err_num_partition_mismatch",
            f"{what} {value.label()} has {value.shape[0]} partitions, expected {data.shape[0]} "
            f"like {data.label()}; slice it to the same partitions",
        )
    if value.free_size != 1:
        raise refuse(
            "sim_vector_operand",
            f"{what} {value.label()} has {value.free_size} elements per partition, expected 1; "
            "use tensor_tensor for operands of full shape",
        )
    flat = value if value.ndim == 2 else value.reshape((value.shape[0], 1))
    return flat.expand(data.shape)


def _free_axes(axis: Any, ndim: int, what: str) -> tuple[int, ...]:
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple(sorted(int(a) + ndim if a < 0 else int(a) for a in axes))
    if 0 in axes or any(a >= ndim for a in axes):
        raise refuse(
            "sim_reduce_axis",
            f"{what} over axes {axes} of a tile of rank {ndim}, expected free axes 1 to "
            f"{ndim - 1}; sum over partitions with a matmul against ones",
        )
    return axes


def _domain(op: str, views: tuple[Tensor, ...]) -> dict[str, Any]:
    """{'bits': True} for bitwise operators, which need integer operands."""
    if op not in table.BITWISE:
        return {}
    for view in views:
        if not view.dt.is_int:
            raise refuse(
                "sim_bitwise_on_float",
                f"{op} got {view.label()}, expected an integer type; use view(nl.int32) for bits",
            )
    return {"bits": True}


# --- copies ---------------------------------------------------------------------------------------
def copy_instruction(
    dst: Tensor, src: Tensor, frame: Frame | None, source: Source | None
) -> Instruction:
    """A tensor_copy that is not recorded (for repairs of the instruction list)."""
    attrs = {"raw": True} if src.dt is dst.dt else {}
    return Instruction(table.TENSOR_COPY, (dst,), (src,), attrs, frame, source)


def copy_into(dst: Tensor, src: Tensor) -> None:
    """Record ``dst <- src`` between on-chip tensors."""
    if not src.storage.on_chip:
        raise refuse(
            "err_unsupported_memory",
            f"{src.label()} is assigned to {dst.label()}, expected a tile in sbuf or psum; load "
            "it with nl.load first",
        )
    attrs = {"raw": True} if src.dt is dst.dt else {}
    trace.current("assignment").emit(table.TENSOR_COPY, (dst,), (src,), attrs)
    note_written(dst)


def note_written(dst: Tensor) -> None:
    """A write covers part of a PSUM tile that matmuls may accumulate into."""
    if dst.storage.zero_init:
        trace.current("write").mark_started(dst)
    elif dst.storage.buffer == "psum" and dst.storage.placed:
        trace.current("write").mark_written(dst)


def fill(dst: Tensor, value: Any) -> None:
    """Record ``dst[...] = constant``."""
    trace.current("assignment").emit(table.MEMSET, (dst,), (), {"value": _number(value)})
    note_written(dst)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def zero_fill(storage: Storage) -> Instruction:
    """The real memset of a zeros-initialised tensor that is read before a matmul wrote it."""
    whole = Tensor.whole(storage)
    blocks = int(np.prod(storage.shape[: storage.paxis], dtype=int))
    if blocks > 1 or storage.paxis:
        whole = Tensor(
            storage, 0, (storage.shape[storage.paxis], blocks, storage.free_size),
            (storage.free_size, storage.size // blocks, 1),
        )  # fmt: skip
    return Instruction(table.MEMSET, (whole,), (), {"value": 0}, storage.frame, storage.source)


def tensor_copy(src: Any, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> Tensor:
    """Copy a tile within SBUF/PSUM; bit-exact unless the type changes.

    ``src`` [P, F...] @ SBUF|PSUM of any type; result alike @ SBUF (PSUM if assigned there).
    """
    data = tile(src, "tensor_copy")
    dt = data.dt if dtype is None else to_dtype(dtype)
    choice = _engine(engine, "tensor_copy", (Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD))
    attrs: dict[str, Any] = {"engine": choice} if choice else {}
    if dt is data.dt and choice is not Engine.SCALAR:
        attrs["raw"] = True
    tracer = trace.current("nisa.tensor_copy")
    return tracer.result(table.TENSOR_COPY, data.shape, dt, (data,), attrs, mask)


def copy_written(source: Tensor, dtype: Any) -> Tensor:
    """SBUF copy of what the instruction that made ``source`` wrote of it, which a mask may cut."""
    producer = source.storage.producer
    if producer is None:
        return source
    if producer.dst[0].shape == source.shape:
        return tensor_copy(source, dtype=dtype)
    written = producer.dst[0]
    tracer = trace.current("copy")
    out = Tensor.whole(
        tracer.storage(source.shape, source.dt if dtype is None else to_dtype(dtype), "sbuf")
    )
    target = compose(written, out)
    assert target is not None  # a mask leaves a box
    attrs = {"raw": True} if out.dt is source.dt else {}
    out.storage.producer = tracer.emit(table.TENSOR_COPY, (target,), (written,), attrs)
    return out


def memset(shape: Any, value: Any, dtype: Any, *, mask: Any = None, engine: Any = None) -> Tensor:
    """New tile of ``shape`` filled with ``value``; VectorE or GpSimdE."""
    attrs: dict[str, Any] = {"value": _number(value)}
    choice = _engine(engine, "memset", (Engine.VECTOR, Engine.GPSIMD))
    if choice:
        attrs["engine"] = choice
    tracer = trace.current("nisa.memset")
    size = tuple(int(s) for s in shape)
    return tracer.result(table.MEMSET, size, to_dtype(dtype), (), attrs, mask)


def iota(expr: Any, dtype: Any, *, mask: Any = None) -> Tensor:
    """Tile with the values of an affine index expression (int32 inside, then cast); GpSimdE."""
    if not isinstance(expr, Index) or expr.ndim < 2:
        raise refuse(
            "sim_iota_expression",
            f"iota got {expr!r}, expected an index expression of at least two axes such as "
            "nl.arange(n)[None, :]",
        )
    tracer = trace.current("nisa.iota")
    attrs = {"values": expr.values()}
    return tracer.result(table.IOTA, expr.shape, to_dtype(dtype), (), attrs, mask)


# --- TensorE --------------------------------------------------------------------------------------
def _collapsed(view: Tensor, what: str) -> tuple[Tensor, int]:
    """The view with one free axis where strides allow it, and its number of free axes."""
    if view.ndim == 2 or view.paxis:
        return view, 1
    from ..language.tensor import intern, reshaped_strides

    flat = (view.shape[0], view.free_size)
    strides = reshaped_strides(view.shape, view.strides, flat)
    if strides is None or view.oob or view.indirect:
        return view, view.ndim - 1
    return Tensor(view.storage, view.offset, intern(flat), intern(strides), view.dt), 1


def _in_sbuf(operand: Tensor) -> Tensor:
    """The operand, a transpose that was assigned nowhere copied out of PSUM first."""
    producer = operand.storage.producer
    if operand.storage.buffer != "psum" or producer is None:
        return operand
    if producer.op is not table.NC_TRANSPOSE:
        return operand
    warn(
        "sim_transposed_operand",
        f"nc_matmul takes {operand.label()}, which nc_transpose made: TensorE reads SBUF only, the "
        "compiler adds a copy; assign the transpose to a tile in sbuf, or copy it explicitly",
    )
    return tensor_copy(operand)


def nc_matmul(
    stationary: Any,
    moving: Any,
    *,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    mask: Any = None,
    **extra: Any,
) -> Tensor:
    """``stationary[K, M].T @ moving[K, N]`` on TensorE -> [M, N] fp32 @ PSUM.

    K <= 128 partitions, M <= 128, N <= 512; both operands in SBUF. ``acc[...] += nc_matmul(...)``
    on a PSUM tile from nl.zeros accumulates in fp32 inside PSUM.
    """
    left, ns = _collapsed(_in_sbuf(tile(stationary, "nc_matmul")), "stationary")
    right, nm = _collapsed(_in_sbuf(tile(moving, "nc_matmul")), "moving")
    attrs: dict[str, Any] = {}
    if (ns, nm) != (1, 1):
        attrs["free_axes"] = (ns, nm)
    if is_transpose:
        attrs["is_transpose"] = True
    if is_stationary_onezero:
        attrs["stationary_onezero"] = True
    if is_moving_onezero:
        attrs["moving_onezero"] = True
    for name in extra:
        if name not in ("tile_position", "tile_size"):
            raise refuse(
                "sim_unknown_keyword",
                f"nc_matmul got keyword '{name}', which NeuronCore-v2 does not have; drop it",
            )
        warn("sim_newer_api", f"nc_matmul({name}=) needs SDK 2.22 or newer; drop it to run on 2.21")
    tracer = trace.current("nisa.nc_matmul")
    shape = (left.free_size, right.free_size)
    dt = right.dt if is_transpose and right.dt is left.dt else FLOAT32
    if mask is None:
        fresh = tracer.storage(shape, dt, "psum")
        out = Tensor.whole(fresh)
        fresh.producer = tracer.emit(table.NC_MATMUL, (out,), (left, right), attrs)
        return out
    return _masked_matmul(tracer, left, right, shape, dt, attrs, mask)


def _masked_matmul(tracer, left, right, shape, dt, attrs, mask):
    """A mask on the [M, N] result cuts the operands' free axes."""
    fresh = tracer.storage(shape, dt, "psum")
    out = Tensor.whole(fresh)
    cut = trace.region(mask, shape)
    if cut is trace.EMPTY:
        return out
    if isinstance(cut, tuple) and left.ndim == right.ndim == 2:
        rows = slice(0, left.shape[0])
        left, right = left.slice_box((rows, cut[0])), right.slice_box((rows, cut[1]))
        out_cut = out.slice_box(cut)
    elif cut is None:
        out_cut = out
    else:
        raise refuse(
            "sim_matmul_mask",
            "mask of nc_matmul is no box of the result [M, N], expected one bound per axis; mask "
            "the operands in their subscripts instead",
        )
    fresh.producer = tracer.emit(table.NC_MATMUL, (out_cut,), (left, right), attrs)
    return out


def accumulate(tracer: trace.Tracer, view: Tensor, value: Tensor, last: Instruction) -> None:
    """``view += nc_matmul(...)``: let the recorded matmul accumulate into PSUM."""
    if view.size != value.size:
        raise refuse(
            "err_store_dst_shape_smaller_than_other_shape",
            f"matmul result of shape {value.shape} is accumulated into {view.shape}, expected "
            "equal shapes; slice the PSUM tile",
        )
    target = view if view.shape == value.shape else view.reshape(value.shape)
    moved = compose(last.dst[0], target)
    assert moved is not None  # a fresh result's box always maps onto a view of its shape
    if view.storage.zero_init or view.storage.placed:
        first = tracer.mark_started(moved)
    else:
        first = False
        warn(
            "sim_accumulation_start",
            f"matmul accumulates into {view.label()}, which nl.zeros did not make; on this core "
            "accumulating onto content written by another instruction is undefined; create the "
            "tile with nl.zeros(..., buffer=nl.psum)",
        )
    last.attrs = trace.shared_attrs({**last.attrs, ("start" if first else "accumulate"): True})
    last.dst = (tracer.same(moved),)
    last.op.check(last)
    value.storage.redirect = view
    if tracer.machine is not None:
        tracer.machine.run(last)


def nc_transpose(data: Any, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> Tensor:
    """[P, F...] -> [F, P], free axes collapsed. TensorE up to 128 x 128, VectorE up to 32 x 32.

    TensorE (default above 32 x 32): SBUF -> PSUM, finite values only.
    """
    source, free = _collapsed(tile(data, "nc_transpose"), "data")
    choice = _engine(engine, "nc_transpose", (Engine.TENSOR, Engine.VECTOR))
    on_vector = choice is Engine.VECTOR
    attrs: dict[str, Any] = {"engine": choice} if choice else {}
    if free != 1:
        attrs["free_axes"] = free
    dt = source.dt if dtype is None else to_dtype(dtype)
    if dt is source.dt:
        attrs["raw"] = True
    tracer = trace.current("nisa.nc_transpose")
    if tracer.program.direct_allocation and not on_vector:
        raise refuse(
            "err_transpose_on_tensor_engine_not_allowed_in_allocated_kernel",
            f"nc_transpose of {source.label()} on TensorE needs a hidden identity tensor, expected "
            "engine=nisa.vector_engine under direct allocation; multiply by an identity tile of "
            "your own with nc_matmul(is_transpose=True)",
        )
    buffer = "sbuf" if on_vector else "psum"
    fresh = tracer.storage((source.free_size, source.shape[0]), dt, buffer)
    out = Tensor.whole(fresh)
    dst = out
    cut = trace.region(mask, source.shape) if mask is not None else None
    if cut is trace.EMPTY:
        return out
    if isinstance(cut, tuple):
        source, dst = source.slice_box(cut), out.slice_box((cut[1], cut[0]))
    fresh.producer = tracer.emit(table.NC_TRANSPOSE, (dst,), (source,), attrs)
    return out


# --- ScalarE --------------------------------------------------------------------------------------
_BIAS_TYPES = (FLOAT32, FLOAT16, BFLOAT16)


def _scale_and_bias(data: Tensor, bias: Any, scale: Any) -> tuple[list[Tensor], dict[str, Any]]:
    src = [data]
    attrs: dict[str, Any] = {}
    if isinstance(scale, Tensor):
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
        src.append(vector(scale, data, "scale"))
    elif isinstance(scale, (int, float, np.number)) and not isinstance(scale, bool):
        if float(scale) != 1.0:
            attrs["scale"] = float(np.float32(scale))
    else:
        raise refuse(
            "err_activation_scale_invalid_type",
            f"activation scale of type {type(scale).__name__}, expected a number or an fp32 tile",
        )
    if bias is not None:
        if not isinstance(bias, Tensor) or bias.dt not in _BIAS_TYPES:
            got = bias.label() if isinstance(bias, Tensor) else type(bias).__name__
            raise refuse(
                "err_activation_bias_invalid_type",
                f"activation bias is {got}, expected a ({data.shape[0]}, 1) tile of fp32, fp16 or "
                "bf16: this core takes no constant bias; make one with nisa.memset",
            )
        attrs["bias_at"] = len(src)
        src.append(vector(bias, data, "bias"))
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
) -> Tensor:
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
        return tracer.result(table.ACTIVATION, source.shape, dt, tuple(src), attrs, mask)
    return _with_reduction(
        tracer, table.ACTIVATION, source, src, attrs, dt, reduce_op, reduce_res, mask
    )


def _running_sums(tracer, data, src, attrs, dt, reduce_op, reduce_res, command, mask):
    """``activation`` with ``reduce_cmd``: the registers are a hidden [P, 1] fp32 tile."""
    warn("sim_newer_api", "activation(reduce_cmd=) needs SDK 2.22 or newer; use activation_reduce")
    before = None if command in (reduce_cmd.reset, reduce_cmd.reset_reduce) else tracer.sums
    if command in (reduce_cmd.idle, reduce_cmd.reset):
        tracer.sums = before
        result = tracer.result(table.ACTIVATION, data.shape, dt, tuple(src), attrs, mask)
    else:
        registers = Tensor.whole(tracer.storage((data.shape[0], 1), FLOAT32, "sbuf"))
        result = _with_reduction(
            tracer, table.ACTIVATION, data, src, attrs, dt, reduce_op, registers, mask
        )
        if before is not None:
            add = {"op": "add"}
            tracer.emit(table.TENSOR_TENSOR, (registers,), (registers, before), add)
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


def _with_reduction(tracer, op, data, src, attrs, dt, reduce_op, reduce_res, mask):
    """Record an instruction with a second result: a reduction over all free axes."""
    total = tile(reduce_res, f"{op.name} reduce_res")
    if total.shape[0] != data.shape[0] or total.free_size != 1:
        raise refuse(
            "sim_reduce_res_shape",
            f"{op.name} reduce_res {total.label()}, expected shape ({data.shape[0]}, 1)",
        )
    name = operators.name_of(reduce_op) if reduce_op is not None else "add"
    if op is table.ACTIVATION and name != "add":
        raise refuse(
            "sim_activation_reduce_op",
            f"activation_reduce with reduce_op '{name}', expected add on NeuronCore-v2; use "
            "nisa.tensor_reduce",
        )
    if op is not table.ACTIVATION:
        attrs["reduce_op"] = name
    attrs["reduce_axes"] = data.ndim - 1
    attrs["reduce_pad"] = (1,) * (total.ndim - 1)
    fresh = tracer.storage(data.shape, dt, "sbuf")
    out = Tensor.whole(fresh)
    dst = out
    cut = trace.region(mask, data.shape) if mask is not None else None
    if cut is trace.EMPTY:
        return out
    if isinstance(cut, tuple):
        dst = out.slice_box(cut)
        src = [s.slice_box(cut) for s in src]
        total = total.slice_box((cut[0], *(slice(0, s) for s in total.shape[1:])))
    elif cut is not None:
        raise refuse(
            "sim_reduce_mask",
            f"mask of {op.name} is no box, expected one bound per axis; mask whole rows or columns",
        )
    fresh.producer = tracer.emit(op, (dst, total), tuple(src), attrs)
    return out


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
) -> Tensor:
    """As ``activation``; ``reduce_res`` [P, 1] receives the sum over the free axes."""
    return activation(
        op, data, bias=bias, scale=scale, reduce_op=reduce_op, reduce_res=reduce_res, mask=mask,
        dtype=dtype,
    )  # fmt: skip


# --- VectorE --------------------------------------------------------------------------------------
def tensor_reduce(
    op: Any,
    data: Any,
    axis: Any,
    *,
    mask: Any = None,
    dtype: Any = None,
    negate: bool = False,
    keepdims: bool = False,
) -> Tensor:
    """Reduce free axes in fp32: [P, F...] -> [P, rest...], at least rank 2. ``negate`` is free."""
    source = tile(data, "tensor_reduce")
    name = operators.name_of(op)
    if name not in table.REDUCTIONS:
        raise refuse(
            "sim_reduce_operator",
            f"tensor_reduce with operator '{name}', expected one of "
            f"{', '.join(sorted(table.REDUCTIONS))}",
        )
    axes = _free_axes(axis, source.ndim, "tensor_reduce")
    kept = [a for a in range(source.ndim) if a not in axes]
    attrs: dict[str, Any] = {"op": name, "axes": len(axes), **_domain(name, (source,))}
    if negate:
        attrs["negate"] = True
    trailing = axes == tuple(range(source.ndim - len(axes), source.ndim))
    if not trailing:
        attrs["order"] = (*kept, *axes)
        warn(
            "sim_reduce_middle_axis",
            f"tensor_reduce over axes {axes} of {source.label()}: sources disagree whether axes "
            "that are not the last ones work on SDK 2.21; present the reduced axis last",
        )
    dt = source.dt if dtype is None else to_dtype(dtype)
    return _reduced(source, axes, kept, dt, attrs, mask, keepdims)


def _reduced(source, axes, kept, dt, attrs, mask, keepdims):
    tracer = trace.current("nisa.tensor_reduce")
    cut = trace.region(mask, source.shape) if mask is not None else None
    if keepdims:
        shape = tuple(1 if a in axes else s for a, s in enumerate(source.shape))
    else:
        shape = tuple(source.shape[a] for a in kept)
        shape += (1,) * (2 - len(shape))
    fresh = tracer.storage(shape, dt, "sbuf")
    out = Tensor.whole(fresh)
    dst = out
    if cut is trace.EMPTY:
        return out
    if isinstance(cut, tuple):
        source = source.slice_box(cut)
        if keepdims:
            box = tuple(slice(0, 1) if a in axes else cut[a] for a in range(len(cut)))
        else:
            box = (*(cut[a] for a in kept), *(slice(0, 1) for _ in range(2 - len(kept))))
        dst = out.slice_box(box)
    elif cut is not None:
        raise refuse(
            "sim_reduce_mask",
            "mask of a reduction is no box, expected one bound per axis; fill the masked elements "
            "with the neutral value first",
        )
    fresh.producer = tracer.emit(table.TENSOR_REDUCE, (dst,), (source,), attrs)
    return out


def tensor_tensor(
    data1: Any, data2: Any, op: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None
) -> Tensor:
    """``data1 op data2`` of equal shapes; not both in PSUM. VectorE (power: GpSimdE)."""
    a, b = tile(data1, "tensor_tensor"), tile(data2, "tensor_tensor")
    name = operators.name_of(op)
    a, b = _equal_shapes(a, b)
    if name not in table.BITWISE and name not in table.ARITHMETIC:
        raise refuse(
            "sim_unknown_operator",
            f"tensor_tensor with operator '{name}', expected an ALU operator; functions such as "
            "exp run on ScalarE with nisa.activation, division is a reciprocal and a product",
        )
    attrs: dict[str, Any] = {"op": name, **_domain(name, (a, b))}
    if name == "power":
        attrs["engine"] = Engine.GPSIMD
    choice = _engine(engine, "tensor_tensor", (Engine.VECTOR, Engine.GPSIMD))
    if choice:
        attrs["engine"] = choice
    dt = promote(a.dt, b.dt) if dtype is None else to_dtype(dtype)
    tracer = trace.current("nisa.tensor_tensor")
    return tracer.result(table.TENSOR_TENSOR, a.shape, dt, (a, b), attrs, mask)


def _equal_shapes(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
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
    raise refuse(
        "sim_shape_mismatch",
        f"tensor_tensor got {a.label()} and {b.label()}, expected equal shapes; use tensor_scalar "
        "for (P, 1) vectors",
    )


def _operand(k: str, op: Any, value: Any, reverse: bool, src: list[Tensor]) -> dict[str, Any]:
    """Attributes of one step of tensor_scalar; vectors are appended to ``src``."""
    attrs: dict[str, Any] = {"op" + k: operators.name_of(op)}
    if isinstance(value, Tensor):
        attrs["at" + k] = len(src)
        src.append(vector(value, src[0], "operand" + k))
    elif is_integer(value) or isinstance(value, (float, np.floating, bool)):
        attrs["value" + k] = _number(value)
    else:
        raise refuse(
            "sim_operand_type",
            f"tensor_scalar operand{k} of type {type(value).__name__}, expected a number or a "
            "(P, 1) tile",
        )
    if reverse:
        attrs["reverse" + k] = True
    return attrs


def _step_classes(attrs: dict[str, Any], src: list[Tensor], what: str) -> dict[str, Any]:
    names = [attrs[k] for k in ("op0", "op1") if k in attrs]
    bits = [n in table.BITWISE for n in names]
    if any(bits) and not all(bits):
        raise refuse(
            "sim_mixed_operator_classes",
            f"{what} joins {' and '.join(names)}, expected both bitwise or both arithmetic; use "
            "two instructions",
        )
    for name in names:
        if name not in table.BITWISE and name not in table.ARITHMETIC:
            raise refuse(
                "sim_unknown_operator",
                f"{what} with operator '{name}', expected an ALU operator; functions such as exp "
                "run on ScalarE with nisa.activation, division is a reciprocal and a product",
            )
    return _domain(names[0], tuple(src)) if bits and bits[0] else {}


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
) -> Tensor:
    """``(data op0 operand0) op1 operand1``; operands are numbers or (P, 1) tiles. One or two steps
    cost the same. Result has data's type unless ``dtype`` is given."""
    src = [tile(data, "tensor_scalar")]
    attrs = _operand("0", op0, operand0, reverse0, src)
    if op1 is not None:
        attrs |= _operand("1", op1, operand1, reverse1, src)
    attrs |= _step_classes(attrs, src, "tensor_scalar")
    choice = _engine(engine, "tensor_scalar", (Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD))
    if choice:
        attrs["engine"] = choice
    dt = src[0].dt if dtype is None else to_dtype(dtype)
    tracer = trace.current("nisa.tensor_scalar")
    return tracer.result(table.TENSOR_SCALAR, src[0].shape, dt, tuple(src), attrs, mask)


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
) -> Tensor:
    """``data op0 operand0``, and ``reduce_res`` [P, 1] its reduction over all free axes."""
    src = [tile(data, "tensor_scalar_reduce")]
    if reverse0:
        raise refuse(
            "sim_unsupported_reverse",
            "tensor_scalar_reduce with reverse0=True, expected False: SDK 2.21 does not support it",
        )
    attrs = _operand("0", op0, operand0, False, src)
    attrs |= _step_classes(attrs, src, "tensor_scalar_reduce")
    dt = src[0].dt if dtype is None else to_dtype(dtype)
    return _with_reduction(
        trace.current("nisa.tensor_scalar_reduce"), table.TENSOR_SCALAR, src[0], src, attrs, dt,
        reduce_op, reduce_res, mask,
    )  # fmt: skip


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
) -> Tensor:
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
        if name not in table.ARITHMETIC:
            raise refuse(
                "sim_unknown_operator",
                f"tensor_tensor_scan with operator '{name}', expected an arithmetic ALU operator",
            )
    attrs: dict[str, Any] = {"op0": names[0], "op1": names[1]}
    src = [a, b]
    if isinstance(initial, Tensor):
        attrs["initial_at"] = len(src)
        src.append(vector(initial, a, "initial"))
    else:
        attrs["initial"] = float(initial)
    attrs |= {k: True for k, on in (("reverse0", reverse0), ("reverse1", reverse1)) if on}
    dt = promote(a.dt, b.dt) if dtype is None else to_dtype(dtype)
    tracer = trace.current("nisa.tensor_tensor_scan")
    return tracer.result(table.TENSOR_TENSOR_SCAN, a.shape, dt, tuple(src), attrs, mask)


def bn_stats(data: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Statistics of each partition's N <= 512 elements -> [P, 6]: count, mean and variance * count
    of the elements at even positions, then of those at odd ones. Input to ``bn_aggr``."""
    return _statistics(table.BN_STATS, tile(data, "bn_stats"), 6, dtype, mask)


def bn_aggr(data: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Mean and population variance [P, 2] from the columns of ``bn_stats`` ([P, 3 k])."""
    return _statistics(table.BN_AGGR, tile(data, "bn_aggr"), 2, dtype, mask)


def _statistics(op: table.OpSpec, data: Tensor, columns: int, dtype: Any, mask: Any) -> Tensor:
    """Record an instruction that turns the free axes into a few columns."""
    tracer = trace.current(f"nisa.{op.name}")
    dt = data.dt if dtype is None else to_dtype(dtype)
    fresh = tracer.storage((data.shape[0], columns), dt, "sbuf")
    out = Tensor.whole(fresh)
    dst = out
    cut = trace.region(mask, data.shape) if mask is not None else None
    if cut is trace.EMPTY:
        return out
    if isinstance(cut, tuple):
        data = data.slice_box(cut)
        dst = out.slice_box((cut[0], slice(0, columns)))
    elif cut is not None:
        raise refuse(
            "sim_reduce_mask",
            f"mask of {op.name} is no box, expected one bound per axis; mask whole rows or columns",
        )
    fresh.producer = tracer.emit(op, (dst,), (data,), {"free_axes": data.ndim - 1})
    return out


def reciprocal(data: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None) -> Tensor:
    """``1 / data``. VectorE (more exact, 8N cycles) or ScalarE."""
    source = tile(data, "reciprocal")
    choice = _engine(engine, "reciprocal", (Engine.VECTOR, Engine.SCALAR))
    attrs: dict[str, Any] = {"engine": choice} if choice else {}
    dt = source.dt if dtype is None else to_dtype(dtype)
    tracer = trace.current("nisa.reciprocal")
    return tracer.result(table.RECIPROCAL, source.shape, dt, (source,), attrs, mask)


# --- GpSimdE --------------------------------------------------------------------------------------
def affine_select(
    pred: Any, on_true_tile: Any, on_false_value: Any, *, mask: Any = None, dtype: Any = None
) -> Tensor:
    """Keep elements where one affine comparison holds, else ``on_false_value``. GpSimdE, SBUF."""
    source = tile(on_true_tile, "affine_select")
    if not isinstance(pred, Mask) or len(pred.terms) != 1:
        raise refuse(
            "sim_affine_select_predicate",
            "affine_select predicate is not one affine comparison, expected e.g. i_q >= i_k; chain "
            "two affine_selects for a conjunction",
        )
    keep = np.broadcast_to(pred.evaluate(source.shape), source.shape)
    attrs = {"keep": keep, "on_false": float(on_false_value)}
    dt: DType = source.dt if dtype is None else to_dtype(dtype)
    tracer = trace.current("nisa.affine_select")
    if source.storage.buffer == "psum":
        warn(
            "sim_gpsimd_psum",
            f"affine_select reads {source.label()}: GpSimdE has no PSUM port, the compiler adds a "
            "copy to SBUF; copy it explicitly",
        )
        source = tensor_copy(source)
    return tracer.result(table.AFFINE_SELECT, source.shape, dt, (source,), attrs, mask)


# --- DMA ------------------------------------------------------------------------------------------
def _dma_options(oob: Any, dge: Any) -> None:
    """Refuse descriptor options that NeuronCore-v2 has no hardware for."""
    if dge is dge_mode.hwdge or oob is not oob_mode.error:
        raise refuse(
            "sim_newer_core",
            f"dma_copy with {dge} and {oob}, expected descriptors made in advance and "
            "oob_mode.error on NeuronCore-v2; drop the options and mask rows out of bounds",
        )


def dma_copy(
    src: Any,
    dst: Any,
    *,
    mask: Any = None,
    dst_rmw_op: Any = None,
    oob_mode: Any = oob_mode.error,
    dge_mode: Any = None,
) -> None:
    """Copy ``src`` to ``dst`` (HBM or SBUF each) with a cast where the types differ.

    ``dst_rmw_op=np.add`` adds to what ``dst`` holds (SDK 2.23).
    """
    _dma_options(oob_mode, dge_mode)
    source, target = tile(src, "dma_copy"), tile(dst, "dma_copy")
    rmw = None if dst_rmw_op is None else operators.name_of(dst_rmw_op)
    if rmw not in (None, "add"):
        raise refuse(
            "sim_rmw_operator",
            f"dma_copy with dst_rmw_op '{rmw}', expected add; combine the values on chip",
        )
    move(target, source, mask, rmw)


class LoopReduction:
    """Result of ``nl.loop_reduce``, waiting for the tile it is combined into."""

    def __init__(self, value: Tensor, op: str, mask: Any) -> None:
        self.value, self.op, self.mask = value, op, mask

    def into(self, view: Tensor) -> None:
        """Record ``view = view op value`` in place."""
        value = self.value if self.value.shape == view.shape else self.value.reshape(view.shape)
        cut = trace.region(self.mask, view.shape) if self.mask is not None else None
        if cut is trace.EMPTY:
            return
        attrs: dict[str, Any] = {"op": self.op}
        if isinstance(cut, tuple):
            view, value = view.slice_box(cut), value.slice_box(cut)
        elif cut is not None:
            attrs["mask"] = cut
        tracer = trace.current("nl.loop_reduce")
        tracer.emit(table.TENSOR_TENSOR, (view,), (view, value), attrs)


def move(dst: Tensor, src: Tensor, mask: Any = None, rmw: str | None = None) -> None:
    """Record one DMA between views of equal shape (size-1 axes aside); ``rmw`` adds instead."""
    if dst.shape != src.shape:
        squeezed = [s for s in src.shape if s != 1]
        if squeezed != [s for s in dst.shape if s != 1]:
            raise refuse(
                "err_store_dst_shape_smaller_than_other_shape",
                f"dma of {src.label()} to a region of shape {dst.shape}, expected equal shapes; "
                "slice both sides alike",
            )
        if src.on_chip and not dst.on_chip and dst.indirect is None:
            dst = dst.reshape(src.shape)
        else:
            src = src.reshape(dst.shape)
    attrs: dict[str, Any] = {"raw": True} if src.dt is dst.dt and rmw is None else {}
    if rmw is not None:
        attrs["rmw"] = rmw
    cut = trace.region(mask, dst.shape) if mask is not None else None
    if cut is trace.EMPTY:
        return
    transfer(dst, src, attrs, cut)


def transfer(dst: Tensor, src: Tensor, attrs: dict[str, Any], cut: Any) -> Instruction:
    """Record a DMA of what a mask leaves: a box, or an array of booleans.

    Where the region reaches outside of its tensor, a mask that is no box becomes one DMA for each
    box it consists of, so that every element is checked and none outside is touched.
    """
    tracer = trace.current("dma")
    if isinstance(cut, tuple):
        return tracer.emit(table.DMA_COPY, (dst.slice_box(cut),), (src.slice_box(cut),), attrs)
    if cut is None:
        return tracer.emit(table.DMA_COPY, (dst,), (src,), attrs)
    if dst.oob or src.oob or dst.indirect or src.indirect:
        for box in trace.boxes(cut):
            last = tracer.emit(table.DMA_COPY, (dst.slice_box(box),), (src.slice_box(box),), attrs)
        return last
    return tracer.emit(table.DMA_COPY, (dst,), (src,), {**attrs, "mask": cut})
