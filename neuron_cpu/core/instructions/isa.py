"""The names that ``language`` and ``program`` call instructions by, whatever engine they run on."""

from .arguments import tile
from .constants import tensor_engine, vector_engine
from .copies import (
    copy_into,
    copy_written,
    fill,
    memset,
    tensor_copy,
    zero_fill,
)
from .dma import dma_copy, move, transfer
from .gpsimd import dropout, iota
from .recorder import note_written
from .scalar import activation, activation_reduce
from .tensor_engine import collapsed, nc_matmul, nc_transpose
from .vector import (
    LoopReduction,
    reciprocal,
    tensor_reduce,
    tensor_scalar,
    tensor_tensor,
)

__all__ = [
    "LoopReduction",
    "activation",
    "activation_reduce",
    "collapsed",
    "copy_into",
    "copy_written",
    "dma_copy",
    "dropout",
    "fill",
    "iota",
    "memset",
    "move",
    "nc_matmul",
    "nc_transpose",
    "note_written",
    "reciprocal",
    "tensor_copy",
    "tensor_engine",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_tensor",
    "tile",
    "transfer",
    "vector_engine",
    "zero_fill",
]
