"""Every refusal that only the current language has, by the shortest kernel that earns it.

Warnings are errors here (NKI_CPU_STRICT=1).
"""

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError
from tests.nki.tiles import beside
from tests.nki.tiles import ones as sb
from tests.warned import allows


def indices(rows=1):
    return sb((rows, 1), nl.int32)


def two_offsets(x):
    picked = x.vector_select(0, indices(4))
    return picked.select(1, indices())


def indirect_rows(x):
    return x.vector_select(0, indices(4))[0:2, :]


def loaded_register():
    register = nisa.register_alloc()
    nisa.register_load(register, indices())
    return register


def open_transpose(x):
    psum = nl.ndarray((4, 4), nl.bfloat16, buffer=nl.psum)
    nisa.nc_transpose(psum, sb((4, 4), nl.bfloat16), engine=nisa.engine.tensor)


def with_comprehension(x):
    assert [k for k in range(3)]


def search(x):
    nisa.nc_find_index8(sb((4, 8), nl.int32), sb((4, 16)), sb((4, 8)))


def in_tiles(size):
    psum = nl.ndarray((4, 4), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(psum, sb((4, 4)), sb((4, 4)), tile_position=(0, 0), tile_size=size)


def lost_product(flag, read=False):
    psum = nl.ndarray((64, 64), nl.float32, buffer=nl.psum)
    one = nl.full((4, 64), 1.0, nl.float32)
    nisa.nc_matmul(psum, one, one, accumulate=False)
    if read:
        nisa.tensor_copy(sb((64, 64)), psum)
    nisa.nc_matmul(psum, one, one, accumulate=flag)


CASES = {
    "sim_number": lambda x: nisa.nc_match_replace8(sb((4, 8)), sb((4, 8)), sb((4, 8)), None),
    "sim_sequence": lambda x: nisa.dma_compute(x, x, nl.add),
    "sim_constant": lambda x: nl.shared_constant(np.zeros((2, 2), np.int64)),
    "sim_ap_offset": lambda x: x[1:3, :].ap([[64, 2], [1, 64]], offset=0),
    "sim_array_tile": lambda x: in_tiles((32, 128)),
    "sim_dma_engine": lambda x: nisa.dma_copy(sb((4, 64)), x[0:4], engine=nisa.engine.sync),
    "sim_dma_sources": lambda x: nisa.dma_compute(sb((4, 64)), [], nl.add),
    "sim_dtype": lambda x: nl.ndarray((4, 4), np.float64),
    "sim_index_tile": lambda x: x.vector_select(0, sb((4, 1))),
    "sim_indirect_axis": indirect_rows,
    "sim_indirect_twice": two_offsets,
    "sim_loop_body": lambda x: nl.fori_loop(0, 2, lambda i: 1),
    "sim_matmul_transpose": lambda x: nl.matmul(sb((4, 4)), sb((4, 4))),
    "sim_narrow_product": lambda x: nl.transpose(sb((4, 4), nl.bfloat16)),
    "sim_needs_values": lambda x: nl.fori_loop(0, loaded_register(), lambda i: None),
    "sim_parser_subset": with_comprehension,
    "sim_pattern": lambda x: nisa.iota(sb((4, 8)), [[1, 4]]),
    "sim_random_type": lambda x: nisa.rng(sb((4, 4))),
    "sim_rearrange": lambda x: x.rearrange(("p", "f"), ("f",)),
    "sim_reduce_command": lambda x: nisa.activation(
        sb((4, 4)), nl.exp, sb((4, 4)), reduce_res=sb((4, 1)), reduce_cmd="reset"
    ),
    "sim_register_operand": lambda x: nisa.register_load(nisa.register_alloc(), sb((4, 4))),
    "sim_replica_group": lambda x: ncc.ReplicaGroup([[0, 1], [1, 2]]),
    "sim_search_types": search,
    "sim_squeeze": lambda x: x.squeeze_dim(1),
    "sim_static_descriptors": lambda x: nisa.dma_copy(
        sb((4, 64)), x.vector_select(0, indices(4)), dge_mode=nisa.dge_mode.none
    ),
    "sim_tensor_operator": lambda x: sb((4, 4)) + 1.0,
    "sim_transpose_type": open_transpose,
    "sim_vector_type": lambda x: nisa.tensor_scalar(
        sb((4, 4)), sb((4, 4)), nl.add, sb((4, 1), nl.bfloat16)
    ),
    "sim_view_axis": lambda x: sb((4, 8)).broadcast(0, 8),
}
LATER = {  # on gen3
    "sim_hwdge_offsets": lambda x: nisa.dma_copy(
        sb((4, 64)), x.vector_select(0, indices(4)), dge_mode=nisa.dge_mode.hwdge
    ),
    "sim_hwdge_types": lambda x: nisa.dma_copy(
        sb((4, 64), nl.bfloat16), x[0:4], dge_mode=nisa.dge_mode.hwdge
    ),
    "sim_nonzero": lambda x: nisa.nonzero_with_count(sb((16, 4), nl.int32), sb((16, 4))),
    "sim_range_select": lambda x: nisa.range_select(
        sb((4, 4)), sb((4, 4)), nl.less, nl.less, sb((4, 1)), sb((4, 1)), on_false_value=0.0
    ),
    "sim_topk": lambda x: nisa.topk(sb((16, 4)), sb((16, 4), nl.uint32), sb((16, 4)), n=16),
    "sim_random_state": lambda x: nisa.rand_set_state(sb((4, 5), nl.uint32)),
}


def refused(body):
    """The identifier of what a kernel with this body is refused for."""
    made = nki.jit(body_in_line(body)) if body is with_comprehension else beside(body)
    with pytest.raises(NkiError) as caught:
        made.trace(np.zeros((128, 64), np.float32))
    return caught.value.identifier


def body_in_line(body):
    def kernel(x):
        with_comprehension(x)
        out = nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(out, x)
        return out

    return kernel


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("NKI_CPU_STRICT", "1")


@pytest.mark.parametrize("identifier", CASES)
@allows("sim_expansion")
def test_refused_on_gen2(identifier, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NKI", "2.32")  # the last one with a parser
    assert refused(CASES[identifier]) == identifier


@pytest.mark.parametrize("identifier", LATER)
def test_refused_on_gen3(identifier, target):
    target("trn2")
    assert refused(LATER[identifier]) == identifier


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.ap([[64, 129], [1, 64]])[0:128],  # only what is used has to be there
        lambda x: nisa.dma_copy(sb((8, 64)), x.ap([[64, 9], [1, 64]], 120 * 64)[0:8, :]),
        lambda x: sb((4, 4))[0:0, 0:0],
        lambda x: nisa.nc_matmul(
            nl.ndarray((4, 1024), nl.float32, buffer=nl.psum)[:, 512:1024],
            nl.full((4, 4), 1.0, nl.float32),
            nl.full((4, 512), 1.0, nl.float32),
        ),
        lambda x: lost_product(True),
        lambda x: lost_product(None),
        lambda x: lost_product(False, read=True),
    ],
)
def test_near_misses_pass(body):
    assert beside(body).trace(np.zeros((128, 64), np.float32))


@nki.jit
def copy(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, x, name="all")
    return out


def test_refused_when_called(monkeypatch):
    x = np.zeros((4, 4), np.float32)
    calls = {
        "sim_launch": lambda: copy[(1, 1)],
        "sim_list_argument": lambda: copy([x]),
        "sim_no_arguments": lambda: copy(),
        "sim_jit_option": lambda: nki.jit(copy, platform_target="trn9"),
        "sim_schedule_name": lambda: copy.with_schedule([("all", "none")])(x),
    }
    for identifier, call in calls.items():
        with pytest.raises(NkiError) as caught:
            call()
        assert caught.value.identifier == identifier
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    with pytest.raises(NkiError, match="sim_unknown_target"):
        copy(x)


def test_a_condition_that_never_fails_ends(monkeypatch):
    from neuron_cpu.core.current import control

    monkeypatch.setattr(control, "LIMIT", 8)
    assert refused(lambda x: nl.while_loop(1, lambda c: c)) == "sim_endless_loop"
