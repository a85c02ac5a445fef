"""Direct allocation: addresses, sharing of memory, and what is not allowed beside it."""

import pytest
import torch
from neuronxcc import nki
from neuronxcc.nki import compiler as ncc
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

from neuron_cpu.core import NkiError
from neuron_cpu.core.device.spec import KIB
from neuron_cpu.core.program.placement import overlapping
from tests.peaks import psum_high_water, sbuf_high_water

BYTES = 64 * 4  # per partition of a (128, 64) fp32 tile


def trace(body, rows=128):
    """The program of a kernel whose body gets an input, and an output to store to."""

    @nki.jit
    def kernel(x):
        out = nl.ndarray((4, rows, 64), nl.float32, buffer=nl.shared_hbm)
        body(x, out)
        return out

    return kernel.trace(torch.empty(rows, 64, device="meta"))


def refused(body, identifier, rows=128):
    with pytest.raises(NkiError) as caught:
        trace(body, rows)
    assert caught.value.identifier == identifier, str(caught.value)
    return str(caught.value)


def at(byte, partition=0, rows=128, columns=64):
    """A tile at an explicit SBUF address."""
    return nl.ndarray(
        (rows, columns), nl.float32, buffer=ncc.sbuf.alloc(lambda *_: (partition, byte))
    )


def through(tile, x, out):
    tile[...] = nl.load(x)
    for i in nl.static_range(4):
        nl.store(out[i], tile)


def addresses(tensor):
    return [(t.partition, t.start) for t in tensor.storage.address]


# --- addresses ------------------------------------------------------------------------------------
def test_mod_alloc_wraps_block_indices():
    seen = {}

    def body(x, out):
        blocks = (4, nl.par_dim(128), 64)
        for name, buffer in {
            "two": ncc.sbuf.mod_alloc(base_addr=0, num_free_tiles=(2,)),
            "banks": ncc.psum.mod_alloc(base_bank=3, num_bank_tiles=(4,)),
        }.items():
            seen[name] = addresses(nl.ndarray(blocks, nl.float32, buffer=buffer))
        quarters = ncc.sbuf.mod_alloc(base_addr=0, num_par_tiles=(4,))
        seen["par"] = addresses(nl.ndarray((4, nl.par_dim(32), 64), nl.float32, buffer=quarters))
        grid = ncc.sbuf.mod_alloc(base_addr=0, num_free_tiles=(2, 3))
        seen["grid"] = addresses(nl.ndarray((2, 3, nl.par_dim(128), 64), nl.float32, buffer=grid))
        through(at(0), x, out)

    trace(body)
    assert seen["two"] == [(0, 0), (0, BYTES)] * 2
    assert seen["par"] == [(0, 0), (32, 0), (64, 0), (96, 0)]
    assert seen["grid"] == [(0, k * BYTES) for k in range(6)]
    assert seen["banks"] == [(0, bank * 2 * KIB) for bank in (3, 4, 5, 6)]


@pytest.mark.parametrize("rows", [128, 64, 32])
@pytest.mark.parametrize("partition", [0, 16, 32, 64, 96])
def test_start_partitions(rows, partition):
    legal = {128: (0,), 64: (0, 64), 32: (0, 32, 64, 96)}[rows]
    body = lambda x, out: through(at(0, partition, rows), x, out)  # noqa: E731
    if partition in legal:
        trace(body, rows)
    else:
        assert "expected one of" in refused(body, "sim_allocation_partition", rows)


@pytest.mark.parametrize(
    ("byte", "legal"),
    [(0, True), (4, True), (2, False), (-4, False), (176 * KIB - BYTES, True),
     (176 * KIB - BYTES + 4, False)],
)  # fmt: skip
def test_sbuf_bytes(byte, legal):
    body = lambda x, out: through(at(byte), x, out)  # noqa: E731
    if legal:
        assert sbuf_high_water(trace(body)) == byte + BYTES
    else:
        refused(body, "sim_allocation_address")


@pytest.mark.parametrize(
    ("address", "legal"), [((7, 0, 0), True), ((8, 0, 0), False), ((0, 32, 0), False),
                           ((0, 0, 4), False)],
)  # fmt: skip
def test_psum_is_placed_by_bank_only(address, legal):
    def body(x, out):
        data, result = at(0), at(BYTES)
        product = nl.ndarray((64, 64), nl.float32, buffer=ncc.psum.alloc(lambda *_: address))
        data[...] = nl.load(x)
        product[...] = nisa.nc_matmul(data, data)
        result[0:64] = nl.copy(product)
        for i in nl.static_range(4):
            nl.store(out[i, 0:64], result[0:64])
            nl.store(out[i, 64:128], data[64:128])

    if legal:
        assert psum_high_water(trace(body)) == address[0] + 1
    else:
        refused(body, "sim_allocation_address")


# --- sharing memory -------------------------------------------------------------------------------
@pytest.mark.parametrize("shift", [0, 4, BYTES - 4, BYTES])
def test_reading_what_another_tile_overwrote(shift):
    def body(x, out):
        first, second = at(1024), at(1024 + shift)
        first[...] = nl.load(x)
        second[...] = nl.load(x)
        for i in nl.static_range(4):
            nl.store(out[i], first)

    if shift == BYTES:
        trace(body)
        return
    message = refused(body, "sim_allocation_overlap")
    assert f"from sbuf tensor[0:128, {shift // 4}:64]" in message
    line = body.__code__.co_firstlineno + 3
    assert f"(line {line}) wrote 'sbuf tensor" in message


def test_tiles_share_memory_only_while_both_are_in_use():
    """Verifying hundreds of tiles placed one after the other looks at few pairs."""

    def body(x, out):
        for _ in range(8):
            tile = at(1024)
            tile[...] = nl.load(x)
            nl.store(out[0], tile)
        kept, over = at(1024), at(1024 + BYTES // 2)
        kept[...] = nl.load(x)
        over[...] = nl.load(x)
        for i in nl.static_range(4):
            nl.store(out[i, :, 0:32], kept[:, 0:32])
            nl.store(out[i, :, 32:64], over[:, 32:64])

    program = trace(body)
    kept, over = [s for s in program.storages if s.address][-2:]
    found = overlapping(program)
    assert found.keys() == {kept.id, over.id} and [len(v) for v in found.values()] == [1, 1]
    assert [tile.storage for tile in found[over.id][0]] == [over, kept]


def test_rows_that_nobody_wrote_are_named_where_their_tile_is_gone():
    def body(x, out):
        first, copied, second = at(1024), at(4096), at(1024)
        first[0:64] = nl.load(x[0:64])
        copied[...] = nl.copy(first)
        second[...] = nl.load(x)
        nl.store(out[0], copied)
        for i in nl.static_range(1, 4):
            nl.store(out[i], second)

    assert "sbuf tensor[64:128, 0:64] of" in refused(body, "sim_undefined_data")


@pytest.mark.warns("sim_loop_rebinding", "sim_loop_side_effect")
def test_a_cursor_advanced_in_a_loop_body_gives_the_first_iteration_s_addresses():
    """A device traces the body once; so AWS's allocated attention advances its address counter."""
    seen = []

    def body(x, out):
        cursor = 0
        for i in nl.affine_range(4):
            for _ in nl.static_range(2):
                tile = nl.ndarray(
                    (nl.par_dim(128), 64), nl.float32, buffer=ncc.sbuf.mod_alloc(base_addr=cursor)
                )
                cursor += BYTES
                seen.append(addresses(tile))
                tile[...] = nl.load(x)
                nl.store(out[i], tile)

    trace(body)
    assert seen == [[(0, 0)], [(0, BYTES)]] * 4


# --- beside the compiler's own --------------------------------------------------------------------
def test_automatic_tensors_beside_explicit_ones():
    def body(x, out):
        through(at(0), x, out)
        nl.store(out[0], nl.load(x))

    with pytest.warns(match="has no address while other tensors have one.*sim_mixed_allocation"):
        assert trace(body).direct_allocation


def test_scratch_in_hbm():
    def body(x, out):
        scratch = nl.ndarray((128, 64), nl.float32, buffer=nl.hbm)
        tile = at(0)
        through(tile, x, out)
        nl.store(scratch, tile)

    refused(body, "sim_allocation_hbm")


def test_force_auto_alloc_ignores_addresses():
    @nki.jit
    @ncc.force_auto_alloc
    def kernel(x):
        out = nl.ndarray((4, 128, 64), nl.float32, buffer=nl.shared_hbm)
        through(at(2), x, out)  # misaligned, but nobody asks
        return out

    program = kernel.trace(torch.empty(128, 64, device="meta"))
    assert not program.direct_allocation and sbuf_high_water(program) == BYTES
