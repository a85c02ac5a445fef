"""``neuronxcc.nki.isa``: one function per device instruction, engines and enumerations."""

# Written by stubs/generate.py.
from enum import Enum, IntEnum
from typing import Any

dma_engine: Any
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
    """An instruction's use of ScalarE's running sums (SDK 2.22)."""
    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
class engine:
    """``nisa.engine`` of SDK 2.22: the same choices as attributes."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    dma: Any
    gpsimd: Any
    scalar: Any
    sync: Any
    tensor: Any
    vector: Any

class fp32:
    """Range of fp32 (SDK 2.23)."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    max: Any
    min: Any

def activation(op: Any, data: Any, *, bias: Any = None, scale: Any = 1.0, reduce_op: Any = None, reduce_res: Any = None, reduce_cmd: Any = None, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """``op(data * scale + bias)`` in fp32 on ScalarE.

    ``data`` [P, F...] @ SBUF|PSUM, ``scale`` a number or fp32 [P, 1], ``bias`` [P, 1] of
    fp32/fp16/bf16. Result has data's shape and type unless ``dtype`` is given. ``reduce_cmd``
    (SDK 2.22) adds the sums over the free axes to registers that outlive the instruction;
    ``reduce_res`` [P, 1] then receives the registers."""
def activation_reduce(op: Any, data: Any, *, reduce_op: Any, reduce_res: Any, bias: Any = None, scale: Any = 1.0, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """Do what ``activation`` does; ``reduce_res`` [P, 1] receives the sum over the free axes."""
def affine_select(pred: Any, on_true_tile: Any, on_false_value: Any, *, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """Keep elements where one affine comparison holds, else ``on_false_value``. GpSimdE, SBUF."""
def bn_aggr(data: Any, *, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """Mean and population variance [P, 2] from the columns of ``bn_stats`` ([P, 3 k])."""
def bn_stats(data: Any, *, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """Statistics of each partition's N <= 512 elements -> [P, 6]: count, mean and variance * count
    of the elements at even positions, then at odd positions. Input to ``bn_aggr``."""
def builtin_custom_op(*_: Any, **__: Any) -> Any:
    """Calls a compiled GpSimdE program, whose format is not public."""
def dma_copy(src: Any, dst: Any, *, mask: Any = None, dst_rmw_op: Any = None, oob_mode: Any = oob_mode.error, dge_mode: Any = None, name: Any = ...) -> Any:
    """Copy ``src`` to ``dst`` (HBM or SBUF each) with a cast where the types differ.

    ``dst_rmw_op=np.add`` adds to what ``dst`` holds (SDK 2.23)."""
def dma_transpose(src: Any, *, axes: Any = None, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """Transpose by DMA into a new SBUF tile: 2-D [1, 0], 3-D [2, 1, 0], 4-D [3, 1, 2, 0].

    ``src`` @ HBM|SBUF. Element-granular descriptors: very slow on this core."""
def dropout(data: Any, prob: Any, *, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """``data`` with elements set to zero with probability ``prob`` (a number or [P, 1])."""
def get_nc_version(*, name: Any = ...) -> Any:
    """The generation that kernels are traced for; outside of kernels the environment's."""
def iota(expr: Any, dtype: Any, *, mask: Any = None, name: Any = ...) -> Any:
    """Tile with the values of an affine index expression (int32 inside, then cast); GpSimdE."""
def local_gather(src_buffer: Any, index: Any, num_elem_per_idx: Any = 1, num_valid_indices: Any = None, *, mask: Any = None, name: Any = ...) -> Any:
    """Gather along the free axis: [P, F...] and uint16 [P, n] -> [P, n, 16, num_elem_per_idx].

    Fewer than all valid indices make it [P, num_valid_indices, num_elem_per_idx].

    The indices of each 16 partitions, read partition first, serve all 16; P is a multiple of 16.
    Indices are element offsets, already multiplied by ``num_elem_per_idx``."""
def max8(*, src: Any, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """The 8 largest elements of each partition, descending: [P, F...] -> [P, 8] (SDK 2.22)."""
def memset(shape: Any, value: Any, dtype: Any, *, mask: Any = None, engine: Any = None, name: Any = ...) -> Any:
    """New tile of ``shape`` filled with ``value``; VectorE or GpSimdE."""
def nc_find_index8(*, data: Any, vals: Any, mask: Any = None, dtype: Any = ..., name: Any = ...) -> Any:
    """First index in each partition of ``data`` of each of ``vals`` [P, 8] -> [P, 8] (SDK 2.22).

    A value that does not occur has no defined index on the device; it gives 0 here."""
def nc_match_replace8(*, data: Any, vals: Any, imm: Any, dst_idx: Any = None, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """``data`` with the first occurrence of each of ``vals`` [P, 8] replaced by ``imm`` (SDK 2.22).

    ``dst_idx`` [P, 8] (SDK 2.24) receives the indices of those first occurrences."""
def nc_matmul(stationary: Any, moving: Any, *, is_stationary_onezero: Any = False, is_moving_onezero: Any = False, is_transpose: Any = False, mask: Any = None, **extra: Any) -> Any:
    """``stationary[K, M].T @ moving[K, N]`` on TensorE -> [M, N] fp32 @ PSUM.

    K <= 128 partitions, M <= 128, N <= 512; both operands in SBUF. ``acc[...] += nc_matmul(...)``
    on a PSUM tile from nl.zeros accumulates in fp32 inside PSUM."""
def nc_stream_shuffle(src: Any, dst: Any, shuffle_mask: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """In each quadrant of 32 partitions, partition i of ``dst`` = partition ``shuffle_mask[i]`` of
    ``src``; 255 leaves it as it is (SDK 2.22). ``dst`` [32 k, F...] @ SBUF|PSUM; ``src`` may have
    fewer partitions, as in the documentation's broadcast of one."""
def nc_transpose(data: Any, *, mask: Any = None, dtype: Any = None, engine: Any = None, name: Any = ...) -> Any:
    """[P, F...] -> [F, P], free axes collapsed. TensorE up to 128 x 128, VectorE up to 32 x 32.

    TensorE (default above 32 x 32): SBUF -> PSUM, finite values only."""
def range_select(*, on_true_tile: Any, comp_op0: Any, comp_op1: Any, bound0: Any, bound1: Any, reduce_cmd: Any = reduce_cmd.reset_reduce, reduce_res: Any = None, reduce_op: Any = ..., range_start: Any = 0, on_false_value: Any = -3.4028234663852886e+38, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """Keep columns whose number lies between two bounds [P, 1] of each partition (SDK 2.23).

    NeuronCore-v3 and newer. Columns count from ``range_start``; the others become the least fp32
    number. ``reduce_res`` [P, 1] receives the maximum over the free axes."""
def reciprocal(data: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None, name: Any = ...) -> Any:
    """``1 / data``. VectorE (more exact, 8N cycles) or ScalarE."""
def scalar_tensor_tensor(*, data: Any, op0: Any, operand0: Any, op1: Any, operand1: Any, reverse0: Any = False, reverse1: Any = False, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """``(data op0 operand0) op1 operand1``: operand0 a number or [P, 1], operand1 of data's shape.

    ``data``, ``operand1`` [P, N] @ SBUF|PSUM, not both in PSUM; ``reverse`` swaps arguments."""
def select_reduce(*, dst: Any, predicate: Any, on_true: Any, on_false: Any, reduce_res: Any = None, reduce_cmd: Any = reduce_cmd.idle, reduce_op: Any = ..., reverse_pred: Any = False, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """``dst`` = ``on_true`` where ``predicate`` else ``on_false`` (number or [P, 1]) (SDK 2.26).

    With ``reduce_cmd=reset_reduce``, ``reduce_res`` [P, 1] receives the maximum over the free axes."""
def sequence_bounds(*, segment_ids: Any, dtype: Any = None, name: Any = ...) -> Any:
    """Segment ids [1, n] -> [1, 2, n]: first index and end (exclusive) of each element's segment.

    Id 0 is padding: start n, end -1 (SDK 2.26). Types fp32 or int32."""
def tensor_copy(src: Any, *, mask: Any = None, dtype: Any = None, engine: Any = None, name: Any = ...) -> Any:
    """Copy a tile within SBUF/PSUM; bit-exact unless the type changes.

    ``src`` [P, F...] @ SBUF|PSUM of any type; result alike @ SBUF (PSUM if assigned there)."""
def tensor_copy_dynamic_dst(*, dst: Any, src: Any, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """Copy to a destination whose offset is data (SDK 2.22); ``dtype`` is dst's."""
def tensor_copy_dynamic_src(src: Any, *, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """Copy whose source offset is data: ``t[i_p, offset[0, k] + i_f]`` @ SBUF|PSUM.

    ``offset`` is an integer tile in SBUF; the index must stay inside of its axis at run time."""
def tensor_copy_predicated(*, src: Any, dst: Any, predicate: Any, mask: Any = None, dtype: Any = None, reverse_pred: Any = False, name: Any = ...) -> Any:
    """``dst`` = ``src`` (a tile or a number) where ``predicate`` (uint8/16/32, or bool as the
    documentation's example has it) is nonzero, else unchanged (SDK 2.22)."""
def tensor_partition_reduce(op: Any, data: Any, *, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """Reduce the partition axis: [P, F...] -> [1, F...]; add, max, bitwise_or, bitwise_and."""
def tensor_reduce(op: Any, data: Any, axis: Any, *, mask: Any = None, dtype: Any = None, negate: Any = False, keepdims: Any = False, name: Any = ...) -> Any:
    """Reduce free axes in fp32: [P, F...] -> [P, rest...], at least rank 2. ``negate`` is free.

    A mask that is no box, as of windows that reach over an edge, becomes a reduction for each box,
    with a warning."""
def tensor_scalar(data: Any, op0: Any, operand0: Any, reverse0: Any = False, op1: Any = None, operand1: Any = None, reverse1: Any = False, *, dtype: Any = None, mask: Any = None, engine: Any = None, name: Any = ...) -> Any:
    """``(data op0 operand0) op1 operand1``; operands are numbers or (P, 1) tiles. One or two steps
    cost the same. Result has data's type unless ``dtype`` is given."""
def tensor_scalar_reduce(*, data: Any, op0: Any, operand0: Any, reduce_op: Any, reduce_res: Any, reverse0: Any = False, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """``data op0 operand0``, and ``reduce_res`` [P, 1] its reduction over all free axes."""
def tensor_tensor(data1: Any, data2: Any, op: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None, name: Any = ...) -> Any:
    """``data1 op data2`` of equal shapes; not both in PSUM. VectorE (power: GpSimdE).

    Tiles of 32-bit integers are added, subtracted and multiplied in fp32, since SDK 2.26 exactly by
    GpSimdE unless one lies in PSUM (v2.26.0, nki.isa).
    Free axes of size 1 are stretched, with a warning: the documentation asks for equal shapes, but
    course kernels with published utilisation (SDK 2.26) and AWS's own reference add (P, 1) tiles."""
def tensor_tensor_scan(data0: Any, data1: Any, initial: Any, op0: Any, op1: Any, reverse0: Any = False, reverse1: Any = False, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """``r[i] = (data0[i] op0 r[i-1]) op1 data1[i]`` along the free axis, carried in fp32.

    ``data0``, ``data1`` [P, N] @ SBUF|PSUM, not both in PSUM; ``initial`` a number or a [P, 1]
    tile; ``reverse`` swaps the arguments of its operator. Arithmetic operators only."""
