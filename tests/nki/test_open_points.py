"""What the documentation leaves open is taken on the safe side, with a warning that says so.

Each case has a near miss: the same without what is open, and no warning.
"""

from __future__ import annotations

import warnings

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiWarning


def sb(shape=(32, 32), dtype=nl.float32):
    made = nl.ndarray(shape, dtype)
    nisa.memset(made, 0)
    return made


def ps(shape=(32, 32), dtype=nl.float32):
    return nl.ndarray(shape, dtype, buffer=nl.psum)


def column_tile(start):
    narrow, whole = sb((32, 32), nl.bfloat16), ps((128, 32))
    target = whole[start : start + 32, :]
    nisa.nc_matmul(target, narrow, narrow, tile_position=(0, 32), tile_size=(32, 32))


def filled(value, flag):
    target = ps()
    nisa.memset(target, value)
    nisa.nc_matmul(target, sb(), sb(), accumulate=flag)


def looped(inside):
    outer = ps()
    for _ in nl.dynamic_range(2):
        nisa.nc_matmul(ps() if inside else outer, sb(), sb())


def assigned(x):
    tile = sb()
    tile[...] = sb()


def summed(count):
    nisa.dma_compute(sb(), [sb() for _ in range(count)], nl.add)


def rows(x, count):
    at = sb((count, 1), nl.int32)
    if count > 1:
        nisa.dma_copy(sb(), x.vector_select(0, at))
    else:
        nisa.dma_copy(sb((1, 32)), x.select(0, at).expand_dim(0))


def reduced(op):
    nisa.tensor_partition_reduce(sb((1, 32)), op, sb())


def turned(x, by_dma):
    if by_dma:
        nisa.dma_transpose(sb(), sb())
    else:
        nisa.nc_transpose(sb(), sb())


def dropped(x):
    nisa.dropout(sb(), sb(), 0.5)


def sums(dtype):
    nisa.nc_matmul(ps(dtype=dtype), sb(dtype=nl.bfloat16), sb(dtype=nl.bfloat16))


PATTERN = [[32, 2], [1, 32]]
# identifier: generation, what is open, the near miss
CASES = {
    "sim_ap_offset": (
        2, lambda x: x[1:3].ap(PATTERN, offset=0), lambda x: x[1:3].ap(PATTERN)
    ),
    "sim_array_tile_place": (3, lambda x: column_tile(0), lambda x: column_tile(32)),
    "sim_accumulation_start": (2, lambda x: filled(1.0, None), lambda x: filled(0.0, None)),
    "sim_accumulation_loop": (2, lambda x: looped(False), lambda x: looped(True)),
    "sim_tensor_assignment": (2, assigned, lambda x: nisa.tensor_copy(sb(), sb())),
    "sim_dma_one_source": (2, lambda x: summed(1), lambda x: summed(2)),
    "sim_vector_offsets": (2, lambda x: rows(x, 32), lambda x: rows(x, 1)),
    "sim_dma_on_chip": (2, lambda x: nisa.dma_copy(sb(), sb()), lambda x: nisa.dma_copy(sb(), x)),
    "sim_transpose_by_dma": (2, lambda x: turned(x, True), lambda x: turned(x, False)),
    "sim_unpublished_limit": (
        2, lambda x: nl.tile_size.psum_min_align, lambda x: nl.tile_size.sbuf_fmax_bytes
    ),
    "sim_average": (2, lambda x: reduced(nl.average), lambda x: reduced(nl.add)),
    "sim_dropout_probability": (2, dropped, lambda x: nisa.tensor_copy(sb(), sb())),
    "sim_rounded_sums": (4, lambda x: sums(nl.bfloat16), lambda x: sums(nl.float32)),
}  # fmt: skip
GATES_ALONE = {"sim_vector_offsets", "sim_transpose_by_dma"}  # open on gen2 only


def told(body):
    @nki.jit
    def kernel(x):
        body(x)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, x)
        return out

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel(np.zeros((32, 32), np.float32))
    return " ".join(str(w.message) for w in caught if issubclass(w.category, NkiWarning))


@pytest.mark.parametrize("identifier", CASES)
def test_open_points_warn(target, identifier):
    number, doubtful, near = CASES[identifier]
    target(f"gen{number}")
    assert identifier in told(doubtful)
    assert identifier not in told(near)
    if identifier in GATES_ALONE:
        target("gen3")
        assert identifier not in told(doubtful)
