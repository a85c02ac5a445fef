"""The next rungs of the ladder: kernels in the style of production libraries, against numpy.

Such kernels carry their own allocator of addresses and their own views, choose engines and sizes by
generation, pass tiles from function to function and lists of tiles as buffers. Each runs twice,
replayed and in eager mode; those of two cores are replayed only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from nki.isa.constants import dge_mode, oob_mode
from nki.language import NKIObject

from neuron_cpu.core import NkiError, NkiWarning
from neuron_cpu.core.device.spec import GEN3
from neuron_cpu.core.time.schedule import schedule

# what production kernels do is no occasion for a warning
pytestmark = [
    pytest.mark.filterwarnings("error::neuron_cpu.core.device.errors.NkiWarning"),
    pytest.mark.usefixtures("production"),
]

BF16 = np.dtype(ml_dtypes.bfloat16)
P = nl.tile_size.pmax
BANK = 2048  # bytes of a PSUM bank


@pytest.fixture(params=["replayed", "eager"])
def execution(request, monkeypatch):
    if request.param == "eager":
        monkeypatch.setenv("NKI_CPU_EAGER", "1")


def data(seed, shape, dtype=np.float32, scale=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(dtype)


def close(found, want, tolerance=1e-4):
    want = np.asarray(want, np.float64)
    assert found.shape == want.shape
    assert np.abs(found.astype(np.float64) - want).max() <= tolerance * np.abs(want).max()


def sb(shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def ps(shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def kernel_assert(condition, message):
    assert condition, f"[KERNEL] {message}"


# --- tools of such libraries ----------------------------------------------------------------------
class Stack(NKIObject):
    """An allocator of SBUF: addresses grow inside a scope and fall back at its end."""

    size: int
    used: int = 0
    scopes: list = None
    count: int = 0

    def __post_init__(self):
        self.scopes = []

    def open_scope(self):
        self.scopes.append(self.used)

    def close_scope(self):
        self.used = self.scopes.pop()

    def alloc(self, shape, dtype, align=32):
        free = 1
        for n in shape[1:]:
            free *= n
        start = math.ceil(self.used / align) * align
        self.used = start + free * (4 if dtype == nl.float32 else 2)
        kernel_assert(self.used <= self.size, f"{self.used} bytes of {self.size}")
        self.count += 1
        name = "stack_" + str(self.count)
        return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf, name=name, address=(0, start))


class TiledRange(NKIObject):
    """Tiles of an axis: (start, size) of each, with a remainder."""

    length: int
    tile: int

    def tiles(self):
        found = []
        for k in range(math.ceil(self.length / self.tile)):
            found.append((k * self.tile, min(self.tile, self.length - k * self.tile)))
        return found


class Pattern(NKIObject):
    """A view kept as sizes and strides, made a tensor by one access pattern at the end."""

    base: nl.NkiTensor
    sizes: tuple
    strides: tuple
    offset: int = 0

    def slice(self, dim, start, end, step=1):
        sizes, strides = list(self.sizes), list(self.strides)
        offset = self.offset + start * strides[dim]
        sizes[dim], strides[dim] = (end - start + step - 1) // step, strides[dim] * step
        return Pattern(self.base, tuple(sizes), tuple(strides), offset)

    def split(self, dim, inner):
        sizes, strides = list(self.sizes), list(self.strides)
        kernel_assert(sizes[dim] % inner == 0, "no whole parts")
        outer = (sizes[dim] // inner, strides[dim] * inner)
        sizes[dim : dim + 1], strides[dim : dim + 1] = [outer[0], inner], [outer[1], strides[dim]]
        return Pattern(self.base, tuple(sizes), tuple(strides), self.offset)

    def swap(self, a, b):
        sizes, strides = list(self.sizes), list(self.strides)
        sizes[a], sizes[b], strides[a], strides[b] = sizes[b], sizes[a], strides[b], strides[a]
        return Pattern(self.base, tuple(sizes), tuple(strides), self.offset)

    def get_view(self, scalar_offset=None, indirect_dim=0):
        pattern = []
        for k in range(len(self.sizes)):
            pattern.append([self.strides[k], self.sizes[k]])
        return self.base.ap(
            pattern, offset=self.offset, scalar_offset=scalar_offset, indirect_dim=indirect_dim
        )


def view_of(tensor):
    return Pattern(tensor, tuple(tensor.shape), tuple(tensor.strides), 0)


class Norm(Enum):
    NONE = 0
    RMS = 1

    def scales(self):
        return self != Norm.NONE


# --- across partitions ----------------------------------------------------------------------------
def broadcast_row(dst, src):
    """Row 0 of ``src`` on every partition of ``dst``: a shuffle for each quadrant."""
    for quadrant in range(dst.shape[0] // 32):
        rows = nl.ds(quadrant * 32, 32)
        nisa.nc_stream_shuffle(dst[rows, :], src[0:32, :], shuffle_mask=[0] * 32)


@nki.jit
def row_everywhere(x):
    rows, width = x.shape
    out = nl.ndarray((P, width), x.dtype, buffer=nl.shared_hbm)
    source, target = nl.zeros((32, width), x.dtype), sb((P, width), x.dtype)
    nisa.dma_copy(source[0:rows, :], x)
    broadcast_row(target, source)
    nisa.dma_copy(out, target)
    return out


@pytest.mark.usefixtures("execution")
def test_a_row_on_all_partitions():
    x = data(1, (3, 50), BF16)
    assert np.array_equal(row_everywhere(x), np.repeat(x[:1], 128, 0))


@nki.jit
def moved_rows(x, target, moves):
    """Rows between quadrants and inside of them, (to, from) in a tuple; the others stay."""
    tile, kept = nl.load(x), nl.load(target)
    for move in moves:
        to, source = move
        mask = [255] * 32
        mask[to % 32] = source % 32
        first, second = to // 32 * 32, source // 32 * 32
        nisa.nc_stream_shuffle(kept[first : first + 32], tile[second : second + 32], mask)
    nl.store(target, kept)
    return target


@pytest.mark.usefixtures("execution")
def test_rows_move_across_partitions():
    x, y = data(2, (128, 20)), data(3, (128, 20))
    moves, want = ((5, 70), (69, 0), (127, 31), (64, 64)), y.copy()
    for to, source in moves:
        want[to] = x[source]
    assert np.array_equal(moved_rows(x, y, moves), want) and np.array_equal(y, want)


@nki.jit
def transposed_with_places(x):
    """(rows, columns) to (columns, rows): tiles at addresses of a stack, banks of PSUM in turn."""
    rows, columns = x.shape
    out = nl.ndarray((columns, rows), x.dtype, buffer=nl.shared_hbm)
    stack, gen2 = Stack(size=64 * 1024), nisa.get_nc_version() < nisa.nc_version.gen3
    for r in TiledRange(rows, P).tiles():
        stack.open_scope()
        tile = stack.alloc((r[1], columns), x.dtype)
        nisa.dma_copy(dst=tile, src=x[nl.ds(r[0], r[1]), :])
        for c in TiledRange(columns, P).tiles():
            at = (c[0] // P) % 8 * BANK
            dtype = nl.float32 if gen2 else x.dtype
            turned = nl.ndarray((c[1], r[1]), dtype, buffer=nl.psum, address=(0, at))
            nisa.nc_transpose(turned, tile[:, nl.ds(c[0], c[1])], engine=nisa.tensor_engine)
            done = stack.alloc((c[1], r[1]), x.dtype)
            nisa.tensor_copy(done, turned, engine=nisa.vector_engine)
            nisa.dma_copy(dst=out[nl.ds(c[0], c[1]), nl.ds(r[0], r[1])], src=done)
        stack.close_scope()
    return out


@pytest.mark.parametrize("chip", ["trn1", "trn2"])
@pytest.mark.usefixtures("execution")
def test_transposes_at_addresses(target, chip):
    target(chip)
    x = data(4, (150, 300), BF16)
    assert np.array_equal(transposed_with_places(x), x.T)


@nki.jit
def interleaved(x, y, scale, engines):
    """Two tensors element by element beside each other, each piece on the engine of its turn."""
    rows, width = x.shape
    out = nl.ndarray((rows, 2 * width), x.dtype, buffer=nl.shared_hbm)
    both, zero = sb((rows, width, 2), x.dtype), nl.zeros((rows, 1), nl.float32)
    for k in range(2):
        tile = nl.load((x, y)[k])
        for piece in range(len(engines)):
            part = nl.ds(piece * (width // len(engines)), width // len(engines))
            into, source, engine = both[:, part, k], tile[:, part], engines[piece]
            if engine == nisa.scalar_engine:
                nisa.activation(dst=into, op=nl.copy, data=source, scale=scale, bias=zero)
            elif engine == nisa.gpsimd_engine:
                nisa.tensor_tensor(into, source, source, nl.add, engine=engine)
            else:
                nisa.tensor_scalar(into, source, nl.multiply, scale, engine=engine)
    nisa.dma_copy(dst=out.reshape((rows, width, 2)), src=both)
    return out


@pytest.mark.usefixtures("execution")
def test_engines_by_turn(target):
    target("trn2")
    x, y = data(5, (70, 60)), data(6, (70, 60))
    engines = (nisa.scalar_engine, nisa.gpsimd_engine, nisa.vector_engine)
    want = 2 * np.stack([x, y], -1).reshape(70, 120)
    close(interleaved(x, y, 2.0, engines), want)


# --- run-time offsets and loops -------------------------------------------------------------------
@nki.jit
def added_where_it_counts(x, y, count, rows=32):
    """x + y over as many tiles as the count says; a device loop, its index an offset of patterns
    over HBM."""
    total, width = x.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, x)
    tiles, size = nisa.register_alloc(0), sb((1, 1), nl.int32)
    nisa.dma_copy(size, count)
    nisa.register_load(tiles, size)
    pattern = [[width, rows], [1, width]]
    shape = (total // rows, rows, width)
    x_tiles, y_tiles, o_tiles = x.reshape(shape), y.reshape(shape), out.reshape(shape)
    for k in nl.dynamic_range(tiles):
        a, b = sb((rows, width)), sb((rows, width))
        nisa.dma_copy(a, x_tiles.ap(pattern, scalar_offset=k, indirect_dim=0))
        nisa.dma_copy(b, y_tiles.ap(pattern, 0, k, None, 0))
        nisa.tensor_tensor(a, a, b, nl.add)
        nisa.dma_copy(o_tiles.ap(pattern, scalar_offset=k), a, dge_mode=dge_mode.swdge)
    return out


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_as_many_tiles_as_data_say(count):
    x, y = data(7, (128, 40)), data(8, (128, 40))
    want = x.copy()
    want[: 32 * count] += y[: 32 * count]
    assert np.array_equal(added_where_it_counts(x, y, np.array([[count]], np.int32)), want)


@pytest.mark.parametrize("rows", [16, 128])
def test_one_index_costs_gpsimd_once_a_transfer(target, rows):
    """On trn2 the address is worked out once, however many rows it serves."""
    target("trn2")

    @nki.jit
    def chosen(x, which):
        place, tile = sb((1, 1), nl.int32), sb((rows, 64))
        out = nl.ndarray((rows, 64), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(place, which)
        nisa.dma_copy(tile, x.ap([[64, rows], [1, 64]], scalar_offset=place, indirect_dim=0))
        nisa.dma_copy(out, tile)
        return out

    x = np.zeros((4, rows, 64), np.float32)
    found = schedule(chosen.trace(x, np.array([[2]], np.int32)), "sdk2.25")
    built = [move.built_ns for move in found.transfers.values()]
    assert sorted(built) == [0, 0, GEN3.dma.one_index_ns]


@nki.jit
def flattened_at(rows, starts, length):
    """Rows to places of a flat tensor that data name; what would leave it is left out."""
    count, width = rows.shape
    out = nl.ndarray((length, 1), rows.dtype, buffer=nl.shared_hbm)
    tile, index = nl.load(rows), nl.load(starts)
    nisa.dma_copy(out.reshape((length // P, P)), nl.zeros((length // P, P), rows.dtype))
    for k in range(count):
        place = sb((1, 1), nl.int32)
        nisa.dma_copy(place, starts[k : k + 1, :])
        nisa.dma_copy(
            dst=out.ap([[1, 1], [1, width]], scalar_offset=place, indirect_dim=0),
            src=nl.load(rows[k : k + 1, :]), oob_mode=oob_mode.skip, name=f"row_{k}",
        )  # fmt: skip
    kernel_assert(tile.shape[0] == index.shape[0], "as many places as rows")
    return out


@pytest.mark.usefixtures("execution")
def test_rows_at_places_that_data_name():
    rows = data(9, (5, 12))
    starts = np.array([[0], [100], [600], [40], [500]], np.int32)
    want = np.zeros(512, np.float32)
    for k, at in enumerate(starts[:, 0]):
        if at + 12 <= 512:
            want[at : at + 12] = rows[k]
    assert np.array_equal(flattened_at(rows, starts, 512)[:, 0], want)


@nki.jit
def gathered_sums(table, ids, x):
    """x plus rows of a table, by DMA's own adders; then the largest eight of each row."""
    rows, width = x.shape
    out = nl.ndarray(x.shape, nl.float32, buffer=nl.shared_hbm)
    best = nl.ndarray((rows, 8), nl.uint32, buffer=nl.shared_hbm)
    index, total = sb((rows, 1), nl.uint32), nl.load(x)
    nisa.dma_copy(index, ids)
    source = table.ap([[width, rows], [1, width]], vector_offset=index, indirect_dim=0)
    nisa.dma_compute(dst=total, srcs=[source, total], reduce_op=nl.add)
    eight, places = sb((rows, 8)), sb((rows, 8), nl.uint32)
    nisa.max8(eight, total)
    nisa.nc_find_index8(places, total, eight)
    nisa.dma_copy(out, total)
    nisa.dma_copy(best, places)
    return [out, best]


@pytest.mark.usefixtures("execution")
def test_gather_and_add():
    table, x = data(10, (40, 64)), data(11, (16, 64))
    ids = np.random.default_rng(12).permutation(40)[:16].astype(np.uint32).reshape(16, 1)
    total, best = gathered_sums(table, ids, x)
    want = x + table[ids[:, 0]]
    close(total, want)
    assert np.array_equal(best, np.argsort(-want, axis=1, kind="stable")[:, :8])


# --- reductions -----------------------------------------------------------------------------------
@nki.jit
def loss_gradient(logits, labels, scale):
    """(softmax - one-hot) * scale, in place, tiles of columns twice over."""
    rows, width = logits.shape
    most, total = sb((rows, 1)), nl.zeros((rows, 1), nl.float32)
    tile, label = nl.load(logits), sb((rows, 1))
    nisa.dma_copy(label, labels)
    nisa.tensor_reduce(most, nl.maximum, tile, axis=1, negate=True)
    for c in TiledRange(width, 50).tiles():
        part, powers = sb((rows, 1)), sb((rows, c[1]))
        nisa.activation_reduce(powers, nl.exp, tile[:, nl.ds(c[0], c[1])], reduce_op=nl.add,
                               reduce_res=part, bias=most)  # fmt: skip
        nisa.tensor_tensor(total, total, part, nl.add)
        nisa.tensor_copy(tile[:, nl.ds(c[0], c[1])], powers)
    nisa.reciprocal(total, total)
    for c in TiledRange(width, 50).tiles():
        number, part = sb((rows, c[1])), tile[:, nl.ds(c[0], c[1])]
        nisa.iota(number, pattern=[[1, c[1]]], offset=c[0], channel_multiplier=0)
        nisa.tensor_scalar(number, number, nl.equal, label)
        nisa.scalar_tensor_tensor(part, part, nl.multiply, total, nl.subtract, number)
        nisa.tensor_scalar(part, part, nl.multiply, scale)
    nl.store(logits, tile)
    return logits


@pytest.mark.usefixtures("execution")
def test_gradient_of_a_loss():
    logits = data(13, (60, 120), scale=20.0)
    labels = np.random.default_rng(14).integers(0, 120, (60, 1)).astype(np.int32)
    wide = logits.astype(float)
    powers = np.exp(wide - wide.max(1, keepdims=True))
    want = (powers / powers.sum(1, keepdims=True) - np.eye(120)[labels[:, 0]]) * 0.5
    assert loss_gradient(logits, labels, 0.5) is logits
    close(logits, want)


@nki.jit
def largest_of_all(x):
    """The largest element of a vector and its place: maxima of partitions turn to one row."""
    width = x.shape[0] // P
    out = nl.ndarray((1, 2), nl.float32, buffer=nl.shared_hbm)
    tile = nl.load(x.reshape((P, width)))
    eight, place = sb((P, 8)), sb((P, 8), nl.uint32)
    nisa.max8(eight, tile)
    nisa.nc_find_index8(place, tile, eight)
    both, first = sb((P, 2)), sb((P, 1))
    nisa.iota(first, [[0, 1]], channel_multiplier=width)
    nisa.tensor_copy(both[:, 0:1], eight[:, 0:1])
    nisa.tensor_tensor(both[:, 1:2], first, place[:, 0:1], nl.add)
    rows = []
    for k in range(2):
        turned = ps((1, P))
        eye = nl.shared_identity_matrix(P, dtype=nl.float32)
        nisa.nc_matmul(turned, both[:, k : k + 1], eye, is_moving_onezero=True)
        rows.append(sb((1, P)))
        nisa.tensor_copy(rows[k], turned)
    most, best, where = sb((1, 8)), sb((1, 8), nl.uint32), sb((1, 2))
    nisa.max8(most, rows[0])
    nisa.nc_find_index8(best, rows[0], most)
    nisa.tensor_copy(where[:, 0:1], most[:, 0:1])
    register = nisa.register_alloc()
    nisa.register_load(register, best[:, 0:1])
    chosen = rows[1].ap([[P, 1], [1, 1]], scalar_offset=register, indirect_dim=1)
    nisa.tensor_copy(where[:, 1:2], chosen)
    nisa.dma_copy(out, where)
    return out


@pytest.mark.usefixtures("execution")
def test_largest_of_a_vector():
    x = data(15, (128 * 40,))
    for at in (0, 77, 128 * 40 - 1):
        x[at] = 50.0 + at
        assert largest_of_all(x)[0].tolist() == [x[at], at]


@dataclass
class NormConfig(NKIObject):
    kind: Norm = Norm.RMS
    eps: float = 1e-6
    places: bool = False


@nki.jit
def normed_columns(x, gain, config):
    """A norm over features on partitions, as a decode step has them, by a product with ones."""
    features, tokens = x.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    kernel_assert(features % P == 0, f"features {features}")
    parts, tiles, weights = features // P, [], []
    for k in range(parts):
        tiles.append(nl.load(x[nl.ds(k * P, P), :]))
        weights.append(sb((P, 1)))
        nisa.dma_copy(weights[k], gain[nl.ds(k * P, P), :])
    if config.kind.scales():
        scale = inverse_norms(tiles, features, config.eps)
        for k in range(parts):
            nisa.scalar_tensor_tensor(
                tiles[k], data=tiles[k], op0=nl.multiply, operand0=weights[k], op1=nl.multiply,
                operand1=scale,
            )  # fmt: skip
    for k in range(parts):
        nisa.dma_copy(dst=out[nl.ds(k * P, P), :], src=tiles[k])
    return out


def inverse_norms(tiles, features, eps):
    """1 / rms of columns, the same on all partitions."""
    ones, total, bias = sb((P, P)), ps((P, tiles[0].shape[1])), sb((P, 1))
    nisa.memset(ones, value=1.0 / features)
    nisa.memset(bias, eps, engine=nisa.gpsimd_engine)
    for tile in tiles:
        square = sb(tile.shape)
        nisa.activation(square, op=nl.square, data=tile)
        nisa.nc_matmul(total, ones, square)
    scale = sb(total.shape)
    nisa.activation(dst=scale, op=nl.rsqrt, data=total, bias=bias)
    return scale


@pytest.mark.parametrize("kind", list(Norm))
@pytest.mark.usefixtures("execution")
def test_norm_over_partitions(kind):
    x, gain = data(16, (384, 17)), data(17, (384, 1))
    want = x.astype(float)
    if kind is Norm.RMS:
        want = want / np.sqrt((want**2).mean(0) + 1e-6) * gain
    close(normed_columns(x, gain, NormConfig(kind)), want)


# --- products -------------------------------------------------------------------------------------
@nki.jit
def rotated_by_products(x, cos, sin):
    """Rotary embedding of (tokens, heads, d) with features on partitions: transposes by an
    identity, the halves exchanged by a permutation."""
    tokens, heads, d = x.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    eye = nl.shared_identity_matrix(P, dtype=x.dtype)
    swap = nl.zeros((d, d), x.dtype)
    for half in range(2):  # rows of the other half, minus in front of the high one
        rows, columns = nl.ds(half * d // 2, d // 2), nl.ds((1 - half) * d // 2, d // 2)
        nisa.tensor_scalar(
            swap[rows, columns],
            eye[0 : d // 2, 0 : d // 2],
            nl.multiply,
            1.0 if half == 0 else -1.0,
        )
    c, s, tile = nl.load(cos), nl.load(sin), nl.load(x.reshape((tokens, heads * d)))
    for h in range(heads):
        turned, features = ps((d, tokens), psum_type(x.dtype)), sb((d, tokens), x.dtype)
        nisa.nc_transpose(turned, tile[:, nl.ds(h * d, d)])
        nisa.tensor_copy(features, turned)
        other, first, second = ps((d, tokens)), sb((d, tokens)), sb((d, tokens))
        nisa.nc_matmul(other, swap, features, is_stationary_onezero=False)
        nisa.tensor_tensor(first, features, c, nl.multiply)
        nisa.tensor_tensor(second, other, s, nl.multiply)
        nisa.tensor_tensor(features, first, second, nl.add)
        back = ps((tokens, d), psum_type(x.dtype))
        nisa.nc_transpose(back, features)
        nisa.tensor_copy(tile[:, nl.ds(h * d, d)], back)
    nl.store(out.reshape((tokens, heads * d)), tile)
    return out


def psum_type(dtype):
    return nl.float32 if nisa.get_nc_version() <= 2 else dtype


@pytest.mark.parametrize("chip", ["trn1", "trn2"])
@pytest.mark.usefixtures("execution")
def test_rotary_embedding_by_products(target, chip):
    target(chip)
    x, angle = data(18, (30, 3, 64), BF16), data(19, (32, 30))
    c, s = (np.concatenate([f(angle)] * 2).astype(BF16) for f in (np.cos, np.sin))
    wide, (low, high) = x.astype(float), np.split(x.astype(float), 2, -1)
    want = wide * c.T[:, None].astype(float)
    want += np.concatenate([-high, low], -1) * s.T[:, None].astype(float)
    close(rotated_by_products(x, c, s), want, 2**-7)


@nki.jit
def convolved(x, w, bias):
    """conv1d (channels, time) with (taps, channels, filters): banks of PSUM at addresses, the bias
    and the activation as they are emptied."""
    channels, time = x.shape
    taps, _, filters = w.shape
    length = time - taps + 1
    out = nl.ndarray((filters, length), nl.float32, buffer=nl.shared_hbm)
    tile, weight, column = nl.load(x), sb((channels, taps, filters)), nl.load(bias)
    nisa.dma_copy(weight, w.permute((1, 0, 2)))
    pieces = TiledRange(length, 100).tiles()
    banks = []
    for k in range(len(pieces)):
        shape, place = (filters, pieces[k][1]), (0, k % 8 * BANK)
        banks.append(nl.ndarray(shape, nl.float32, nl.psum, name=f"bank{k}", address=place))
    for tap in range(taps):
        for k in range(len(pieces)):
            moving = tile[:, nl.ds(pieces[k][0] + tap, pieces[k][1])]
            nisa.nc_matmul(banks[k], weight[:, tap, :], moving, accumulate=tap > 0)
    for k in range(len(pieces)):
        done = sb(banks[k].shape)
        nisa.activation(done, nl.gelu, banks[k], bias=column)
        nisa.dma_copy(out[:, nl.ds(pieces[k][0], pieces[k][1])], done)
    return out


@pytest.mark.usefixtures("execution")
def test_convolution_in_banks():
    x, w, bias = data(20, (24, 330)), data(21, (5, 24, 32), scale=0.1), data(22, (32, 1))
    sums = sum(w[k].T.astype(float) @ x[:, k : k + 326] for k in range(5)) + bias
    want = sums * 0.5 * (1 + np.vectorize(math.erf)(sums / math.sqrt(2)))
    close(convolved(x, w, bias), want, 1e-3)


@nki.jit
def views_of_views(x, h, w):
    """(P, h * w) -> every second row of windows, transposed, by a pattern made at the end."""
    out = nl.ndarray((x.shape[0], w, h // 2), x.dtype, buffer=nl.shared_hbm)
    tile, done = nl.load(x), sb((x.shape[0], w, h // 2), x.dtype)
    part = view_of(tile).split(1, w).slice(1, 1, h, 2).swap(1, 2)
    nisa.tensor_copy(done, part.get_view())
    nisa.dma_copy(out, done)
    return out


@pytest.mark.usefixtures("execution")
def test_views_of_ones_own():
    x = data(23, (40, 6 * 10))
    assert np.array_equal(views_of_views(x, 6, 10), x.reshape(40, 6, 10)[:, 1::2].swapaxes(1, 2))


@nki.jit
def bits(x):
    """The exponents of fp32 numbers, by their bits."""
    out = nl.ndarray(x.shape, nl.int32, buffer=nl.shared_hbm)
    tile = nl.load(x)
    words = tile.view(nl.int32)
    nisa.tensor_scalar(words, words, nl.right_shift, 23, op1=nl.bitwise_and, operand1=255)
    nisa.tensor_scalar(words, words, nl.subtract, 127)
    nisa.dma_copy(out, words)
    return out


@pytest.mark.usefixtures("execution")
def test_bits_of_numbers():
    x = data(24, (30, 20), scale=100.0)
    assert np.array_equal(bits(x), np.frexp(x)[1] - 1)


# --- later chips ----------------------------------------------------------------------------------
@nki.jit
def causal_by_ranges(q, k, v, scale):
    """Attention of one tile of queries: keys and values turned by DMA, the mask and the maximum in
    one instruction."""
    n, d = q.shape
    m = k.shape[0]
    out = nl.ndarray((n, d), nl.float32, buffer=nl.shared_hbm)
    turned_q, turned_k = sb((d, n), q.dtype), sb((d, m), k.dtype)
    nisa.dma_transpose(dst=turned_q, src=q)
    nisa.dma_transpose(dst=turned_k, src=k, axes=(1, 0))
    product, tile, low, high = ps((n, m)), sb((n, m)), sb((n, 1)), sb((n, 1))
    nisa.nc_matmul(product, turned_q, turned_k)
    nisa.memset(low, 0.0)
    nisa.iota(high, [[0, 1]], offset=m - n, channel_multiplier=1)
    most, bias, total = sb((n, 1)), sb((n, 1)), sb((n, 1))
    nisa.range_select(tile, product, nl.greater_equal, nl.less_equal, low, high, reduce_res=most,
                      reduce_cmd=nisa.reduce_cmd.reset_reduce, reduce_op=nl.maximum)  # fmt: skip
    nisa.tensor_scalar(bias, most, nl.multiply, -scale)
    weights = sb((n, m), q.dtype)
    nisa.activation(weights, nl.exp, tile, bias, scale, nl.add, total,
                    nisa.reduce_cmd.reset_reduce)  # fmt: skip
    acc, done = ps((n, d)), sb((n, d))
    for part in TiledRange(m, P).tiles():
        columns = nl.ds(part[0], part[1])
        turned, stationary = ps((part[1], n), q.dtype), sb((part[1], n), q.dtype)
        nisa.nc_transpose(turned, weights[:, columns])
        nisa.tensor_copy(stationary, turned, engine=nisa.scalar_engine)
        nisa.nc_matmul(acc, stationary, nl.load(v[columns, :]))
    nisa.reciprocal(total, total)
    nisa.tensor_scalar(done, acc, nl.multiply, total)
    nisa.dma_copy(out, done)
    return out


@pytest.mark.usefixtures("execution")
def test_attention_masked_by_ranges(target):
    target("trn2")
    q, k, v = data(25, (64, 32), BF16), data(26, (200, 32), BF16), data(27, (200, 32), BF16)
    s = q.astype(float) @ k.astype(float).T * 0.2
    s = np.where(np.arange(200) <= np.arange(64)[:, None] + 136, s, -np.inf)
    p = np.exp(s - s.max(1, keepdims=True))
    close(causal_by_ranges(q, k, v, 0.2), p / p.sum(1, keepdims=True) @ v.astype(float), 2**-6)


@nki.jit
def doubled_rows(x, w):
    """fp8 products of pairs of rows: [K, 2, M] with [K, 2, N] contracts 2 K rows."""
    rows, tokens = x.shape
    k = rows // 2
    out = nl.ndarray((tokens, w.shape[1]), nl.float32, buffer=nl.shared_hbm)
    left, right = sb((k, 2, tokens), x.dtype), sb((k, 2, w.shape[1]), w.dtype)
    nisa.dma_copy(left, x.reshape((2, k, tokens)).permute((1, 0, 2)))
    nisa.dma_copy(right, w.reshape((2, k, w.shape[1])).permute((1, 0, 2)))
    acc, done = ps(out.shape), sb(out.shape)
    mode = nisa.matmul_perf_mode.double_row
    nisa.nc_matmul(acc, left, right, perf_mode=mode)
    nisa.tensor_copy(done, acc)
    nisa.dma_copy(out, done)
    return out


@pytest.mark.usefixtures("execution")
def test_double_rows_of_fp8(target):
    target("trn2")
    fp8 = np.dtype(ml_dtypes.float8_e4m3)
    x, w = data(28, (256, 20), fp8), data(29, (256, 70), fp8)
    close(doubled_rows(x, w), x.astype(float).T @ w.astype(float))


@nki.jit(mode="trace", debug_kernel=True)
def mlp_of_two_cores(x, gate, up, down):
    """Each core has half of the inner features; partial outputs meet in shared HBM, behind a
    barrier each adds its half of the columns by DMA."""
    hidden, tokens = x.shape
    inner = gate.shape[1]
    cores, me = nl.num_programs(axes=0), nl.program_id(axis=0)
    out = nl.ndarray((hidden, tokens), nl.float32, buffer=nl.shared_hbm)
    parts = nl.ndarray((2, hidden, tokens), nl.float32, buffer=nl.shared_hbm)
    mine = inner // cores
    columns = nl.ds(me * mine, mine)
    x_sb, middle = nl.load(x), []
    for piece in TiledRange(mine, P).tiles():
        own = nl.ds(me * mine + piece[0], piece[1])
        gated, raised = ps((piece[1], tokens)), ps((piece[1], tokens))
        nisa.nc_matmul(gated, nl.load(gate[:, own]), x_sb)
        nisa.nc_matmul(raised, nl.load(up[:, own]), x_sb)
        tile = sb((piece[1], tokens))
        nisa.activation(tile, nl.silu, gated)
        nisa.tensor_tensor(tile, tile, raised, nl.multiply)
        middle.append(tile)
    acc, done, rows = ps((hidden, tokens)), sb((hidden, tokens)), nl.load(down[columns, :])
    for k in range(len(middle)):
        nisa.nc_matmul(acc, rows[nl.ds(k * P, middle[k].shape[0]), :], middle[k])
    nisa.tensor_copy(done, acc)
    nisa.dma_copy(parts[me], done)
    if cores > 1:
        nisa.core_barrier(parts, (0, 1))
        half = nl.ds(me * (hidden // 2), hidden // 2)
        nisa.dma_compute(out[half, :], [parts[0, half, :], parts[1, half, :]], nl.add)
    else:
        nisa.dma_copy(out, parts[0])
    return out


@pytest.mark.parametrize("cores", [1, 2])
def test_mlp_of_two_cores(target, cores):
    target("trn2")
    inner = 128 * cores
    x, down = data(30, (96, 20)), data(33, (inner, 96), scale=0.1)
    gate, up = data(31, (96, inner), scale=0.1), data(32, (96, inner), scale=0.1)
    g, u = gate.T.astype(float) @ x, up.T.astype(float) @ x
    close(mlp_of_two_cores[cores](x, gate, up, down), down.T @ (g / (1 + np.exp(-g)) * u), 1e-3)


@nki.jit
def normed_by_two_cores(x):
    """RMSNorm of rows whose columns two cores share: sums of squares cross over by sendrecv."""
    rows, width = x.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    cores, me = nl.num_programs(), nl.program_id(0)
    own = nl.ds(me * (width // cores), width // cores)
    tile, square, total = nl.load(x[:, own]), sb((rows, width // cores)), sb((rows, 1))
    nisa.activation(square, nl.square, tile, reduce_op=nl.add, reduce_res=total,
                    reduce_cmd=nisa.reduce_cmd.reset_reduce)  # fmt: skip
    if cores == 2:
        other = sb((rows, 1))
        nisa.sendrecv(src=total, dst=other, send_to_rank=1 - me, recv_from_rank=1 - me, pipe_id=0,
                      dma_engine=nisa.dma_engine.gpsimd_dma)  # fmt: skip
        nisa.tensor_tensor(total, total, other, nl.add)
    nisa.activation(total, nl.rsqrt, total, scale=1.0 / width)
    nisa.tensor_scalar(tile, tile, nl.multiply, total)
    nisa.dma_copy(out[:, own], tile)
    return out


@pytest.mark.parametrize("cores", [1, 2])
def test_norm_of_two_cores(target, cores):
    target("trn2")
    x = data(34, (50, 64))
    close(normed_by_two_cores[cores](x), x / np.sqrt((x.astype(float) ** 2).mean(1, keepdims=True)))


class Base(NKIObject):
    first: int
    second: int = 2


class Derived(Base):
    third: "a name that nobody defines" = 3  # noqa: F722


def test_fields_are_those_of_the_bases_first():
    made = Derived(1, third=5)
    assert (made.first, made.second, made.third) == (1, 2, 5)
    assert Base(7).second == 2 and Base().first is None
    with pytest.raises(TypeError, match="fields first, second, third"):
        Derived(fourth=1)


@dataclass
class Loose(NKIObject):
    """A field without a default behind one with one, and one without annotation."""

    scale: float = 2.0
    weight: nl.ndarray
    rows = 4

    @property
    def has_weight(self):
        return self.weight is not None

    def doubled(self):
        return 2 * self.scale


def test_data_classes_of_the_language():
    assert (Loose().weight, Loose().rows, Loose(3.0).doubled()) == (None, 4, 6.0)
    assert Loose(weight="w", rows=8).rows == 8 and Loose(1.0, "w", 2).rows == 2
    assert Loose(rows=1) == Loose(2.0, None, 1)
    with pytest.raises(TypeError, match="columns"):
        Loose(columns=1)


@dataclass
class Optional(NKIObject):
    bias: nl.ndarray = None


@nki.jit
def with_options(x, bias=None):
    options = Optional(bias=bias)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    if options and options.bias:
        nisa.tensor_tensor(tile, tile, nl.load(bias), nl.add)
    nl.store(out, tile)
    return out


@pytest.mark.filterwarnings("default::neuron_cpu.core.device.errors.NkiWarning")
def test_an_optional_tensor_is_true():
    x = data(80, (4, 8))
    assert np.array_equal(with_options(x), x)
    with pytest.warns(NkiWarning, match="sim_tensor_truth"):
        assert np.array_equal(with_options(x, 2 * x), 3 * x)


@nki.jit
def root_of_squares(x):
    """The squares go to one element of each row; the sums alone are read."""
    out = nl.ndarray((x.shape[0], 1), nl.float32, buffer=nl.shared_hbm)
    tile, sums, sink = nl.load(x), sb((x.shape[0], 1)), sb((x.shape[0], 1), nl.bfloat16)
    nothing = sink.ap(pattern=[[1, x.shape[0]], [0, x.shape[1]]])
    nisa.activation_reduce(nothing, nl.square, tile, nl.add, sums)
    nl.store(out, sums)
    return out


def test_a_sink_for_what_is_only_summed(execution):
    x = data(81, (16, 32))
    close(root_of_squares(x), (x.astype(np.float64) ** 2).sum(1, keepdims=True))


@nki.jit
def scaled_sum(x, y, factor):
    """`factor` (P, 1) is bf16, which tensor_scalar would refuse."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile, factors = nl.load(x), nl.load(factor)
    nisa.scalar_tensor_tensor(tile, tile, nl.multiply, factors, nl.add, nl.load(y))
    nl.store(out, tile)
    return out


def test_a_narrow_factor(execution):
    x, y, factor = data(82, (8, 16)), data(83, (8, 16)), data(84, (8, 1), BF16)
    close(scaled_sum(x, y, factor), x * factor.astype(np.float64) + y)


@nki.jit
def centred(x, mean):
    """Means in PSUM, each repeated over a row of eight: 8192 elements of a partition, 1024 held."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile, means = nl.load(x), ps((x.shape[0], x.shape[1]))
    nisa.tensor_copy(means, nl.load(mean))
    nisa.tensor_tensor(tile, tile, means.expand_dim(2).broadcast(2, x.shape[2]), nl.subtract)
    nl.store(out, tile)
    return out


def test_what_a_broadcast_repeats_counts_once(execution):
    x, mean = data(85, (4, 1024, 8)), data(86, (4, 1024))
    close(centred(x, mean), x.astype(np.float64) - mean[..., None])


def test_undefined_rows_that_a_later_store_replaces():
    """A wrapper in test_mlp_proj_mxfp4.py pads so (nki-library d2ad3a5)."""

    @nki.jit
    def kernel(x, rows: int):
        out = nl.ndarray((128, 64), x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray((128, 64), x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(tile[0:96], x[0:96])
        nisa.dma_copy(out, tile)
        zeros = nl.zeros((rows, 64), x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(out[128 - rows : 128], zeros)
        return out

    x = np.arange(128 * 64, dtype=np.float32).reshape(128, 64)
    with pytest.warns(NkiWarning, match="stores 2048 undefined .* later stores replace them"):
        found = kernel(x, 32)
    assert np.array_equal(found[0:96], x[0:96]) and not found[96:].any()
    with pytest.raises(NkiError, match="stores 2048 undefined elements"):
        kernel(x, 16)
