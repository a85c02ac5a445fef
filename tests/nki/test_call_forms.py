"""Call forms of the current language, crossed: every instruction reads and writes every kind of
view, takes numbers, registers and (P, 1) tiles where it may, by position and by keyword; loops of
every kind carry state in every memory; kernels take and return what the documentation allows.

Every test runs twice: replayed, as programs run, and in eager mode. References are numpy.
"""

import inspect

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from tests.nki.tiles import close
from tests.warned import allows

pytestmark = allows("sim_dynamic_slice", "sim_parser_subset")

P, A, B = 64, 4, 6  # every view has this shape
# kernels are made inside of tests and written as Python is; the parser's own page is test_control


@pytest.fixture(autouse=True, params=["replayed", "eager"])
def execution(request, monkeypatch, target):
    target("trn2")  # whose engines take operands at run-time offsets
    if request.param == "eager":
        monkeypatch.setenv("NKI_CPU_EAGER", "1")


def data(seed, *shape):
    return np.random.default_rng(seed).uniform(0.5, 2.0, shape).astype(np.float32)


def tile(*shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


# --- every view of every operand ------------------------------------------------------------------
def loaded(value):
    register = nisa.register_alloc()
    nisa.register_load(register, nl.full((1, 1), value, nl.int32))
    return register


VIEWS = {
    "whole": lambda: tile(P, A, B),
    "slices": lambda: tile(P, A + 2, B + 2)[:, 1 : A + 1, 2:],
    "negative indices": lambda: tile(P, A + 2, B + 2)[:, -A:, -B - 1 : -1],
    "steps": lambda: tile(P, 2 * A, 2 * B)[:, ::2, 1::2],
    "nl.ds": lambda: tile(P, A, B + 3)[..., nl.ds(3, B)],
    "an index": lambda: tile(P, 3, A, B)[:, 1],
    "select": lambda: tile(P, A, 3, B).select(2, 1),
    "slice": lambda: tile(P, A, B + 4).slice(2, 1, B + 1).slice(dim=1, start=0, end=A, step=1),
    "permute": lambda: tile(P, B, A).permute((0, 2, 1)),
    "reshape": lambda: tile(P, A * B).reshape((P, A, B)),
    "reshape_dim": lambda: tile(P, A * B).reshape_dim(1, (A, -1)),
    "flatten_dims": lambda: tile(P, 2, A // 2, B).flatten_dims(1, 2),
    "squeeze and expand": lambda: tile(P, A, 1, B).squeeze_dim(2).expand_dim(1).squeeze_dim(1),
    "rearrange": lambda: tile(P, B, A).rearrange(("p", "b", "a"), ("p", "a", "b")),
    "ap": lambda: tile(P, 50).ap([[50, P], [9, A], [2, B]], offset=3),
    "ap at a register": lambda: tile(P, 96).ap(
        [[96, P], [7, A], [1, B]], scalar_offset=loaded(5), indirect_dim=1
    ),
    "ap at a tile": lambda: tile(P, 9, A, B).ap(
        [[9 * A * B, P], [B, A], [1, B]], None, nl.full((1, 1), 2, nl.int32), None, 1
    ),
    "nl.ds at a register": lambda: tile(P, A, B + 5)[:, :, nl.ds(loaded(2), B)],
    "other partitions": lambda: tile(128, A, B)[64:128],
    "other bits": lambda: tile(P, A, B, dtype=nl.int32).view(nl.float32),
    "reinterpret_cast": lambda: tile(P, A, B, dtype=nl.uint32).reinterpret_cast(nl.float32),
}
INDIRECT = {name for name in VIEWS if "at a" in name}


def tensor_tensor(dst, x, y):
    nisa.tensor_tensor(dst, x, y, nl.subtract)


def tensor_scalar(dst, x):
    nisa.tensor_scalar(dst, x, nl.multiply, 2.0, op1=nl.add, operand1=1.0)


def scalar_tensor_tensor(dst, x, y):
    nisa.scalar_tensor_tensor(dst, x, nl.multiply, 3.0, nl.add, y)


def scan(dst, x, y):
    nisa.tensor_tensor_scan(dst, x, y, 1.0, nl.multiply, nl.add)


def activation(dst, x):
    nisa.activation(dst, nl.square, x, scale=2.0)


def copy(dst, x):
    nisa.tensor_copy(dst, x)


def copy_on_gpsimd(dst, x):
    nisa.tensor_copy(dst=dst, src=x, engine=nisa.engine.gpsimd)


def reciprocal(dst, x):
    nisa.reciprocal(dst, x)


def dma(dst, x):
    nisa.dma_copy(dst, x)


def select(dst, x):
    nisa.affine_select(dst, [[-1, A * B]], 1, x, 7.0, nl.greater_equal, offset=3)


def predicated(dst, x, y):
    chosen = tile(P, A, B, dtype=nl.uint8)
    nisa.tensor_scalar(chosen, y, nl.greater, 1.0)
    nisa.memset(dst, 0.0)
    nisa.tensor_copy_predicated(dst, x, chosen)


def shuffled(dst, x):
    nisa.nc_stream_shuffle(dst, x, [31 - k for k in range(32)])


def cumulative(dst, x):
    nisa.tensor_scalar_cumulative(
        dst, x, nl.multiply, nl.add, 2.0, 1.0, reduce_cmd=nisa.reduce_cmd.load_reduce
    )


def activation_reduce(dst, x):
    total = tile(P, 1)
    nisa.activation_reduce(dst, nl.copy, x, nl.add, total, scale=2.0)
    nisa.tensor_scalar(dst, dst, nl.add, total)


def tensor_scalar_reduce(dst, x):
    most = tile(P, 1)
    nisa.tensor_scalar_reduce(dst, x, nl.add, 1.0, nl.maximum, most)
    nisa.tensor_scalar(dst, dst, nl.subtract, most)


def select_reduce(dst, x, y):
    chosen, most = tile(P, A, B, dtype=nl.uint8), tile(P, 1)
    nisa.tensor_scalar(chosen, y, nl.greater, 1.0)
    nisa.select_reduce(dst, chosen, x, -1.0, most, nisa.reduce_cmd.reset_reduce, nl.maximum)
    nisa.tensor_scalar(dst, dst, nl.subtract, most)


def dma_compute(dst, x, y):
    nisa.dma_compute(dst, [x, y], nl.add)


def memset(dst, x):
    nisa.memset(dst, 3)
    nisa.tensor_tensor(dst, dst, x, nl.add, engine=nisa.gpsimd_engine)


def functions(dst, x, y):
    nisa.tensor_copy(dst, nl.add(nl.exp(x), nl.where(nl.greater(y, 1.0), x, y)))


def scanned(x, y):
    found, last = np.empty((P, A * B)), np.ones(P)
    for k in range(A * B):
        last = found[:, k] = last * x.reshape(P, -1)[:, k] + y.reshape(P, -1)[:, k]
    return found.reshape(P, A, B)


def selected(x, y):
    return np.where(y > 1, x, -1.0)


PLACES = np.arange(P)[:, None] - np.arange(A * B) + 3
INSTRUCTIONS = {
    tensor_tensor: lambda x, y: x - y,
    tensor_scalar: lambda x: 2 * x + 1,
    scalar_tensor_tensor: lambda x, y: 3 * x + y,
    scan: scanned,
    activation: lambda x: (2 * x) ** 2,
    copy: lambda x: x,
    copy_on_gpsimd: lambda x: x,
    reciprocal: lambda x: 1 / x,
    dma: lambda x: x,
    select: lambda x: np.where(PLACES.reshape(P, A, B) >= 0, x, 7.0),
    predicated: lambda x, y: np.where(y > 1, x, 0),
    cumulative: lambda x: 1 + 2 * x.reshape(P, -1).cumsum(1).reshape(x.shape),
    activation_reduce: lambda x: 2 * x + 2 * x.sum((1, 2), keepdims=True),
    tensor_scalar_reduce: lambda x: x - x.max((1, 2), keepdims=True),
    select_reduce: lambda x, y: selected(x, y) - selected(x, y).max((1, 2), keepdims=True),
    dma_compute: lambda x, y: x + y,
    memset: lambda x: x + 3,
    functions: lambda x, y: np.exp(x) + np.where(y > 1, x, y),
    shuffled: lambda x: x.reshape(2, 32, A, B)[:, ::-1].reshape(P, A, B),
}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda f: f.__name__)
@allows("sim_dma_on_chip", "sim_engine_operators", "sim_expansion")
def test_every_view_is_every_operand(instruction, place):
    """One kernel for each instruction and operand, all kinds of views one after the other."""
    operands = len(inspect.signature(instruction).parameters)
    if place >= operands:
        pytest.skip("it has fewer operands")
    left_out = INDIRECT if instruction is dma_compute and place == 0 else ()  # documented so
    names = [name for name in VIEWS if name not in left_out]

    @nki.jit
    def kernel(x, y):
        out = nl.ndarray((len(names), P, A, B), nl.float32, buffer=nl.shared_hbm)
        for number, name in enumerate(names):
            views = [tile(P, A, B) for _ in range(operands)]
            views[place] = VIEWS[name]()
            for view, source in zip(views[1:], (x, y)):
                nisa.dma_copy(view, source)
            instruction(*views)
            nisa.dma_copy(out[number], views[0])
        return out

    x, y = data(1, P, A, B), data(2, P, A, B)
    want = INSTRUCTIONS[instruction](*(a.astype(np.float64) for a in (x, y)[: operands - 1]))
    for name, found in zip(names, kernel(x, y)):
        assert np.allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max()), name


# --- kernels, arguments and results ---------------------------------------------------------------


def test_decorators_and_calls():
    def kernel(x, factor=2.0):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        source = nl.load(src=x)
        nisa.tensor_scalar(dst=source, data=source, op0=nl.multiply, operand0=factor)
        nl.store(dst=out, value=source)
        return out

    x = data(13, 3, 4)
    made = nki.jit(kernel)
    forms = [
        made,
        nki.jit()(kernel),
        nki.jit(mode="auto")(kernel),
        nki.simulate(kernel),
        nki.jit(made),
        nki.simulate(made),
        made[1],
    ]
    for form in forms:
        close(form(x), 2 * x)
        close(form(x=x, factor=3), 3 * x)
        close(form(x, 4.0), 4 * x)
    assert forms[0].name == "kernel"
