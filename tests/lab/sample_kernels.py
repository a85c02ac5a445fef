"""Kernels of ours that make the programs of published rows, so that no checkout is needed.

Vector additions in tiles and a transpose by tiles of 128: `test_calibrate.py` holds their estimates
against the ratios of lab/docs/calibration.md.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

ROWS = 128


@nki.jit
def add_tiles(a, b, width):
    """128 rows of ``width`` numbers at a time, all of them side by side in HBM."""
    tiles = a.shape[0] // (ROWS * width)
    a, b = (x.reshape((tiles, ROWS, width)) for x in (a, b))
    out = nl.ndarray(a.shape, a.dtype, buffer=nl.hbm)
    for at in nl.affine_range(tiles):
        left = nl.load(a[at])
        right = nl.load(b[at])
        nl.store(out[at], value=nl.add(left, right))
    return out.reshape((tiles * ROWS * width,))


@nki.compiler.skip_middle_end_transformations
@nki.jit
def transpose(x):
    """Tiles of 128 by 128 through TensorE, a load and a store each."""
    out = nl.ndarray(x.shape[::-1], x.dtype, buffer=nl.hbm)
    for m in nl.affine_range(x.shape[0] // ROWS):
        for n in nl.affine_range(x.shape[1] // ROWS):
            rows = slice(m * ROWS, (m + 1) * ROWS)
            columns = slice(n * ROWS, (n + 1) * ROWS)
            tile = nl.ndarray((ROWS, ROWS), x.dtype, buffer=nl.sbuf)
            nisa.dma_copy(src=x[rows, columns], dst=tile)
            turned = nisa.tensor_copy(nisa.nc_transpose(tile))
            nisa.dma_copy(src=turned, dst=out[columns, rows])
    return out
