"""Tensors in coordinates of tiles and blocks (SDK 2.33)."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError

X = np.arange(300 * 700, dtype=np.float32).reshape(300, 700)


@nki.jit
def by_tiles(src):
    """The copy of the page on NkiTileGrid."""
    grid = nl.tiles(src, tile_shape=(128, 256))
    dst = nl.ndarray(src.shape, dtype=src.dtype, buffer=nl.shared_hbm)
    into = nl.tiles(dst, tile_shape=(128, 256))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            one = grid[i, j]
            tile = nl.ndarray(one.element_shape, dtype=src.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=tile.data, src=one.data)
            nisa.dma_copy(dst=into[i, j].data, src=tile.data)
    return dst


@nki.jit
def by_blocks(src):
    """A block of two by two tiles at a time, on chip in one allocation."""
    dst = nl.ndarray(src.shape, dtype=src.dtype, buffer=nl.shared_hbm)
    grids = [nl.blocks(t, tile_shape=(64, 100), block_shape=(2, 2)) for t in (src, dst)]
    for i in range(grids[0].shape[0]):
        for j in range(grids[0].shape[1]):
            block = grids[0][i, j]
            kept = nl.alloc_blocks(
                tile_shape=block.tile_shape,
                block_shape=block.block_shape,
                element_shape=block.element_shape,
                buffer=nl.sbuf,
                dtype=src.dtype,
            )
            inside, here = nl.tiles(block), nl.tiles(kept[0, 0])
            assert inside.shape == here.shape
            for a in range(inside.shape[0]):
                nisa.dma_copy(dst=here[a].data, src=inside[a].data)  # a row of tiles
            for a in range(inside.shape[0]):
                for b in range(inside.shape[1]):
                    nisa.dma_copy(dst=nl.tiles(grids[1][i, j])[a, b].data, src=here[a, b].data)
    return dst


@pytest.mark.parametrize("kernel", [by_tiles, by_blocks])
def test_every_tile_is_copied(kernel):
    assert np.array_equal(kernel(X), X)


def test_what_grids_say():
    said = {}

    @nki.jit
    def kernel(src):
        grid = nl.tiles(src, tile_shape=(128, 256))
        last = grid[-1, 1:]
        deep = nl.tiles(src.reshape((3, 100, 700)), tile_shape=(50, 350))
        packed = nl.alloc_tiles(
            tile_shape=(64, 64), element_shape=(100, 100), buffer=nl.sbuf, dtype=src.dtype
        )
        said["whole"] = grid.shape, grid.element_shape, grid.is_remainder, grid.index_step_elements
        said["last"] = last.shape, last.element_shape, last.is_remainder
        said["inner"] = grid[0, 0].shape, grid[0, 0].data.shape, grid[0, 0].is_remainder
        said["deep"] = deep.shape, deep[1, 0].element_shape, deep[1, 0].data.shape
        said["packed"] = packed.shape, packed.is_data_representable, packed[1].data.shape
        blocks = nl.blocks(grid, block_shape=(2, 2))
        said["blocks"] = blocks.shape, blocks[0, 1].element_shape, blocks.index_step_elements
        assert isinstance(blocks, nl.NkiGrid) and blocks.dtype == src.dtype
        return src

    kernel(X)
    assert said == {
        "whole": ((3, 3), (300, 700), True, (128, 256)),
        "last": ((2,), (44, 444), True),
        "inner": ((), (128, 256), False),
        "deep": ((3, 2, 2), (50, 700), (50, 700)),
        "packed": ((2, 2), False, (36, 100)),
        "blocks": ((2, 2), (256, 188), (256, 512)),
    }


REFUSED = {
    "err_tensor_access_out_of_bound": lambda x: nl.tiles(x, tile_shape=(128, 256))[3, 0],
    "sim_shape": lambda x: nl.tiles(x, tile_shape=(128,)),
    "sim_grid": lambda x: nl.tiles([x], tile_shape=(128, 256)),
    "sim_grid_data": lambda x: nl.alloc_tiles(
        tile_shape=(64, 64), element_shape=(128, 64), buffer=nl.sbuf, dtype=x.dtype
    ).data,
}


@pytest.mark.parametrize("identifier", REFUSED)
def test_refused(identifier):
    @nki.jit
    def kernel(x):
        REFUSED[identifier](x)
        return x

    with pytest.raises(NkiError) as caught:
        kernel(X)
    assert caught.value.identifier == identifier
