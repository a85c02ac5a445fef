"""Program-level checks: undefined data, outputs, races, scopes, on-chip capacity."""

import warnings

import numpy as np
import pytest
import torch
from neuronxcc import nki
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

from neuron_cpu.core import NkiError, NkiWarning
from neuron_cpu.core.check.undefined import FLOW, _Walk
from neuron_cpu.core.device.dtypes import FLOAT32
from neuron_cpu.core.device.spec import KIB
from neuron_cpu.core.language.tensor import Tile as Tensor
from neuron_cpu.core.program.accumulation import Groups
from neuron_cpu.core.program.program import Program
from neuron_cpu.core.program.storage import Storage
from neuron_cpu.core.program.trace import Tracer
from tests.peaks import psum_high_water, sbuf_high_water


def trace(kernel, *shapes, grid=()):
    """The verified program of ``kernel`` for fp32 inputs of the given shapes."""
    inputs = [torch.empty(s, device="meta") for s in shapes]
    return (kernel[grid] if grid else kernel).trace(*inputs)


def refused(kernel, identifier, *shapes, **options):
    """The message with which ``kernel`` is refused for ``identifier``."""
    with pytest.raises(NkiError) as caught:
        trace(kernel, *shapes, **options)
    assert caught.value.identifier == identifier, str(caught.value)
    return str(caught.value)


def accepted(kernel, *shapes, **options):
    """The program of a kernel that must pass without any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        return trace(kernel, *shapes, **options)


# --- undefined data -------------------------------------------------------------------------------
def through(body, rows=100, columns=64):
    """A kernel that loads [rows, columns] of a (128, 64) tile, applies ``body`` and stores it."""

    @nki.jit
    def kernel(x):
        tile = nl.ndarray((128, 64), nl.float32)
        tile[0:rows, 0:columns] = nl.load(x[0:rows, 0:columns])
        result, stored = body(tile)
        out = nl.ndarray(stored, nl.float32, buffer=nl.shared_hbm)
        nl.store(out, result)
        return out

    return kernel


def matmul_with(tile, side):
    other = nisa.memset((128, 32), 1.0, nl.float32)
    pair = (tile, other) if side == "stationary" else (other, tile)
    return nl.copy(nisa.nc_matmul(*pair))


ROWS_SURVIVE = {
    "activation": lambda t: (nl.exp(t)[0:100], (100, 64)),
    "vector_operand": lambda t: (nisa.tensor_scalar(t, nl.add, t[:, 0:1])[0:100], (100, 64)),
    "reduce": lambda t: (nl.sum(t, axis=1)[0:100], (100, 1)),
    "transpose": lambda t: (nl.copy(nisa.nc_transpose(t))[:, 0:100], (64, 100)),
    "select": lambda t: (nl.where(nl.greater(t, 0.0), t, 0.0)[0:100], (100, 64)),
}
ROWS_SPREAD = {
    "activation": lambda t: (nl.exp(t), (128, 64)),
    "transpose": lambda t: (nl.copy(nisa.nc_transpose(t)), (64, 128)),
    "stationary": lambda t: (matmul_with(t, "stationary")[0:1, 0:1], (1, 1)),
    "moving": lambda t: (matmul_with(t, "moving")[0:1, 0:1], (1, 1)),
    "vector_operand": lambda t: (nisa.tensor_scalar(t, nl.add, t[:, 0:1]), (128, 64)),
}


@pytest.mark.parametrize("name", ROWS_SURVIVE)
def test_computing_on_tail_rows_is_legal(name):
    """Rows nobody loaded pass through every engine as long as they are not stored."""
    accepted(through(ROWS_SURVIVE[name]), (128, 64))


@pytest.mark.parametrize("name", ROWS_SPREAD)
def test_tail_rows_that_are_stored_are_refused(name):
    message = refused(through(ROWS_SPREAD[name]), "sim_undefined_data", (128, 64))
    assert "tile[100:" in message  # the part nobody wrote, not the part that was stored


def test_affine_select_replaces_undefined_elements():
    def keep(bound):
        def body(tile):
            i_p, i_f = nl.arange(128)[:, None], nl.arange(64)[None, :]
            return nisa.affine_select(i_p < bound + 0 * i_f, tile, 0.0), (128, 64)

        return body

    accepted(through(keep(100)), (128, 64))
    refused(through(keep(101)), "sim_undefined_data", (128, 64))


def test_masked_elements_keep_their_old_state():
    def diagonal(filled):
        def body(tile):
            i_p, i_f = nl.arange(128)[:, None], nl.arange(64)[None, :]
            result = nl.ndarray((128, 64), nl.float32)
            if filled:
                result[...] = 0.0
            result[...] = nisa.tensor_copy(tile, mask=(i_p + i_f < 60))
            return result, (128, 64)

        return body

    accepted(through(diagonal(True)), (128, 64))
    refused(through(diagonal(False)), "sim_undefined_data", (128, 64))


@pytest.mark.parametrize("scatters", [False, True])
def test_rows_at_an_undefined_index_are_undefined(scatters):
    def kernel_for(rows):
        @nki.jit
        def kernel(x, rows_hbm):
            size = 1000 if scatters else 64
            out = nl.ndarray((size, 16), nl.float32, buffer=nl.shared_hbm)
            index = nl.ndarray((64, 1), nl.int32)
            index[0:rows] = nl.load(rows_hbm[0:rows], dtype=nl.int32)
            i_p, i_f = nl.arange(64)[:, None], nl.arange(16)[None, :]
            named, first = (index[i_p, 0], i_f), (i_p, i_f)
            target, source = (named, first) if scatters else (first, named)
            nl.store(out[target], nl.load(x[source]))
            return out

        return kernel

    accepted(kernel_for(64), (1000, 16), (64, 1))
    message = refused(kernel_for(60), "sim_undefined_data", (1000, 16), (64, 1))
    assert "stores 64 undefined elements" in message  # 4 rows of 16


def test_flow_rules_of_rare_kinds():
    """scan: everything right of the element; all: the whole partition."""

    source = np.zeros((3, 4), bool)
    source[1, 2] = True
    scanned = FLOW["scan"](None, [source, None], (3, 4))  # type: ignore[arg-type]
    assert scanned.tolist() == [[False] * 4, [False, False, True, True], [False] * 4]
    spread = FLOW["all"](None, [None, source], (3, 2))  # type: ignore[arg-type]
    assert spread.tolist() == [[False] * 2, [True] * 2, [False] * 2]


def gathered(rows, index_rows, stored):
    """local_gather of a tile with ``rows`` loaded by an index with ``index_rows`` loaded."""

    @nki.jit
    def kernel(x, index_hbm):
        tile = nl.ndarray((128, 8), nl.float32)
        tile[0:rows] = nl.load(x[0:rows])
        index = nl.ndarray((128, 2), nl.uint16)
        index[0:index_rows] = nl.load(index_hbm[0:index_rows], dtype=nl.uint16)
        found = nisa.local_gather(tile, index)
        out = nl.ndarray((stored.stop - stored.start, 32), nl.float32, buffer=nl.shared_hbm)
        nl.store(out, found[stored].reshape((stored.stop - stored.start, 32)))
        return out

    return kernel


@pytest.mark.parametrize(
    ("rows", "index_rows", "clean"),
    [
        (100, 128, 100),  # data: a partition's own
        (128, 100, 96),  # indices: 96 to 111 share a core, so its first four are lost as well
        (128, 96, 96),
        (90, 100, 90),
        (128, 90, 80),
    ],
)
def test_a_gather_reads_its_own_data_and_the_indices_of_its_core(rows, index_rows, clean):
    shapes = (128, 8), (128, 2)
    accepted(gathered(rows, index_rows, slice(0, clean)), *shapes)
    for start in (clean, 127):
        refused(gathered(rows, index_rows, slice(start, start + 1)), "sim_undefined_data", *shapes)


def random_program(rng):
    """Random copies, sums, reductions, transposes and products on three tiles, and the truth.

    The truth follows NaN through float64 arithmetic: it says which elements of the tile that is
    stored last are undefined.
    """
    program = Program("random", (), None)
    with Tracer(program) as tracer:
        tiles = [Tensor.whole(tracer.storage((32, 32), FLOAT32, "sbuf")) for _ in range(3)]
        source = Tensor.whole(tracer.storage((32, 32), FLOAT32, "hbm", "input"))
        values = [np.full((32, 32), np.nan) for _ in tiles]
        program.outputs.append(tracer.storage((32, 32), FLOAT32, "shared_hbm", "output"))

        def box():
            start = rng.integers(0, 24, 2) * (rng.random(2) < 0.4)
            size = np.where(rng.random(2) < 0.6, 32, rng.integers(1, 33, 2))
            stop = np.minimum(start + size, 32)
            return (slice(int(start[0]), int(stop[0])), slice(int(start[1]), int(stop[1])))

        for _ in range(int(rng.integers(4, 16))):
            a, b, c = (int(k) for k in rng.integers(0, 3, 3))
            at = box()
            action = str(rng.choice(["load", "load", "load", "add", "sum", "transpose", "matmul"]))
            if action == "load":
                tiles[a][at] = nl.load(source[at])
                values[a][at] = 0
            elif action == "add":
                tiles[a][at] = nl.add(tiles[b][at], tiles[c][at])
                values[a][at] = values[b][at] + values[c][at]
            elif action == "sum":
                rows = at[0]
                tiles[a][rows, 5:6] = nl.sum(tiles[b][at], axis=1)
                values[a][rows, 5:6] = values[b][at].sum(axis=1, keepdims=True)
            elif action == "transpose":
                tiles[a][...] = nisa.nc_transpose(tiles[b], engine=nisa.vector_engine)
                values[a] = values[b].T.copy()
            else:
                tiles[a][...] = nl.copy(nisa.nc_matmul(tiles[b], tiles[c]))
                values[a] = values[b].T @ values[c]
        nl.store(Tensor.whole(program.outputs[0]), tiles[0])
        tracer.finish()
    return program, np.isnan(values[0])


@pytest.mark.filterwarnings("ignore::neuron_cpu.core.NkiWarning")
def test_undefined_flow_agrees_with_nan_arithmetic():
    rng = np.random.default_rng(1)
    clean = 0
    for _ in range(300):
        program, truth = random_program(rng)
        walk = _Walk(program, codes=False)
        assert walk.run() is None
        stores = [k for found in walk.spoiled.values() for k in found]
        assert bool(stores) == truth.any()
        if not stores:
            clean += 1
            continue
        stored = stores[0]
        np.testing.assert_array_equal(walk.stored, truth)
        error = _Walk(program, codes=True).blame(stored)
        assert f"stores {np.count_nonzero(truth)} undefined elements" in str(error)
    assert 20 < clean < 280


# --- outputs --------------------------------------------------------------------------------------
def test_partly_written_output_is_a_warning_with_the_first_gap():
    @nki.jit
    def kernel(x):
        out = nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)
        nl.store(out[0:100], nl.load(x[0:100]))
        nl.store(out[100:128, 0:60], nl.load(x[100:128, 0:60]))
        return out

    with pytest.warns(NkiWarning, match=r"112 elements are missing, out\[100:128, 60:64\] first"):
        trace(kernel, (128, 64))


# --- races ----------------------------------------------------------------------------------------
def looped(body, trips=4, order=None):
    """A kernel that runs ``body(i, x, shared, out)`` in a loop over a tile made before it."""
    iterate = order or nl.affine_range

    @nki.jit
    def kernel(x):
        out = nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)
        shared = nl.zeros((128, 64), nl.float32)
        for i in iterate(trips):
            body(i, x, shared, out)
        nl.store(out, shared)
        return out

    return kernel


def piece(i):
    return slice(i * 16, i * 16 + 16)


def own_columns(i, x, shared, out):
    shared[:, piece(i)] = nl.load(x[:, piece(i)])


def overlapping_columns(i, x, shared, out):
    stop = min(i * 16 + 17, 64)
    shared[:, i * 16 : stop] = nl.load(x[:, i * 16 : stop])


def neighbour_read(i, x, shared, out):
    shared[:, piece(i)] = nl.add(nl.load(x[:, piece(i)]), shared[:, piece((i + 1) % 4)])


def own_read(i, x, shared, out):
    shared[:, piece(i)] = nl.add(nl.load(x[:, piece(i)]), shared[:, piece(i)])


def own_read_in_part(i, x, shared, out):
    """Columns of iterations alternate, so that boxes around them meet."""
    i_p, i_a = nl.arange(128)[:, None, None], nl.arange(4)[None, :, None] * 16 + i * 4
    i_f, half = nl.arange(4)[None, None, :], nl.arange(2)[None, None, :]
    shared[i_p, i_a + i_f] = nl.copy(nl.load(x)[i_p, i_a + i_f])
    shared[i_p, i_a + half + 2] = nl.copy(shared[i_p, i_a + half])


def accumulated(operator):
    def body(i, x, shared, out):
        shared[...] = operator(shared, nl.load(x))

    return body


def running_value_read(i, x, shared, out):
    shared[...] = nl.add(shared, nl.load(x))
    nl.store(out[:, piece(i)], shared[:, piece(i)])


def mixed_accumulation(i, x, shared, out):
    shared[...] = (nl.add if i else nl.multiply)(shared, nl.load(x))


def diagonal_mask(i, x, shared, out):
    """Each iteration writes one of four interleaved sets of columns, cut by a slanted mask."""
    i_p, i_f = nl.arange(128)[:, None], nl.arange(16)[None, :]
    shared[i_p, i_f * 4 + i] = nisa.tensor_copy(nl.load(x[:, piece(i)]), mask=(i_p + i_f < 100))


RACE_FREE = {
    "own columns": own_columns,
    "reading what it wrote itself": own_read,
    "reading a part of that": own_read_in_part,
    "sum": accumulated(nl.add),
    "maximum": accumulated(nl.maximum),
    "product": accumulated(nl.multiply),
    "interleaved columns": diagonal_mask,
}
RACES = {
    "one column shared": overlapping_columns,
    "next iteration's columns read": neighbour_read,
    "difference is not associative": accumulated(nl.subtract),
    "running sum read": running_value_read,
    "sum and product mixed": mixed_accumulation,
    "every iteration writes all": lambda i, x, shared, out: own_columns(0, x, shared, out),
}


@pytest.mark.parametrize("name", RACE_FREE)
def test_independent_iterations_pass(name):
    accepted(looped(RACE_FREE[name]), (128, 64))


@pytest.mark.parametrize("name", RACES)
def test_dependent_iterations_are_refused(name):
    refused(looped(RACES[name]), "err_unexpected_output_dependencies", (128, 64))


@pytest.mark.parametrize("name", RACES)
def test_the_same_bodies_pass_in_order(name):
    trace(looped(RACES[name], order=nl.sequential_range), (128, 64))


@pytest.mark.parametrize("level", ["outer", "inner", "none"])
def test_every_level_of_a_nest_is_checked(level):
    @nki.jit
    def kernel(x):
        out = nl.ndarray((4, 4, 128, 64), nl.float32, buffer=nl.shared_hbm)
        for i in nl.affine_range(4):
            for _ in nl.sequential_range(2):
                for j in nl.affine_range(4):
                    row = 0 if level == "outer" else i
                    column = 0 if level == "inner" else j
                    nl.store(out[row, column], nl.load(x))
        for i in nl.static_range(4):
            for j in nl.static_range(4):
                nl.store(out[i, j], nl.load(x))
        return out

    if level == "none":
        accepted(kernel, (128, 64))
    else:
        message = refused(kernel, "err_unexpected_output_dependencies", (128, 64))
        first = kernel.function.__code__.co_firstlineno
        assert f":{first + (3 if level == 'outer' else 5)} writes" in message


def test_grid_instances_must_write_disjoint_parts():
    def kernel_for(width):
        @nki.jit
        def kernel(x):
            out = nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)
            start = nl.program_id(0) * 16
            stop = min(start + width, 64)
            nl.store(out[:, start:stop], nl.load(x[:, start:stop]))
            return out

        return kernel

    accepted(kernel_for(16), (128, 64), grid=(4,))
    message = refused(kernel_for(18), "err_unexpected_output_dependencies", (128, 64), grid=(4,))
    assert "instance 0 of the launch grid" in message and "out[0:128, 16:18]" in message


# --- capacity -------------------------------------------------------------------------------------
def stack(tiles, columns, scope):
    """``tiles`` SBUF tiles of ``columns`` fp32, all live at once or one after the other."""

    @nki.jit
    def kernel(x):
        out = nl.ndarray((tiles, 128, 8), nl.float32, buffer=nl.shared_hbm)
        made = []
        for _ in nl.static_range(tiles if scope == "together" else 0):
            made.append(nisa.memset((128, columns), 1.0, nl.float32))
        for i in nl.static_range(tiles):
            tile = made[i] if made else nisa.memset((128, columns), 1.0, nl.float32)
            nl.store(out[i], tile[:, 0:8])
        return out

    return kernel


def test_sbuf_is_counted_by_what_is_live(monkeypatch):
    columns = 11 * KIB  # 44 KiB per partition: four fit into 176 KiB
    assert sbuf_high_water(trace(stack(4, columns, "together"), (1, 1))) == 176 * KIB
    assert sbuf_high_water(trace(stack(9, columns, "one by one"), (1, 1))) == 44 * KIB
    monkeypatch.setenv("NKI_CPU_STRICT", "1")  # else a warning: the compiler spills
    message = refused(stack(5, columns, "together"), "sim_sbuf_capacity", (1, 1))
    assert f"need {220 * KIB} bytes per partition" in message and str(44 * KIB) in message


def test_a_tensor_first_used_inside_a_loop_lives_from_its_beginning():
    """The device runs the loop as a loop, where every iteration may find what the last one left."""

    @nki.jit
    def kernel(x):
        out = nl.ndarray((3, 128, 8), nl.float32, buffer=nl.shared_hbm)
        kept = nl.ndarray((128, 1024), nl.float32, buffer=nl.sbuf)
        for i in nl.sequential_range(2):
            if i == 0:
                early = nisa.memset((128, 512), 1.0, nl.float32)
                nl.store(out[2], early[:, 0:8])
            kept[...] = nisa.memset((128, 1024), 2.0, nl.float32)
            nl.store(out[i], kept[:, 0:8])
        return out

    # unrolled, `early` is gone when `kept` is first written
    assert sbuf_high_water(trace(kernel, (1, 1))) == 6 * KIB


def banks(tiles, columns):
    @nki.jit
    def kernel(x):
        out = nl.ndarray((tiles, 64, 64), nl.float32, buffer=nl.shared_hbm)
        data = nl.load(x)
        made = []
        for _ in nl.static_range(tiles):
            made.append(nl.zeros((64, columns), nl.float32, buffer=nl.psum))
        for tile in made:
            tile[:, 0:64] += nisa.nc_matmul(data, data)
        for i in nl.static_range(tiles):
            nl.store(out[i], nl.copy(made[i][:, 0:64]))
        return out

    return kernel


@pytest.mark.parametrize(("columns", "fitting"), [(64, 64), (128, 32), (257, 8), (512, 8)])
def test_psum_has_eight_banks_that_small_tiles_share(columns, fitting, monkeypatch):
    """257 fp32 columns are more than half of a bank, and no tile crosses one."""
    monkeypatch.setenv("NKI_CPU_STRICT", "1")
    assert psum_high_water(accepted(banks(fitting, columns), (128, 64))) == 8
    message = refused(banks(fitting + 1, columns), "sim_psum_capacity", (128, 64))
    assert "need 9 banks" in message and f": {4 * columns} bytes" in message


def test_blocks_written_in_parts_are_followed_one_by_one() -> None:
    """Of four blocks one lacks eight columns, which are named as columns of the whole tensor."""

    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 8, 16), nl.float32, buffer=nl.shared_hbm)
        tiles = nl.ndarray((4, nl.par_dim(8), 16), nl.float32, buffer=nl.sbuf)
        p, f = nl.arange(8)[:, None], nl.arange(8)[None, :]
        for k in range(4):
            tiles[k, p, f] = nl.load(a[k, p, f])
            if k != 2:
                tiles[k, p, 8 + f] = nl.load(a[k, p, 8 + f])
        for k in range(4):
            nl.store(out[k], tiles[k])
        return out

    told = refused(kernel, "sim_undefined_data", (4, 8, 16))
    assert "tiles[2:3, 0:8, 8:16] of 'tiles' (4, 8, 16)" in told, told


@pytest.mark.parametrize("dropped", range(6))
def test_a_block_that_nobody_wrote_is_no_other_tile(dropped: int) -> None:
    """Results that went elsewhere leave gaps in the numbers of tensors."""

    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 8, 16), nl.float32, buffer=nl.shared_hbm)
        tiles = nl.ndarray((3, nl.par_dim(8), 16), nl.float32, buffer=nl.sbuf)
        for _ in range(dropped):
            tiles[0] = nl.load(a[0])
        other = nl.ndarray((nl.par_dim(8), 16), nl.float32, buffer=nl.sbuf)
        for tile in (tiles[0], tiles[1], other):
            tile[...] = nl.load(a[1])
        for k, tile in enumerate((tiles[0], tiles[1], tiles[2], other)):
            nl.store(out[k], tile)
        return out

    assert "tiles[2:3, 0:8, 0:16]" in refused(kernel, "sim_undefined_data", (4, 8, 16))


def test_blocks_as_groups_are_what_a_map_of_them_says() -> None:
    """Random regions of a tensor of blocks, against a plain array of what has begun."""
    draw = np.random.default_rng(5)
    for _ in range(60):
        storage = Storage(0, (4, 8, 16), FLOAT32, "psum")
        storage.lay_out(1)
        groups, begun = Groups(storage.size, zeroed=True), np.zeros((4, 8, 16), bool)
        for _ in range(8):
            first = int(draw.integers(4))
            count = int(draw.integers(1, 5 - first)) if draw.random() < 0.2 else 1
            left = int(draw.choice([0, 0, 0, 8]))
            region = Tensor.whole(storage)[first : first + count, :, left:16]
            region = region if count > 1 else Tensor.whole(storage)[first, :, left:16]
            mine = begun[first : first + count, :, left:16]
            if draw.random() < 0.5:
                missing = groups.missing(region)
                some = mine.any() and not mine.all()
                assert (missing is not None) == some
                continue
            if mine.any() and not mine.all():
                with pytest.raises(NkiError, match="covered in part"):
                    groups.begin(region)
                continue
            assert groups.begin(region) == (not mine.any())
            mine[...] = True
