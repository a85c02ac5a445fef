"""``nki.language``: types, tensors, loops, operators and convenience functions.

Source of names: aws-neuron-sdk v2.32.0, nki/api/nki/language/__init__.py; 2.33's pages.
"""

from neuron_cpu.core.device import unknown as _unknown
from neuron_cpu.core.current import elementwise as _elementwise
from neuron_cpu.core.current.control import (
    affine_range, device_print, dynamic_range, fori_loop, no_reorder, num_programs, program_id,
    program_ndim, sequential_range, static_range, while_loop,
)  # fmt: skip
from neuron_cpu.core.current.creation import (
    empty_like, full, load, load_transpose2d, ndarray, ones, shared_constant,
    shared_identity_matrix, store, zeros, zeros_like,
)  # fmt: skip
from neuron_cpu.core.current.creation import (
    NkiBlockGrid, NkiGrid, NkiTileGrid, alloc_blocks, alloc_tiles, blocks, tiles,
)  # fmt: skip
from neuron_cpu.core.current.releases import of_language as _of_language
from neuron_cpu.core.current.tensor import NkiTensor, ds
from neuron_cpu.core.current.types import NAMES as _NAMES
from neuron_cpu.core.current.types import (
    MemoryRegion, NKIObject, hbm, is_hbm, is_on_chip, is_psum, is_sbuf, private_hbm, psum, sbuf,
    shared_hbm, tile_size,
)  # fmt: skip

globals().update(_NAMES)
globals().update(_elementwise.FUNCTIONS)
globals().update(_of_language(dict(globals())))
__all__ = [name for name in globals() if not name.startswith("_")]
bool = _NAMES["bool_"]  # AWS's library uses these two names, which the stubs do not have
range = affine_range

__getattr__ = _unknown.of_module("nl", globals(), current=True)
