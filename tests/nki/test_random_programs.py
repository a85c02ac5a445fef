"""Random legal kernels against an interpreter in NumPy, written from the documentation alone.

Each node computes in float64 and keeps the call of nisa that has to do the same. It rounds where a
destination is narrower (to nearest even; integers saturate), and is left out unless fp32 holds
all of its intermediate values exactly, sums in any order included: so results are compared to the
bit.
"""

import random
import warnings

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

TYPES = {
    nl.float32: np.float32, nl.bfloat16: ml_dtypes.bfloat16, nl.float16: np.float16,
    nl.int32: np.int32,
}  # fmt: skip
MOST = 30_000.0  # magnitudes, so that fp16 holds them
GRAIN = 256  # values are whole numbers of 1 / GRAIN: 15 + 8 bits are exact in fp32
INPUT = (np.random.default_rng(7).integers(-16, 17, (128, 96)) / 4).astype(np.float32)
# Names of NumPy's too
ARITHMETIC = [
    "add", "subtract", "multiply", "maximum", "minimum", "equal", "not_equal", "greater",
    "greater_equal", "less", "less_equal", "logical_and", "logical_or",
]  # fmt: skip


class Unfit(Exception):
    """A node whose result is not exact, or that finds no operands: it is left out."""


def exact(values):
    """The values, where they are numbers that everything here holds exactly."""
    values = np.asarray(values, np.float64)
    if np.abs(values).max() > MOST or ((values * GRAIN) % 1).any():
        raise Unfit
    return values


def rounded(values, dtype):
    if dtype == nl.int32:
        return np.rint(values).clip(-(2**31), 2**31 - 1).astype(np.int32)
    return np.asarray(values).astype(np.float32).astype(TYPES[dtype])


class View:
    """Columns at equal distances of some rows of a tile, or one column stretched to as many."""

    def __init__(self, tile, *subscripts, stretched=0):
        self.tile, self.subscripts, self.stretched = tile, subscripts, stretched

    def of(self, tiles):
        part = tiles[self.tile][self.subscripts]
        if not self.stretched:
            return part
        if isinstance(part, np.ndarray):
            return np.broadcast_to(part, (len(part), self.stretched))
        return part.broadcast(1, self.stretched)


class Program:
    """Tiles of NumPy, and the calls that make the kernel's: each takes its tiles and its input."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.tiles, self.types, self.psum, self.calls = [], [], set(), []

    def pick(self, options):
        if not options:
            raise Unfit
        return self.draw.choice(list(options))

    def new(self, values, dtype, call, psum=False):
        """One more tile, which ``call`` writes as the last of the kernel's tiles."""
        if psum:
            self.psum.add(len(self.tiles))
        self.tiles.append(rounded(values, dtype))
        self.types.append(dtype)
        buffer = nl.psum if psum else nl.sbuf
        self.calls += [
            lambda tiles, _: tiles.append(nl.ndarray(values.shape, dtype, buffer=buffer)),
            call,
        ]

    def band(self):
        """Rows that engines take."""
        row = self.pick((0, 32, 64, 96))
        return slice(row, row + self.draw.randint(1, {0: 128, 64: 64}.get(row, 32)))

    def view(self, band, count, psum=True, types=TYPES, write=False):
        tile = self.pick(
            [
                t
                for t, x in enumerate(self.tiles)
                if len(x) >= band.stop and self.types[t] in types and (psum or t not in self.psum)
            ]
        )
        room = self.tiles[tile].shape[1]
        if room < count and write:
            raise Unfit
        if room < count or (not write and self.draw.random() < 0.2):
            column = self.draw.randrange(room)
            return View(tile, band, slice(column, column + 1), stretched=count)
        step = self.draw.randint(1, (room - 1) // (count - 1) if count > 1 else 1)
        start = self.draw.randrange(room - (count - 1) * step)
        return View(tile, band, slice(start, start + (count - 1) * step + 1, step))

    def read(self, view):
        return view.of(self.tiles).astype(np.float64)

    def write(self, view, values, call):
        view.of(self.tiles)[...] = rounded(exact(values), self.types[view.tile])
        self.calls.append(call)


# --- nodes ----------------------------------------------------------------------------------------
def load(p):
    top, left = p.pick((0, 7)), p.pick((0, 3))
    rows = slice(top, top + p.pick((121, 64, 33)))
    part = rows, slice(left, left + p.pick((8, 17, 48)), p.pick((1, 2)))
    p.new(INPUT[part], p.pick(TYPES), lambda tiles, x: nisa.dma_copy(tiles[-1], x[part]))


def binary(p):
    band, count, op = p.band(), p.draw.randint(1, 16), p.pick(ARITHMETIC)
    out, a, b = p.view(band, count, write=True), p.view(band, count), p.view(band, count)
    both = p.types[a.tile] == p.types[b.tile] == nl.int32
    if p.psum >= {a.tile, b.tile} or (out.tile in p.psum and both):
        raise Unfit
    values = getattr(np, op)(p.read(a), p.read(b))
    p.write(
        out, values, lambda t, _: nisa.tensor_tensor(out.of(t), a.of(t), b.of(t), getattr(nl, op))
    )


def scalar(p):
    """One step of the ALU with a column of fp32, or two with a number each."""
    band, count = p.band(), p.draw.randint(1, 16)
    out, a, column = p.view(band, count, write=True), p.view(band, count), None
    values, steps = p.read(a), []
    if p.draw.random() < 0.5:
        column = p.view(band, 1, types=(nl.float32,))
    for _ in range(1 if column else 2):
        op, number, reverse = p.pick(ARITHMETIC), p.pick((0.5, 2.0, -1.0, 0.0)), p.pick((0, 1))
        pair = values, p.read(column) if column else number
        values = exact(getattr(np, op)(*(pair[::-1] if reverse else pair)))
        steps.append((getattr(nl, op), number, bool(reverse)))

    def call(t, _):
        (op, number, reverse), *more = steps
        named = dict(zip(("op1", "operand1", "reverse1"), more[0])) if more else {}
        operand = column.of(t) if column else number
        nisa.tensor_scalar(out.of(t), a.of(t), op, operand, reverse0=reverse, **named)

    p.write(out, values, call)


def transpose(p):
    source = p.pick([t for t, kind in enumerate(p.types) if kind in (nl.float32, nl.bfloat16)])
    if source in p.psum:
        raise Unfit
    rows, columns = (p.draw.randint(1, n) for n in p.tiles[source].shape)
    p.new(
        p.tiles[source][:rows, :columns].T,
        p.types[source],
        lambda t, _: nisa.nc_transpose(t[-1], t[source][0:rows, 0:columns]),
        psum=True,
    )


def matmul(p):
    """Up to three products in one place: added to those before, or in their place."""
    types = p.pick(((nl.float32,), (nl.bfloat16, nl.float16)))
    band, total, parts = p.band(), 0, []
    m, n = p.draw.randint(1, 16), p.draw.randint(1, 16)
    for k in range(p.draw.randint(1, 3)):
        a, b = (p.view(band, count, psum=False, types=types) for count in (m, n))
        flag = p.pick((None, True, False) if k else (None, False))
        exact(np.abs(p.read(a)).T @ np.abs(p.read(b)))
        total = exact(p.read(a).T @ p.read(b) + (0 if flag is False else total))
        parts.append((a, b, flag))

    def call(t, _):
        for a, b, flag in parts:
            nisa.nc_matmul(t[-1], a.of(t), b.of(t), accumulate=flag)

    p.new(total, nl.float32, call, psum=True)


NODES = load, binary, scalar, transpose, matmul


def program(seed):
    """A program and the nodes of it that are legal."""
    p, met = Program(seed), set()
    for node in (load, load, *p.draw.choices(NODES, k=20)):
        try:
            node(p)
            met.add(node)
        except Unfit:
            pass
    return p, met


def run(calls, psum):
    @nki.jit
    def kernel(x):
        tiles, outs = [], []
        for call in calls:
            call(tiles, x)
        for k, tile in enumerate(tiles):
            outs.append(nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm))
            if k in psum:
                held = nl.ndarray(tile.shape, tile.dtype)
                nisa.tensor_copy(held, tile)
                tile = held
            nisa.dma_copy(outs[-1], tile)
        return tuple(outs)

    return kernel(INPUT)


@pytest.mark.parametrize("eager", ["0", "1"])
@pytest.mark.parametrize("chip", ["trn2", "trn3"])
def test_random_programs(chip, eager, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", chip)
    monkeypatch.setenv("NKI_CPU_EAGER", eager)
    warnings.simplefilter("ignore")
    met = set()
    for seed in range(15):
        p, nodes = program(seed)
        met |= nodes
        for got, expected in zip(run(p.calls, p.psum), p.tiles, strict=True):
            a, b = np.asarray(got).astype(np.float64), expected.astype(np.float64)
            assert np.array_equal(a, b), (seed, nodes)
    assert met == {*NODES}
