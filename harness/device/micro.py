"""Small kernels of `neuronxcc.nki`, each of whose times one constant of a NeuronCore explains.

A kernel repeats one thing ``n`` times. Two rows of `rows.py` differ in ``n`` or in a size alone, so
that what else a kernel does falls out of their difference. Chains are dependent, so nothing may be
left out or rearranged. Repetitions side by side differ in a constant, so that none is another's
copy. Every result reaches HBM.

Shapes are [partition, free]; ``x_hbm`` is fp32 unless a kernel says otherwise.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np

P = 128
ENGINES = {"vector": nisa.vector_engine, "gpsimd": nisa.gpsimd_engine}


def step(tile, engine, addend):
    """One instruction of VectorE, ScalarE or GpSimdE over a whole tile."""
    if engine == "scalar":
        return nisa.activation(np.copy, tile, scale=1.0 + addend)
    return nisa.tensor_scalar(tile, np.add, addend, engine=ENGINES[engine])


@nki.jit
def chain(x_hbm, n, engine):
    """``n`` instructions of one engine, each on the result of the last."""
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x_hbm)
    for _ in nl.static_range(n):
        tile = step(tile, engine, 1.0)
    nl.store(out_hbm, tile)
    return out_hbm


@nki.jit
def stream(x_hbm, n, engine):
    """``n`` instructions of one column, none of which needs another's result."""
    out_hbm = nl.ndarray((P, n), x_hbm.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x_hbm)
    results_sb = nl.ndarray((P, n), x_hbm.dtype, buffer=nl.sbuf)
    for i in nl.static_range(n):
        results_sb[:, i : i + 1] = step(tile, engine, float(i))
    nl.store(out_hbm, results_sb)
    return out_hbm


@nki.jit
def two_chains(x_hbm, n, first, second, in_psum):
    """A chain on each of two engines that share nothing, but perhaps a port of SBUF or PSUM.

    With the same engine twice, the second chain stands behind the first one in the text.
    """
    out_hbm = nl.ndarray((2, *x_hbm.shape), x_hbm.dtype, buffer=nl.shared_hbm)
    for k, engine in enumerate((first, second)):
        tile = nl.load(x_hbm)
        for _ in nl.static_range(n):
            if in_psum:
                moved = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.psum)
                moved[...] = step(tile, engine, 1.0)
                tile = moved
            else:
                tile = step(tile, engine, 1.0)
        nl.store(out_hbm[k], nl.copy(tile) if in_psum else tile)
    return out_hbm


@nki.jit
def products(x_hbm, y_hbm, n):
    """``n`` products of [128, 128] and [128, columns] that add up in one tile of PSUM."""
    out_hbm = nl.ndarray((P, y_hbm.shape[1]), nl.float32, buffer=nl.shared_hbm)
    stationary, moving = nl.load(x_hbm), nl.load(y_hbm)
    sum_psum = nl.zeros((P, y_hbm.shape[1]), nl.float32, buffer=nl.psum)
    for _ in nl.static_range(n):
        sum_psum += nisa.nc_matmul(stationary, moving)
    nl.store(out_hbm, nl.copy(sum_psum))
    return out_hbm


@nki.jit
def product_chain(x_hbm, y_hbm, n):
    """``n`` products, each of what VectorE has copied of the last one."""
    out_hbm = nl.ndarray((P, y_hbm.shape[1]), y_hbm.dtype, buffer=nl.shared_hbm)
    stationary, tile = nl.load(x_hbm), nl.load(y_hbm)
    for _ in nl.static_range(n):
        product_psum = nisa.nc_matmul(stationary, tile)
        tile = nisa.tensor_copy(product_psum, dtype=y_hbm.dtype, engine=nisa.vector_engine)
    nl.store(out_hbm, tile)
    return out_hbm


@nki.jit
def rows(x_hbm, row):
    """One transfer of [partitions, k, 2 row]: the first ``row`` elements of each, so that a row is
    a descriptor of its own. The result is a column of the tile."""
    partitions, k, _ = x_hbm.shape
    out_hbm = nl.ndarray((partitions, k), x_hbm.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x_hbm[:, :, 0:row])
    nl.store(out_hbm, nl.copy(tile[:, :, 0]))
    return out_hbm


@nki.jit
def transfers(x_hbm, n):
    """``n`` transfers [partitions, columns] from places of their own, and one back."""
    _, partitions, columns = x_hbm.shape
    out_hbm = nl.ndarray((partitions, n * columns), x_hbm.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray((partitions, n * columns), x_hbm.dtype, buffer=nl.sbuf)
    for i in nl.static_range(n):
        tile[:, i * columns : (i + 1) * columns] = nl.load(x_hbm[i])
    nl.store(out_hbm, tile)
    return out_hbm


@nki.jit
def round_trips(x_hbm, n):
    """``n`` times to HBM and back, each behind the last."""
    out_hbm = nl.ndarray((n, *x_hbm.shape), x_hbm.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x_hbm)
    for i in nl.static_range(n):
        nl.store(out_hbm[i], tile)
        tile = nl.load(out_hbm[i]) if i < n - 1 else tile
    return out_hbm


@nki.jit
def gathers(x_hbm, rows_hbm, n):
    """``n`` loads [128, columns] of the rows that ``rows_hbm`` [128, n] (int32) names."""
    columns = x_hbm.shape[1]
    out_hbm = nl.ndarray((P, n * columns), x_hbm.dtype, buffer=nl.shared_hbm)
    rows_sb = nl.load(rows_hbm)
    tile = nl.ndarray((P, n * columns), x_hbm.dtype, buffer=nl.sbuf)
    column = nl.arange(columns)[None, :]
    for i in nl.static_range(n):
        tile[:, i * columns : (i + 1) * columns] = nl.load(x_hbm[rows_sb[:, i], column])
    nl.store(out_hbm, tile)
    return out_hbm


@nki.jit
def held(x_hbm, n):
    """``n`` tiles [128, columns] that are all there before the first is used again: spills."""
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    tiles = []
    for i in nl.static_range(n):
        tiles.append(step(nl.load(x_hbm[i]), "vector", float(i)))
    for i in nl.static_range(n):
        nl.store(out_hbm[i], nl.add(tiles[i], tiles[n - 1 - i]))
    return out_hbm


@nki.jit
def small(x_hbm):
    """A load, an instruction and a store: what a graph of many kernels repeats."""
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    nl.store(out_hbm, step(nl.load(x_hbm), "vector", 1.0))
    return out_hbm
