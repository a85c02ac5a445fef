"""``nki.language``: memory operations, math and iterators, lowered to ``isa`` instructions.

Signatures are those of SDK 2.21 (aws-neuron-sdk v2.21.1, general/nki/api/nki/language/__init__.py).
Composite functions expand as the public tutorials do, so that costs and precision follow.
"""

from __future__ import annotations

import builtins
import linecache
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..device import dtypes
from ..device.dtypes import BOOL, FLOAT32, DType, promote, scalar_dtype, to_dtype
from ..device.errors import refuse, warn
from ..device.spec import GEN2, Engine
from ..instructions import arguments, copies, dma, recorder, scalar, tensor_engine, vector
from ..instructions.arguments import tile
from ..instructions.assignment import assign
from ..program import trace
from ..program.accumulation import Groups
from ..program.index import Index, is_integer
from ..program.view import View
from .buffers import sbuf
from .tensor import sizes_of

# --- types and limits -----------------------------------------------------------------------------
float32 = np.float32
float16 = np.float16
bfloat16 = dtypes.BFLOAT16.public
tfloat32 = dtypes.tfloat32
float8_e4m3 = dtypes.FLOAT8_E4M3.public
float8_e5m2 = dtypes.FLOAT8_E5M2.public
int32, int16, int8 = np.int32, np.int16, np.int8
uint32, uint16, uint8 = np.uint32, np.uint16, np.uint8
bool_ = np.bool_


class tile_size:
    """Tile limits of NeuronCore-v2 (nki/programming_model.rst)."""

    pmax = GEN2.partitions
    psum_fmax = GEN2.psum_free_max
    gemm_stationary_fmax = GEN2.stationary_free_max
    gemm_moving_fmax = GEN2.moving_free_max
    bn_stats_fmax = GEN2.bn_stats_free_max
    psum_min_align = GEN2.sbuf_align_bytes
    sbuf_min_align = GEN2.sbuf_align_bytes
    total_available_sbuf_size = GEN2.sbuf_usable_bytes


class par_dim(int):
    """``nl.par_dim(n)`` marks the partition axis in a shape with block axes before it."""


# --- creation -------------------------------------------------------------------------------------
_ASSIGNED = re.compile(r"^\s*([A-Za-z_]\w*)\s*=[^=]")
_names: dict[Any, str] = {}


def _name_at(source: Any) -> str:
    """The variable that a creation is assigned to, for messages and reports."""
    if source is None:
        return ""
    found = _names.get(source)
    if found is None:
        match = _ASSIGNED.match(linecache.getline(source.file, source.line))
        found = _names[source] = match.group(1) if match else ""
    return found


def _shape(shape: Any) -> tuple[tuple[int, ...], int]:
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    marked = [a for a, s in enumerate(sizes) if isinstance(s, par_dim)]
    for s in sizes:
        if not is_integer(s) or s < 1:
            raise refuse(
                "sim_shape",
                f"tensor shape {tuple(sizes)!r} has axis {s!r}, expected positive integers known "
                "while tracing; compute sizes from input shapes",
            )
    return tuple(int(s) for s in sizes), (marked[0] if marked else 0)


def _check_on_chip(shape: tuple[int, ...], paxis: int, dt: DType, kind: str) -> None:
    if len(shape) < 2 or len(shape) - paxis < 2:
        raise refuse(
            "sim_rank",
            f"Insufficient rank: {kind} tensor of shape {shape}, expected a partition axis and at "
            "least one free axis; add an axis of 1",
        )
    if shape[paxis] > GEN2.partitions:
        raise refuse(
            "err_num_partition_exceed_arch_limit",
            f"Size of partition dimension {shape[paxis]} exceeds architecture limitation of "
            f"{GEN2.partitions} for {kind} tensor of shape {shape}; tile the partition axis",
        )
    free = dt.itemsize * int(np.prod(shape[paxis + 1 :]))
    if kind == "psum" and free > GEN2.psum_bank_bytes:
        raise refuse(
            "err_size_of_dimension_exceed_arch_limit",
            f"psum tile of shape {shape} {dt} needs {free} bytes per partition, expected at most "
            f"{GEN2.psum_bank_bytes}, one bank; split the free axis into blocks",
        )


def ndarray(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **_: Any) -> View:
    """An uninitialised tensor in ``buffer`` (default SBUF)."""
    tracer = trace.current("nl.ndarray")
    sizes, paxis = _shape(shape)
    dt = to_dtype(dtype)
    where = sbuf if buffer is None else buffer
    kind = getattr(where, "kind", None)
    if kind is None:
        raise refuse(
            "sim_buffer",
            f"buffer {buffer!r}, expected nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm or an ncc "
            "allocation",
        )
    if kind == "shared_hbm" and not tracer.at_kernel_level():
        raise refuse(
            "err_shared_hbm_must_in_kernel_level",
            f"shared_hbm tensor of shape {sizes} is created in a loop, branch or called function, "
            "expected the kernel's own top level; create it first and pass it down",
        )
    if kind in ("sbuf", "psum"):
        _check_on_chip(sizes, paxis, dt, kind)
        if paxis:
            warn(
                "err_leading_dimension_of_tensor_must_be_partition",
                f"{kind} tensor of shape {sizes} has {paxis} block axes before its partition axis, "
                "which SDK 2.23 deprecates and later ones refuse; put the blocks on a free axis",
            )
    if kind == "shared_hbm":
        made = tracer.shared_storage(sizes, dt)
    else:
        made = tracer.storage(sizes, dt, kind, "local", name)
    made.source = tracer.place()
    made.name = name or _name_at(made.source)
    made.paxis = paxis if kind in ("sbuf", "psum") else 0
    place = getattr(where, "place", None)
    if place is not None:
        if kind == "psum":  # no initial value is possible: its first matmul overwrites
            made.groups = Groups(made.size, zeroed=False)
        place(made)
    return tracer.whole(made)


def full(
    shape: Any, fill_value: Any, dtype: Any, *, buffer: Any = None, name: str = "", **kw: Any
) -> View:
    """A tensor filled with a constant (a PSUM tile of zeros costs nothing: see nl.zeros)."""
    tensor = ndarray(shape, dtype, buffer=buffer, name=name, **kw)
    storage = tensor.storage
    if storage.address is not None:
        raise refuse(
            "err_tensor_creation_on_scratchpad_with_init_value_not_allowed",
            f"{storage.label()} is allocated directly and has an initial value, expected "
            "nl.ndarray; write it with nisa.memset",
        )
    if not storage.on_chip:
        raise refuse(
            "err_hbm_tensor_with_init_value_not_supported",
            f"{storage.label()} in HBM has an initial value, expected nl.ndarray; store the "
            "constant with nl.store(tensor, value)",
        )
    if storage.buffer == "psum" and fill_value == 0:
        storage.groups = storage.watcher = Groups(storage.size, zeroed=True)
        machine = trace.current("nl.zeros").machine
        if machine is not None:
            machine.run(copies.zero_fill(storage))
        return tensor
    copies.fill(View.blocks_last(storage), fill_value)
    return tensor


def zeros(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **kw: Any) -> View:
    """A tensor of zeros; in PSUM the idiom that starts a matmul accumulation group."""
    return full(shape, 0, dtype, buffer=buffer, name=name, **kw)


def ones(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **kw: Any) -> View:
    """A tensor of ones."""
    return full(shape, 1, dtype, buffer=buffer, name=name, **kw)


def zeros_like(a: View, dtype: Any = None, *, buffer: Any = None, name: str = "") -> View:
    """Zeros with the shape (and type) of ``a``."""
    return zeros(a.shape, a.dtype if dtype is None else dtype, buffer=buffer, name=name)


def empty_like(a: View, dtype: Any = None, *, buffer: Any = None, name: str = "") -> View:
    """An uninitialised tensor with the shape (and type) of ``a`` (SDK 2.22)."""
    return ndarray(a.shape, a.dtype if dtype is None else dtype, buffer=buffer, name=name)


# --- memory ---------------------------------------------------------------------------------------
def load(src: Any, *, mask: Any = None, dtype: Any = None) -> View:
    """HBM region -> new SBUF tile of the same shape (P first, at most 128), optionally cast."""
    source = tile(src, "load")
    if source.on_chip:
        raise refuse(
            "err_unsupported_memory",
            f"Expected operand 'src' of 'load' to be in address space 'hbm', got {source.label()}; "
            "use nl.copy between on-chip tensors",
        )
    while source.ndim < 2:  # a 1-D region is a column, one of its elements a (1, 1) tile
        source = source.expand_dims(source.ndim)
    if source.shape[0] > GEN2.partitions:
        raise refuse(
            "err_num_partition_exceed_arch_limit",
            f"Size of partition dimension {source.shape[0]} exceeds architecture limitation of "
            f"{GEN2.partitions} in load of {source.label()}; load {GEN2.partitions} rows at a time",
        )
    return dma.transfer(source, dtype, mask)


def store(dst: Any, value: Any, *, mask: Any = None) -> None:
    """SBUF tile (or a constant) -> HBM region of equal shape; casts to the HBM type."""
    target = tile(dst, "store")
    if target.on_chip:
        raise refuse(
            "err_unsupported_memory",
            f"Expected operand 'dst' of 'store' to be in address space 'hbm', got "
            f"{target.label()}; assign with dst[...] = value on chip",
        )
    if isinstance(value, (int, float, np.generic)):
        shape = target.shape if target.ndim > 1 else (1, *target.shape)
        value = copies.memset(shape, value, target.dtype)
    source = tile(value, "store")
    if not source.on_chip:
        raise refuse(
            "err_unsupported_memory",
            f"Expected operand 'value' of 'store' to be in address space 'sbuf', got "
            f"{source.label()}; copy between HBM tensors with nisa.dma_copy",
        )
    if source.storage.buffer == "psum":
        source = copies.tensor_copy(source)
    dma.move(target, source, mask)


def copy(src: Any, *, mask: Any = None, dtype: Any = None) -> View:
    """On-chip copy into a new SBUF tile, with a cast if ``dtype`` is given."""
    source = tile(src, "copy")
    if not source.on_chip:
        raise refuse(
            "err_unsupported_memory",
            f"copy got {source.label()}, expected a tile in sbuf or psum; load it with nl.load",
        )
    return copies.tensor_copy(source, mask=mask, dtype=dtype)


def load_transpose2d(src: Any, *, mask: Any = None, dtype: Any = None) -> View:
    """HBM [F, P] -> SBUF [P, F] by DMA (element-granular: slow on this core)."""
    source = tile(src, "load_transpose2d")
    if source.ndim != 2:
        raise refuse(
            "err_exceed_max_supported_dimension",
            f"load_transpose2d of {source.label()}, expected two axes; index the others first",
        )
    return dma.transposed(source, (1, 0), dtype, mask)


def partition_broadcast(source: View, shape: tuple[int, ...]) -> View:
    """One partition to ``shape[0]`` partitions: ones-matmul on TensorE, then a copy to SBUF.

    The product with a ones column is exact; each piece of 512 columns fills one PSUM bank.
    Integers take the same way as fp32, 32-bit ones as two halves.
    """
    rows = shape[0]
    row = source if source.storage.buffer == "sbuf" else copies.tensor_copy(source)
    if row.dt.is_int:
        return _integer_broadcast(row, shape)
    row = row.expand((1, *shape[1:])) if row.shape[1:] != shape[1:] else row
    flat = tensor_engine.collapsed(row)
    if flat.ndim != 2:
        flat = copies.tensor_copy(row).reshape((1, row.free_size))
    ones_row = copies.memset((1, rows), 1, row.dtype)
    out = ndarray((rows, flat.shape[1]), row.dtype)
    step = GEN2.moving_free_max
    for start in range(0, flat.shape[1], step):
        columns = slice(start, builtins.min(start + step, flat.shape[1]))
        piece = flat.slice_box((slice(0, 1), columns))
        assign(out.slice_box((slice(0, rows), columns)), tensor_engine.nc_matmul(ones_row, piece))
    return out.reshape(shape) if len(shape) != 2 else out


def _integer_broadcast(row: View, shape: tuple[int, ...]) -> View:
    """partition_broadcast of an integer row, exact: fp32 holds every value of up to 24 bits."""

    def spread(part: View) -> View:
        wide = partition_broadcast(copies.tensor_copy(part, dtype=np.float32), shape)
        return copies.tensor_copy(wide, dtype=row.dtype)

    if row.dt.itemsize < 4:
        return spread(row)
    high = vector.tensor_scalar(row, np.right_shift, 16)
    low = vector.tensor_scalar(row, np.bitwise_and, 0xFFFF)
    high = vector.tensor_scalar(spread(high), np.left_shift, 16)
    return vector.tensor_tensor(high, spread(low), np.bitwise_or)


def broadcast_to(src: Any, *, shape: Any) -> View:
    """numpy broadcasting (SDK 2.22); from one partition to many a ones-matmul on the device."""
    own, new = tile(src, "broadcast_to"), sizes_of((shape,), None)
    if own.ndim > len(new) >= 2 and all(s == 1 for s in own.shape[len(new) :]):
        own = own.reshape(own.shape[: len(new)])  # axes of an mgrid that are named, of size 1
    if own.on_chip and own.shape[0] == 1 and len(new) == own.ndim and new[0] > 1:
        return partition_broadcast(own, new)
    return own.expand(new)


def expand_dims(data: Any, axis: int) -> View:
    """A size-1 axis after the last one."""
    source = tile(data, "expand_dims")
    if axis not in (source.ndim, -1):
        raise refuse(
            "sim_expand_dims",
            f"expand_dims of {source.label()} at axis {axis}, expected {source.ndim} or -1: only "
            "positions after the last axis are supported",
        )
    return source.expand_dims(source.ndim)


# --- matmul and transpose -------------------------------------------------------------------------
def matmul(x: Any, y: Any, *, transpose_x: bool = False, mask: Any = None) -> View:
    """``x @ y``, or ``x.T @ y`` with x already [K, M] (transpose_x=True, no transpose needed).

    Result [M, N] fp32 in PSUM.
    """
    left = tile(x, "matmul")
    if not transpose_x:
        left = copies.tensor_copy(tensor_engine.nc_transpose(left, engine=Engine.TENSOR))
    return tensor_engine.nc_matmul(left, y, mask=mask)


def transpose(x: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """2-D transpose, both sides at most 128; result in SBUF."""
    source = tile(x, "transpose")
    if source.ndim != 2:
        raise refuse(
            "err_exceed_max_supported_dimension",
            f"transpose of {source.label()}, expected two axes; collapse the free axes first",
        )
    if builtins.max(source.shape) <= GEN2.vector_transpose_max:
        return tensor_engine.nc_transpose(source, dtype=dtype, mask=mask, engine=Engine.VECTOR)
    if source.storage.buffer == "psum":
        source = copies.tensor_copy(source)
    made = tensor_engine.nc_transpose(source, mask=mask, engine=Engine.TENSOR)
    return copies.copy_written(made, dtype)


# --- element-wise binary --------------------------------------------------------------------------
def _scalar_like(value: Any) -> bool:
    return isinstance(value, (int, float, np.generic))


def _broadcast_pair(name: str, x: View, y: View) -> tuple[View, View]:
    """Operands with one shape; partition broadcast is explicit work, free broadcast a view."""
    if x.ndim != y.ndim:
        low, high = (x, y) if x.ndim < y.ndim else (y, x)
        warn(
            "sim_trailing_broadcast",
            f"nl.{name} broadcasts {low.label()} over trailing axes of {high.label()}, which gave "
            "wrong results on the device (aws-neuron-sdk issue 1138); loop over the axis with "
            "(P, 1) vectors",
        )
        low = low.reshape((*low.shape, *(1,) * (high.ndim - low.ndim)))
        x, y = (low, y) if x.ndim < y.ndim else (x, low)
    try:
        shape = np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        raise refuse(
            "err_num_partition_mismatch" if x.shape[0] != y.shape[0] else "sim_broadcast",
            f"nl.{name} of {x.label()} and {y.label()}, expected shapes that broadcast; slice them "
            "alike",
        ) from None
    pair = []
    for view in (x, y):
        if view.shape[0] == 1 and shape[0] > 1:
            view = partition_broadcast(view, (shape[0], *view.shape[1:]))
        pair.append(view)
    return pair[0], pair[1]


def _binary(name: str, x: Any, y: Any, dtype: Any, mask: Any) -> View:
    """Lower a binary function to tensor_scalar or tensor_tensor."""
    if isinstance(x, Index) or isinstance(y, Index):
        raise refuse(
            "sim_operand_type",
            f"nl.{name} got an index expression, expected tensors or numbers; use nisa.iota",
        )
    if _scalar_like(x):
        return _with_scalar(name, tile(y, name), x, True, dtype, mask)
    if _scalar_like(y):
        return _with_scalar(name, tile(x, name), y, False, dtype, mask)
    a, b = _broadcast_pair(name, tile(x, name), tile(y, name))
    dt = _result_dtype(name, a.dt, b.dt) if dtype is None else to_dtype(dtype)
    if name == "divide":
        return _binary("multiply", a, vector.reciprocal(b, dtype=float32, mask=mask), dt, mask)
    if a.shape != b.shape:
        if b.free_size == 1 and name != "power":
            return vector.tensor_scalar(a, name, b, dtype=dt, mask=mask)
        if a.free_size == 1 and name != "power":
            return vector.tensor_scalar(b, name, a, True, dtype=dt, mask=mask)
        shape = tuple(np.broadcast_shapes(a.shape, b.shape))
        a, b = a.expand(shape), b.expand(shape)
    return vector.tensor_tensor(a, b, name, dtype=dt, mask=mask)


def _with_scalar(name: str, x: View, value: Any, reverse: bool, dtype: Any, mask: Any) -> View:
    dt = _result_dtype(name, x.dt, scalar_dtype(value)) if dtype is None else to_dtype(dtype)
    if name == "divide":
        if reverse:
            inverse = vector.reciprocal(x, dtype=float32, mask=mask)
            return vector.tensor_scalar(inverse, "multiply", value, dtype=dt, mask=mask)
        scale = float(np.float32(1.0) / np.float32(value))
        return vector.tensor_scalar(x, "multiply", scale, dtype=dt, mask=mask)
    return vector.tensor_scalar(x, name, value, reverse, dtype=dt, mask=mask)


_COMPARISONS = {"equal", "not_equal", "less", "less_equal", "greater", "greater_equal"}
_BOOLEAN = _COMPARISONS | {"logical_and", "logical_or", "logical_xor"}


def _result_dtype(name: str, a: DType, b: DType) -> DType:
    if name in _BOOLEAN:
        return BOOL
    if name == "divide" and not (a.is_float or b.is_float):
        return FLOAT32
    return promote(a, b)


def named(name: str, function: Callable) -> Callable:
    """Mark a function as operator ``name``, so that it can be passed as ``op=``."""
    function.__name__ = function.__qualname__ = name
    function.nki_name = name  # type: ignore[attr-defined]
    return function


def _make_binary(name: str, doc: str) -> Callable:
    def apply(x: Any, y: Any, *, dtype: Any = None, mask: Any = None) -> View:
        return _binary(name, x, y, dtype, mask)

    apply.__doc__ = f"Element-wise {doc}; numpy broadcasting, the partition axis at extra cost."
    return named(name, apply)


add = _make_binary("add", "x + y")
subtract = _make_binary("subtract", "x - y")
multiply = _make_binary("multiply", "x * y")
divide = _make_binary("divide", "x / y (reciprocal, then multiply)")
power = _make_binary("power", "x ** y")
maximum = _make_binary("maximum", "maximum")
minimum = _make_binary("minimum", "minimum")
bitwise_and = _make_binary("bitwise_and", "x & y of integers")
bitwise_or = _make_binary("bitwise_or", "x | y of integers")
bitwise_xor = _make_binary("bitwise_xor", "x ^ y of integers")
left_shift = _make_binary("left_shift", "x << y of integers")
right_shift = _make_binary("right_shift", "logical x >> y of integers")
logical_and = _make_binary("logical_and", "x and y")
logical_or = _make_binary("logical_or", "x or y")
logical_xor = _make_binary("logical_xor", "x xor y")
equal = _make_binary("equal", "x == y")
not_equal = _make_binary("not_equal", "x != y")
less = _make_binary("less", "x < y")
less_equal = _make_binary("less_equal", "x <= y")
greater = _make_binary("greater", "x > y")
greater_equal = _make_binary("greater_equal", "x >= y")
mod = _make_binary("mod", "x mod y, sign of y (SDK 2.22)")
fmod = _make_binary("fmod", "C fmod, sign of x (SDK 2.22)")


# --- element-wise unary ---------------------------------------------------------------------------
def _make_unary(name: str) -> Callable:
    def apply(x: Any, *, dtype: Any = None, mask: Any = None) -> View:
        return scalar.activation(name, tile(x, name), dtype=dtype, mask=mask)

    apply.__doc__ = f"Element-wise {name} on ScalarE, fp32 inside; input's type unless dtype."
    return named(name, apply)


exp = _make_unary("exp")
log = _make_unary("log")
sqrt = _make_unary("sqrt")
rsqrt = _make_unary("rsqrt")
square = _make_unary("square")
sigmoid = _make_unary("sigmoid")
relu = _make_unary("relu")
tanh = _make_unary("tanh")
silu = _make_unary("silu")
silu_dx = _make_unary("silu_dx")
gelu = _make_unary("gelu")
gelu_dx = _make_unary("gelu_dx")
gelu_apprx_tanh = _make_unary("gelu_apprx_tanh")
gelu_apprx_sigmoid = _make_unary("gelu_apprx_sigmoid")
softplus = _make_unary("softplus")
mish = _make_unary("mish")
erf = _make_unary("erf")
erf_dx = _make_unary("erf_dx")
sin = _make_unary("sin")
arctan = _make_unary("arctan")
sign = _make_unary("sign")
named("copy", copy)


def negative(x: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """``-x`` on VectorE."""
    source = tile(x, "negative")
    dt = source.dt if dtype is None else dtype
    return vector.tensor_scalar(source, "multiply", -1.0, dtype=dt, mask=mask)


def invert(x: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """``~x`` of integers, on VectorE."""
    return vector.tensor_scalar(tile(x, "invert"), "invert", 0, dtype=dtype, mask=mask)


def reciprocal(x: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """``1 / x`` on VectorE (SDK 2.22)."""
    return vector.reciprocal(x, dtype=dtype, mask=mask)


named("negative", negative)
named("invert", invert)
named("reciprocal", reciprocal)


# --- reductions and composites --------------------------------------------------------------------
def _make_reduction(name: str, op: str) -> Callable:
    def apply(
        x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False
    ) -> View:
        return vector.tensor_reduce(
            op, tile(x, name), axis, dtype=dtype, mask=mask, keepdims=keepdims
        )

    apply.__doc__ = f"Reduce the last free axes with {op}, fp32 inside; result at least rank 2."
    return named(name, apply)


sum = _make_reduction("sum", "add")
max = _make_reduction("max", "maximum")
min = _make_reduction("min", "minimum")
prod = _make_reduction("prod", "multiply")


def _count(x: View, axis: Any) -> int:
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    return int(np.prod([x.shape[a] for a in axes]))


def mean(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False) -> View:
    """Mean over the last free axes; integers give fp32."""
    source = tile(x, "mean")
    dt = (source.dt if source.dt.is_float else FLOAT32) if dtype is None else to_dtype(dtype)
    total = vector.tensor_reduce("add", source, axis, dtype=float32, mask=mask, keepdims=keepdims)
    return vector.tensor_scalar(total, "multiply", 1.0 / _count(source, axis), dtype=dt)


def softmax(
    x: Any, axis: Any, *, dtype: Any = None, compute_dtype: Any = None, mask: Any = None
) -> View:
    """Softmax over the last free axes: negated max, exp with bias and sum, reciprocal, product."""
    source = tile(x, "softmax")
    dt = source.dt if dtype is None else to_dtype(dtype)
    inner = FLOAT32 if compute_dtype is None else to_dtype(compute_dtype)
    peak = vector.tensor_reduce("maximum", source, axis, dtype=float32, negate=True, mask=mask)
    total = ndarray((source.shape[0], 1), float32)
    if peak.free_size == 1:
        exps = scalar.activation_reduce(
            "exp", source, bias=peak, reduce_op="add", reduce_res=total, dtype=inner, mask=mask
        )
        inverse = vector.reciprocal(total, dtype=float32)
        return vector.tensor_scalar(exps, "multiply", inverse, dtype=dt, mask=mask)
    shape = (*peak.shape, *(1,) * (source.ndim - peak.ndim))
    shifted = vector.tensor_tensor(
        source, peak.reshape(shape).expand(source.shape), "add", dtype=float32, mask=mask
    )
    exps = scalar.activation("exp", shifted, dtype=inner, mask=mask)
    sums = vector.tensor_reduce("add", exps, axis, dtype=float32, mask=mask)
    inverse = vector.reciprocal(sums).reshape(shape).expand(source.shape)
    return vector.tensor_tensor(exps, inverse, "multiply", dtype=dt, mask=mask)


def rms_norm(
    x: Any,
    w: Any,
    axis: Any,
    n: int,
    epsilon: float = 1e-6,
    *,
    dtype: Any = None,
    compute_dtype: Any = None,
    mask: Any = None,
) -> View:
    """``x * rsqrt(sum(x^2) / n + epsilon) * w`` over the free axis, fp32 inside."""
    source, weight = tile(x, "rms_norm"), tile(w, "rms_norm")
    dt = source.dt if dtype is None else to_dtype(dtype)
    total = ndarray((source.shape[0], 1), float32)
    scalar.activation_reduce(
        "square", source, reduce_op="add", reduce_res=total, dtype=float32, mask=mask
    )
    eps = copies.memset((source.shape[0], 1), epsilon, float32)
    scale = scalar.activation("rsqrt", total, scale=1.0 / n, bias=eps)
    normed = vector.tensor_scalar(source, "multiply", scale, dtype=float32, mask=mask)
    return _binary("multiply", normed, weight, dt, mask)


def where(condition: Any, x: Any, y: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """``x`` where the data tile ``condition`` is nonzero, else ``y`` (a tile or a number)."""
    cond, first = tile(condition, "where"), tile(x, "where")
    src = [cond.expand(first.shape) if cond.shape != first.shape else cond, first]
    constant, dt = None, first.dt
    if _scalar_like(y):
        constant = arguments.number(y)
    else:
        other = tile(y, "where")
        src.append(other.expand(first.shape) if other.shape != first.shape else other)
        dt = promote(first.dt, other.dt)
    attrs = copies.SelectAttrs(on_false=constant)
    final = arguments.result_type(dtype, dt)
    return recorder.fresh(copies.SELECT, first.shape, final, tuple(src), attrs, mask)


# --- iterators and launch grid --------------------------------------------------------------------
affine_range = trace.observe_loop("affine", "affine_range")
sequential_range = trace.observe_loop("sequential", "sequential_range")


def static_range(*args: int, **_: Any) -> range:
    """``nl.static_range(...)``: fully unrolled while tracing; indices are Python ints."""
    return range(*(int(a) for a in args))


def program_id(axis: int) -> int:
    """Index of the running grid instance on ``axis``."""
    index = trace.current("nl.program_id").grid_index
    if not 0 <= axis < len(index):
        raise refuse(
            "sim_program_axis",
            f"program_id({axis}) in a launch grid of rank {len(index)}, expected an axis below it; "
            "launch with kernel[grid](...)",
        )
    return index[axis]


def num_programs(axes: Any = None) -> int:
    """Number of grid instances along ``axes`` (default: all)."""
    grid = trace.current("nl.num_programs").program.grid
    if axes is None:
        return int(np.prod(grid, dtype=int))
    chosen = axes if isinstance(axes, (tuple, list)) else (axes,)
    return int(np.prod([grid[a] for a in chosen], dtype=int))


def program_ndim() -> int:
    """Rank of the launch grid."""
    return len(trace.current("nl.program_ndim").program.grid)
