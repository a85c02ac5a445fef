"""``nki.language``: types, tensors, loops, operators and convenience functions."""

# Written by stubs/generate.py.
from enum import Enum, IntEnum
from typing import Any

hbm: Any
private_hbm: Any
psum: Any
sbuf: Any
shared_hbm: Any
tile_size: Any
float32: Any
tfloat32: Any
bfloat16: Any
float16: Any
float8_e4m3: Any
float8_e5m2: Any
int32: Any
int16: Any
int8: Any
uint32: Any
uint16: Any
uint8: Any
bool_: Any
float8_e4m3fn: Any
float8_e8m0fnu: Any
float8_e4m3fn_x4: Any
float8_e5m2_x4: Any
float4_e2m1fn_x4: Any
bool: Any

class MemoryRegion(Enum):
    """Where a tensor lies; the value is the kind of its storage."""
    sbuf = 'sbuf'
    psum = 'psum'
    private_hbm = 'hbm'
    shared_hbm = 'shared_hbm'
class NKIObject(Any):
    """Base of a kernel's own classes: fields by position or keyword, missing ones are None.

    Class attributes without annotation are fields, too, and ``@dataclass`` makes no difference
    (nki-language-guide.rst; the published parser makes one constructor for all)."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

class NkiBlockGrid:
    """A tensor in coordinates of blocks of ``block_shape`` tiles."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __getitem__(self, key: Any) -> Any: ...
    block_shape: Any
    buffer: Any
    columns: Any
    data: Any
    dtype: Any
    element_shape: Any
    index_step_elements: Any
    is_data_representable: Any
    is_remainder: Any
    shape: Any

class NkiGrid:
    """A part of a tensor in coordinates of tiles or blocks.

    Attributes:
        backing: the whole tensor; of a packed grid its tiles side by side.
        tile_shape: elements of a tile along the last axes.
        spans: of each axis of the source, in elements.
        kept: axes that still have a coordinate.
        columns: tiles in a row of a packed grid, or 0.
        block_shape: tiles of a block, of a grid of blocks."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __getitem__(self, key: Any) -> Any: ...
    block_shape: Any
    buffer: Any
    columns: Any
    data: Any
    dtype: Any
    element_shape: Any
    index_step_elements: Any
    is_data_representable: Any
    is_remainder: Any
    shape: Any

class NkiTensor:
    """A tensor in HBM, SBUF or PSUM, or a part of one.

    Attributes:
        shape, strides, offset: as ``View`` has them, in elements of the storage.
        dtype: the element type, a string that equals ``nl.float32`` and so on.
        buffer: the memory, ``nl.sbuf`` and so on.
        name: given with ``name=``, or of the variable that it was assigned to first."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __add__(self, *others: Any) -> Any: ...
    def __and__(self, *others: Any) -> Any: ...
    def __ge__(self, *others: Any) -> Any: ...
    def __getitem__(self, key: Any) -> Any: ...
    def __gt__(self, *others: Any) -> Any: ...
    def __iter__(self) -> Any: ...
    def __le__(self, *others: Any) -> Any: ...
    def __lshift__(self, *others: Any) -> Any: ...
    def __lt__(self, *others: Any) -> Any: ...
    def __mul__(self, *others: Any) -> Any: ...
    def __neg__(self, *others: Any) -> Any: ...
    def __or__(self, *others: Any) -> Any: ...
    def __pow__(self, *others: Any) -> Any: ...
    def __radd__(self, *others: Any) -> Any: ...
    def __rand__(self, *others: Any) -> Any: ...
    def __rlshift__(self, *others: Any) -> Any: ...
    def __rmul__(self, *others: Any) -> Any: ...
    def __ror__(self, *others: Any) -> Any: ...
    def __rpow__(self, *others: Any) -> Any: ...
    def __rrshift__(self, *others: Any) -> Any: ...
    def __rshift__(self, *others: Any) -> Any: ...
    def __rsub__(self, *others: Any) -> Any: ...
    def __rtruediv__(self, *others: Any) -> Any: ...
    def __rxor__(self, *others: Any) -> Any: ...
    def __setitem__(self, key: Any, value: Any) -> Any:
        """``t[...] = value``: a copy or a fill of the region, and a transfer where HBM takes part.

        trnblas 0.5.4 assigns tiles so, and trnrand cb37049 parts of HBM; both ran on a trn1."""
    def __sub__(self, *others: Any) -> Any: ...
    def __truediv__(self, *others: Any) -> Any: ...
    def __xor__(self, *others: Any) -> Any: ...
    def ap(self, pattern: Any, offset: Any = None, scalar_offset: Any = None, vector_offset: Any = None, indirect_dim: Any = 0, dtype: Any = None) -> Any:
        """Any pattern over the storage: element (i, j, ...) is ``offset + i * s0 + j * s1 + ...``.

        The storage is addressed, whatever the view is; an offset of None is the view's. Up to 2.30
        a part counts by itself: its offset is added, its own width steps from row to row (so
        nki-library at d2ad3a5, mlp_tkg with biases and column tiling; 2.31's guide says otherwise).
        ``scalar_offset`` (a register or a (1, 1) tile) moves the pattern along ``indirect_dim`` of
        the tensor, ``vector_offset`` (P, 1) chooses a row of it for each partition."""
    def bitcast(self, dt: Any) -> Any:
        """The same bits as another type of the same size."""
    def block(self, *args: Any, **kwargs: Any) -> Any: ...
    def blocks(self) -> Any:
        """Numbers of the tiles of an on-chip storage that the region reaches into."""
    def blocks_last(self, *args: Any, **kwargs: Any) -> Any: ...
    def box_of(self, part: Any) -> Any:
        """The box that ``slice_box`` made ``part`` with; of a view without overlapping axes."""
    def brief(self) -> Any:
        """For lists of operands: tensor, offset, sizes and type."""
    def broadcast(self, dim: Any, size: Any) -> Any:
        """An axis of size 1 as one of ``size`` with stride 0; on chip not the partition axis."""
    buffer: Any
    by_data: Any
    def check_bounds(self) -> Any:
        """Refuse elements outside of the storage's axes, once masks have cut the region."""
    current_language: Any
    data: Any
    dt: Any
    dtype: Any
    def expand_dim(self, dim: Any) -> Any:
        """A new axis of size 1 at ``dim``; on chip not before the partition axis."""
    def expand_dims(self, axis: Any) -> Any:
        """View with a size-1 axis at ``axis``."""
    def flatten_dims(self, start_dim: Any, end_dim: Any) -> Any:
        """Axes ``start_dim`` to ``end_dim`` as one; their strides must allow that."""
    def flattened(self) -> Any:
        """The tile with one free axis, or None where its strides or conditions do not allow it."""
    free_size: Any
    def get_pattern(self) -> Any:
        """``[[stride, count], ...]``, as ``ap`` takes it."""
    def grounded(self) -> Any:
        """The same bytes in elements of a size that divides all types of this memory.

        With one element size this is the view itself, otherwise a view with a further axis: the
        parts of an element."""
    def indirect(self, index: Any, num_elem: Any = None) -> Any:
        """[P, num_elem] columns at free offsets that ``index`` [P, K] names (gen4)."""
    def is_contiguous(self) -> Any:
        """Whether the view is dense and row-major; on chip within each partition."""
    def is_full(self) -> Any:
        """True when the view is the whole storage in its own order."""
    def is_indirect(self) -> Any:
        """Whether data choose the view's elements."""
    def key(self) -> Any:
        """Identity of the region: two views with equal keys are the same elements."""
    def label(self) -> Any:
        """For messages: name, shape, dtype and memory."""
    name: Any
    ndim: Any
    def nothing(self) -> Any:
        """The view under a condition that does not hold: instructions on it are not recorded.

        The class keeps that, so that views of this view select nothing either."""
    def numpy(self) -> Any:
        """Current values (eager mode only)."""
    offset: Any
    on_chip: Any
    oob: Any
    paxis: Any
    def permute(self, dims: Any) -> Any:
        """The axes in another order; on chip the partition axis stays first."""
    def rearrange(self, src_pattern: Any, dst_pattern: Any, fixed_sizes: Any = None) -> Any:
        """Axes by name: ``(("h", "d"), "s")`` to ``("h", "s", "d")``; tuples split and merge."""
    def reinterpret_cast(self, dtype: Any) -> Any:
        """The same bits as another type: the last axis grows or shrinks with the type's size."""
    def reshape(self, shape: Any, *more: Any) -> Any:
        """View with other sizes, one possibly -1; on chip the partition axis stays unchanged."""
    def reshape_dim(self, dim: Any, shape: Any) -> Any:
        """One axis split into several, one of them possibly -1."""
    scalar_offsets_anywhere: Any
    def select(self, dim: Any, index: Any) -> Any:
        """One index of an axis, which goes; a register or a (1, 1) tile selects at run time."""
    selects_nothing: Any
    shape: Any
    size: Any
    def slice(self, dim: Any, start: Any, end: Any, step: Any = 1) -> Any:
        """Elements ``start`` to ``end`` of one axis in steps."""
    def slice_box(self, box: Any) -> Any:
        """Sub-view by one slice of step 1 per axis, as masks cut operands."""
    def squeeze_dim(self, dim: Any) -> Any:
        """Without an axis of size 1."""
    start_partition: Any
    storage: Any
    strides: Any
    def vector_select(self, dim: Any, vector_offset: Any) -> Any:
        """Rows of an HBM tensor by data: row p of the result is row ``vector_offset[p]``."""
    def view(self, dtype: Any) -> Any:
        """The same bits as another type: the last axis grows or shrinks with the type's size."""
    def whole(self, *args: Any, **kwargs: Any) -> Any: ...
    def widened(self, shape: Any) -> Any:
        """Zero-stride view of ``shape``; missing trailing axes count as axes of size 1."""

class NkiTileGrid:
    """A tensor in coordinates of tiles."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __getitem__(self, key: Any) -> Any: ...
    block_shape: Any
    buffer: Any
    columns: Any
    data: Any
    dtype: Any
    element_shape: Any
    index_step_elements: Any
    is_data_representable: Any
    is_remainder: Any
    shape: Any

class ndarray(NkiTensor):
    """An uninitialised tensor; ``address`` (partition, byte) fixes its place on chip."""
    def __init__(self, shape: Any, dtype: Any, buffer: Any = MemoryRegion.sbuf, name: Any = '', address: Any = None) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
def abs(x: Any, dtype: Any = None) -> Any:
    """Magnitudes."""
def abs_max(x: Any, y: Any, dtype: Any = None) -> Any:
    """The one of larger magnitude (gen4), of tiles of equal shape, or a tile and a number or column."""
def abs_min(x: Any, y: Any, dtype: Any = None) -> Any:
    """The one of smaller magnitude (gen4), of tiles of equal shape, or a tile and a number or column."""
def add(x: Any, y: Any, dtype: Any = None) -> Any:
    """x + y, of tiles of equal shape, or a tile and a number or column."""
def affine_range(start: Any, stop: Any = None, step: Any = 1) -> Any:
    """Python's ``range``; the three names mean the same since SDK 2.27."""
def all(x: Any, axis: Any, dtype: Any = None) -> Any:
    """1 where all elements along the last free axes are nonzero."""
def alloc_blocks(*, block_shape: Any, tile_shape: Any, element_shape: Any, buffer: Any, dtype: Any, address: Any = None, name: Any = '') -> Any:
    """Allocate tiles as ``alloc_tiles`` does, in coordinates of blocks of ``block_shape`` tiles."""
def alloc_tiles(*, tile_shape: Any, element_shape: Any, buffer: Any, dtype: Any, address: Any = None, name: Any = '') -> Any:
    """A new tensor as a grid of tiles; on chip it takes a place for every whole tile."""
def arctan(x: Any, dtype: Any = None) -> Any:
    """``arctan`` of every element, on ScalarE."""
def average(*_: Any) -> Any:
    """For ``op=nl.average`` of an instruction; a call does nothing."""
def bitwise_and(x: Any, y: Any, dtype: Any = None) -> Any:
    """Bits of both integers, of tiles of equal shape, or a tile and a number or column."""
def bitwise_or(x: Any, y: Any, dtype: Any = None) -> Any:
    """Bits of either integer, of tiles of equal shape, or a tile and a number or column."""
def bitwise_xor(x: Any, y: Any, dtype: Any = None) -> Any:
    """Bits of one of the integers, of tiles of equal shape, or a tile and a number or column."""
def blocks(source: Any, *, tile_shape: Any = None, block_shape: Any) -> Any:
    """``source`` as a grid of blocks, each of ``block_shape`` tiles."""
def broadcast_to(x: Any, shape: Any, dtype: Any = None) -> Any:
    """``x`` stretched to ``shape``: along free axes a view, over partitions a copy (a product)."""
def bypass(*_: Any) -> Any:
    """For ``op=nl.bypass`` of an instruction; a call does nothing."""
def ceil(x: Any, dtype: Any = None) -> Any:
    """Smallest whole number not below ``x``."""
def copy(x: Any, dtype: Any = None) -> Any:
    """A copy in SBUF, bit-exact between equal types."""
def cos(x: Any, dtype: Any = None) -> Any:
    """Cosine as sin(x + pi/2) with whole turns removed."""
def device_print(print_prefix: Any, tensor: Any) -> Any:
    """Print a tensor while the kernel runs; here in eager mode, elsewhere nothing."""
def divide(x: Any, y: Any, dtype: Any = None) -> Any:
    """x / y as a reciprocal and a product: the hardware has no division."""
def dropout(x: Any, rate: Any, dtype: Any = None) -> Any:
    """``x`` with elements set to zero with probability ``rate``."""
def ds(start: Any, size: Any) -> Any:
    """The subscript ``start : start + size``; ``start`` may be a register or a (1, 1) tile."""
def dynamic_range(start: Any, stop: Any = None, step: Any = 1) -> Any:
    """A device loop; its index is a register that the body may only read."""
def empty_like(x: Any, dtype: Any = None, buffer: Any = None, name: Any = '') -> Any:
    """An uninitialised tensor in the shape, type and memory of ``x``."""
def equal(x: Any, y: Any, dtype: Any = None) -> Any:
    """1 where x == y, else 0, of tiles of equal shape, or a tile and a number or column."""
def erf(x: Any, dtype: Any = None) -> Any:
    """``erf`` of every element, on ScalarE."""
def erf_dx(x: Any, dtype: Any = None) -> Any:
    """``erf_dx`` of every element, on ScalarE."""
def exp(x: Any, dtype: Any = None) -> Any:
    """``exp`` of every element, on ScalarE."""
def expand_dims(x: Any, axis: Any) -> Any:
    """A view with a new axis of size 1."""
def floor(x: Any, dtype: Any = None) -> Any:
    """Largest whole number not above ``x``."""
def fmod(x: Any, y: Any, dtype: Any = None) -> Any:
    """The remainder of C, of the sign of x, of tiles of equal shape, or a tile and a number or column."""
def fori_loop(lower: Any, upper: Any, body_fun: Any, step: Any = 1) -> Any:
    """A device loop: ``body_fun(index register)`` for every index; it returns nothing."""
def full(shape: Any, fill_value: Any, dtype: Any, buffer: Any = MemoryRegion.sbuf, name: Any = '') -> Any:
    """A tensor of one value in any memory."""
def gather_flattened(data: Any, indices: Any, axis: Any = 0, dtype: Any = None) -> Any:
    """``data`` (P, F...) read at ``indices`` (uint32, (P, n)) of its flattened free axes."""
def gelu(x: Any, dtype: Any = None) -> Any:
    """``gelu`` of every element, on ScalarE."""
def gelu_apprx_sigmoid(x: Any, dtype: Any = None) -> Any:
    """``gelu_apprx_sigmoid`` of every element, on ScalarE."""
def gelu_apprx_sigmoid_dx(x: Any, dtype: Any = None) -> Any:
    """``gelu_apprx_sigmoid_dx`` of every element, on ScalarE."""
def gelu_apprx_tanh(x: Any, dtype: Any = None) -> Any:
    """``gelu_apprx_tanh`` of every element, on ScalarE."""
def gelu_dx(x: Any, dtype: Any = None) -> Any:
    """``gelu_dx`` of every element, on ScalarE."""
def greater(x: Any, y: Any, dtype: Any = None) -> Any:
    """1 where x > y, else 0, of tiles of equal shape, or a tile and a number or column."""
def greater_equal(x: Any, y: Any, dtype: Any = None) -> Any:
    """1 where x >= y, else 0, of tiles of equal shape, or a tile and a number or column."""
def invert(x: Any, dtype: Any = None) -> Any:
    """All bits turned over."""
def is_hbm(buffer: Any) -> Any:
    """Whether a memory is HBM, a core's own or shared."""
def is_on_chip(buffer: Any) -> Any:
    """Whether a memory is SBUF or PSUM."""
def is_psum(buffer: Any) -> Any:
    """Whether a memory is PSUM."""
def is_sbuf(buffer: Any) -> Any:
    """Whether a memory is SBUF."""
def left_shift(x: Any, y: Any, dtype: Any = None) -> Any:
    """x shifted left, of integers, of tiles of equal shape, or a tile and a number or column."""
def less(x: Any, y: Any, dtype: Any = None) -> Any:
    """1 where x < y, else 0, of tiles of equal shape, or a tile and a number or column."""
def less_equal(x: Any, y: Any, dtype: Any = None) -> Any:
    """1 where x <= y, else 0, of tiles of equal shape, or a tile and a number or column."""
def load(src: Any, dtype: Any = None) -> Any:
    """An HBM region as a new SBUF tile of the same shape."""
def load_transpose2d(src: Any, dtype: Any = None) -> Any:
    """An HBM region (F, P) as a new SBUF tile (P, F)."""
def log(x: Any, dtype: Any = None) -> Any:
    """``log`` of every element, on ScalarE."""
def logical_and(x: Any, y: Any, dtype: Any = None) -> Any:
    """1 where both are nonzero, of tiles of equal shape, or a tile and a number or column."""
def logical_not(x: Any, dtype: Any = None) -> Any:
    """1 where x is zero."""
def logical_or(x: Any, y: Any, dtype: Any = None) -> Any:
    """1 where either is nonzero, of tiles of equal shape, or a tile and a number or column."""
def logical_xor(x: Any, y: Any, dtype: Any = None) -> Any:
    """1 where one of them is nonzero, of tiles of equal shape, or a tile and a number or column."""
def matmul(x: Any, y: Any, transpose_x: Any = False) -> Any:
    """``x.T @ y`` in PSUM, x (K, M) and y (K, N) in SBUF; other forms are not supported."""
def max(x: Any, axis: Any, dtype: Any = None, keepdims: Any = False) -> Any:
    """``max`` over the last free axes, in fp32."""
def maximum(x: Any, y: Any, dtype: Any = None) -> Any:
    """The larger one, of tiles of equal shape, or a tile and a number or column."""
def mean(x: Any, axis: Any, dtype: Any = None, keepdims: Any = False) -> Any:
    """Mean over the last free axes, in fp32."""
def min(x: Any, axis: Any, dtype: Any = None, keepdims: Any = False) -> Any:
    """``min`` over the last free axes, in fp32."""
def minimum(x: Any, y: Any, dtype: Any = None) -> Any:
    """The smaller one, of tiles of equal shape, or a tile and a number or column."""
def mish(x: Any, dtype: Any = None) -> Any:
    """``mish`` of every element, on ScalarE."""
def mod(x: Any, y: Any, dtype: Any = None) -> Any:
    """x modulo y, of the sign of y, of tiles of equal shape, or a tile and a number or column."""
def multiply(x: Any, y: Any, dtype: Any = None) -> Any:
    """x * y, of tiles of equal shape, or a tile and a number or column."""
def negative(x: Any, dtype: Any = None) -> Any:
    """-x."""
def no_reorder() -> Any:
    """Every pair of consecutive instructions that are recorded inside is ordered."""
def not_equal(x: Any, y: Any, dtype: Any = None) -> Any:
    """1 where x != y, else 0, of tiles of equal shape, or a tile and a number or column."""
def num_programs(axes: Any = 0) -> Any:
    """Cores that run the kernel."""
def ones(shape: Any, dtype: Any, buffer: Any = MemoryRegion.sbuf, name: Any = '') -> Any:
    """A tensor of ones."""
def power(x: Any, y: Any, dtype: Any = None) -> Any:
    """x to the power of y (two tiles: on GpSimdE), of tiles of equal shape, or a tile and a number or column."""
def prelu(*_: Any) -> Any:
    """For ``op=nl.prelu`` of an instruction; a call does nothing."""
def prod(x: Any, axis: Any, dtype: Any = None, keepdims: Any = False) -> Any:
    """``prod`` over the last free axes, in fp32."""
def program_id(axis: Any = 0) -> Any:
    """Number of the core that runs the program, 0 or 1."""
def program_ndim() -> Any:
    """1 where the kernel was launched with a subscript, else 0."""
def rand(shape: Any, dtype: Any, buffer: Any = MemoryRegion.sbuf, name: Any = '') -> Any:
    """Uniform numbers in [0, 1)."""
def random_seed(seed: Any) -> Any:
    """Seed of the random functions that follow: a (1, 1) tile."""
def range(start: Any, stop: Any = None, step: Any = 1) -> Any:
    """Python's ``range``; the three names mean the same since SDK 2.27."""
def reciprocal(x: Any, dtype: Any = None) -> Any:
    """1 / x, on VectorE."""
def relu(x: Any, dtype: Any = None) -> Any:
    """``relu`` of every element, on ScalarE."""
def right_shift(x: Any, y: Any, dtype: Any = None) -> Any:
    """x shifted right, of integers, zeros coming in, of tiles of equal shape, or a tile and a number or column."""
def rms_norm(x: Any, w: Any, axis: Any, n: Any, epsilon: Any = 1e-06, dtype: Any = None, compute_dtype: Any = None) -> Any:
    """x / sqrt(sum(x^2) / n + epsilon) * w, ``w`` of the shape of x."""
def rsqrt(x: Any, dtype: Any = None) -> Any:
    """1 / sqrt(x), on GpSimdE: no operand in PSUM."""
def sequential_range(start: Any, stop: Any = None, step: Any = 1) -> Any:
    """Python's ``range``."""
def shared_constant(constant: Any, *, dtype: Any = ...) -> Any:
    """A numpy array (or the path of a .npy file) as an HBM tensor that the program brings along."""
def shared_identity_matrix(n: Any, dtype: Any = 'uint8', dst: Any = None) -> Any:
    """The identity (n, n) in SBUF; one for each type and size of a kernel."""
def sigmoid(x: Any, dtype: Any = None) -> Any:
    """``sigmoid`` of every element, on ScalarE."""
def sign(x: Any, dtype: Any = None) -> Any:
    """``sign`` of every element, on ScalarE."""
def silu(x: Any, dtype: Any = None) -> Any:
    """``silu`` of every element, on ScalarE."""
def silu_dx(x: Any, dtype: Any = None) -> Any:
    """``silu_dx`` of every element, on ScalarE."""
def sin(x: Any, dtype: Any = None) -> Any:
    """The sine, its argument reduced first."""
def softmax(x: Any, axis: Any = -1, dtype: Any = None) -> Any:
    """exp(x - max) / sum over the last free axes: one pass on ScalarE sums while it computes."""
def softplus(x: Any, dtype: Any = None) -> Any:
    """``softplus`` of every element, on ScalarE."""
def sqrt(x: Any, dtype: Any = None) -> Any:
    """``sqrt`` of every element, on ScalarE."""
def square(x: Any, dtype: Any = None) -> Any:
    """``square`` of every element, on ScalarE."""
def static_range(start: Any, stop: Any = None, step: Any = 1) -> Any:
    """Python's ``range``."""
def store(dst: Any, value: Any) -> Any:
    """An SBUF tile to an HBM region with as many elements."""
def subtract(x: Any, y: Any, dtype: Any = None) -> Any:
    """x - y, of tiles of equal shape, or a tile and a number or column."""
def sum(x: Any, axis: Any, dtype: Any = None, keepdims: Any = False) -> Any:
    """``sum`` over the last free axes, in fp32."""
def tan(x: Any, dtype: Any = None) -> Any:
    """Tangent as sine times the reciprocal of the cosine."""
def tanh(x: Any, dtype: Any = None) -> Any:
    """``tanh`` of every element, on ScalarE."""
def tiles(source: Any, *, tile_shape: Any = None) -> Any:
    """``source`` as a grid of tiles of ``tile_shape`` elements along its last axes."""
def transpose(x: Any, dtype: Any = None) -> Any:
    """(P, F) to (F, P) in PSUM, on TensorE."""
def trunc(x: Any, dtype: Any = None) -> Any:
    """``x`` without its fraction: sign(x) * floor(|x|)."""
def var(x: Any, axis: Any, dtype: Any = None, keepdims: Any = False) -> Any:
    """Population variance over the last free axes, in fp32; the axes always stay, with size 1."""
def where(condition: Any, x: Any, y: Any, dtype: Any = None) -> Any:
    """Choose ``x`` where the condition is nonzero, else ``y``; tiles or numbers."""
def while_loop(init: Any, body_fun: Any) -> Any:
    """A device loop: while the condition register is nonzero, it becomes ``body_fun(it)``."""
def zeros(shape: Any, dtype: Any, buffer: Any = MemoryRegion.sbuf, name: Any = '') -> Any:
    """A tensor of zeros."""
def zeros_like(x: Any, dtype: Any = None, buffer: Any = None, name: Any = '') -> Any:
    """Zeros in the shape, type and memory of ``x``."""
