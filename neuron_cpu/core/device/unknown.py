"""Names that NKI does not have, answered with those that it has.

Whoever comes from numpy, PyTorch or CUDA writes ``nl.dot``, ``tile.T`` or ``np.mean(tile)``, and so
does every language model. One sentence refuses each and names the call that does it. An answer
holds for both languages unless it is a pair: for ``neuronxcc.nki`` first, for ``nki`` second.
"""

import difflib
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from .errors import NkiError, current_place

Answer = str | tuple[str, str]


class UnknownName(NkiError, AttributeError):
    """A name that a module or a tile of NKI lacks; an AttributeError, so ``hasattr`` is False."""


class ForeignCall(NkiError, TypeError):
    """A tile handed to an operator or to a function of another library."""


_MATMUL = (
    "nl.matmul(x, y), or nisa.nc_matmul(stationary, moving) with the contraction on partitions",
    "nisa.nc_matmul(dst, stationary, moving), with the contraction on partitions and dst in PSUM",
)
_CLAMP = (
    "nl.minimum(nl.maximum(x, low), high), or one nisa.tensor_scalar with nl.maximum and nl.minimum"
)
_VALUES = "nl.device_print, as a tile has no values while a kernel is traced"
_NEW = "nl.ndarray(shape, dtype, buffer=nl.sbuf), and nl.psum for products"
_CONSTANT = "nl.full, nl.zeros or nl.ones, and nl.load for data that the kernel gets"
_CAST = ("nl.copy(x, dtype=...)", "nisa.tensor_copy(dst, src) into a tile of the other type")
_TURN = (
    "nl.transpose(x) or nisa.nc_transpose, and nl.load_transpose2d for a tensor in HBM",
    "nisa.nc_transpose(dst, data), or nisa.dma_transpose for a tensor in HBM",
)
_JOIN = "a tile of the joint shape from nl.ndarray, with each part written into a slice of it"
_PARTS = "slices, tile[:, a:b]: they are views and cost nothing"
_MASKED = "nisa.affine_select for masks of index arithmetic, nl.where for a tile of conditions"
_REDUCE = ("nl.sum, nl.max or nisa.tensor_reduce(op, data, axis)",
           "nisa.tensor_reduce(dst, op, data, axis)")  # fmt: skip
_NORM = "nisa.bn_stats and nisa.bn_aggr for mean and variance, then nl.rsqrt"
_LOOP = ("nl.affine_range, or nl.sequential_range where iterations depend on each other",
         "Python's range, or nl.affine_range")  # fmt: skip
_RANK = "nl.program_id(axis), and nl.num_programs(axis) for their number"
_SYNC = (
    "nothing: engines wait for the data that they read",
    "nothing between engines, which wait for their data; nisa.core_barrier between two cores",
)
_MOVE = ("nl.load(x_hbm), nl.store(x_hbm, tile) or nisa.dma_copy(dst=..., src=...)",
         "nisa.dma_copy(dst, src)")  # fmt: skip
_COPY = ("nl.copy(x) or nisa.tensor_copy(x)", "nisa.tensor_copy(dst, src)")
_TOP = "nisa.max8, nisa.nc_find_index8 and nisa.nc_match_replace8, eight values at a time"
_ROUND = "nl.floor(nl.add(x, 0.5)), or nl.trunc, nl.ceil and nl.floor"
_LOG = "nl.log(x) times a constant"
_INDICES = ("nl.arange(n)[:, None] in subscripts, nisa.iota for a tile of numbers",
            "slices and nl.ds in subscripts, nisa.iota for a tile of numbers")  # fmt: skip
_GATHER = ("nl.load of rows that an index tile names, or nisa.local_gather",
           "nisa.dma_copy of a tensor's .ap(vector_offset=...), or nisa.local_gather")  # fmt: skip
_REPEAT = "nl.broadcast_to(x, shape), or a second product with a tile of ones for partitions"
_WIDTHS = "nl.float32, nl.bfloat16, nl.float16 or an fp8 type: no type has 64 bits"
_WHOLE = "nl.int32, nl.int16, nl.int8 or their unsigned forms: no type has 64 bits"
_TWO = ("nl functions, or nisa.tensor_tensor(x, y, op)", "nisa.tensor_tensor(dst, x, y, op)")
_ACT = ("nisa.activation(op=nl.exp, data=x), which computes op(scale * x + bias)",
        "nisa.activation(dst, op=nl.exp, data=x), which computes op(scale * x + bias)")  # fmt: skip
_AXIS = "tile.shape[0], the partitions; a tile is no sequence"

# Names, separated by blanks -> what to use.
_TABLE: dict[str, Answer] = {
    "dot mm bmm einsum linear tensordot inner outer vdot dense gemm mv addmm baddbmm mma": _MATMUL,
    "clamp clip clamp_min clamp_max hardtanh relu6 hardsigmoid": _CLAMP,
    "value values item tolist data get print printf debug detach cpu asarray asnumpy": _VALUES,
    "empty alloc allocate buffer tile tensor Tensor make_tensor new_empty alloc_tensor": _NEW,
    "local_tensor shared_memory local smem register zeros_tile empty_tile": _NEW,
    "array constant scalar const eye identity linspace logspace new_zeros tri": _CONSTANT,
    "cast astype to type_as convert convert_element_type half type asdtype": _CAST,
    "T t mT H transpose_ permute swapaxes moveaxis transpose2d adjoint rot90": _TURN,
    "cat concat concatenate stack hstack vstack dstack append block_diag column_stack": _JOIN,
    "split chunk unbind tensor_split array_split hsplit vsplit narrow index slice_": _PARTS,
    "masked_fill tril triu causal_mask mask masked_select tril_ triu_ select choose if_": _MASKED,
    "amax reduce_max": "nl.max(x, axis), or nisa.tensor_reduce with nl.maximum",
    "amin reduce_min": "nl.min(x, axis), or nisa.tensor_reduce with nl.minimum",
    "reduce reduce_sum tensor_sum nansum count_nonzero norm l2norm": _REDUCE,
    "argmax argmin topk sort argsort kthvalue max_index top_k maxk": _TOP,
    "layer_norm layernorm batch_norm group_norm instance_norm var_mean": _NORM,
    "rmsnorm normalize": "nl.rms_norm, or nl.square, nl.mean and nl.rsqrt",
    "std stddev": "nl.sqrt(nl.var(x, axis))",
    "cumsum cumprod scan cummax associative_scan prefix_sum": "nisa.tensor_tensor_scan",
    "logsumexp log_softmax": "nl.max, nl.exp, nl.sum and nl.log, the maximum subtracted first",
    "log2 log10 log1p": _LOG,
    "exp2 expm1": "nl.exp(x), the argument times ln 2 or the result minus 1",
    "pow float_power": "nl.power(x, y)",
    "sub": "nl.subtract(x, y)",
    "mul": "nl.multiply(x, y)",
    "div true_divide": "nl.divide(x, y)",
    "floor_divide floordiv": "nl.floor(nl.divide(x, y))",
    "remainder": "nl.mod(x, y)",
    "neg": "nl.negative(x)",
    "absolute fabs": "nl.abs(x)",
    "rcp recip inv inverse": "nl.reciprocal(x)",
    "lt": "nl.less(x, y)",
    "le": "nl.less_equal(x, y)",
    "gt": "nl.greater(x, y)",
    "ge": "nl.greater_equal(x, y)",
    "eq": "nl.equal(x, y)",
    "ne": "nl.not_equal(x, y)",
    "not_ bitwise_not logical_negate": "nl.invert(x), or nl.logical_not(x)",
    "bitwise_left_shift shl": "nl.left_shift(x, n)",
    "bitwise_right_shift shr": "nl.right_shift(x, n)",
    "swish": "nl.silu(x)",
    "gelu_tanh gelu_new": "nl.gelu_apprx_tanh(x)",
    "quick_gelu": "nl.gelu_apprx_sigmoid(x)",
    "leaky_relu elu selu celu": "nl.maximum(x, nl.multiply(x, slope)) and nl.exp",
    "atan": "nl.arctan(x)",
    "asin acos atan2 sinh cosh asinh acosh atanh arcsin arccos": "nl.arctan, nl.exp and nl.sqrt",
    "fma mad addcmul": "nisa.scalar_tensor_tensor, or nl.add(nl.multiply(x, y), z)",
    "lerp": "nl.add(x, nl.multiply(w, nl.subtract(y, x)))",
    "round rint around nearbyint": _ROUND,
    "isnan": "nl.not_equal(x, x)",
    "isinf isfinite": "nl.equal(nl.abs(x), float('inf'))",
    "range_ prange parallel_range loop for_range tile_range arange_loop": _LOOP,
    "block_idx thread_idx blockIdx threadIdx pid get_program_id block_id core_id rank": _RANK,
    "grid_dim block_dim num_blocks num_cores gridDim blockDim": _RANK,
    "syncthreads sync barrier wait fence synchronize semaphore": _SYNC,
    "dma dma_start dma_load dma_store async_copy memcpy load_tile store_tile dma_transfer": _MOVE,
    "copy_ clone assign set": _COPY,
    "gather take index_select embedding scatter scatter_add take_along_axis indirect_load": _GATHER,
    "repeat tile_ expand_as repeat_interleave broadcast broadcast_in_dim": _REPEAT,
    "flip roll pad": "nl.load and nl.store of slices, or nisa.dma_copy between places in HBM",
    "range": _LOOP,
    "float64 double float fp64 complex64 complex128": _WIDTHS,
    "fp32 f32": "nl.float32",
    "bf16": "nl.bfloat16",
    "fp16 f16": "nl.float16",
    "fp8 float8 e4m3 f8e4m3": "nl.float8_e4m3",
    "e5m2 f8e5m2": "nl.float8_e5m2",
    "int64 uint64 long int uint": _WHOLE,
    "activate act activation_fn": _ACT,
    "conv1d conv2d convolution conv": "nisa.nc_matmul, one product for each tap of the filter",
    "flash_attention attention scaled_dot_product_attention": "nisa.nc_matmul and a softmax",
    "random randn normal uniform": "nl.rand(shape, dtype)",
    "unsqueeze": "nl.expand_dims(x, axis)",
    "squeeze flatten ravel view_as": "tile.reshape(shape)",
    "cdiv ceil_div": "-(-n // d), as sizes are Python's own numbers",
    "program num_program": _RANK,
    "jit": "nki.jit, the decorator of the package",
    "tile_max partition_max pmax P_MAX": "nl.tile_size.pmax, 128 partitions",
}
# Of `nisa`: the arithmetic of an instruction is an argument.
_ISA: dict[str, Answer] = {
    "add subtract multiply divide maximum minimum tensor_add tensor_mul tensor_sub": _TWO,
    "mul sub power tensor_multiply tensor_subtract elementwise": _TWO,
    "exp relu gelu silu sigmoid tanh sqrt rsqrt square log sin activation_exp": _ACT,
    "sum max min mean reduce_add tensor_max": _REDUCE,
    "matmul dot gemm mm matmult": _MATMUL,
    "transpose tensor_transpose": _TURN,
    "load store dma_load dma_store": _MOVE,
    "copy tensor_move mov": _COPY,
    "zeros fill set memzero full": ("nisa.memset(shape, value, dtype)", "nisa.memset(dst, value)"),
    "softmax": "nisa.tensor_reduce for the maximum and nisa.activation_reduce for the exponentials",
    "shuffle stream_shuffle": "nisa.nc_stream_shuffle",
    "select where": _MASKED,
    "broadcast": _REPEAT,
    "arange": _INDICES,
}


def _spread(table: Mapping[str, Answer]) -> dict[str, Answer]:
    return {name: answer for names, answer in table.items() for name in names.split()}


ANSWERS, ISA_ANSWERS = _spread(_TABLE), _spread(_ISA)
# What only one of the two languages has, and what the other one has for it.
_GONE: dict[str, Answer] = {
    "arange mgrid": ("", _INDICES[1]),
    "par_dim": ("", "nothing: axis 0 of a tile is always the partition axis"),
    "loop_reduce": ("", "nisa.tensor_tensor with nl.add, or products that accumulate in PSUM"),
    "tensor_copy_dynamic_src tensor_copy_dynamic_dst": ("", "nisa.tensor_copy of .ap(...)"),
    "spmd_dim nc": ("", "nl.program_id(0) of a kernel that is called as kernel[2](...)"),
    "static_cast": ("", _CAST[1]),
    "dynamic_range while_loop fori_loop": ("nl.sequential_range with a fixed count and masks", ""),
    "register_alloc register_load register_move register_store": (
        "nl.load of the number as an index tile: registers came with the language of SDK 2.29", ""),
}  # fmt: skip
GONE = _spread(_GONE)


def answer(name: str, current: bool, isa: bool = False) -> str | None:
    """What to use instead of ``name`` in one of the two languages; None where nothing is known."""
    for table in (ISA_ANSWERS if isa else {}, ANSWERS, GONE):
        found = table.get(name)
        text = found[current] if isinstance(found, tuple) else found
        if text:
            return text
    return None


def of_module(alias: str, names: Mapping[str, Any], current: bool) -> Callable[[str], NoReturn]:
    """A module's ``__getattr__``: refuses a name that it lacks. ``alias`` is nl or nisa."""

    def missing(name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"module {names['__name__']!r} has no attribute {name!r}")
        use = answer(name, current, alias == "nisa")
        other, room = ("nl", "language") if alias == "nisa" else ("nisa", "isa")
        package = names["__name__"].rpartition(".")[0]
        if use is None and name in vars(sys.modules.get(f"{package}.{room}", difflib)):
            use = f"{other}.{name}"
        if use is None:
            public = [known for known in names if not known.startswith("_")]
            close = difflib.get_close_matches(name, public, 3)
            use = " or ".join(f"{alias}.{known}" for known in close)
        mend = f"use {use}" if use else f"dir({alias}) lists what there is"
        raise UnknownName(
            "sim_unknown_name",
            f"{alias}.{name} does not exist, expected a name of {names['__name__']}; {mend}",
            current_place(),
        )

    return missing


# Operators of Python that neither language has: how they are written, and whose answer they get.
OPERATORS = {
    "matmul": ("@", "dot"),
    "rmatmul": ("@", "dot"),
    "floordiv": ("//", "floor_divide"),
    "rfloordiv": ("//", "floor_divide"),
    "mod": ("%", "remainder"),
    "rmod": ("%", "remainder"),
    "abs": ("abs()", "absolute"),
    "round": ("round()", "round"),
}


_NO_VALUES = "values, which a tile has none of while a kernel is traced"


class Foreign:
    """What tiles answer to attributes, operators and functions that other libraries have."""

    __slots__ = ()
    current_language = False

    label: Callable[[], str]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        use = answer(name, self.current_language) or _function(name)
        if use is None:
            public = [known for known in dir(type(self)) if not known.startswith("_")]
            close = difflib.get_close_matches(name, public, 1)
            use = f".{close[0]}" if close else "functions of nl and nisa"
        raise UnknownName(
            "sim_unknown_name",
            f"a tile has no .{name} (of {self.label()}), expected what tiles have (shape, dtype, "
            f"slices, reshape); use {use}",
            current_place(),
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Any:
        python = getattr(operator, _PYTHON.get(ufunc.__name__, ufunc.__name__), None)
        scalar = len(inputs) == 2 and isinstance(inputs[0], np.generic)
        if method == "__call__" and scalar and python is not None:
            return python(inputs[0].item(), inputs[1])  # np.float32(2) * tile
        raise self._refused(f"np.{ufunc.__name__}", ufunc.__name__)

    def __array_function__(self, func: Any, *_: Any) -> NoReturn:
        raise self._refused(f"np.{func.__name__}", func.__name__)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(func, "__name__", str(func)).strip("_")
        given = [*args, *(kwargs or {}).values()]
        tile = next(value for value in given if isinstance(value, Foreign))
        raise tile._refused(f"torch's {name}", name)

    def __format__(self, form: str) -> str:
        if form:
            raise self._refused(f"the format {form!r}", "value")
        return str(self)

    def __len__(self) -> NoReturn:
        raise ForeignCall(
            "sim_foreign_call",
            f"len() got {self.label()}, expected a sequence; use {_AXIS}",
            current_place(),
        )

    def _refused(self, what: str, name: str, expected: str = _NO_VALUES) -> ForeignCall:
        """The error of a function or operator that takes no tile."""
        use = answer(name, self.current_language) or _function(name) or "functions of nl and nisa"
        return ForeignCall(
            "sim_foreign_call",
            f"{what} got {self.label()}, expected {expected}; use {use}",
            current_place(),
        )


_PYTHON = {"multiply": "mul", "subtract": "sub", "divide": "truediv", "true_divide": "truediv",
           "power": "pow", "less": "lt", "less_equal": "le", "greater": "gt",
           "greater_equal": "ge", "equal": "eq", "not_equal": "ne"}  # fmt: skip


def _function(name: str) -> str | None:
    """The function of nl by the same name, which both languages have."""
    return f"nl.{name}(x, ...)" if name in _SHARED else None


# Functions of both languages that are methods elsewhere.
_SHARED = frozenset(
    ("abs", "add", "all", "arctan", "ceil", "copy", "cos", "divide", "equal", "erf", "exp", "floor")
    + ("gelu", "greater", "greater_equal", "invert", "less", "less_equal", "log", "logical_and")
    + ("logical_not", "logical_or", "logical_xor", "matmul", "max", "maximum", "mean", "min")
    + ("minimum", "mish", "mod", "multiply", "negative", "not_equal", "power", "prod")
    + ("reciprocal", "relu", "rms_norm", "rsqrt", "sigmoid", "sign", "silu", "sin", "softmax")
    + ("softplus", "sqrt", "square", "subtract", "sum", "tan", "tanh", "transpose", "trunc", "var")
    + ("where", "zeros_like", "bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "full")
    + ("right_shift", "dropout", "empty_like")
)


def _operator(symbol: str, name: str) -> Callable[..., NoReturn]:
    def refuse_it(self: Foreign, *_: Any) -> NoReturn:
        raise self._refused(f"operator {symbol}", name, "an operator that tiles have")

    return refuse_it


for _name, (_symbol, _asked) in OPERATORS.items():
    setattr(Foreign, f"__{_name}__", _operator(_symbol, _asked))


def not_callable(memory: Any) -> ForeignCall:
    """The error of ``nl.sbuf(...)``: a memory is an argument."""
    return ForeignCall(
        "sim_foreign_call",
        f"{memory!r} is called, expected it as an argument: it names a memory; use "
        f"nl.ndarray(shape, dtype, buffer={memory!r})",
        current_place(),
    )
