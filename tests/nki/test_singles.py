"""Forms that devices ran, or that were wrong without a word, and their siblings, in both languages.

A row has a kernel's body, its arguments, and what must come of it: an array, an error's words, or a
warning's beside the array.
"""

import functools
import runpy
import types

import neuronxcc.nki as first
import neuronxcc.nki.isa as fisa
import neuronxcc.nki.language as fl
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError
from neuron_cpu.core.device.errors import NkiAdvice, NkiWarning
from neuron_cpu.core.device.refusals import refusals

X = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
ROW, COLUMN = np.mgrid[0:64, 0:32]
BIG = np.full((64, 32), 2**24 + 1, np.int32)
AT, NAN = np.array([[3]], np.int32), np.float32("nan")
LOST = NkiWarning, "sim_inexact_integers"


def sb(dtype=nl.float32, shape=(64, 32)):
    return nl.ndarray(shape, dtype, buffer=nl.sbuf)


def today(body, shape=(64, 32), dtype=nl.float32):
    """A kernel of `nki` whose body fills the output that it gets, or returns a tile for it."""

    @nki.jit
    def kernel(*given):
        out = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
        made = body(out, *given)
        if made is not None:
            nisa.dma_copy(out, made)
        return out

    return kernel


def older(body, shape=(64, 32), dtype=fl.float32):
    """The same of `neuronxcc.nki`."""

    @first.jit
    def kernel(*given):
        out = fl.ndarray(shape, dtype, buffer=fl.shared_hbm)
        made = body(out, *given)
        if made is not None:
            fl.store(out, made)
        return out

    return kernel


def filled(make, **arguments):
    """A body that makes a tile by one instruction of today's, from a loaded one."""

    def body(out, x):
        tile = sb(x.dtype)
        make(tile, data=nl.load(x), **arguments)
        return tile

    return body


# --- assignments ----------------------------------------------------------------------------------
def halves(out, x):
    tile = nl.load(x)
    out[:, 0::2] = tile[:, 16:32]
    out[:, 1::2] = tile[:, 0:16]


def rows(out, x):
    tile = nl.load(x)
    for k in range(64):
        out[k] = tile[63 - k : 64 - k, :]


def from_psum(out, x):
    tile, total = nl.load(x), nl.ndarray((32, 32), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(total, tile, tile)
    out[0:32, :] = total


def put(tile, value):
    """Assign the value; the tile, or nothing where it lies in HBM."""
    tile[...] = value
    return tile if tile.on_chip else None


def of_first(buffer=fl.sbuf):
    return fl.ndarray((64, 32), fl.float32, buffer=buffer)


INTERLEAVED = np.stack([X[:, 16:], X[:, :16]], -1).reshape(64, 32)
ASSIGNMENTS = {
    "whole": (today(lambda out, x: put(out, nl.load(x))), [X], X),
    "steps": (today(halves), [X], INTERLEAVED),
    "rows": (today(rows), [X], X[::-1]),
    "hbm": (today(lambda out, x: put(out, x)), [X], X),
    "constant": (today(lambda out, x: put(out, 2.0)), [X], np.full_like(X, 2)),
    "load": (today(lambda out, x: put(sb(), x)), [X], X),
    "psum": (today(from_psum), [X], r"out\[\.\.\.\] = value: dma_copy.*err_unsupported_memory"),
    "older": (older(lambda out, x: put(out, fl.load(x))), [X], "write HBM tensors with"),
    "older constant": (older(lambda out, x: put(out, 2.0)), [X], "sbuf or psum"),
    # an argument that was assigned before any instruction had been taken for an empty result
    "older load": (older(lambda out, x: put(of_first(), x)), [X], "load it with nl.load first"),
    "older tile": (older(lambda out, x: put(of_first(), fl.load(x))), [X], X),
}


# --- offsets that data choose ---------------------------------------------------------------------
def scratch(rows, **offset):
    def body(out, x, at):
        held = nl.ndarray((128, 32), nl.float32, buffer=nl.hbm)
        nisa.dma_copy(held[0:rows, :], x[0:rows, :])
        (axis,) = offset
        part = held.ap([[32, 4], [1, 32]], indirect_dim=0, **{axis: nl.load(at)})
        tile = sb(shape=(4, 32))
        nisa.dma_copy(tile, part)
        return tile

    return today(body, (4, 32))


def scratch_of_first(out, x, at):
    held = fl.ndarray((128, 32), fl.float32, buffer=fl.hbm)
    fl.store(held[0:8, :], fl.load(x[0:8, :]))
    i, j = fl.mgrid[0:1, 0:32]
    return fl.load(held[fl.load(at)[i, 0], j])


def columns(out, x, at):
    tile = sb()
    nisa.dma_copy(tile[0:1, 0:16], x[0:1, 0:16])
    made = sb(shape=(1, 4))
    part = tile[0:1, :].ap([[32, 1], [1, 4]], scalar_offset=nl.load(at), indirect_dim=1)
    nisa.tensor_copy(made, part)
    return made


FOUR = np.array([[3], [0], [7], [3]], np.int32)
OFFSETS = {
    "rows": (scratch(8, scalar_offset=1), [X, AT], X[3:7]),
    "rows chosen": (scratch(8, vector_offset=1), [X, FOUR], X[FOUR[:, 0]]),
    # which rows nobody wrote shows when it runs
    "rows missing": (
        scratch(2, vector_offset=1),
        [X, FOUR],
        np.where(FOUR < 2, X[FOUR[:, 0]], NAN),
    ),
    "columns": (today(columns, (1, 4)), [X, AT], X[0:1, 3:7]),
    "older": (older(scratch_of_first, (1, 32)), [X, AT], X[3:4]),
    "older missing": (older(scratch_of_first, (1, 32)), [X, AT + 9], X[12:13] * NAN),
}


# --- digits of integers ---------------------------------------------------------------------------
def select_today(tile, data):
    nisa.affine_select(tile, [[1, 32]], 1, data, 0.0, cmp_op=nl.greater_equal)


def select_older(out, x):
    i, j = fl.mgrid[0:64, 0:32]
    return fl.where(i >= j, fl.load(x), 0)


EVEN = BIG - 1
INTEGERS = {
    "activation": (today(filled(nisa.activation, op=nl.copy), dtype=nl.int32), [BIG], EVEN, LOST),
    "select": (today(filled(select_today), dtype=nl.int32), [BIG], EVEN, LOST),
    "copy": (today(lambda out, x: nl.copy(nl.load(x)), dtype=nl.int32), [BIG], BIG),
    "add": (today(lambda out, x: nl.add(nl.load(x), 1), dtype=nl.int32), [BIG], EVEN, LOST),
    "older activation": (
        older(lambda out, x: fisa.activation(op=fl.copy, data=fl.load(x)), dtype=fl.int32),
        [BIG], EVEN, LOST),
    "older select": (older(select_older, dtype=fl.int32), [BIG],
                     np.where(ROW >= COLUMN, EVEN, 0), LOST),
    "older where": (
        older(lambda out, x: fl.where(fl.greater(fl.load(x), 0), fl.load(x), 0), dtype=fl.int32),
        [BIG], EVEN, LOST),
    "older copy": (older(lambda out, x: fl.copy(fl.load(x)), dtype=fl.int32), [BIG], BIG),
}  # fmt: skip


# --- choices by indices and by tiles --------------------------------------------------------------
def where_older(condition, other):
    def body(out, x):
        i, j = fl.mgrid[0:64, 0:32]
        tile = fl.load(x)
        return fl.where(condition(i, j), tile, other(tile))

    return older(body)


def where_today(condition, other=lambda tile: nl.negative(tile)):
    def body(out, x):
        tile = nl.load(x)
        return nl.where(condition(tile), tile, other(tile))

    return today(body)


ADVICE = NkiAdvice, "sim_expansion"
BELOW, BAND = ROW >= COLUMN, (ROW >= COLUMN) & (ROW < COLUMN + 9)
CHOICES = {
    "older number": (where_older(lambda i, j: i >= j, lambda t: -1.0), [X], np.where(BELOW, X, -1)),
    "older band": (
        where_older(lambda i, j: (i >= j) & (i < j + 9), lambda t: -1.0), [X],
        np.where(BAND, X, -1)),
    # no public run shows it with two tiles
    "older tiles": (where_older(lambda i, j: i >= j, fl.negative), [X], "nisa.affine_select"),
    "tile": (where_today(lambda t: nl.greater(t, 0.0)), [X], np.abs(X), ADVICE),
    "floats": (where_today(lambda t: nl.maximum(t, 0.0)), [X], np.abs(X), ADVICE),
    "number": (where_today(lambda t: nl.less(t, 0.0), lambda t: 7.0), [X],
               np.where(X < 0, X, 7), ADVICE),
}  # fmt: skip


TABLES = (ASSIGNMENTS, OFFSETS, INTEGERS, CHOICES)
ROWS = [pytest.param(*row, id=name) for table in TABLES for name, row in table.items()]


def show(*row):
    kernel, given, expected, warned = (*row, None)[:4]
    if isinstance(expected, str):
        with pytest.raises(NkiError, match=expected):
            kernel(*given)
    elif warned:
        kind, words = warned
        with pytest.warns(kind, match=words):
            assert np.array_equal(kernel(*given), expected)
    else:
        assert np.array_equal(kernel(*given), expected, equal_nan=True)


@pytest.mark.parametrize("row", [pytest.param(row.values, id=row.id) for row in ROWS])
def test_singles_and_their_siblings(row, target):
    target("trn2")
    show(*row)


def test_tiles_made_on_one_line_are_not_all_named_after_the_first(tmp_path):
    path = tmp_path / "lines.py"
    path.write_text(
        "import nki, nki.isa as nisa, nki.language as nl\n"
        "@nki.jit\n"
        "def kernel(x):\n"
        "    one = nl.ndarray((8, 4), x.dtype, buffer=nl.shared_hbm); two = nl.load(x)\n"
        "    nisa.tensor_copy(one, two)\n"
    )
    with pytest.raises(NkiError, match=r"shared_hbm tensor \(8, 4\)"):
        runpy.run_path(str(path))["kernel"](X)


# --- what the parser of SDK 2.29 to 2.32 refuses --------------------------------------------------
class Box:
    def __init__(self):
        self.a = 0


def pair():
    return 1, 2


@functools.cache
def sizes(n):
    return n


def parts(x):
    held = [0, 0]
    held[0], held[1] = pair()


def attributes(x):
    box = Box()
    box.a, _ = pair()


def swapped(x):
    held = [1, 2]
    held[0], held[1] = held[1], held[0]


def counted(x):
    held = [0]
    for held[0] in range(2):
        pass


def raising(x):
    if x.shape[0] > 1000:
        raise ValueError("too large")


def catching(x):
    try:
        return x.shape
    except ValueError:
        return None


def formatted(x):
    assert f"{1.5:.2f}"


def inner(x):
    def helper():
        return x

    return helper()


def starred(x):
    return max(*x.shape)


def leaving(x):
    for i in nl.dynamic_range(3):
        for _ in range(2):
            break  # of a loop that unrolls
        if x.shape[0] > 1000:
            continue
        assert i.frozen


def numbered(x):
    return {1: x}


def chained(x):
    held = [0, 0]
    held[0] = held[1] = 1


def a_set(x):
    assert x.shape[0] in {64, 128}


def decorated(x):
    sizes(3)


def made_set(x):
    assert x.shape[0] in frozenset((64, 128))


def set_of_the_module(x):
    assert x.shape[0] in ROWS


def represented(x):
    return repr(3)


def ranged(x):
    return list(range(3))


def around(number=3):
    def body(x):
        return number

    return body


called, ROWS = parts, frozenset((64, 128))
SOURCES = {
    made_set: "a set", set_of_the_module: "the set 'ROWS'", represented: "repr",
    ranged: "list.range", parts: "unpacking into", attributes: "unpacking into",
    swapped: "unpacking into", counted: "several names", chained: "two parts at once",
    a_set: "a set", decorated: "the decorator cache", raising: "raise", catching: "try",
    formatted: "format", inner: "function in a function", starred: "star",
    leaving: "continue in a device loop", numbered: "other keys than strings",
}  # fmt: skip


def calling(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, x)
    called(x)
    return out


@pytest.mark.parametrize("body", [*SOURCES, around], ids=lambda body: body.__name__)
def test_the_parser_refuses_it_up_to_2_32(body, monkeypatch):
    names = {**globals(), "called": around() if body is around else body}
    kernel = nki.jit(types.FunctionType(calling.__code__, names, "kernel"))
    monkeypatch.setenv("NEURON_CPU_NKI", "2.32")
    with pytest.raises(NkiError, match=rf"{SOURCES.get(body, 'number')}.*sim_parser_subset"):
        kernel.trace(X)
    monkeypatch.setenv("NEURON_CPU_NKI", "2.33")
    kernel.trace(X)


# --- the vendor's pages ---------------------------------------------------------------------------
def test_a_transpose_by_dma_of_2_28_takes_four_axes(target, monkeypatch):
    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
        nisa.dma_transpose(dst=tile, src=x)
        nisa.dma_copy(out, tile)
        return out

    target("trn2")
    square = np.arange(4096, dtype=np.float16).reshape(64, 64)
    monkeypatch.setenv("NEURON_CPU_NKI", "2.28")
    with pytest.raises(NkiError, match=r"four; use nisa.nc_transpose \[sim_dma_transpose_axes\]"):
        kernel(square)
    monkeypatch.setenv("NEURON_CPU_NKI", "2.29")
    assert np.array_equal(kernel(square), square.T)


PAGE = """EARG001 EBIR023 EBVF030 EHCA005 EMOD025 EOOM001 EOOM002 ESFH002 ESPP004 ESPP047 EUOC002
    EVRF001 EVRF004-007 EVRF009-011 EVRF013 EVRF015-019 EVRF022 EVRF031 EVRF035-065 EXSP001
    EXTP004"""  # aws-neuron/aws-neuron-sdk 81ce03a, compiler/error-codes/index.rst


def codes(first_one, last=None):
    """``EVRF004`` to ``EVRF007``, both included."""
    stop = int(last or first_one[-3:])
    return {f"{first_one[:-3]}{n:03}" for n in range(int(first_one[-3:]), stop + 1)}


def test_every_code_of_the_vendor_s_page_stands_in_the_table():
    listed = set()
    for one in refusals():
        for code in one.code.replace("NCC_", "").split(", "):
            ends = code.split(" to ")
            listed |= codes(ends[0], ends[-1][-3:]) if ends[0][-3:].isdigit() else set()
    on_page = set().union(*(codes(*code.split("-")) for code in PAGE.split()))
    assert on_page <= listed
