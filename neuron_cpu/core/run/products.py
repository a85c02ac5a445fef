"""Matmuls on the CPU: one torch product, or several whose widened operands fit the cache.

A torch matmul in bf16 rounds its result, so it cannot stand for PSUM: products run in fp32 on
widened operands, in chunks small enough that the widened weights stay in the cache.
"""

import math
from collections.abc import Callable

import numpy as np
import torch

from ..device.dtypes import FLOAT32, Shape
from ..device.errors import refuse
from .memory import DIRECT, TWINS, Arena, widen
from .merge import Op, Ref
from .packing import FACTOR, Packable, multiply
from .selections import constant_product
from .threads import LARGE, ONE_DNN

Step = Callable[[], None]
CHUNK = 1 << 19  # widened weight elements per matmul call: 2 MiB of fp32, about one L2 cache
WIDTH = 1 << 16  # weight elements of a partition that one moving column meets at a time


class _Product:
    """How a (batched) matmul becomes one torch matmul: groups of axes of both operands."""

    def __init__(self, op: Op) -> None:
        left, right, out = op.src[0], op.src[1], op.dst[0]
        # Of the merged axes, those that are accumulated over lengthen the contraction; one along
        # which only the stationary (moving) operand changes makes more rows (columns) of the same
        # product; along any other, each step is a product of its own.
        b = op.batch
        ns, nm = len(left.shape) - b - 1, len(right.shape) - b - 1  # free axes
        self.batch: list[int] = []
        k, m, n = [], [], []
        for axis in range(b):
            if axis in op.contract:
                k.append(axis)
            elif right.strides[axis] == 0 and left.strides[axis] != 0:
                m.append(axis)
            elif left.strides[axis] == 0 and right.strides[axis] != 0:
                n.append(axis)
            else:
                self.batch.append(axis)
        # Contraction axes in the order of the larger operand's memory, so that it needs no copy.
        wide = right if _elements(right) >= _elements(left) else left
        self.k = sorted([*k, b], key=lambda a: -wide.strides[a])
        # Outer blocks of the weights stay batch axes, so that each block is a plain matrix. Axes
        # slower than the contraction cannot be joined with the faster ones without a copy of the
        # weights, which costs more than the product of a decode step.
        outer, own = max(wide.strides[a] for a in self.k), n if wide is right else m
        for axis in [a for a in own if wide.strides[a] > outer]:
            own.remove(axis)
            self.batch.append(axis)
        self.m, self.n = m, n
        self.left_axes = [*self.batch, *self.k, *m, *range(b + 1, b + 1 + ns)]
        self.right_axes = [*self.batch, *self.k, *n, *range(b + 1, b + 1 + nm)]
        # Columns of a slice of a wider tile stay several axes in the result, as in the operand.
        self.out_axes = [*self.batch, *m, b, *n, *range(b + 1, len(out.shape))]
        self.sizes = [out.shape[a] for a in self.batch]


def _picked(ref: Ref, axes: list[int]) -> Ref:
    """The view with just these axes (a contracted axis of a result has stride 0 and goes)."""
    shape = tuple(ref.shape[a] for a in axes)
    return ref.over(shape, tuple(ref.strides[a] for a in axes))


def _elements(ref: Ref) -> int:
    return math.prod(size for size, stride in zip(ref.shape, ref.strides) if stride)


class _Operand:
    """One side of a product: a view (batch..., K..., free...) that becomes fp32 matrices."""

    def __init__(self, arena: Arena, ref: Ref, batch: int, k: int, slot: int) -> None:
        wide = arena.fp32(ref)
        self.view = arena.viewer(ref) if wide is None else lambda: wide
        self.shape, self.strides = ref.shape, ref.strides
        self.dt, self.arena, self.slot = arena.kept(ref) if wide is None else FLOAT32, arena, slot
        self.lead, self.kept = self.shape[:batch], self.shape[batch + k :]
        self.depth = math.prod(self.shape[batch : batch + k])
        self.free = math.prod(self.kept)
        self.fixed = not any(s for s, n in zip(self.strides, self.lead) if n > 1)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def whole(self, turned: bool) -> Callable[[], torch.Tensor]:
        """A function that gives (batch, K, free), or ``turned`` (batch, free, K), in fp32."""
        batches = math.prod(self.lead)

        def matrices(values: torch.Tensor) -> torch.Tensor:
            values = values.reshape(-1, self.depth, self.free).expand(batches, -1, -1)
            return values.transpose(1, 2) if turned else values

        if self.dt.torch is torch.float32:
            return lambda: matrices(self.view())
        # What all batches share is widened once. The copy brings the axes into their order; where
        # it goes is decided here, so that a call makes no views of it.
        shape = self.shape[len(self.lead) :] if self.fixed else self.shape
        size = math.prod(shape)
        if size <= TWINS:

            def fresh() -> torch.Tensor:
                view = self.view()
                if self.fixed:
                    view = view[(0,) * len(self.lead)]
                return matrices(widen(view, self.dt, False))

            return fresh
        room = self.arena.scratch(self.slot, max(size, CHUNK))[:size].view(shape)
        widened, at = matrices(room), (0,) * len(self.lead) if self.fixed else ()

        def widen_it() -> torch.Tensor:
            view = self.view()[at] if at else self.view()
            room.copy_(view if self.dt in DIRECT else widen(view, self.dt, False))
            return widened

        return widen_it

    def matrix(self, view: torch.Tensor, place: Shape, part: slice) -> torch.Tensor:
        """(K of ``part``, free) of one batch, in scratch memory where it has to be copied."""
        view = view[place][part]
        rows = self.depth // self.shape[len(self.lead)] * view.shape[0]
        if self.dt is FLOAT32 and view.is_contiguous():
            return view.view(rows, -1)
        room = self.arena.scratch(self.slot, view.numel())
        room.view(view.shape).copy_(view if self.dt in DIRECT else widen(view, self.dt, False))
        return room.view(rows, -1)


# BLAS takes a tenth of the time for 8 rows of 1536 columns that 1536 rows of 8 columns take: so a
# side with few free elements gives the rows, and the result is seen turned round.
FEW = 32


def _turned(m: int, n: int) -> bool:
    return n < m and n < FEW


def _times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(K, m) and (K, n) -> (m, n)."""
    if _turned(a.shape[-1], b.shape[-1]):
        return torch.mm(b.t(), a).t()
    return _product(a.t(), b)


def _add_times(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``total`` (m, n), a result of ``_times``, plus the product of (K, m) and (K, n), in place."""
    if _turned(a.shape[-1], b.shape[-1]):
        return total.t().addmm_(b.t(), a).t()
    return total.add_(_product(a.t(), b))


_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if ONE_DNN else None


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(m, K) @ (K, n) in fp32."""
    if _LINEAR is not None and a.shape[0] * a.shape[1] * b.shape[1] >= LARGE:
        if b.shape[1] < a.shape[0]:  # a fifth faster with the fewer ones as rows
            return _LINEAR(b.t(), _without_gaps(a.t()).t(), None, "none", [], "").t()
        return _LINEAR(a, _without_gaps(b).t(), None, "none", [], "")
    return torch.mm(a, b)


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    """The operand with rows or columns without gaps inside: BLAS would copy it with more calls."""
    lying = any(s == 1 or n == 1 for s, n in zip(matrix.stride(), matrix.shape))
    return matrix if lying else matrix.contiguous()


def _without_gaps(weight: torch.Tensor) -> torch.Tensor:
    """The operand without gaps between rows or columns. With gaps oneDNN takes loops 500 times as
    slow (240 ms for 128 x 66 x 512), and a copy is little beside a large product."""
    return weight if weight.is_contiguous() or weight.t().is_contiguous() else weight.contiguous()


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(batch, m, K) @ (batch, K, n) in fp32."""
    if _LINEAR is not None and a.shape[1] * a.shape[2] * b.shape[2] >= LARGE:
        return torch.stack([_product(one, two) for one, two in zip(a, b)])
    return torch.bmm(a, b)


def matmul_step(op: Op, arena: Arena) -> Step:
    """One torch matmul, or a loop over batches and parts of K whose operands fit the cache; a
    refusal of other operands than the kernel has promised, for which fewer passes count."""
    step, attrs = _packed_or(_step(op, arena), op, arena), op.instruction.attrs
    constant = constant_product(op, arena)
    if constant is not None:
        step = _first_of(constant, step)
    words = ("stationary_onezero", 0), ("moving_onezero", 1), ("is_transpose", 1)
    promised = [op.src[at] for word, at in words if getattr(attrs, word, False)]
    if not promised:
        return step
    looks = [(arena.viewer(ref), ref) for ref in promised]

    def run() -> None:
        for look, ref in looks:
            values = widen(look(), ref.dt, False)
            if not ((values == 0) | (values == 1)).all():
                raise refuse(
                    "sim_onezero",
                    f"nc_matmul got {ref.memory.storage.label()}, whose hint says ones and zeros, "
                    "expected nothing else in it; leave out the hint",
                )
        step()

    return run


def _deliver(target: torch.Tensor, values: torch.Tensor, adds: bool) -> None:
    values = values.reshape(target.shape)
    target.add_(values) if adds else target.copy_(values)


def _first_of(way: Callable[[], bool], step: Step) -> Step:
    def run() -> None:
        if not way():
            step()

    return run


def _packed_or(step: Step, op: Op, arena: Arena) -> Step:
    """The step; with packed weights in runs that have them."""
    found = Packable.of(op, arena.moving)
    if found is None:
        return step
    arena.packable.setdefault(id(found.memory), []).append(found)
    x, dt = arena.fp32(found.rows), arena.kept(found.rows)
    rows = arena.viewer(found.rows) if x is None else lambda: x
    out, adds = arena.viewer(found.out), op.attrs.accumulate

    m, n, k = found.sizes

    def run() -> None:
        pack = found.packed(arena)
        if pack is None:
            return step()
        values = rows()
        wide = values if values.dtype is torch.float32 else widen(values, dt, False)
        scaled = wide.reshape(m, k).contiguous() * FACTOR
        made = arena.product(found, scaled, (m, n), lambda given, made: multiply(given, pack, made))
        _deliver(out(), made, adds)

    return run


def _step(op: Op, arena: Arena) -> Step:
    product = _Product(op)
    axes = product.left_axes, product.right_axes
    left, right = (
        _Operand(arena, _picked(op.src[k], axes[k]), len(product.batch), len(product.k), k)
        for k in (0, 1)
    )
    out = arena.viewer(_picked(op.dst[0], product.out_axes))
    adds = op.attrs.accumulate
    # Of many rows and columns the arithmetic takes the time, not the way to memory.
    chunk = 4 * CHUNK if min(left.free, right.free) >= FEW else CHUNK
    if max(left.elements, right.elements) <= chunk:
        return _at_once(left, right, out, adds)
    by_rows = _row_by_row(op, product, arena, out)
    if by_rows is not None:
        return by_rows
    # of the outermost contraction axis, which give the wider operand `chunk` elements
    count = left.shape[len(product.sizes)]
    widest = max(left.elements, right.elements) // math.prod(product.sizes)
    length = max(1, count * chunk // max(1, widest))
    parts = [slice(k, min(k + length, count)) for k in range(0, count, length)]
    return _in_parts(left, right, out, product.sizes, parts, adds)


def _at_once(left: _Operand, right: _Operand, out: Callable[[], torch.Tensor], adds: bool) -> Step:
    """All batches in one product."""
    turned = _turned(left.free, right.free)
    first, second = (right, left) if turned else (left, right)
    rows, columns = first.whole(turned=True), second.whole(turned=False)
    single = math.prod(left.lead) == 1

    def run() -> None:
        a, b = rows(), columns()
        values = _product(_dense(a[0]), _dense(b[0])) if single else _products(a, b)
        _deliver(out(), values.transpose(-1, -2) if turned else values, adds)

    return run


def _row_by_row(
    op: Op, product: _Product, arena: Arena, out: Callable[[], torch.Tensor]
) -> Step | None:
    """One moving column: memory gives the weights as they lie, partition by partition.

    Widening stretches of a few KiB, which lie far apart, takes three times as long as the sums that
    this adds: over the other contracted axes, of results of 128 elements. None for other products.
    """
    left, right, b = op.src[0], op.src[1], op.batch
    dt = arena.kept(left)
    if dt is FLOAT32 or dt not in DIRECT or len(left.shape) != b + 2 or left.strides[-1] != 1:
        return None
    if not b or product.n or math.prod(right.shape[b + 1 :]) > 1:
        return None
    # Axes in the order of the weights' memory: the outermost contracted one, which chunks divide;
    # those between, each step of which is a product of its own; the stationary features.
    outer = product.k[0]
    between = sorted((a for a in range(b + 1) if a != outer), key=lambda a: -left.strides[a])
    stationary = _picked(left, [outer, *between, b + 1])
    weights, moving = arena.viewer(stationary), arena.viewer(_picked(right, [*between, outer]))
    count, *sizes, features = stationary.shape
    # Rows of all features are read as they lie, but for rows so wide that few of them would fit:
    # of those a group of steps of the outermost axis between after the other.
    width = math.prod(sizes[1:]) * features
    group = max(1, min(sizes[0], WIDTH // width))
    length = max(1, 2 * CHUNK // (group * width))
    summed = [at for at, axis in enumerate(between) if axis in product.k]
    kept = [axis for axis in between if axis not in product.k]
    order = [*(kept.index(axis) for axis in (*product.batch, *product.m)), len(kept)]
    adds, moving_dt = op.attrs.accumulate, arena.kept(right)

    def run() -> None:
        x = widen(moving(), moving_dt, False).reshape(sizes[0], -1, count)
        totals = torch.zeros(sizes[0], width // features, features)
        lying = weights()
        for first in range(0, sizes[0], group):
            steps = slice(first, first + group)
            column, total = x[steps].reshape(-1, 1, count), totals[steps].view(-1, 1, features)
            for start in range(0, count, length):
                part = lying[start : start + length, steps]
                room = arena.scratch(0, part.numel())
                room.view(part.shape).copy_(part)
                rows = room.view(len(part), -1, features).transpose(0, 1)
                total.baddbmm_(column[:, :, start : start + length], rows)
        values = totals.view(*sizes, features)
        _deliver(out(), (values.sum(summed) if summed else values).permute(order), adds)

    return run


def _in_parts(
    left: _Operand,
    right: _Operand,
    out: Callable[[], torch.Tensor],
    sizes: list[int],
    parts: list[slice],
    adds: bool,
) -> Step:
    """Batch after batch, part after part of K; an operand that stays the same is widened once."""
    places = list(np.ndindex(*sizes))
    # An operand that all batches share, in one part, is widened before the first of them.
    keep = [side.fixed and len(parts) == 1 for side in (left, right)]

    def run() -> None:
        one, two, result = left.view(), right.view(), out()
        x = left.matrix(one, places[0], parts[0]) if keep[0] else None
        y = right.matrix(two, places[0], parts[0]) if keep[1] else None
        for place in places:
            total: torch.Tensor | None = None
            for part in parts:
                a = left.matrix(one, place, part) if x is None else x
                b = right.matrix(two, place, part) if y is None else y
                total = _times(a, b) if total is None else _add_times(total, a, b)
            assert total is not None
            _deliver(result[place], total, adds)

    return run
