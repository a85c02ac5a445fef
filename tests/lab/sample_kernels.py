"""Kernels of ours that make the programs of published rows, so that no checkout is needed.

Vector additions in chunks and in tiles, a transpose by tiles of 128, a scan over the states of
Mamba: `test_calibrate.py` holds their estimates against the ratios of lab/docs/calibration.md.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

ROWS = 128


@nki.jit
def add_chunks(a, b):
    """A partition for each of 128 numbers."""
    out = nl.ndarray(a.shape, a.dtype, buffer=nl.hbm)
    for at in nl.affine_range(a.shape[0] // ROWS):
        here = slice(at * ROWS, (at + 1) * ROWS)
        left = nl.load(a[here])
        right = nl.load(b[here])
        nl.store(out[here], value=nl.add(left, right))
    return out


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
def copy_add_tiles(a, b, width):
    """A row of HBM to each partition, ``width`` numbers of it at a time, in instructions."""
    shape = (ROWS, a.shape[0] // ROWS)
    a_rows, b_rows = a.reshape(shape), b.reshape(shape)
    out = nl.ndarray(shape, a.dtype, buffer=nl.hbm)
    for at in nl.affine_range(shape[1] // width):
        here = slice(at * width, (at + 1) * width)
        left = nl.ndarray((ROWS, width), a.dtype, buffer=nl.sbuf)
        right = nl.ndarray((ROWS, width), a.dtype, buffer=nl.sbuf)
        nisa.dma_copy(src=a_rows[:, here], dst=left)
        nisa.dma_copy(src=b_rows[:, here], dst=right)
        nisa.dma_copy(src=nisa.tensor_tensor(left, right, op=nl.add), dst=out[:, here])
    return out.reshape(a.shape)


@nki.jit
def scan_states(delta, u, decay, b, c):
    """Mamba's states one after the other; everything is loaded again for each."""
    batch, channels, length = delta.shape
    out = nl.ndarray(delta.shape, delta.dtype, buffer=nl.shared_hbm)
    tiles = channels // ROWS
    for one in nl.affine_range(batch):
        total = nl.zeros((tiles, nl.par_dim(ROWS), length), dtype=delta.dtype)
        for state in nl.affine_range(decay.shape[1]):
            for tile in nl.affine_range(tiles):
                here = slice(tile * ROWS, (tile + 1) * ROWS)
                step = nl.load(delta[one, here, 0:length])
                rate = nl.load(decay[here, state])
                kept = nisa.activation(op=nl.exp, data=step, scale=rate)
                value = nl.load(u[one, here, 0:length])
                into = nl.load(b[one, state : state + 1, 0:length])
                fresh = nisa.tensor_tensor(step, value, op=nl.multiply)
                wide = into.broadcast_to((ROWS, length))
                fresh = nisa.tensor_tensor(fresh, wide, op=nl.multiply)
                found = nisa.tensor_tensor_scan(kept, fresh, initial=0, op0=nl.multiply, op1=nl.add)
                out_of = nl.load(c[one, state : state + 1, 0:length])
                wide = out_of.broadcast_to((ROWS, length))
                part = nisa.tensor_tensor(found, wide, op=nl.multiply)
                total[tile, 0:ROWS, 0:length] += part
        for tile in nl.affine_range(tiles):
            here = slice(tile * ROWS, (tile + 1) * ROWS)
            nl.store(out[one, here, 0:length], total[tile, 0:ROWS, 0:length])
    return out


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
