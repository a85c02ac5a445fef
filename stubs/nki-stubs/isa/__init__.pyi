"""``nki.isa``: one function per instruction, destinations first."""

# Written by stubs/generate.py.
from enum import Enum, IntEnum
from typing import Any

gpsimd_engine: Any
scalar_engine: Any
tensor_engine: Any
unknown_engine: Any
vector_engine: Any

class dge_mode(Enum):
    """Who makes the descriptors of a DMA: GpSimdE, a block of hardware, which NeuronCore-v2 lacks,
    or the host in advance (SDK 2.23)."""
    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3
class dma_engine(Enum):
    """Which DMA an exchange between cores uses."""
    dma = 1
    gpsimd_dma = 2
class engine(Enum):
    """Engines of a core; ``unknown`` leaves the choice to the compiler."""
    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6
class matmul_perf_mode(Enum):
    """Faster modes of TensorE."""
    none = 'none'
    double_row = 'double_row'
class nc_version(IntEnum):
    """NeuronCore generations, in order."""
    gen2 = 2
    gen3 = 3
    gen4 = 4
class oob_mode(Enum):
    """A DMA's treatment of run-time indices out of bounds (SDK 2.23)."""
    error = 0
    skip = 1
class reduce_cmd(Enum):
    """An instruction's use of its engine's accumulators."""
    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4
class NkiInstruction:
    """Handle of a recorded instruction, for ordering."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def depends_on(self, *producers: Any) -> Any:
        """Run after ``producers``, whatever the data say; returns the handle."""

class NkiValidationError:
    """A kernel that compiler or hardware would refuse, or silently miscompute.

    Attributes:
        identifier: the documented error name, e.g. ``err_num_partition_mismatch``.
        source: ``file:line`` in the kernel, or None outside of one."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    add_note: Any
    args: Any
    with_traceback: Any

class VirtualRegister:
    """A register of the running kernel.

    Attributes:
        static: its value where constants made it (or the kernel is executed while recorded).
        frozen: a loop's index, which the kernel may only read.
        loaded: the value was read from a tensor, of a kernel that is executed while recorded."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __add__(self, *_: Any) -> Any: ...
    def __ge__(self, *_: Any) -> Any: ...
    def __gt__(self, *_: Any) -> Any: ...
    def __le__(self, *_: Any) -> Any: ...
    def __lt__(self, *_: Any) -> Any: ...
    def __mul__(self, *_: Any) -> Any: ...
    def __radd__(self, *_: Any) -> Any: ...
    def __rmul__(self, *_: Any) -> Any: ...
    def __rsub__(self, *_: Any) -> Any: ...
    def __sub__(self, *_: Any) -> Any: ...
    frozen: Any
    loaded: Any
    static: Any
    tile: Any
    def value(self, what: Any) -> Any:
        """The value, for control flow.

        Raises:
            NeedsValues: it is known when the kernel runs only."""

def activate2(dst: Any, op: Any, data: Any, imm0: Any, imm1: Any, op0: Any, op1: Any, relu_param: Any = 0.0, reverse0: Any = False, reverse1: Any = False, reduce_op: Any = None, reduce_res: Any = None, reduce_cmd: Any = reduce_cmd.idle, name: Any = None) -> Any:
    """``op((data op0 imm0) op1 imm1)`` on ScalarE of gen4."""
def activation(dst: Any, op: Any, data: Any, bias: Any = None, scale: Any = 1.0, reduce_op: Any = None, reduce_res: Any = None, reduce_cmd: Any = reduce_cmd.idle, name: Any = None) -> Any:
    """``op(data * scale + bias)`` in fp32 on ScalarE, with sums per partition in its registers.

    ``scale`` a number or (P, 1) fp32; ``bias`` (P, 1), from gen3 on also a number."""
def activation_reduce(dst: Any, op: Any, data: Any, reduce_op: Any, reduce_res: Any, bias: Any = None, scale: Any = 1.0, name: Any = None) -> Any:
    """``activation`` whose sums over the free axes go to ``reduce_res`` (P, 1)."""
def affine_select(dst: Any, pattern: Any, channel_multiplier: Any, on_true_tile: Any, on_false_value: Any, cmp_op: Any = None, offset: Any = 0, name: Any = None) -> Any:
    """Keep elements whose affine value compares with 0 as ``cmp_op`` says (default: equal)."""
def bn_aggr(dst: Any, data: Any, name: Any = None) -> Any:
    """Mean and population variance (P, 2) from the triples of ``bn_stats``."""
def bn_stats(dst: Any, data: Any, name: Any = None) -> Any:
    """Count, mean, variance * count of even elements, then of odd ones: (P, 6), N <= 512."""
def core_barrier(data: Any, cores: Any = ..., engine: Any = engine.gpsimd, name: Any = None) -> Any:
    """Both cores reach it before either goes on; ``data`` is the shared tensor it protects."""
def dma_compute(dst: Any, srcs: Any, reduce_op: Any, scales: Any = None, unique_indices: Any = True, oob_mode: Any = oob_mode.error, name: Any = None) -> Any:
    """``dst`` = the sum of ``srcs`` in fp32, by the DMA engines' adders.

    With run-time rows: two sources, one of which is the destination itself (scatter-add into HBM,
    gather-add into SBUF)."""
def dma_copy(dst: Any, src: Any, priority: Any = None, oob_mode: Any = oob_mode.error, dge_mode: Any = dge_mode.unknown, engine: Any = engine.unknown, name: Any = None, *, unique_indices: Any = ...) -> Any:
    """``dst = src`` between HBM and SBUF, in any shapes with equal counts, cast through fp32.

    Either side may have run-time offsets; with ``oob_mode.skip`` rows out of bounds are left as
    they are."""
def dma_transpose(dst: Any, src: Any, axes: Any = None, priority: Any = None, dge_mode: Any = dge_mode.unknown, oob_mode: Any = oob_mode.error, name: Any = None) -> Any:
    """Axes of ``src`` (HBM or SBUF) in the order (1, 0), (2, 1, 0) or (3, 1, 2, 0) into SBUF."""
def dropout(dst: Any, data: Any, prob: Any, name: Any = None) -> Any:
    """``data`` with elements set to zero with probability ``prob`` (a number or (P, 1))."""
def exponential(dst: Any, src: Any, max_value: Any = 0.0, reduce_res: Any = None, reduce_cmd: Any = reduce_cmd.idle, reduce_init: Any = 0.0, name: Any = None) -> Any:
    """``exp(src - max_value)`` with running sums on VectorE of gen4."""
def get_nc_sub_version() -> Any:
    """Revision of the silicon: 0, the documented default."""
def get_nc_version() -> Any:
    """The generation that the kernel is built for."""
def iota(dst: Any, pattern: Any, offset: Any = 0, channel_multiplier: Any = 0, name: Any = None) -> Any:
    """``offset + p * channel_multiplier + sum of index * step`` over ``[[step, num], ...]``."""
def local_gather(dst: Any, src_buffer: Any, index: Any, num_elem_per_idx: Any = 1, num_valid_indices: Any = None, name: Any = None) -> Any:
    """Each of 8 GpSimd cores reads its 16 partitions at the offsets of its 16 index rows.

    ``index`` uint16 of the same partitions, flattened partition-first; ``dst`` takes
    ``num_valid_indices`` times ``num_elem_per_idx`` elements per partition."""
def max8(dst: Any, src: Any, name: Any = None) -> Any:
    """The 8 largest elements of each partition, descending, to (P, 8)."""
def memset(dst: Any, value: Any, engine: Any = engine.unknown, name: Any = None) -> Any:
    """Every element of ``dst`` becomes ``value``, an integer for integer types."""
def nc_find_index8(dst: Any, data: Any, vals: Any, name: Any = None) -> Any:
    """Index of the first occurrence of each of 8 values; equal values take successive ones.

    A value that does not occur gives all ones."""
def nc_match_replace8(dst: Any, data: Any, vals: Any, imm: Any, dst_idx: Any = None, name: Any = None) -> Any:
    """``data`` with the first occurrence of each of 8 values replaced by ``imm``.

    ``dst_idx`` (P, 8) receives their indices. Values are taken from the last to the first."""
def nc_matmul(dst: Any, stationary: Any, moving: Any, is_stationary_onezero: Any = False, is_moving_onezero: Any = False, is_transpose: Any = False, accumulate: Any = None, tile_position: Any = (), tile_size: Any = (), perf_mode: Any = matmul_perf_mode.none, name: Any = None, *, is_moving_zero: Any = ...) -> Any:
    """``dst[M, N] = stationary[K, M].T @ moving[K, N]``, SBUF times SBUF into PSUM, in fp32.

    ``accumulate``: False overwrites, True adds; None overwrites where no product has written yet
    and adds elsewhere. K, M <= 128; N <= 512, on gen4 as much as PSUM takes."""
def nc_matmul_mx(dst: Any, stationary: Any, moving: Any, stationary_scale: Any, moving_scale: Any, tile_position: Any = None, tile_size: Any = None, accumulate: Any = None, name: Any = None) -> Any:
    """``stationary.T @ moving`` of packed elements [P, M], [P, N] with their scales; gen4.

    The contraction runs over 4 P values; a scale stands for 8 partitions and 4 values."""
def nc_n_gather(dst: Any, data: Any, indices: Any, name: Any = None) -> Any:
    """``dst[p, j] = data[p].flatten()[indices[p, j]]``, indices uint32; GpSimdE."""
def nc_stream_shuffle(dst: Any, src: Any, shuffle_mask: Any, name: Any = None) -> Any:
    """In each quadrant of 32 partitions, partition i of ``dst`` = ``shuffle_mask[i]`` of ``src``.

    255 leaves a partition of ``dst`` as it is. Partition counts may differ: the larger one, rounded
    up to a multiple of 32, is how many are active (aws-neuron-sdk, nki.isa.nc_stream_shuffle)."""
def nc_transpose(dst: Any, data: Any, engine: Any = engine.unknown, name: Any = None) -> Any:
    """(P, F...) to (F, P). TensorE: SBUF to PSUM, 128 x 128; VectorE: 32 x 32, SBUF or PSUM.

    By default the engine follows from the destination. On gen2 TensorE writes fp32."""
def nonzero_with_count(dst: Any, src: Any, index_offset: Any = 0, padding_val: Any = -1, name: Any = None) -> Any:
    """Places of nonzero elements in partitions 0, 16, ..., then padding, then their count; gen3."""
def quantize_mx(dst: Any, src: Any, dst_scale: Any, name: Any = None) -> Any:
    """16-bit floats [P, F] to packed fp8 [P, F / 4] and their scales; gen4."""
def rand2(dst: Any, min: Any, max: Any, name: Any = None) -> Any:
    """Uniform fp32 numbers between two bounds on VectorE of gen4."""
def rand_get_state(dst: Any, engine: Any = engine.gpsimd, name: Any = None) -> Any:
    """The state of a generator, as ``rand_set_state`` takes it."""
def rand_set_state(src_seeds: Any, engine: Any = engine.gpsimd, name: Any = None) -> Any:
    """State of a generator of gen3 (GpSimdE) or gen4 (VectorE): uint32, 6 or 24 a partition."""
def range_select(dst: Any, on_true_tile: Any, comp_op0: Any, comp_op1: Any, bound0: Any, bound1: Any, reduce_cmd: Any = reduce_cmd.reset_reduce, reduce_res: Any = None, reduce_op: Any = None, range_start: Any = 0, on_false_value: Any = -3.4028234663852886e+38, name: Any = None) -> Any:
    """Keep columns whose number lies between two bounds of each partition; gen3."""
def reciprocal(dst: Any, data: Any, name: Any = None) -> Any:
    """``1 / data`` on VectorE, which is more exact and slower than ScalarE's."""
def register_alloc(x: Any = None) -> Any:
    """A new register: of an int, uninitialised, or loaded from a tensor of one element."""
def register_load(dst: Any, src: Any) -> Any:
    """``dst`` becomes the one element of ``src`` (SBUF or HBM)."""
def register_move(dst: Any, src: Any, *, imm: Any = ...) -> Any:
    """``dst`` becomes the constant or the other register's value."""
def register_store(dst: Any, src: Any) -> Any:
    """The one element of ``dst`` (SBUF or HBM) becomes the register's value."""
def rng(dst: Any, engine: Any = engine.vector, name: Any = None) -> Any:
    """Random bits of an integer type on VectorE, from gen3 on also GpSimdE."""
def scalar_tensor_tensor(dst: Any, data: Any, op0: Any, operand0: Any, op1: Any, operand1: Any, reverse0: Any = False, reverse1: Any = False, reduce_cmd: Any = reduce_cmd.reset_reduce, reduce_op: Any = ..., reduce_res: Any = None, name: Any = None) -> Any:
    """``(data op0 operand0) op1 operand1``: operand0 a number or (P, 1), operand1 a whole tile.

    Tiles of any type, computed with in fp32 (aws-neuron-sdk v2.32.0, nki.isa). With ``reduce_op``
    the result is reduced over all free axes, too (SDK 2.33): ``reduce_res`` (P, 1) receives it."""
def select_reduce(dst: Any, predicate: Any, on_true: Any, on_false: Any, reduce_res: Any = None, reduce_cmd: Any = reduce_cmd.idle, reduce_op: Any = None, reverse_pred: Any = False, name: Any = None) -> Any:
    """``dst`` = ``on_true`` where ``predicate`` else ``on_false`` (a number or (P, 1) fp32).

    The commands keep the maximum of each partition; ``reduce_op`` is nl.maximum."""
def sendrecv(src: Any, dst: Any, send_to_rank: Any, recv_from_rank: Any, pipe_id: Any, dma_engine: Any = dma_engine.dma, name: Any = None) -> Any:
    """Exchange of SBUF tiles of one shape and type between the two cores, at the same time.

    ``gpsimd_dma`` takes at most 1024 bytes of a partition (512 of 16-bit, 256 of 8-bit types)."""
def sequence_bounds(dst: Any, segment_ids: Any, name: Any = None) -> Any:
    """(1, n) segment ids to (1, 2, n): first index and end of each element's segment; 0 pads."""
def set_rng_seed(src_seeds: Any, name: Any = None) -> Any:
    """Seed of VectorE's generator: a (1, 1) tile of 32 bits."""
def tensor_copy(dst: Any, src: Any, engine: Any = engine.unknown, name: Any = None, *, dtype: Any = ...) -> Any:
    """``dst = src`` within SBUF and PSUM: bit-exact between equal types, else through fp32.

    VectorE, GpSimdE (SBUF only), and from gen3 on ScalarE. One side may have a run-time offset."""
def tensor_copy_predicated(dst: Any, src: Any, predicate: Any, reverse_pred: Any = False, name: Any = None) -> Any:
    """``dst`` becomes ``src`` (a tile or a number) where ``predicate`` (uint8/16/32) is nonzero."""
def tensor_partition_reduce(dst: Any, op: Any, data: Any, name: Any = None) -> Any:
    """(P, F...) reduced over its partitions to (1, F...) on GpSimdE."""
def tensor_reduce(dst: Any, op: Any, data: Any, axis: Any, negate: Any = False, keepdims: Any = False, name: Any = None) -> Any:
    """The last free axes of ``data`` reduced in fp32; ``negate`` costs nothing."""
def tensor_scalar(dst: Any, data: Any, op0: Any, operand0: Any, reverse0: Any = False, op1: Any = None, operand1: Any = None, reverse1: Any = False, engine: Any = engine.unknown, name: Any = None) -> Any:
    """``(data op0 operand0) op1 operand1`` with numbers or (P, 1) fp32 tiles, in one pass."""
def tensor_scalar_cumulative(dst: Any, src: Any, op0: Any, op1: Any, imm0: Any, imm1: Any = None, reduce_cmd: Any = reduce_cmd.reset_reduce, name: Any = None) -> Any:
    """``reg = op1(op0(x, imm0), reg)`` for every element in turn, each written to ``dst``."""
def tensor_scalar_reduce(dst: Any, data: Any, op0: Any, operand0: Any, reduce_op: Any, reduce_res: Any = None, reverse0: Any = False, reduce_cmd: Any = reduce_cmd.reset_reduce, reduce_init: Any = None, reduce_res_negate: Any = False, name: Any = None) -> Any:
    """``dst = data op0 operand0``, and ``reduce_res`` (P, 1) its reduction over all free axes."""
def tensor_tensor(dst: Any, data1: Any, data2: Any, op: Any, engine: Any = engine.unknown, name: Any = None) -> Any:
    """``data1 op data2``, not both in PSUM; fp32 on VectorE.

    Operands of 32-bit integers are computed with exactly on GpSimdE, unless one lies in PSUM or the
    kernel asks for VectorE. ``nl.power`` runs on GpSimdE."""
def tensor_tensor_scan(dst: Any, data0: Any, data1: Any, initial: Any, op0: Any, op1: Any, reverse0: Any = False, reverse1: Any = False, name: Any = None) -> Any:
    """``r[i] = (data0[i] op0 r[i-1]) op1 data1[i]`` along the free axes, carried in fp32."""
def topk(val_dst: Any, idx_dst: Any, src: Any, n: Any, name: Any = None) -> Any:
    """The largest bf16 elements of each group of 16 partitions, ascending, and their numbers.

    Element e of a group lies at partition e % 16, column e // 16; ``n`` of them count. Results are
    the same on all partitions of the group here; the documentation does not say where they are."""
