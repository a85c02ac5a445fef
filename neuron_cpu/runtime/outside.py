"""What the vendor's compiler makes of PyTorch's operators: the time that each keeps engines busy.

Rates are the ruler's own, none is fitted to a model (docs/cost_model.md, Outside of kernels).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..core.device import spec
from ..core.device.spec import Engine
from .recording import COLLECTIVE, TORCH, Event, TensorShape

ROW_READS = frozenset({"embedding", "gather", "index", "index_select"})
_ROW_WRITES = frozenset(
    {"index_put", "index_put_", "scatter", "scatter_", "slice_scatter", "select_scatter"}
    | {"index_copy", "index_copy_"}
)
ROWS = ROW_READS | _ROW_WRITES  # they touch rows of a table

_PASSES = {"_softmax": 3, "native_layer_norm": 3}  # over all elements; others take one
_TILE, _MOVING, _LEAST = 128, 512, 64  # columns of TensorE's operands; cycles of an instruction


class Work(NamedTuple):
    """Nanoseconds of DMA, of TensorE, and of VectorE or ScalarE that one event takes."""

    dma: float = 0.0
    tensor: float = 0.0
    vector: float = 0.0

    def ns(self, modular: bool) -> float:
        """The event's time. Nothing overlaps in prompts, which NxDI compiles as modules (-O1). Else
        transfers run beside products, and two engines share the elements."""
        return sum(self) if modular else max(self.dma, self.tensor) + self.vector / 2


def moved(event: Event) -> int:
    """HBM bytes of one event by itself: operands and result; only touched rows of lookups."""
    read, written = _size(event.inputs), _size(event.outputs)
    if event.kind == COLLECTIVE:
        return max(read, written)
    if event.name in ROW_READS:
        return 2 * written
    if event.name in _ROW_WRITES:  # in place: the cache's other rows stay where they are
        return 2 * _size(event.inputs[1:])
    return read + written


def _size(tensors: Sequence[TensorShape]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def work(event: Event) -> Work:
    """The work of an event outside of kernels; of a kernel, what turns its operands."""
    rows = moved(event) if event.name in ROWS else 0
    rate = spec.CORE.dma.engines * spec.CORE.dma.bytes_per_ns
    if rows:
        return Work(rows / rate)
    if event.is_product:  # tiles of the right side stand in TensorE, rows of the left side move
        lhs, rhs = event.inputs[-2:]
        batch = rhs.shape[0] if len(rhs.shape) == 3 else 1
        deep, wide = lhs.shape[-1], rhs.shape[-1] if len(rhs.shape) > 1 else 1
        moving = math.prod(lhs.shape) // (deep * batch)
        tiles = batch * math.ceil(deep / _TILE) * math.ceil(wide / _TILE)
        passes = 4 if rhs.dtype.itemsize == 4 else 1
        tensor = tiles * passes * _tile(moving)
        return Work(rhs.nbytes / rate, tensor, _vector(batch * moving * wide))
    if event.kind != TORCH:
        return turning(event.inputs)
    elements = max((math.prod(t.shape) for t in (*event.inputs, *event.outputs)), default=0)
    passes = _PASSES.get(event.name, 1) if elements > 1 else 0  # the compiler folds a number
    return Work(vector=passes * _vector(elements))


def turning(operands: Sequence[TensorShape]) -> Work:
    """The work of views whose rows are not contiguous: they are read, turned and written."""
    turned = [tensor for tensor in operands if not tensor.contiguous]
    tiles = sum(math.ceil(math.prod(tensor.shape) / _TILE**2) for tensor in turned)
    rate = spec.CORE.dma.engines * spec.CORE.dma.bytes_per_ns
    return Work(2 * _size(turned) / rate, tiles * _tile(_TILE))


def _tile(rows: int) -> float:
    """Nanoseconds of a stationary tile, whose columns take two cycles each, and of its rows."""
    cycles = math.ceil(rows / _MOVING) * 2 * _TILE + max(2 * _LEAST, rows * spec.CORE.tensor_pace)
    return cycles * 1e9 / spec.CORE.clock_hz[Engine.TENSOR]


def _vector(elements: int) -> float:
    core = spec.CORE
    return max(_LEAST, elements / core.partitions) * 1e9 / core.clock_hz[Engine.VECTOR]
