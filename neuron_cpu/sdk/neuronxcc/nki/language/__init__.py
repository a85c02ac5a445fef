"""``neuronxcc.nki.language``: memory, math, reductions, indexing, iterators, types and buffers.

Source of names: aws-neuron-sdk v2.21.1 to v2.26.1, general/nki/api/nki/language/__init__.py.
"""

from neuron_cpu.core.device import unknown as _unknown
from neuron_cpu.core.instructions.arguments import fp32
from neuron_cpu.core.language.copies import gather_flattened, rand, random_seed
from neuron_cpu.core.language.creation import (
    empty_like, full, ndarray, ones, par_dim, shared_constant, shared_identity_matrix, zeros,
    zeros_like,
)  # fmt: skip
from neuron_cpu.core.language.elementwise import FUNCTIONS as _FUNCTIONS
from neuron_cpu.core.language.grid import (
    affine_range, all_reduce, gemm_grid, gemm_stationary_grid, loop_reduce, nc, num_programs,
    program_id, program_ndim, sequential_range, spmd_dim, static_range,
)  # fmt: skip
from neuron_cpu.core.language.operands import label_all as _label_all
from neuron_cpu.core.language.memory import (
    atomic_rmw, broadcast_to, copy, device_print, expand_dims, load, load_transpose2d, store,
)  # fmt: skip
from neuron_cpu.core.language.products import matmul, transpose
from neuron_cpu.core.language.types import (
    bfloat16, bool_, finfo, float8_e4m3, float8_e5m2, float16, float32, hbm, int8, int16, int32,
    private_hbm, psum, sbuf, shared_hbm, tfloat32, tile_size, uint8, uint16, uint32,
)  # fmt: skip
from neuron_cpu.core.program.index import arange, ds, mgrid

globals().update(_FUNCTIONS)
__all__ = [name for name in globals() if not name.startswith("_")]

_label_all(globals(), __all__)

__getattr__ = _unknown.of_module("nl", globals(), current=False)
