"""Convenience functions of ``nki.language``; most of them are operators of instructions, too.

Each allocates its result in SBUF (a product or transpose: in PSUM) and records ``nisa``
instructions. The vendor's expansions are not published; these are the shortest. Two operands have
equal shapes, or one is a number or one value a partition.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from ..device.dtypes import FLOAT32, UINT8, UINT16, UINT32, DType, Shape
from ..device.errors import refuse, warn
from ..device.spec import CORE
from ..device.target import needs
from ..instructions.alu import ACTIVATIONS, BINARY, LATER, named
from ..instructions.arguments import flag, free_axes, real, several, whole
from ..instructions.vector import TENSOR_TENSOR
from ..language import elementwise as older
from ..language.operands import REDUCTIONS, fitted
from ..program import trace
from ..program.view import View, called, form_of
from . import compute, copies, products, selection
from .creation import ndarray, new
from .operands import USUAL, alike, engine, naming, put, tensor
from .tensor import POWERS
from .types import element_type, psum, sbuf


def _loaded(x: View) -> View:
    """``x``, which must be a tile."""
    if not x.on_chip:
        raise refuse(
            "err_unsupported_memory",
            f"nl function of {x.label()}, expected a tile in SBUF or PSUM; load it first, tile = "
            f"nl.load({called(x)}), or copy it into a tile with nisa.dma_copy",
        )
    return x


def _type(x: View, dtype: Any) -> DType:
    return x.dt if dtype is None else element_type(dtype)


def _result(x: View, dtype: Any, shape: Any = None) -> Any:
    """A new SBUF tile in the shape of ``x`` and its type, unless ``dtype`` says another."""
    return new(_loaded(x).shape if shape is None else shape, _type(x, dtype), sbuf)


def _expanded(function: Callable) -> Callable:
    """The same function with a warning that its intermediate tiles are this simulator's choice."""

    fitting = fitted(function)

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        warn(
            "sim_expansion",
            f"nl.{function.__name__} is several instructions, and which ones, with intermediate "
            "results of which types, is not published, expected instructions of nisa; here they "
            "are the shortest that compute it, in fp32",
            advice=True,
        )
        return fitting(*args, **kwargs)

    return told


def _token(name: str) -> Callable:
    """An object that names an operator, for functions that are built from others."""
    token = named(name, lambda *_: None)
    token.__doc__ = f"For ``op=nl.{name}`` of an instruction; a call does nothing."
    return token


# --- two operands ---------------------------------------------------------------------------------
def _binary_function(name: str, summary: str) -> Callable:
    later, own, call = name in LATER, f"nl.{name}", naming(f"nl.{name}(x, y)")

    def function(x: Any, y: Any, dtype: Any = None) -> Any:
        if later:
            needs(own, 4)
        a, b = (x, y) if isinstance(x, View) else (y, x)
        source = tensor(a, own)
        if name == "power" and not isinstance(y, View):
            warn(
                "sim_power",
                "nl.power of a tile and a number is not supported by the release notes of SDK 2.29 "
                f"and 2.30, expected others; write {POWERS}",
            )
        with call:
            if isinstance(b, View):
                same = x.shape == y.shape
                if same or not (_is_column(x, y) or _is_column(y, x)):
                    if not same:
                        alike(call.expression, *sorted((x, y), key=lambda one: -one.size))
                    made = _result(source, dtype)
                    known: Any = trace.active()
                    form = (own, form_of(made), form_of(x), form_of(y))
                    if attrs := known.attrs.get(form):  # such a call once more
                        put(TENSOR_TENSOR, (made,), (x, y), attrs)
                        return made
                    attrs = compute.tensor_tensor(made, x, y, function)._made.attrs
                    if same and 0 not in form and name in USUAL:
                        known.attrs[form] = attrs
                    return made
                source, b = (y, _wide(x)) if _is_column(x, y) else (x, _wide(y))
            made = _result(source, dtype)
            compute.tensor_scalar(made, source, function, b, reverse0=source is not x)
            return made

    function.__doc__ = f"{summary}, of tiles of equal shape, or a tile and a number or column."
    return named(name, function)


def _is_column(x: View, beside: View) -> bool:
    """Whether ``x`` has one element a partition and ``beside`` more: tensor_scalar stretches it.

    A published run on a trn2 took nl.subtract of [128, 512] and [128, 1].
    """
    return x.on_chip and x.free_size == 1 < beside.free_size and x.shape[0] == beside.shape[0]


def _wide(x: View) -> View:
    """A column as fp32, which arithmetic asks of it."""
    if x.dt is FLOAT32 or x.dt.is_int:
        return x
    made = new(x.shape, FLOAT32, sbuf)
    copies.tensor_copy(made, x)
    return made


OF_MAGNITUDE = {
    "abs_max": "The one of larger magnitude (gen4)",
    "abs_min": "The one of smaller magnitude (gen4)",
}
FUNCTIONS: dict[str, Callable] = {
    name: _binary_function(name, s) for name, s in (BINARY | OF_MAGNITUDE).items()
}


def divide(x: Any, y: Any, dtype: Any = None) -> Any:
    """x / y as a reciprocal and a product: the hardware has no division."""
    whole_tiles = isinstance(x, View) and isinstance(y, View) and not _is_column(y, x)
    if whole_tiles:
        warn(
            "sim_divide",
            "nl.divide(x, y) of two tiles, which no engine computes, expected a reciprocal and a "
            "product; write nl.multiply(x, nl.reciprocal(y))",
        )
    else:
        warn(
            "sim_division",
            "nl.divide(x, y): a run on a trn2 took it with a column, and another trn2's compiler "
            "refuses all of it, expected a reciprocal and a product; write nl.multiply(x, "
            "nl.reciprocal(y))",
        )
    if not isinstance(y, View):
        by = real(y, "nl.divide: y")
        inverse = 1.0 / by if by else math.copysign(math.inf, by)  # as the reciprocal of a tile
        return FUNCTIONS["multiply"](x, inverse, dtype)
    with naming("nl.divide(x, y)"):
        inverse = new(y.shape, FLOAT32, sbuf)
        compute.reciprocal(inverse, y)
        made = _result(x if isinstance(x, View) else y, dtype)
        if whole_tiles:
            compute.tensor_tensor(made, x, inverse, FUNCTIONS["multiply"])
        else:
            data, by = (x, inverse) if isinstance(x, View) else (inverse, x)
            compute.tensor_scalar(made, data, FUNCTIONS["multiply"], by)
        return made


# --- one operand ----------------------------------------------------------------------------------
def _unary(name: str, record: Callable[[Any, View], Any], summary: str) -> Callable:
    def function(x: View, dtype: Any = None) -> Any:
        with naming(f"nl.{name}(x)"):
            made = _result(x, dtype)
            record(made, x)
            return made

    function.__doc__ = f"{summary}."
    return named(name, function)


def _activation_function(name: str) -> Callable:
    def record(made: Any, x: View) -> None:
        compute.activation(made, FUNCTIONS[name], x)

    return _unary(name, record, f"``{name}`` of every element, on ScalarE")


OTHERWISE = ("abs", "copy", "reciprocal", "rsqrt", "sin")  # on other engines, or in several steps
FUNCTIONS |= {name: _activation_function(name) for name in ACTIVATIONS if name not in OTHERWISE}


def _with_number(operator: str, value: float) -> Callable[[Any, View], Any]:
    """One pass of VectorE with a number."""
    return lambda made, x: compute.tensor_scalar(made, x, FUNCTIONS[operator], value)


_abs = _with_number("abs", 0.0)


def _rsqrt(made: Any, x: View) -> None:
    compute.tensor_scalar(made, x, FUNCTIONS["rsqrt"], 0.0, engine=engine.gpsimd)


FUNCTIONS |= {
    name: _unary(name, record, summary)
    for name, record, summary in (
        ("abs", _abs, "Magnitudes"),
        ("rsqrt", _rsqrt, "1 / sqrt(x), on GpSimdE: no operand in PSUM"),
        ("reciprocal", compute.reciprocal, "1 / x, on VectorE"),
        ("negative", _with_number("multiply", -1.0), "-x"),
        (
            "invert",
            lambda made, x: _with_number("bitwise_xor", (1 << 8 * x.dt.itemsize) - 1)(made, x),
            "All bits turned over",
        ),
        ("logical_not", _with_number("equal", 0.0), "1 where x is zero"),
        ("copy", copies.tensor_copy, "A copy in SBUF, bit-exact between equal types"),
    )
}


# --- reductions -----------------------------------------------------------------------------------
def _kept_shape(x: View, axis: Any, keepdims: bool) -> Shape:
    axes = free_axes(axis, x.ndim, "a reduction")
    if flag(keepdims, "keepdims"):
        return tuple(1 if a in axes else s for a, s in enumerate(x.shape))
    left = tuple(s for a, s in enumerate(x.shape) if a not in axes)
    return left if len(left) > 1 else (*left, 1)


def _reduction(name: str, operator: str) -> Callable:
    def function(x: View, axis: Any, dtype: Any = None, keepdims: bool = False) -> Any:
        made = _result(x, dtype, _kept_shape(x, axis, keepdims))
        compute.tensor_reduce(made, FUNCTIONS[operator], x, axis)
        return made

    function.__doc__ = f"``{name}`` over the last free axes, in fp32."
    return named(name, function)


FUNCTIONS |= {name: _reduction(name, operator) for name, operator in REDUCTIONS.items()}


def all(x: View, axis: Any, dtype: Any = None) -> Any:
    """1 where all elements along the last free axes are nonzero."""
    return older.all(_loaded(x), axis, dtype=_type(x, dtype))


def mean(x: View, axis: Any, dtype: Any = None, keepdims: bool = False) -> Any:
    """Mean over the last free axes, in fp32."""
    return older.mean(_loaded(x), axis, dtype=_type(x, dtype), keepdims=keepdims)


def var(x: View, axis: Any, dtype: Any = None, keepdims: bool = False) -> Any:
    """Population variance over the last free axes, in fp32; the axes always stay, with size 1."""
    free_axes(axis, x.ndim, "nl.var")
    return older.var(_loaded(x), axis, dtype=_type(x, dtype)).reshape(_kept_shape(x, axis, True))


def softmax(x: View, axis: Any = -1, dtype: Any = None) -> Any:
    """exp(x - max) / sum over the last free axes: one pass on ScalarE sums while it computes."""
    return older.softmax(_loaded(x), axis, dtype=_type(x, dtype))


def rms_norm(
    x: View,
    w: View,
    axis: Any,
    n: int,
    epsilon: float = 1e-06,
    dtype: Any = None,
    compute_dtype: Any = None,
) -> Any:
    """x / sqrt(sum(x^2) / n + epsilon) * w, ``w`` of the shape of x."""
    wide = FLOAT32 if compute_dtype is None else element_type(compute_dtype)
    squares, total = new(x.shape, wide, sbuf), new((x.shape[0], 1), FLOAT32, sbuf)
    compute.activation_reduce(squares, FUNCTIONS["square"], x, FUNCTIONS["add"], total)
    count = max(1, whole(n, "rms_norm n"))
    steps = (FUNCTIONS["multiply"], 1.0 / count, False, FUNCTIONS["add"], epsilon)
    compute.tensor_scalar(total, total, *steps)
    _rsqrt(total, total)
    made = _result(x, dtype)
    multiply = FUNCTIONS["multiply"]
    compute.scalar_tensor_tensor(made, x, multiply, total, multiply, w)
    return made


# --- selection, shapes, randomness ----------------------------------------------------------------
def where(condition: View, x: Any, y: Any, dtype: Any = None) -> Any:
    """Choose ``x`` where the condition is nonzero, else ``y``; tiles or numbers."""
    given = next((v for v in (x, y) if isinstance(v, View)), None)
    own = FLOAT32 if given is None else given.dt
    made = _result(condition, own if dtype is None else dtype)
    predicate = condition
    if condition.dt not in (UINT8, UINT16, UINT32):
        predicate = new(condition.shape, UINT8, sbuf)
        compute.tensor_scalar(predicate, condition, FUNCTIONS["not_equal"], 0.0)
    _put(made, y)
    if isinstance(x, View) and x.dt is not made.dt:
        wide = new(x.shape, made.dt, sbuf)
        copies.tensor_copy(wide, x)
        x = wide
    copies.tensor_copy_predicated(made, x, predicate)
    return made


OF_OLDER = older.SEVERAL | {
    "sin": (
        lambda x, dt, choose: older.shifted_sine(x, 0.0, dt),
        "The sine, its argument reduced first",
    )
}


def _of_older(name: str) -> Callable:
    """A function that records what the older language's does."""
    make, summary = OF_OLDER[name]

    def function(x: View, dtype: Any = None) -> Any:
        with naming(f"nl.{name}(x)"):
            return make(_loaded(x), _type(x, dtype), where)

    function.__doc__ = f"{summary}."
    return named(name, function)


def _put(made: Any, value: Any) -> None:
    if isinstance(value, View):
        copies.tensor_copy(made, value)
    else:
        number = real(value, "nl function operand")
        copies.memset(made, int(number) if made.dt.is_int else number)


def dropout(x: View, rate: Any, dtype: Any = None) -> Any:
    """``x`` with elements set to zero with probability ``rate``."""
    made = _result(x, dtype)
    selection.dropout(made, x, rate)
    return made


def rand(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> Any:
    """Uniform numbers in [0, 1)."""
    made = ndarray(shape, dtype, buffer, name)
    bits = new(shape, UINT32, sbuf)
    selection.rng(bits)
    # 24 bits, which fp32 holds exactly, so that the result stays below 1
    few = new(shape, UINT32, sbuf)
    compute.tensor_scalar(few, bits, FUNCTIONS["right_shift"], 8)
    compute.tensor_scalar(made, few, FUNCTIONS["multiply"], 2.0**-24)
    return made


def random_seed(seed: Any) -> None:
    """Seed of the random functions that follow: a (1, 1) tile."""
    selection.set_rng_seed(seed)


def expand_dims(x: View, axis: int) -> Any:
    """A view with a new axis of size 1."""
    return x.expand_dim(axis)  # type: ignore[attr-defined]


def broadcast_to(x: View, shape: Any, dtype: Any = None) -> Any:
    """``x`` stretched to ``shape``: along free axes a view, over partitions a copy (a product)."""
    source: Any = x
    if len(several(shape, "shape of nl.broadcast_to")) != source.ndim:
        raise refuse(
            "sim_broadcast",
            f"nl.broadcast_to of {source.label()} to {tuple(shape)}, expected as many axes; "
            "reshape it first",
        )
    if source.on_chip and source.shape[0] != shape[0]:
        if source.shape[0] != 1:
            raise refuse(
                "sim_broadcast",
                f"nl.broadcast_to of {source.label()} to {tuple(shape)}, expected 1 or {shape[0]} "
                "partitions; load a column as a row, with nl.load_transpose2d, or turn it with "
                "nl.copy(nl.transpose(x))",
            )
        source = _over_partitions(source, whole(shape[0], "shape of nl.broadcast_to"))
    for axis, size in enumerate(shape):
        if source.shape[axis] != size:
            source = source.broadcast(axis, size)
    if dtype is not None and element_type(dtype) is not source.dt:
        made = new(source.shape, element_type(dtype), sbuf)
        copies.tensor_copy(made, source)
        return made
    return source


def _over_partitions(row: Any, partitions: int) -> Any:
    """Copy one partition to all: 32 at a time by a shuffle, which keeps bits unchanged."""
    made = new((partitions, *row.shape[1:]), row.dt, sbuf)
    lanes = [0] * CORE.quadrant_partitions
    for start in range(0, partitions, CORE.quadrant_partitions):
        stop = min(partitions, start + CORE.quadrant_partitions)
        shape, steps = (stop - start, *row.shape[1:]), (0, *row.strides[1:])
        rows = row._with(row.offset, shape, steps, None, None)
        copies.nc_stream_shuffle(made[start:stop], rows, lanes)
    return made


def gather_flattened(data: View, indices: View, axis: int = 0, dtype: Any = None) -> Any:
    """``data`` (P, F...) read at ``indices`` (uint32, (P, n)) of its flattened free axes."""
    made = new(indices.shape, data.dt, sbuf)
    copies.nc_n_gather(made, data, indices)
    return made if dtype is None else FUNCTIONS["copy"](made, dtype)


# --- TensorE --------------------------------------------------------------------------------------
def matmul(x: View, y: View, transpose_x: bool = False) -> Any:
    """``x.T @ y`` in PSUM, x (K, M) and y (K, N) in SBUF; other forms are not supported."""
    if not transpose_x and x.on_chip:  # else its memory is told first
        raise refuse(
            "sim_matmul_transpose",
            "nl.matmul without transpose_x=True fails in the vendor's compiler, expected x as "
            "(K, M), the contraction on partitions; write nl.matmul(x, y, transpose_x=True) for "
            "x.T @ y, and give nl.copy(nl.transpose(x)) as x for x @ y",
        )
    _refuse_narrow_result("nl.matmul", x.dt, "nisa.nc_matmul into a float32 tile in nl.psum")
    made = new((x.free_size, y.free_size), FLOAT32, psum)
    products.nc_matmul(made, x, y)
    return made


def _refuse_narrow_result(name: str, dt: DType, instead: str) -> None:
    """Results have the operands' type, and TensorE of gen2 writes float32 only.

    So the compiler of nki 0.6 refuses them (nki-samples, contributed/decode_attention.py).
    """
    if CORE.number == 2 and dt is not FLOAT32:
        raise refuse(
            "sim_narrow_product",
            f"{name} makes its result {dt.name}, the type of its operands, which TensorE of gen2 "
            f"does not write, expected float32; use {instead}",
        )


def transpose(x: View, dtype: Any = None) -> Any:
    """(P, F) to (F, P) in PSUM, on TensorE."""
    own = element_type(dtype or x.dt)
    _refuse_narrow_result("nl.transpose", own, "dtype=nl.float32")
    made = new((x.free_size, x.shape[0]), own, psum)
    products.nc_transpose(made, x, engine=engine.tensor)
    return made


COMPOSED = (divide, mean, var, softmax, rms_norm, where, dropout, rand)  # by the author's choice
OTHERS = (all, random_seed, expand_dims, broadcast_to, gather_flattened, matmul, transpose)
FUNCTIONS |= {made.__name__: _expanded(made) for made in COMPOSED}
FUNCTIONS |= {name: _expanded(_of_older(name)) for name in OF_OLDER}
FUNCTIONS |= {made.__name__: made for made in OTHERS}
FUNCTIONS |= {name: _token(name) for name in ("bypass", "average", "prelu")}
