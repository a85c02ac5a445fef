"""GpSimdE: index patterns, reductions over partitions, gathers, random numbers.

Eight processors serve 16 partitions each; they reach SBUF only. Source: aws-neuron-sdk v2.21.1 to
v2.26.1, general/nki/api/nki/isa/__init__.py. Functions marked "SDK 2.2x" came after 2.21; using one
is a warning, because the kernel does not compile on 2.21.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..device.dtypes import FLOAT32, Shape, Tensors
from ..device.errors import refuse
from ..device.spec import CORE, Engine
from ..program import trace
from ..program.attributes import Attrs, among, constants
from ..program.program import Instruction
from ..program.view import View
from .alu import reduce_last
from .entry import SBUF, OpSpec, flat, free_elements, streaming

START_CYCLES = 150  # nisa.iota, nisa.affine_select: fixed part of an instruction on GpSimdE
GATHER_WIDTHS = (1, 2, 4, 8, 16, 32)
GATHER_MAX = 4096  # nisa.local_gather: indices of one processor


_gpsimd = functools.partial(OpSpec, engine=Engine.GPSIMD, reads=(SBUF,), writes=(SBUF,))


# --- index patterns -------------------------------------------------------------------------------
@constants
class IotaAttrs(Attrs):
    """Attributes of an index pattern.

    Attributes:
        values: of every element of the result.
    """

    values: np.ndarray

    def cut(self, box: tuple[slice, ...]) -> IotaAttrs:
        return replace(self, values=self.values[box])


IOTA = _gpsimd(
    "iota",
    "fill",
    IotaAttrs,
    lambda attrs, _: torch.as_tensor(attrs.values.copy()),
    lambda i: START_CYCLES + i.dst[0].free_size,
    reads=(),
    note="affine expression of aranges, int32 inside",
    operands=(0, 0),
)


@constants
class KeepAttrs(Attrs):
    """Attributes of a choice that is known while tracing.

    Attributes:
        keep: which elements of the result are the operand's.
        on_false: what the others become.
    """

    keep: np.ndarray
    on_false: float

    def cut(self, box: tuple[slice, ...]) -> KeepAttrs:
        return replace(self, keep=self.keep[box])


def _affine_select(attrs: KeepAttrs, xs: Tensors) -> torch.Tensor:
    keep = torch.as_tensor(attrs.keep.copy())
    return torch.where(keep, xs[0], torch.tensor(attrs.on_false, dtype=xs[0].dtype))


AFFINE_SELECT = _gpsimd(
    "affine_select",
    "kept",
    KeepAttrs,
    _affine_select,
    lambda i: START_CYCLES + free_elements(i),
    note="keeps elements where an affine comparison holds, else a constant",
)


# --- reduction over partitions --------------------------------------------------------------------
@constants
class PartitionReduceAttrs(Attrs):
    """Attributes of a reduction over partitions.

    Attributes:
        op: ALU operator.
        ndim: axes of the operand.
    """

    op: str = among(("add", "average", "maximum", "bitwise_or", "bitwise_and"))
    ndim: int


def _partition_reduce(attrs: PartitionReduceAttrs, xs: Tensors) -> torch.Tensor:
    x = xs[0].movedim(-attrs.ndim, -1)
    if attrs.op == "average":
        return x.mean(-1).unsqueeze(-attrs.ndim)
    return reduce_last(attrs.op, x, 1).unsqueeze(-attrs.ndim)


PARTITION_REDUCE = _gpsimd(
    "tensor_partition_reduce",
    "partitions",
    PartitionReduceAttrs,
    _partition_reduce,
    lambda i: START_CYCLES + i.src[0].free_size * i.src[0].shape[0],
    same_partitions=False,
    box_mend="slice the operand instead",
    note="over the partition axis: slow, no published cost; a ones-matmul is faster",
    published=False,
)


# --- gathers --------------------------------------------------------------------------------------
def _out_of_row(what: str, index: torch.Tensor, size: int) -> None:
    if bool(((index < 0) | (index >= size)).any()):
        raise refuse(
            "err_tensor_access_out_of_bound",
            f"{what} with index {int(index.max())}, expected 0 to {size - 1}; correct the indices",
        )


@constants
class LocalGatherAttrs(Attrs):
    """Attributes of a gather with one list of indices for 16 partitions.

    Attributes:
        free_axes: free axes of the data.
        count: indices that each list has.
        width: elements that an index stands for.
        each: partitions that share a list.
    """

    free_axes: int
    count: int
    width: int = 1
    each: int = CORE.gpsimd_partitions

    def offsets(self, index: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """Free offsets [..., P, count * width] in each partition of ``data`` [..., P, n]."""
        lead, rows = data.shape[:-2], data.shape[-2]
        lists = index.to(torch.int64).reshape(*lead, rows // self.each, self.each, -1)
        lists = lists.transpose(-1, -2).flatten(-2)[..., None, : self.count, None]
        at = (lists + torch.arange(self.width)).flatten(-2)
        _out_of_row("a gather or scatter", at, data.shape[-1])
        return at.expand(*at.shape[:-2], self.each, at.shape[-1]).flatten(-3, -2)


def _local_gather(attrs: LocalGatherAttrs, xs: Tensors) -> torch.Tensor:
    data = flat(xs[0], attrs.free_axes)
    picked = data.gather(-1, attrs.offsets(xs[1], data))
    return picked.reshape(*data.shape[:-1], attrs.count, attrs.width)


def _scatter(attrs: LocalGatherAttrs, xs: Tensors) -> torch.Tensor:
    data = flat(xs[2], attrs.free_axes)
    return data.scatter(-1, attrs.offsets(xs[1], data), xs[0].flatten(-2)).reshape(xs[2].shape)


def _local_gather_cycles(i: Instruction) -> float:
    """Elements at the rate that the docstring gives for each width."""
    attrs = LocalGatherAttrs.of(i)
    per_word = min(4 / i.src[0].dt.itemsize, attrs.width)
    constant = ((28 + 4 * attrs.width) / (4 * attrs.width)) / per_word
    return START_CYCLES + attrs.count * attrs.width / constant


LOCAL_GATHER = _gpsimd(
    "local_gather",
    "cores",
    LocalGatherAttrs,
    _local_gather,
    _local_gather_cycles,
    note="each GpSimd core gathers the same free offsets in its 16 partitions",
    operands=(2, 2),
)
INDIRECT_READ = OpSpec(
    "indirect_read",
    "cores",
    LocalGatherAttrs,
    _local_gather,
    lambda i: 0.0,
    note="gen4: the part of an instruction that gathers columns of an operand, in no time",
    operands=(2, 2),
    generation=4,
)
INDIRECT_WRITE = OpSpec(
    "indirect_write",
    "cores",
    LocalGatherAttrs,
    _scatter,
    lambda i: 0.0,
    note="gen4: the part of an instruction that scatters its result into columns, in no time",
    operands=(3, 3),
    generation=4,
)


def gathering(
    data: View, offsets: View, width: int, valid: int | None, target: View | None = None
) -> LocalGatherAttrs:
    """The checked attributes of a local_gather of ``data``, into ``target`` if there is one."""
    available = CORE.gpsimd_partitions * offsets.free_size
    count, wrong = available if valid is None else int(valid), None
    if data.shape[0] % CORE.gpsimd_partitions or data.shape[0] != offsets.shape[0]:
        wrong = f"partition counts that are equal multiples of {CORE.gpsimd_partitions}"
    elif offsets.dt.name != "uint16":
        wrong = "uint16 indices"
    elif width not in GATHER_WIDTHS:
        wrong = f"num_elem_per_idx one of {GATHER_WIDTHS}"
    elif not 0 < count <= min(available, GATHER_MAX):
        wrong = f"num_valid_indices from 1 to {min(available, GATHER_MAX)}"
    elif target is not None and (target.free_size != count * width or target.dt is not data.dt):
        wrong = f"dst of type {data.dt} with {count * width} elements per partition"
    if wrong:
        into = "" if target is None else f" into {target.label()}"
        raise refuse(
            "sim_local_gather",
            f"local_gather of {data.label()} with {offsets.label()}{into}, num_elem_per_idx="
            f"{width}, num_valid_indices={count}, expected {wrong}; make the tile "
            "so with nl.ndarray, or mend the number",
        )
    return LocalGatherAttrs(free_axes=data.ndim - 1, count=count, width=int(width))


@constants
class GatherAttrs(Attrs):
    """Attributes of a gather with indices for every element.

    Attributes:
        free_axes, index_axes: free axes of the data and of the indices.
    """

    free_axes: int
    index_axes: int


def _gather(attrs: GatherAttrs, xs: Tensors) -> torch.Tensor:
    data = flat(xs[0], attrs.free_axes)
    index = flat(xs[1].to(torch.int64), attrs.index_axes)
    _out_of_row("gather_flattened", index, data.shape[-1])
    return data.gather(-1, index).reshape(xs[1].shape)


GATHER = _gpsimd(
    "gather_flattened",
    "all",
    GatherAttrs,
    _gather,
    lambda i: START_CYCLES + i.dst[0].free_size,
    box_mend="slice the operand instead",
    operands=(2, 2),
    published=False,
    note="nl.gather_flattened (SDK 2.24): own indices for each partition",
)


def _bounds(attrs: Attrs, xs: Tensors) -> torch.Tensor:
    ids = xs[0][..., 0, :]
    n = ids.shape[-1]
    place = torch.arange(n, dtype=torch.float32).expand(ids.shape)
    change = torch.ones_like(ids, dtype=torch.bool)
    change[..., 1:] = ids[..., 1:] != ids[..., :-1]
    start = torch.where(change, place, 0.0).cummax(-1).values
    last = torch.ones_like(change)
    last[..., :-1] = change[..., 1:]
    end = torch.where(last, place + 1, float(n)).flip(-1).cummin(-1).values.flip(-1)
    padding = ids == 0
    start, end = torch.where(padding, float(n), start), torch.where(padding, -1.0, end)
    return torch.stack([start, end], -2)[..., None, :, :]


SEQUENCE_BOUNDS = _gpsimd(
    "sequence_bounds",
    "all",
    Attrs,
    _bounds,
    lambda i: START_CYCLES + 2 * i.src[0].free_size,
    note="SDK 2.26: start and end of the segment that each element belongs to",
    published=False,
)


# --- search ---------------------------------------------------------------------------------------
@constants
class TopKAttrs(Attrs):
    """Attributes of the largest elements of each GpSimd core's partitions.

    Attributes:
        n: elements of each core that count; element e lies in row e % 16, column e // 16.
        k: how many are wanted.
        ndim: axes of the operand.
    """

    n: int
    k: int
    ndim: int


def _topk(attrs: TopKAttrs, xs: Tensors) -> Tensors:
    each = CORE.gpsimd_partitions
    data = flat(xs[0], attrs.ndim - 1)
    lead, rows, columns = data.shape[:-2], data.shape[-2], data.shape[-1]
    snake = data.reshape(*lead, rows // each, each, columns).transpose(-1, -2).flatten(-2)
    found = snake[..., : attrs.n].topk(attrs.k, dim=-1)
    # ascending, the same on all partitions of a core
    results = [found.values.flip(-1), found.indices.flip(-1).to(torch.float64)]
    return [r.repeat_interleave(each, dim=-2) for r in results]


TOPK = _gpsimd(
    "topk",
    "groups",
    TopKAttrs,
    _topk,
    lambda i: 4 * TopKAttrs.of(i).n + TopKAttrs.of(i).k,
    note="SDK 2.32: the k largest of each 16 partitions; 4 n + k cycles",
    results=2,
)


@constants
class NonzeroAttrs(Attrs):
    """Attributes of the places of nonzero elements.

    Attributes:
        offset: added to every place.
        padding: what follows the last one.
        free_axes: free axes of the operand.
    """

    offset: int
    padding: int
    free_axes: int


def _nonzero(attrs: NonzeroAttrs, xs: Tensors) -> torch.Tensor:
    data = flat(xs[0], attrs.free_axes) != 0
    n = data.shape[-1]
    place = torch.arange(n, dtype=torch.float64).expand(data.shape)
    ordered = torch.where(data, place, float(n)).sort(-1).values  # the nonzero ones first
    padded = torch.where(ordered < n, ordered + attrs.offset, float(attrs.padding))
    return torch.cat([padded, data.sum(-1, keepdim=True).to(torch.float64)], -1)


NONZERO = _gpsimd(
    "nonzero_with_count",
    "all",
    NonzeroAttrs,
    _nonzero,
    lambda i: START_CYCLES + i.src[0].free_size,
    note="NeuronCore-v3: places of nonzero elements of partitions 0, 16, ..., then their count",
    generation=3,
    published=False,
)


# --- random numbers -------------------------------------------------------------------------------
@constants
class RandomAttrs(Attrs):
    """Attributes of random numbers.

    Attributes:
        count: random instructions since the seed was set.
        seed, seed_at: the seed, or which operand it is.
        shape: of the result.
    """

    count: int
    seed: int = 0
    seed_at: int | None = None
    shape: Shape = ()


@constants
class DropoutAttrs(RandomAttrs):
    """Attributes of a random choice of zeros.

    Attributes:
        probability, probability_at: of an element to become zero, or which operand holds it.
    """

    probability: float = 0.0
    probability_at: int | None = None


def _uniform(attrs: RandomAttrs, xs: Tensors, shape: Any) -> torch.Tensor:
    """Uniform [0, 1): the same for the same seed and position in the kernel."""
    return torch.rand(shape, generator=_generator(attrs, xs))


def _generator(attrs: RandomAttrs, xs: Tensors) -> torch.Generator:
    seed = attrs.seed if attrs.seed_at is None else int(xs[attrs.seed_at].reshape(-1)[0])
    return torch.Generator().manual_seed((seed << 20) + attrs.count)


def random_source(src: list[View], kind: Any = RandomAttrs, **more: Any) -> Any:
    """Attributes of the next random instruction; a seed that is data is appended to ``src``.

    ``more`` are the attributes of ``kind`` beside the seed.
    """
    tracer = trace.current("a random instruction")
    seed, count = tracer.random
    tracer.random = (seed, count + 1)
    if isinstance(seed, View):
        src.append(seed)
        return kind(count=count, seed_at=len(src) - 1, **more)
    return kind(count=count, seed=seed, **more)


RAND = OpSpec(
    "rand",
    "random",
    RandomAttrs,
    lambda attrs, xs: _uniform(attrs, xs, attrs.shape),
    lambda i: START_CYCLES + i.dst[0].free_size,
    engine=Engine.GPSIMD,
    writes=(SBUF,),
    same_partitions=False,
    note="nl.rand: uniform in [0, 1), reproducible from the seed",
    operands=(0, 1),
    published=False,
)


@constants
class UniformAttrs(RandomAttrs):
    """Attributes of random numbers between two bounds.

    Attributes:
        low, high: the bounds, where no operands are.
        low_at, high_at: which operands are.
    """

    low: float = 0.0
    high: float = 1.0
    low_at: int | None = None
    high_at: int | None = None


def _between(attrs: UniformAttrs, xs: Tensors) -> torch.Tensor:
    low = attrs.low if attrs.low_at is None else xs[attrs.low_at]
    high = attrs.high if attrs.high_at is None else xs[attrs.high_at]
    return low + (high - low) * _uniform(attrs, xs, attrs.shape)


UNIFORM = OpSpec(
    "rand2",
    "dropout",
    UniformAttrs,
    _between,
    streaming(),
    same_partitions=False,
    note="NeuronCore-v4: uniform between two bounds; the streams are not documented",
    operands=(0, 3),
    generation=4,
)
RANDOM_BITS = OpSpec(
    "rng",
    "random",
    RandomAttrs,
    lambda attrs, xs: torch.randint(0, 1 << 32, attrs.shape, generator=_generator(attrs, xs)),
    streaming(),
    same_partitions=False,
    note="SDK 2.29: random bits of integer types; the streams are not documented",
    engines=(Engine.VECTOR, Engine.GPSIMD),
    operands=(0, 1),
    published=False,
)


def _dropout(attrs: DropoutAttrs, xs: Tensors) -> torch.Tensor:
    at = attrs.probability_at
    probability = attrs.probability if at is None else xs[at]
    return torch.where(_uniform(attrs, xs, xs[0].shape) < probability, 0.0, xs[0])


DROPOUT = OpSpec(
    "dropout",
    "dropout",
    DropoutAttrs,
    _dropout,
    streaming(),
    same_partitions=False,
    note="zeroes elements with a probability, without rescaling the others",
    operands=(1, 3),
)


def with_probability(
    source: View, prob: Any, along: Callable[[], View]
) -> tuple[list[View], float, int | None]:
    """Operands, and the probability or its place among them; ``along`` gives it their shape."""
    if not isinstance(prob, View):
        return [source], float(prob), None
    if source.dt.is_int and prob.dt is not FLOAT32:
        raise refuse(
            "sim_dropout_types",
            f"dropout of {source.label()} with probabilities {prob.label()}, expected fp32 "
            "probabilities for integer data; cast them",
        )
    return [source, along()], 0.0, 1
