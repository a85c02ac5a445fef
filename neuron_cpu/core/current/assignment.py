"""``t[...] = value`` on tensors of `nki`."""

from typing import Any

import numpy as np

from ..device.spec import CORE
from ..instructions.arguments import no_tensor, number
from ..program.view import View
from .copies import memset, tensor_copy
from .creation import new
from .operands import naming
from .tensor import NkiTensor
from .transfers import dma_copy
from .types import sbuf


def _assignment(self: NkiTensor, key: Any, value: Any) -> None:
    """``t[...] = value``: a copy or a fill of the region, and a transfer where HBM takes part.

    trnblas 0.5.4 assigns tiles so, and trnrand cb37049 parts of HBM; both ran on a trn1.
    """
    target = self[key]
    with naming(f"{self.label()}[...] ="):
        if isinstance(value, (int, float, np.number)):
            if target.on_chip:
                memset(target, number(value))
            else:
                _fill_in_hbm(target, number(value))
        elif not isinstance(value, View):
            raise no_tensor(value, f"{self.label()}[...] =", "a tensor or a number")
        elif value.storage is target.storage and value.key() == target.key():
            return
        elif target.on_chip and value.on_chip:
            tensor_copy(target, value)
        else:
            dma_copy(target, value)


def _fill_in_hbm(target: Any, value: Any) -> None:
    """A constant into HBM: engines write no HBM, so a tile is filled and sent in blocks of rows."""
    rows = target.shape[0] if target.ndim > 1 else 1
    view = target if target.ndim > 1 else target.reshape((1, target.size))
    most = min(rows, CORE.partitions)
    tile = new((most, *view.shape[1:]), target.dt, sbuf)
    memset(tile, value)
    for first in range(0, rows, most):
        part = view[first : min(first + most, rows)]
        dma_copy(part, tile[0 : part.shape[0]])


NkiTensor.__setitem__ = _assignment  # type: ignore[index]
