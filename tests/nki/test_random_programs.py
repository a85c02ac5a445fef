"""Random legal kernels against an interpreter in NumPy, written from the documentation alone.

A program is a list of small nodes over a pool of tiles. The interpreter computes in float64, rounds
where a destination is narrower (to nearest even; integers saturate), and takes only nodes whose
intermediate values fp32 holds exactly, sums in any order included: so results are compared to the
bit.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "15"))
BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES = {
    nl.float32: np.dtype(np.float32),
    nl.bfloat16: BF16,
    nl.float16: np.dtype(np.float16),
    nl.int32: np.dtype(np.int32),
}
FLOATS = (nl.float32, nl.bfloat16, nl.float16)
MOST = 30_000.0  # magnitudes, so that fp16 holds them
GRAIN = 256  # values are whole numbers of 1 / GRAIN: 15 + 8 bits are exact in fp32
INPUT = (np.random.default_rng(7).integers(-16, 17, (128, 96)) / 4).astype(np.float32)
ARITHMETIC = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum,
    "minimum": np.minimum, "equal": np.equal, "not_equal": np.not_equal, "greater": np.greater,
    "greater_equal": np.greater_equal, "less": np.less, "less_equal": np.less_equal,
    "logical_and": np.logical_and, "logical_or": np.logical_or,
}  # fmt: skip
ACTIVATIONS = {
    "copy": lambda x: x, "relu": lambda x: np.maximum(x, 0), "square": np.square, "abs": np.abs,
    "sign": np.sign,
}  # fmt: skip


class Unfit(Exception):
    """A node whose result is not exact, or that finds no operands: it is left out."""


# --- programs -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class View:
    """Rows and columns of a tile: a slice, a transposed pair of axes, or one column stretched."""

    tile: int
    row: int
    rows: int
    form: str
    at: tuple[int, ...]

    def of_numpy(self, tiles):
        part = tiles[self.tile][self.row : self.row + self.rows]
        if self.form in ("slice", "ds", "ap"):
            start, count, step = self.at
            return part[:, start : start + (count - 1) * step + 1 : step]
        if self.form == "column":
            column, count = self.at
            return np.broadcast_to(part[:, column : column + 1], (self.rows, count))
        return part.reshape(self.rows, *self.at).transpose(0, 2, 1)

    def of_nki(self, tiles):
        if self.form == "ap":
            start, count, step = self.at
            tile = tiles[self.tile]
            return tile.ap([[tile.shape[1], self.rows], [step, count]], offset=start)
        part = tiles[self.tile][self.row : self.row + self.rows]
        if self.form == "slice":
            start, count, step = self.at
            return part[:, start : start + (count - 1) * step + 1 : step]
        if self.form == "ds":
            return part[:, nl.ds(self.at[0], self.at[1])]
        if self.form == "column":
            column, count = self.at
            return part[:, column : column + 1].broadcast(1, count)
        return part.reshape((self.rows, *self.at)).permute((0, 2, 1))


@dataclass
class Program:
    """Nodes (name, arguments) and what the interpreter makes of them."""

    ints: list[int]
    nodes: list[tuple[str, tuple]] = field(default_factory=list)
    tiles: list[np.ndarray] = field(default_factory=list)
    types: list[Any] = field(default_factory=list)
    psum: set[int] = field(default_factory=set)

    def pick(self, options):
        if not options:
            raise Unfit
        return list(options)[self.ints.pop() % len(options)] if self.ints else list(options)[0]

    def upto(self, most):
        return self.pick(range(1, most + 1))

    def chance(self):
        return self.pick((True, False))

    # --- tiles and views --------------------------------------------------------------------------
    def new(self, values, dtype, psum=False):
        self.tiles.append(rounded(values, dtype))
        self.types.append(dtype)
        if psum:
            self.psum.add(len(self.tiles) - 1)
        return len(self.tiles) - 1

    def usable(self, rows, psum=True, types=None):
        return [
            t
            for t, tile in enumerate(self.tiles)
            if len(tile) >= rows
            and (psum or t not in self.psum)
            and (types is None or self.types[t] in types)
        ]

    def band(self):
        """A first partition and a number of them that engines take."""
        tile = self.tiles[self.pick(self.usable(1))]
        row = self.pick([r for r in (0, 32, 64, 96) if r < len(tile)])
        room = min(len(tile) - row, 128 if row == 0 else 64 if row == 64 else 32)
        return row, self.upto(room)

    def view(self, band, count, write=False, psum=True, types=None):
        row, rows = band
        tile = self.pick(
            [
                t
                for t in self.usable(row + rows, psum, types)
                if self.tiles[t].shape[1] >= count or not write
            ]
        )
        columns = self.tiles[tile].shape[1]
        forms = [] if write else ["column"]
        if columns >= count:
            forms += ["slice", "ds"] + ["ap"] * (row == 0)
        if columns == count and count % 2 == 0:
            forms.append("turned")
        form = self.pick(forms)
        if form == "column":
            return View(tile, row, rows, form, (self.pick(range(columns)), count))
        if form == "turned":
            return View(tile, row, rows, form, (2, count // 2))
        most = 1 if form == "ds" else (columns - 1) // max(1, count - 1) if count > 1 else 1
        step = self.upto(max(1, most))
        start = self.pick(range(columns - (count - 1) * step))
        return View(tile, row, rows, form, (start, count, step))

    def read(self, view):
        return view.of_numpy(self.tiles).astype(np.float64).reshape(view.rows, -1)

    def write(self, view, values):
        target = view.of_numpy(self.tiles)
        target[...] = rounded(exact(values), self.types[view.tile]).reshape(target.shape)

    def one_in_psum(self, *views):
        if sum(v.tile in self.psum for v in views) > 1:
            raise Unfit


def exact(values):
    """The values, where they are numbers that everything here holds exactly."""
    values = np.asarray(values, np.float64)
    if values.size and (np.abs(values).max() > MOST or ((values * GRAIN) % 1).any()):
        raise Unfit
    return values


def rounded(values, dtype):
    if dtype == nl.int32:
        return np.rint(values).clip(-(2**31), 2**31 - 1).astype(np.int32)
    return np.asarray(values, np.float64).astype(np.float32).astype(TYPES[dtype])


def summed(values, axis=-1):
    exact(np.abs(values).sum(axis))
    return values.sum(axis)


# --- what each node does: the interpreter ---------------------------------------------------------
def load(p):
    rows, columns, dtype = p.pick((128, 64, 33, 5, 1)), p.pick((16, 24, 8)), p.pick(TYPES)
    top, left, step = p.pick((0, 7)), p.pick((0, 3)), p.pick((1, 2))
    top = min(top, 128 - rows)
    made = p.new(INPUT[top : top + rows, left : left + columns * step : step], dtype)
    return made, rows, columns, dtype, top, left, step


def binary(p):
    band, count, op = p.band(), p.upto(16), p.pick(ARITHMETIC)
    out, a, b = p.view(band, count, write=True), p.view(band, count), p.view(band, count)
    p.one_in_psum(a, b)
    if out.tile in p.psum and p.types[a.tile] == p.types[b.tile] == nl.int32:
        raise Unfit
    p.write(out, ARITHMETIC[op](p.read(a), p.read(b)))
    return out, a, b, op


def stepped(p, x, band):
    """One step of the ALU with a number or a column of fp32."""
    op, reverse = p.pick(ARITHMETIC), p.chance()
    if p.chance():
        operand: Any = p.pick((0.5, 2.0, -1.0, 0.0, 3.0))
        y: Any = operand
    else:
        operand = p.view(band, 1, types=(nl.float32,))
        y = p.read(operand)
    value = ARITHMETIC[op](y, x) if reverse else ARITHMETIC[op](x, y)
    return exact(np.broadcast_to(value, x.shape)), (op, operand, reverse)


def scalar(p):
    band, count = p.band(), p.upto(16)
    out, a = p.view(band, count, write=True), p.view(band, count)
    values, first = stepped(p, p.read(a), band)
    second = None
    if p.chance():
        values, second = stepped(p, values, band)
    p.write(out, values)
    return out, a, first, second


def activation(p):
    band, count, op = p.band(), p.upto(16), p.pick(ACTIVATIONS)
    a, scale = p.view(band, count), p.pick((1.0, 0.5, -2.0))
    bias = p.view(band, 1, types=FLOATS)
    x = exact(p.read(a) * scale) + p.read(bias)
    out = p.view(band, count, write=True)
    y = ACTIVATIONS[op](exact(x))
    total = None
    if p.chance():
        total = p.view(band, 1, write=True)
        if total.tile == out.tile:
            raise Unfit
        sums = summed(y)[:, None]
        p.write(out, y)
        p.write(total, sums)
    else:
        p.write(out, y)
    return out, a, bias, scale, op, total


def copy(p):
    band, count = p.band(), p.upto(24)
    out, a = p.view(band, count, write=True), p.view(band, count)
    p.write(out, p.read(a))
    return out, a


def transpose(p):
    source = p.pick(p.usable(1, psum=False, types=(nl.float32, nl.bfloat16)))
    rows, columns = p.upto(len(p.tiles[source])), p.upto(p.tiles[source].shape[1])
    x = p.tiles[source][:rows, :columns].astype(np.float64)
    on_vector = rows <= 32 and p.chance()
    made = p.new(x.T, p.types[source], psum=not on_vector)
    return made, source, rows, columns, on_vector


def matmul(p):
    pair = (nl.float32,) if p.chance() else (nl.bfloat16, nl.float16)
    band, m, n = p.band(), p.upto(16), p.upto(16)
    total, parts = np.zeros((m, n)), []
    for k in range(p.upto(3)):
        a = p.view(band, m, psum=False, types=pair)
        b = p.view(band, n, psum=False, types=pair)
        flag = p.pick((None, False) if k == 0 else (None, True, False))
        x, y = p.read(a), p.read(b)
        exact(np.abs(x).T @ np.abs(y))
        total = exact(x.T @ y + (0 if flag is False or k == 0 else total))
        parts.append((a, b, flag))
    return p.new(total, nl.float32, psum=True), m, n, tuple(parts)


def through_hbm(p):
    source = p.pick(p.usable(1, psum=False))
    rows, columns = p.tiles[source].shape
    kind, start = p.pick(("reshape", "rows", "flip")), p.pick((0, 1))
    x, dtype = p.tiles[source], p.pick(TYPES)
    if kind == "reshape":  # the same elements in rows of half the length
        if columns % 2 or rows > 64:
            raise Unfit
        values = x.reshape(2 * rows, columns // 2)
    elif kind == "rows":
        values = x[start::2]
    else:
        values = x.T if columns > 1 else x
    if not values.size:
        raise Unfit
    return p.new(values, dtype), source, kind, start, values.shape, dtype


def loop(p):
    band, count = p.band(), p.upto(5)
    out, a = p.view(band, count, True), p.view(band, count)
    if {out.form, a.form} - {"slice", "ds"} or out.at[2] > 1 or a.at[2] > 1 or out.tile == a.tile:
        raise Unfit
    op, number = p.pick(("add", "multiply", "maximum")), p.pick((0.5, 1.0, -1.0))
    values = p.read(out)
    for i in range(1, count):
        values[:, i] = ARITHMETIC[op](p.read(a)[:, i], number)
    p.write(out, values)
    return out, a, op, number, count, p.pick(("dynamic", "fori", "data"))


NODES = {
    f.__name__: f
    for f in (
        load, binary, scalar, activation, copy, transpose, matmul, through_hbm, loop,
    )
}  # fmt: skip


def interpreted(steps):
    p = Program([])
    for name, ints in [("load", [0]), ("load", [1, 1]), *steps]:
        p.ints = list(ints)
        before = [tile.copy() for tile in p.tiles], list(p.types), set(p.psum)
        try:
            p.nodes.append((name, NODES[name](p)))
        except Unfit:
            p.tiles, p.types, p.psum = before
    return p


# --- the same with nki ----------------------------------------------------------------------------
def token(name):
    return getattr(nl, name)


class Recorder:
    """Writes a program's nodes with ``nisa``; tiles are made in the interpreter's order."""

    def __init__(self, x):
        self.x, self.tiles = x, []

    def new(self, shape, dtype, buffer=None):
        self.tiles.append(nl.ndarray(shape, dtype, buffer=buffer or nl.sbuf))
        return self.tiles[-1]

    def at(self, view):
        return view.of_nki(self.tiles)

    def operand(self, step):
        return self.at(step[1]) if isinstance(step[1], View) else step[1]

    def load(self, _, rows, columns, dtype, top, left, step):
        source = self.x[top : top + rows, left : left + (columns - 1) * step + 1 : step]
        nisa.dma_copy(self.new((rows, columns), dtype), source)

    def binary(self, out, a, b, op):
        nisa.tensor_tensor(self.at(out), self.at(a), self.at(b), token(op))

    def scalar(self, out, a, first, second):
        more = {}
        if second is not None:
            more = {
                "op1": token(second[0]),
                "operand1": self.operand(second),
                "reverse1": second[2],
            }
        first_operand = self.operand(first)
        nisa.tensor_scalar(
            self.at(out), self.at(a), token(first[0]), first_operand, reverse0=first[2], **more
        )

    def activation(self, out, a, bias, scale, op, total):
        sums = {}
        if total is not None:
            command = nisa.reduce_cmd.reset_reduce
            sums = {"reduce_op": nl.add, "reduce_res": self.at(total), "reduce_cmd": command}
        nisa.activation(
            self.at(out), token(op), self.at(a), bias=self.at(bias), scale=scale, **sums
        )

    def copy(self, out, a):
        nisa.tensor_copy(self.at(out), self.at(a))

    def transpose(self, _, source, rows, columns, on_vector):
        data = self.tiles[source][0:rows, 0:columns]
        made = self.new((columns, rows), data.dtype, nl.sbuf if on_vector else nl.psum)
        nisa.nc_transpose(made, data)

    def matmul(self, _, m, n, parts):
        made = self.new((m, n), nl.float32, nl.psum)
        for a, b, flag in parts:
            nisa.nc_matmul(made, self.at(a), self.at(b), accumulate=flag)

    def through_hbm(self, _, source, kind, start, shape, dtype):
        tile = self.tiles[source]
        room = nl.ndarray(tile.shape, tile.dtype, buffer=nl.private_hbm)
        nisa.dma_copy(room, tile)
        if kind == "reshape":
            view = room.reshape(shape)
        elif kind == "rows":
            view = room[start : tile.shape[0] : 2]
        else:
            view = room.permute((1, 0)) if tile.shape[1] > 1 else room
        nisa.dma_copy(self.new(shape, dtype), view)

    def loop(self, out, a, op, number, count, form):
        target, source = self.at(out), self.at(a)

        def body(i):
            part = source[:, nl.ds(i, 1)]
            nisa.tensor_scalar(target[:, nl.ds(i, 1)], part, token(op), number)

        end = nisa.register_alloc(count)
        if form == "data":
            held = nl.ndarray((1, 1), nl.int32)
            nisa.memset(held, count)
            nisa.register_load(end, held)
        if form == "fori":
            nl.fori_loop(1, end, body)
        else:
            for i in nl.dynamic_range(1, end):
                body(i)


def recorded(program):
    @nki.jit
    def kernel(x):
        recorder, outs = Recorder(x), []
        for name, arguments in program.nodes:
            getattr(recorder, name)(*arguments)
        for k, tile in enumerate(recorder.tiles):
            out = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
            if k in program.psum:
                held = nl.ndarray(tile.shape, tile.dtype)
                nisa.tensor_copy(held, tile)
                tile = held
            nisa.dma_copy(out, tile)
            outs.append(out)
        return tuple(outs)

    return kernel


def agree(steps):
    program = interpreted(steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = recorded(program)(INPUT)
    for k, (got, want) in enumerate(zip(found, program.tiles)):
        a, b = np.asarray(got).astype(np.float64), want.astype(np.float64)
        assert a.shape == b.shape
        assert np.array_equal(a, b), (k, program.nodes)


STEP = st.tuples(
    st.sampled_from(sorted(NODES)), st.lists(st.integers(0, 255), min_size=4, max_size=30)
)


@pytest.mark.parametrize("chip", ["trn2", "trn3"])
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 15,
    suppress_health_check=list(HealthCheck),
)
@given(steps=st.lists(STEP, min_size=3, max_size=14), eager=st.booleans())
def test_random_programs(chip, steps, eager):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", chip)
        if eager:
            patch.setenv("NKI_CPU_EAGER", "1")
        agree(steps)


@pytest.mark.parametrize("name", sorted(NODES))
def test_every_node_is_met(name):
    """Each kind of node is legal for some of these numbers, so that none is left out silently."""
    numbers = np.random.default_rng(3)
    met = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
        for _ in range(40):
            steps = [
                ("matmul", numbers.integers(0, 256, 30).tolist()),
                (name, numbers.integers(0, 256, 30).tolist()),
            ]
            program = interpreted(steps)
            if program.nodes[-1][0] == name and len(program.nodes) > 2:
                agree(steps)
                met += 1
                if met == 3:
                    return
    raise AssertionError(f"{name}: {met} legal ones of 40")
