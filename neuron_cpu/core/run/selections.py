"""Products with constant matrices that hardly multiply: they choose rows, or add all of them up.

TensorE turns, permutes and spreads tiles by products with ones and zeros. Where each row of such a
matrix has one number at most, the product is a choice of the other operand's rows; where its rows
are equal, it is one row of sums that all rows of the result share.
"""

import math
from collections.abc import Callable

import torch

from .memory import Arena, widen
from .merge import Op
from .packing import Packable

LEAST = 1 << 19  # multiplications from which to choose rows is faster than to multiply


class Selection:
    """A constant matrix [N, K] whose rows have one number at most: of each result's row the place
    in the other operand, and its factor."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix
        self.at = (matrix != 0).int().argmax(1)
        factors = matrix.gather(1, self.at[:, None])
        self.factors = None if bool((factors == 1).all()) else factors

    def multiply(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """The matrix times ``values`` [K, M] into ``out`` [N, M]."""
        # 0 times infinity is NaN. A sum of finite numbers may overflow: masked scores' do.
        least, most = torch.aminmax(values)
        if not math.isfinite(float(most) - float(least)):
            torch.mm(self.matrix, values, out=out)
            return
        torch.index_select(values, 0, self.at, out=out)
        if self.factors is not None:
            out.mul_(self.factors)
        out.add_(0.0)  # a sum has no -0


Way = Callable[[torch.Tensor], torch.Tensor]  # values [K, M] -> the product [N, M]


def constant_product(op: Op, arena: Arena) -> Callable[[], bool] | None:
    """A step that gives False where the product has to be multiplied after all; None for products
    of operands that change from run to run."""
    form = Packable.of(op, arena.lasting)
    if form is None or form.sizes[1] == 1:
        return None
    m, n, k = form.sizes
    given, target = form.turned_rows, form.turned_out
    dt, wide, out = arena.kept(given), arena.fp32(given), arena.viewer(target)
    read = arena.viewer(given) if wide is None else lambda: wide
    adds = op.attrs.accumulate
    found: list[Way | None] = []

    def run() -> bool:
        if not found:  # what lasts has been written by now
            found.append(_way(form, arena))
        way = found[0]
        if way is None:
            return False
        values = read()
        values = values if values.dtype is torch.float32 else widen(values, dt, False)
        made, place = way(values.reshape(k, m)), out()
        made = made.expand(n, m).reshape(place.shape)
        place.add_(made) if adds else place.copy_(made)
        return True

    return run


def _way(form: Packable, arena: Arena) -> Way | None:
    m, n, k = form.sizes
    matrix = widen(arena.view(form.weight), arena.kept(form.weight), False).reshape(n, k)
    if not bool(matrix.isfinite().all()):
        return None
    if bool((matrix == matrix[:1]).all()):
        row = matrix[:1].clone()
        return lambda values: torch.mm(row, values)
    if m * n * k <= LEAST or int((matrix != 0).sum(1).max()) > 1:
        return None
    selection = Selection(matrix.clone())

    def chosen(values: torch.Tensor) -> torch.Tensor:
        return arena.product(selection, values, (n, m), selection.multiply)

    return chosen
