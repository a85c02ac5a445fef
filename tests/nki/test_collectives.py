"""Collectives of several ranks, each rank a thread, against numpy on all of their tensors."""

import ml_dtypes
import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch

from neuron_cpu.core import NkiError, on_ranks
from neuron_cpu.core.time.schedule import schedule
from neuron_cpu.runtime.ranks import RankPool
from tests.warned import allows

pytestmark = allows("sim_exchanged_outside")  # short kernels exchange their arguments
RNG = np.random.default_rng(4)


def tensors(ranks, shape, dtype=np.float32):
    drawn = RNG.normal(size=(ranks, *shape)) * 8
    return [x.astype(dtype) for x in drawn]


@pytest.fixture(autouse=True)
def on_arguments(monkeypatch):
    """Kernels exchange their arguments, which a device's compiler refuses, to be short."""
    monkeypatch.setenv("NKI_CPU_SILENCE", "sim_exchanged_outside")


def through(call, shape, on_chip):
    """A kernel that hands a tensor and an empty one of ``shape`` to ``call``."""

    @nki.jit
    def kernel(x):
        out = nl.ndarray(shape, x.dtype, buffer=nl.shared_hbm)
        if on_chip:
            source, target = nl.load(x), nl.ndarray(shape, x.dtype)
            call(source, target)
            nisa.dma_copy(out, target)
        else:
            call(x, out)
        return out

    return kernel


@pytest.mark.parametrize("where", ["argument", "result", "copies of both"])
def test_a_collective_on_an_argument_or_a_result_is_refused(where, monkeypatch):
    monkeypatch.delenv("NKI_CPU_SILENCE")
    group = ncc.ReplicaGroup([[0, 1]])

    @nki.jit
    def kernel(x):
        own, summed = (nl.ndarray(x.shape, x.dtype, buffer=nl.private_hbm) for _ in range(2))
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(own, x)
        source, target = x if where == "argument" else own, out if where == "result" else summed
        ncc.all_reduce([source], [target], group, nl.add)
        if target is summed:
            nisa.dma_copy(out, summed)
        return out

    xs = tensors(2, (4, 4))
    if where != "copies of both":
        with pytest.raises(NkiError, match=f"{where} of kernel.*NCC_I.*sim_exchanged_outside"):
            on_ranks(kernel, [(x,) for x in xs])
        return
    assert np.array_equal(on_ranks(kernel, [(x,) for x in xs])[0], xs[0] + xs[1])


DTYPES = [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3, np.int32, np.uint8]
OPERATORS = {"add": np.add, "maximum": np.maximum, "minimum": np.minimum}


def reduced(xs, op):
    wide = [x.astype(np.int64 if np.issubdtype(x.dtype, np.integer) else np.float32) for x in xs]
    total = wide[0]
    for x in wide[1:]:
        total = OPERATORS[op](total, x)
    return total.astype(xs[0].dtype)


@pytest.mark.parametrize("on_chip", [False, True])
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_reductions(op, dtype, on_chip):
    group = ncc.ReplicaGroup([[0, 1, 2]])
    xs = tensors(3, (6, 5), dtype)
    whole = through(lambda s, d: ncc.all_reduce([s], [d], group, getattr(nl, op)), (6, 5), on_chip)
    parts = through(
        lambda s, d: ncc.reduce_scatter([s], [d], group, 0, getattr(nl, op)), (2, 5), on_chip
    )
    want = reduced(xs, op)
    for rank, found in enumerate(on_ranks(whole, [(x,) for x in xs])):
        assert np.array_equal(found, want), rank
    assert np.array_equal(np.concatenate(on_ranks(parts, [(x,) for x in xs])), want)


@pytest.mark.parametrize("on_chip", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathers(dtype, axis, on_chip):
    xs = tensors(4, (3, 5), dtype)
    shape = (12, 5) if axis == 0 else (3, 20)
    kernel = through(
        lambda s, d: ncc.all_gather([s], [d], ncc.ReplicaGroup([[0, 1, 2, 3]]), axis),
        shape,
        on_chip,
    )
    if axis == 1 and not on_chip:
        with pytest.raises(NkiError, match="sim_collective_dim"):
            on_ranks(kernel, [(x,) for x in xs])
        return
    for found in on_ranks(kernel, [(x,) for x in xs]):
        assert np.array_equal(found.view(np.uint8), np.concatenate(xs, axis).view(np.uint8))


def test_groups_work_apart():
    """Two groups of two, one of them in another order."""
    xs = tensors(4, (2, 3))
    group = ncc.ReplicaGroup([[0, 2], [3, 1]])
    kernel = through(lambda s, d: ncc.all_gather([s], [d], group, 0), (4, 3), False)
    found = on_ranks(kernel, [(x,) for x in xs])
    for rank, members in ((0, (0, 2)), (2, (0, 2)), (1, (3, 1)), (3, (3, 1))):
        assert np.array_equal(found[rank], np.concatenate([xs[m] for m in members]))


def test_exchanges_and_permutations():
    xs = tensors(3, (6, 4))
    group = ncc.ReplicaGroup([[0, 1, 2]])
    exchanged = through(lambda s, d: ncc.all_to_all([s], [d], group, 0), (6, 4), False)
    for rank, found in enumerate(on_ranks(exchanged, [(x,) for x in xs])):
        assert np.array_equal(found, np.concatenate([x[2 * rank : 2 * rank + 2] for x in xs]))

    @nki.jit
    def sent(x):
        out = nl.zeros(x.shape, x.dtype, buffer=nl.shared_hbm)
        ncc.collective_permute([x], [out], [(0, 1), (1, 2)])
        return out

    found = on_ranks(sent, [(x,) for x in xs])
    assert not found[0].any()  # no target keeps what it had
    assert np.array_equal(found[1], xs[0]) and np.array_equal(found[2], xs[1])


@nki.jit
def ring_gather(x, group):
    """All ranks' tensors by steps around the ring, each stored where its rank belongs."""
    ranks = group.size
    rows = x.shape[0]
    out = nl.ndarray((ranks * rows, x.shape[1]), x.dtype, buffer=nl.shared_hbm)
    held = nl.ndarray(x.shape, x.dtype, buffer=nl.private_hbm)
    nisa.dma_copy(held, x)
    for step in range(ranks):
        rank = ncc.collective_permute_implicit_current_processing_rank_id(step, group)
        flat = out.reshape((ranks, rows, x.shape[1]))
        nisa.dma_copy(flat.select(0, rank), held)
        following = nl.ndarray(x.shape, x.dtype, buffer=nl.private_hbm)
        if step < ranks - 1:
            ncc.collective_permute_implicit([held], [following], group)
        held = following
    return out


def test_a_ring():
    xs = tensors(4, (3, 5))
    group = ncc.ReplicaGroup([[0, 1, 2, 3]])
    for found in on_ranks(ring_gather, [(x, group) for x in xs]):
        assert np.array_equal(found, np.concatenate(xs))


def test_a_ring_that_reduces():
    xs, ys = tensors(3, (2, 4)), tensors(3, (2, 4))

    @nki.jit
    def kernel(x, y):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        group = ncc.ReplicaGroup([[0, 1, 2]])
        ncc.collective_permute_implicit_reduce([x], [y], [out], group, nl.add)
        return out

    found = on_ranks(kernel, list(zip(xs, ys)))
    for rank in range(3):
        assert np.array_equal(found[rank], xs[rank - 1] + ys[rank - 1])


@pytest.mark.parametrize(("placed", "halves"), [(False, False), (True, False), (False, True)])
def test_parts_whose_sizes_are_data(placed, halves):
    """Rank r sends r + k + 1 elements to rank k, to thirds of the target where nobody places them;
    in halves the data come between them."""

    @nki.jit
    def kernel(x, told):
        out = nl.zeros((18,), x.dtype, buffer=nl.shared_hbm)
        group = ncc.ReplicaGroup([[0, 1, 2]])
        if not halves:
            ncc.all_to_all_v([x], [out], group, told, has_rdispls=placed)
            return out, told
        sent = nl.ndarray(x.shape, x.dtype, buffer=nl.private_hbm)
        first = ncc.all_to_all_v_prepare([sent], [out], group, told, has_rdispls=placed)
        nisa.dma_copy(sent, x)
        ncc.all_to_all_v_trigger(first)
        return out, told

    xs = tensors(3, (16,))
    counts = np.array([[r + k + 1 for k in range(3)] for r in range(3)])
    starts = np.cumsum(counts, 1) - counts
    arguments = []
    for r in range(3):
        told = np.zeros((4 if placed else 3, 3), np.uint32)
        told[0], told[1] = counts[r], starts[r]
        if placed:
            told[3] = [10, 0, 5]
        arguments.append((xs[r], told))
    for k, (found, told) in enumerate(on_ranks(kernel, arguments)):
        want = np.zeros(18, np.float32)
        for r in range(3):
            count = counts[r, k]
            begin = [10, 0, 5][r] if placed else 6 * r
            want[begin : begin + count] = xs[r][starts[r, k] : starts[r, k] + count]
        assert np.array_equal(found, want) and np.array_equal(told[2], counts[:, k])


@pytest.mark.parametrize(
    ("sent", "received"), [((9, 0), (0, 9)), ((4, 4), (4, 3)), ((5, 3), (5, 3))]
)
def test_counts_that_do_not_fit(sent, received):
    @nki.jit
    def kernel(x, told):
        out = nl.zeros((8,), x.dtype, buffer=nl.shared_hbm)
        ncc.all_to_all_v([x], [out], [[0, 1]], told, recv_counts_known=True)
        return out

    told = np.array([sent, (0, 4), received], np.uint32)
    with pytest.raises(NkiError, match="sim_collective_counts"):
        on_ranks(kernel, [(x, told) for x in tensors(2, (8,))])


def test_two_cores_of_each_of_four_ranks(target):
    target("trn2")

    @nki.jit
    def kernel(x, told):
        out = nl.ndarray((8, 4), x.dtype, buffer=nl.shared_hbm)
        varying = nl.ndarray((16,), x.dtype, buffer=nl.shared_hbm)
        own = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        core = nl.program_id()
        tile = nl.load(x[core : core + 1, :])
        nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
        nisa.dma_copy(own[core : core + 1, :], tile)
        group = ncc.ReplicaGroup([[0, 1, 2, 3]])
        ncc.all_gather([own], [out], group, 0)
        if nl.num_programs() == 2:
            ncc.all_gather_v([x.reshape((8,))], [varying], group, told)
        return out, varying

    xs = tensors(4, (2, 4))
    told = [np.array([[r + 1] * 4, [r] * 4, [0] * 4], np.uint32) for r in range(4)]
    want = [x.reshape(-1)[r : 2 * r + 1] for r, x in enumerate(xs)]
    for found, varying in on_ranks(kernel[2], list(zip(xs, told))):
        assert np.array_equal(found, 2 * np.concatenate(xs))
        parts = varying.reshape(4, 4)
        assert all(np.array_equal(part[: len(one)], one) for part, one in zip(parts, want))
    program = kernel[2].trace(xs[0], told[0])
    assert schedule(program).total > 2 * program.core.collective_ns  # each core waits for both


def test_ranks_of_the_sdk_are_ranks_of_kernels():
    """Inside a model's forward a kernel's collectives meet the other ranks' kernels."""
    pool = RankPool(2)
    xs = [torch.from_numpy(x) for x in tensors(2, (4, 4))]
    kernel = through(lambda s, d: ncc.all_reduce([s], [d], [[0, 1]], nl.add), (4, 4), True)
    found = pool.run([lambda x=x: kernel(x) for x in xs])
    pool.close()
    assert all(torch.equal(one, xs[0] + xs[1]) for one in found)


def test_what_a_collective_takes():
    """A start, then 2 (n - 1) / n of the tensor for an all-reduce."""
    kernel = through(
        lambda s, d: ncc.all_reduce([s], [d], [[0, 1, 2, 3]], nl.add), (1024, 1024), False
    )
    x = np.zeros((1024, 1024), np.float32)
    found = schedule(kernel.trace(x)).total
    assert found == pytest.approx(26e3 + 2 * x.nbytes * 3 / 4 / 50)


# --- what goes wrong ------------------------------------------------------------------------------
def both(body):
    return on_ranks(nki.jit(body), [(x,) for x in tensors(2, (4, 4))])


def alone(x):
    ncc.all_reduce([x], [x], [[0, 1]], nl.add)
    return x


def test_one_rank_of_several_is_refused():
    with pytest.raises(NkiError, match="sim_rank_alone"):
        nki.jit(alone)(np.zeros((4, 4), np.float32))


def different(x):
    if ncc.rank_id():
        ncc.all_reduce([x], [x], [[0, 1]], nl.add)
    else:
        ncc.all_reduce([x], [x], [[0, 1]], nl.maximum)
    return x


def absent(x):
    if ncc.rank_id():
        ncc.all_reduce([x], [x], [[0, 1]], nl.add)
    else:
        nisa.dma_copy(x, x)
    return x


def beyond(x):
    ncc.all_reduce([x], [x], [[0, 1, 2]], nl.add)
    return x


def outside(x):
    ncc.all_reduce([x], [x], [[0]], nl.add)
    return x


def mixed(x):
    ncc.all_reduce([nl.load(x)], [x], [[0, 1]], nl.add)
    return x


def of_two(x):
    ncc.all_reduce([x, x], [x], [[0, 1]], nl.add)
    return x


def of_none(x):
    ncc.all_reduce([], [], [[0, 1]], nl.add)
    return x


@pytest.mark.parametrize(("body", "words"), [(of_two, "got 2 and 1"), (of_none, "got 0 and 0")])
def test_sources_and_destinations_are_as_many(body, words):
    with pytest.raises(NkiError, match=f"as many sources as destinations, {words}"):
        both(body)


def summed(x):
    ncc.all_reduce([x], [x], [[0, 1]], nl.multiply)
    return x


def uneven(x):
    out = nl.ndarray((5, 4), x.dtype, buffer=nl.shared_hbm)
    ncc.all_gather([x], [out], [[0, 1]], 0)
    return out


def sorted_late(x):
    ncc.all_reduce([x], [x], [[0, 1]], nl.add, priority=1)
    return x


def channelled(x):
    ncc.collective_permute_implicit([x], [x], [[0, 1]], channel_ids=[1])
    return x


def undefined(x):
    scratch = nl.ndarray(x.shape, x.dtype, buffer=nl.private_hbm)
    ncc.all_reduce([scratch], [x], [[0, 1]], nl.add)
    return x


def prepared_twice(x):
    told = nl.zeros((3, 2), nl.uint32, buffer=nl.shared_hbm)
    ncc.all_to_all_v_prepare([x], [x], [[0, 1]], told)
    ncc.all_gather_v_prepare([x], [x], [[0, 1]], told)
    return x


def triggered_twice(x):
    told = nl.zeros((3, 2), nl.uint32, buffer=nl.shared_hbm)
    flat = x.reshape((16,))
    out = nl.zeros((16,), x.dtype, buffer=nl.shared_hbm)
    first = ncc.all_to_all_v_prepare([flat], [out], [[0, 1]], told)
    ncc.all_to_all_v_trigger(first)
    ncc.all_to_all_v_trigger(first)
    return out


@pytest.mark.parametrize("body", [prepared_twice, triggered_twice])
def test_halves_of_a_collective_follow_each_other(body):
    with pytest.raises(NkiError, match="_prepare") as caught:
        both(body)
    assert caught.value.identifier == "sim_collective"


def gathered(x):
    ncc.all_gather_v([x], [x], [[0, 1]], x)
    return x


REFUSED = {
    "sim_ranks_differ": different,
    "sim_rank_missing": absent,
    "sim_replica_group": outside,
    "sim_collective": mixed,
    "sim_reduce_operator": summed,
    "sim_shape_mismatch": uneven,
    "sim_newer_core": sorted_late,
    "sim_channels": channelled,
    "sim_undefined_data": undefined,
}


@pytest.mark.parametrize("identifier", REFUSED)
def test_refused(identifier):
    with pytest.raises(NkiError) as caught:
        both(REFUSED[identifier])
    assert caught.value.identifier == identifier


@pytest.mark.parametrize("body", [beyond, gathered])
def test_refused_for_their_ranks(body):
    with pytest.raises(NkiError, match="sim_rank_missing|sim_collective"):
        both(body)
