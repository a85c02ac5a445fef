"""Small kernels, each of whose times one constant of a NeuronCore explains, in both languages.

A kernel repeats one thing ``n`` times. Two rows of `rows.py` differ in ``n`` or in a size alone, so
that what else a kernel does falls out of their difference. Chains are dependent, so nothing may be
left out or rearranged. Repetitions side by side differ in a constant, so that none is another's
copy (but for GpSimdE's in ``nki``). Every result reaches HBM. The file is two modules
(`calls.module`): of ``neuronxcc.nki``, and as ``micro_today`` of ``nki``; only helpers differ.
Shapes are [partition, free].
"""

# mypy: disable-error-code="no-redef, import-untyped"
if __name__.endswith("_today"):
    import nki
    import nki.isa as nisa
    import nki.language as nl

    def step(tile, engine, addend, kept=None, i=None):
        """One instruction of VectorE, ScalarE or GpSimdE over a whole tile; the result is a tile,
        or in ``kept``, of which it may be part i."""
        if kept is None:
            kept = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
        part = kept if i is None else kept[:, i, :]
        if engine == "scalar":
            nisa.activation(dst=part, op=nl.copy, data=tile, scale=1.0 + addend)
        elif engine == "vector":
            on = nisa.engine.vector
            nisa.tensor_scalar(dst=part, data=tile, op0=nl.add, operand0=addend, engine=on)
        else:  # which adds no constants from gen3 on
            on = nisa.engine.gpsimd
            nisa.tensor_tensor(dst=part, data1=tile, data2=tile, op=nl.maximum, engine=on)
        return kept

    def brought(tile, start, part_hbm):
        """A transfer to the columns of ``tile`` from ``start`` on."""
        nisa.dma_copy(dst=tile[:, start : start + part_hbm.shape[1]], src=part_hbm)

    def gathered(tile, start, x_hbm, rows_sb, i):
        """The rows that column i of ``rows_sb`` names, in columns of ``tile`` from ``start`` on."""
        columns = x_hbm.shape[1]
        pattern = [[columns, rows_sb.shape[0]], [1, columns]]
        named = x_hbm.ap(pattern, vector_offset=rows_sb[:, i : i + 1], indirect_dim=0)
        nisa.dma_copy(dst=tile[:, start : start + columns], src=named)

    def sums(columns):
        """A tile of PSUM to add products up in."""
        return nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.psum)

    def multiply(sum_psum, stationary, moving, n):
        """Add the n-th product to a tile of PSUM."""
        nisa.nc_matmul(dst=sum_psum, stationary=stationary, moving=moving, accumulate=n > 0)

    def copied(tile, dtype=nl.float32):
        """A copy in SBUF by VectorE."""
        copy_sb = nl.ndarray(tile.shape, dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=copy_sb, src=tile, engine=nisa.engine.vector)
        return copy_sb

else:
    import neuronxcc.nki as nki
    import neuronxcc.nki.isa as nisa
    import neuronxcc.nki.language as nl
    import numpy as np

    ENGINES = {"vector": nisa.vector_engine, "gpsimd": nisa.gpsimd_engine}

    def step(tile, engine, addend, kept=None, i=None):
        if engine == "scalar":
            result = nisa.activation(np.copy, tile, scale=1.0 + addend)
        else:
            result = nisa.tensor_scalar(tile, np.add, addend, engine=ENGINES[engine])
        if kept is None:
            return result
        if i is None:
            kept[:, :] = result
        else:
            kept[:, i, :] = result
        return kept

    def brought(tile, start, part_hbm):
        tile[:, start : start + part_hbm.shape[1]] = nl.load(part_hbm)

    def gathered(tile, start, x_hbm, rows_sb, i):
        columns = x_hbm.shape[1]
        column = nl.arange(columns)[None, :]
        tile[:, start : start + columns] = nl.load(x_hbm[rows_sb[:, i], column])

    def sums(columns):
        return nl.zeros((P, columns), nl.float32, buffer=nl.psum)

    def multiply(sum_psum, stationary, moving, n):
        sum_psum += nisa.nc_matmul(stationary, moving)

    def copied(tile, dtype=nl.float32):
        return nisa.tensor_copy(tile, dtype=dtype, engine=nisa.vector_engine)


P = 128


@nki.jit
def chain(x_hbm, n, engine):
    """``n`` instructions of one engine, each on the result of the last; graphs repeat one."""
    out_hbm = nl.ndarray(x_hbm.shape, dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x_hbm)
    for _ in nl.static_range(n):
        tile = step(tile, engine, 1.0)
    nl.store(out_hbm, tile)
    return out_hbm


@nki.jit
def stream(x_hbm, n, engine):
    """``n`` instructions, none of which needs another's result. Its first column is stored."""
    out_hbm = nl.ndarray((P, n), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x_hbm)
    results_sb = nl.ndarray((P, n, tile.shape[1]), dtype=x_hbm.dtype, buffer=nl.sbuf)
    for i in nl.static_range(n):
        step(tile, engine, float(i), results_sb, i)
    first = results_sb[:, :, 0]
    nl.store(out_hbm, first if tile.shape[1] == 1 else copied(first))
    return out_hbm


@nki.jit
def two_chains(x_hbm, n, first, second, in_psum):
    """A chain on each of two engines that share nothing, but perhaps a port of SBUF or PSUM.

    With the same engine twice, the second chain stands behind the first one in the text.
    """
    out_hbm = nl.ndarray((2, *x_hbm.shape), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for k, engine in enumerate((first, second)):
        tile = nl.load(x_hbm)
        for _ in nl.static_range(n):
            kept = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.psum) if in_psum else None
            tile = step(tile, engine, 1.0, kept)
        nl.store(out_hbm[k], copied(tile) if in_psum else tile)
    return out_hbm


@nki.jit
def products(x_hbm, y_hbm, n):
    """``n`` products of [128, 128] and [128, columns] that add up in one tile of PSUM."""
    out_hbm = nl.ndarray((P, y_hbm.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    stationary, moving = nl.load(x_hbm), nl.load(y_hbm)
    sum_psum = sums(y_hbm.shape[1])
    for i in nl.static_range(n):
        multiply(sum_psum, stationary, moving, i)
    nl.store(out_hbm, copied(sum_psum))
    return out_hbm


@nki.jit
def product_chain(x_hbm, y_hbm, n, burst=1, pause=0):
    """``n`` times ``burst`` products of what VectorE has copied of the last and moved on."""
    out_hbm = nl.ndarray((P, y_hbm.shape[1]), dtype=y_hbm.dtype, buffer=nl.shared_hbm)
    stationary, tile = nl.load(x_hbm), nl.load(y_hbm)
    for _ in nl.static_range(n):
        product_psum = sums(y_hbm.shape[1])
        for i in nl.static_range(burst):
            multiply(product_psum, stationary, tile, i)
        tile = copied(product_psum, y_hbm.dtype)
        for _ in nl.static_range(pause):
            tile = step(tile, "vector", 1.0)
    nl.store(out_hbm, tile)
    return out_hbm


@nki.jit
def rows(x_hbm, row):
    """One transfer of [partitions, k, 2 row]: the first ``row`` elements of each, so that a row is
    a descriptor of its own. The result is a column of the tile."""
    partitions, k, _ = x_hbm.shape
    out_hbm = nl.ndarray((partitions, k), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray((partitions, k, row), dtype=x_hbm.dtype, buffer=nl.sbuf)
    nisa.dma_copy(src=x_hbm[:, :, 0:row], dst=tile)  # nl.load refuses parts of rows in SDK 2.21
    nl.store(out_hbm, copied(tile[:, :, 0], x_hbm.dtype))
    return out_hbm


@nki.jit
def transfers(x_hbm, n):
    """``n`` transfers [partitions, columns] from places of their own, and one back."""
    _, partitions, columns = x_hbm.shape
    out_hbm = nl.ndarray((partitions, n * columns), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray((partitions, n * columns), dtype=x_hbm.dtype, buffer=nl.sbuf)
    for i in nl.static_range(n):
        brought(tile, i * columns, x_hbm[i])
    nl.store(out_hbm, tile)
    return out_hbm


@nki.jit
def round_trips(x_hbm, n):
    """``n`` times to HBM and back, each behind the last."""
    out_hbm = nl.ndarray((n, *x_hbm.shape), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x_hbm)
    for i in nl.static_range(n):
        nl.store(out_hbm[i], tile)
        tile = nl.load(out_hbm[i]) if i < n - 1 else tile
    return out_hbm


@nki.jit
def gathers(x_hbm, rows_hbm, n):
    """``n`` loads of the rows that ``rows_hbm`` [partitions, n] (int32) names."""
    partitions, columns = rows_hbm.shape[0], x_hbm.shape[1]
    out_hbm = nl.ndarray((partitions, n * columns), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    rows_sb = nl.load(rows_hbm)
    tile = nl.ndarray((partitions, n * columns), dtype=x_hbm.dtype, buffer=nl.sbuf)
    for i in nl.static_range(n):
        gathered(tile, i * columns, x_hbm, rows_sb, i)
    nl.store(out_hbm, tile)
    return out_hbm


@nki.jit
def held(x_hbm, n):
    """``n`` tiles [128, columns] that are all there before the first is used again: spills."""
    out_hbm = nl.ndarray(x_hbm.shape, dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    tiles = []
    for i in nl.static_range(n):
        tiles.append(step(nl.load(x_hbm[i]), "vector", float(i)))
    for i in nl.static_range(n):
        nl.store(out_hbm[i], nl.add(tiles[i], tiles[n - 1 - i]))
    return out_hbm
