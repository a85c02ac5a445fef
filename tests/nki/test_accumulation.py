"""PSUM with ``accumulate`` left open, given or refused, against one flag for each element.

The first product into an element overwrites it, later ones add; what something else wrote counts as
begun. Undefined sums must not reach HBM. Small integers keep every sum exact.
"""

import warnings

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError, NkiWarning

ROWS, DEPTH, LONGEST = 128, 16, 40
KINDS = ["product", "product", "product", "loop", "fill", "transpose"]
STARTS = {128: (0,), 65: (0,), 64: (0, 64), 33: (0, 64), 32: (0, 32, 64, 96), 5: (0, 32, 64, 96)}


def drawn_steps(rng, columns):
    """Products (once, or in a device loop), fills and transposes into parts of a tile."""
    steps = [("product", 0, ROWS, slice(0, columns), rng.choice([None, False]))]
    for _ in range(int(rng.integers(1, 7))):
        rows = int(rng.choice(list(STARTS)))
        first = int(rng.integers(0, columns))
        part = slice(
            first, int(rng.integers(first + 1, columns + 1)), int(rng.choice([1, 1, 2, 3]))
        )
        kind = str(rng.choice(KINDS))
        start = int(rng.choice(STARTS[rows]))
        steps.append((kind, start, rows, part, rng.choice([None, None, False, True])))
    return steps[int(rng.random() < 0.3) :]  # some leave parts undefined


def recorded(steps, columns, buffer_type):
    @nki.jit
    def kernel(x):
        out = nl.ndarray((ROWS, columns), nl.float32, buffer=nl.shared_hbm)
        data = nl.load(x)
        psum = nl.ndarray((ROWS, columns), nl.float32, buffer=nl.psum)
        for n in range(len(steps)):
            kind, start, rows, part, flag = steps[n]
            target = psum[start : start + rows, part]
            left, right = data[:, n : n + rows], data[:, ROWS + n : ROWS + n + target.shape[1]]
            if kind == "product":
                nisa.nc_matmul(target, left, right, accumulate=flag)
            elif kind == "loop":
                for _ in nl.dynamic_range(2):
                    nisa.nc_matmul(target, left, right, accumulate=flag)
            elif kind == "fill":
                whole = buffer_type is None or part.step > 1
                nisa.memset(target if whole else target.view(buffer_type), 0)
            else:
                square = psum[start : start + rows, 0:DEPTH]
                nisa.nc_transpose(square, data[0:DEPTH, n : n + rows])
        kept = nl.ndarray((ROWS, columns), nl.float32)
        nisa.tensor_copy(kept, psum)
        nisa.dma_copy(out, kept)
        return out

    return kernel


def followed(steps, columns, x):
    values = np.full((ROWS, columns), np.nan, np.float32)
    begun = np.zeros((ROWS, columns), bool)
    for n, (kind, start, rows, part, flag) in enumerate(steps):
        place = slice(start, start + rows), part
        if kind == "transpose":
            place = slice(start, start + rows), slice(0, DEPTH)
            values[place] = x[:, n : n + rows].T
        elif kind == "fill":
            values[place] = 0
        else:
            width = len(range(*part.indices(columns)))
            product = x[:, n : n + rows].T @ x[:, ROWS + n : ROWS + n + width]
            for _ in range(1 + (kind == "loop")):
                added = values[place] + product
                first = np.where(begun[place], added, product)
                values[place] = product if flag is False else added if flag is True else first
                begun[place] = True
        begun[place] = True
    return values


@pytest.mark.parametrize("buffer_type", [None, nl.uint16], ids=["plain", "retyped"])
@pytest.mark.parametrize("generation", ["trn1", "trn2"])
def test_the_first_product_into_an_element_overwrites(target, generation, buffer_type):
    target(generation)
    warnings.simplefilter("ignore", NkiWarning)
    outcomes = {True: 0, False: 0}
    for seed in range(25):
        rng = np.random.default_rng(seed)
        columns = int(rng.integers(DEPTH, LONGEST))
        x = rng.integers(-3, 4, (DEPTH, ROWS + LONGEST + 16)).astype(np.float32)
        steps = drawn_steps(rng, columns)
        want = followed(steps, columns, x)
        undefined = bool(np.isnan(want).any())
        outcomes[undefined] += 1
        kernel = recorded(steps, columns, buffer_type)
        if undefined:
            with pytest.raises(NkiError, match="sim_undefined_data"):
                kernel(x)
        else:
            assert np.array_equal(kernel(x), want), (seed, steps)
    assert min(outcomes.values()) > 2


def test_a_region_that_products_covered_in_part():
    """The second product covers what the first began and 16 columns more."""

    @nki.jit
    def kernel(x):
        out = nl.ndarray((64, 64), nl.float32, buffer=nl.shared_hbm)
        tile, sums = nl.load(x), nl.ndarray((64, 64), nl.float32, buffer=nl.psum)
        for columns in (slice(0, 48), slice(32, 64)):
            nisa.nc_matmul(sums[:, columns], tile, tile[:, columns])
        nisa.dma_copy(out, nl.copy(sums))
        return out

    x = np.random.default_rng(0).integers(-3, 4, (DEPTH, 64)).astype(np.float32)
    times = np.repeat([1, 2, 1], [32, 16, 16])
    assert np.array_equal(kernel(x), times * (x.T @ x))
