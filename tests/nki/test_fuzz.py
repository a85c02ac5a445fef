"""Random programs: those that are legal against numpy, and arguments that nobody checked.

Whatever a kernel passes, a function of the language works or refuses in one sentence.
"""

import inspect
import random
import warnings

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError, NkiWarning
from neuron_cpu.core.time.schedule import schedule

SKIPPED = {"while_loop", "fori_loop", "device_print", "no_reorder", "dynamic_range", "range"}
TOKENS = {"bypass", "average", "prelu"}  # operators of instructions, no functions
RANGES = {"affine_range", "sequential_range", "static_range"}  # Python's own, with its errors


def functions_of(module):
    names = [n for n in module.__all__ if inspect.isfunction(getattr(module, n))]
    return [getattr(module, n) for n in names if n not in SKIPPED | RANGES | TOKENS]


CALLED = [*functions_of(nisa) * 3, *functions_of(nl) * 2, *functions_of(ncc)]
OPERATORS = [
    nl.add, nl.subtract, nl.multiply, nl.maximum, nl.minimum, nl.equal, nl.less, nl.logical_and,
    nl.bitwise_and, nl.left_shift, nl.power, nl.abs, nl.rsqrt, nl.square, nl.exp, nl.copy,
    nl.bypass, nl.average, nl.max, nl.abs_max, nl.mod,
]  # fmt: skip
TYPES = [
    *[nl.float32] * 4, nl.bfloat16, nl.float16, nl.int32, nl.uint32, nl.uint8, nl.int8, nl.uint16,
    nl.float8_e4m3, nl.float8_e5m2, nl.float8_e4m3fn, nl.tfloat32, nl.bool_, nl.float8_e4m3fn_x4,
]  # fmt: skip
SHAPES = [*[(4, 8)] * 4, (4, 1), (1, 1), (4, 2, 4), (8, 4), (32, 32), (128, 8), (16, 8), (1, 2, 8)]
MEMBERS = [
    *nisa.engine, *nisa.reduce_cmd, *nisa.oob_mode, *nisa.dge_mode, *nisa.matmul_perf_mode,
]  # fmt: skip
COLUMNS = {
    "operand0", "operand1", "bias", "scale", "imm0", "imm1", "initial", "reduce_res", "bound0",
    "bound1", "prob", "rate", "on_false", "max_value", "min", "max",
}  # fmt: skip
GIVEN = {
    "axis": [1, -1, 0, (1,), [1, 2]], "pattern": [[[1, 8]], [[2, 4], [1, 2]], [[0, 8]]],
    "shuffle_mask": [list(range(32))], "tile_size": [(32, 32), (64, 64)],
    "tile_position": [(0, 0), (0, 32)], "replica_group": [ncc.ReplicaGroup([[0]])],
    "buffer": [nl.sbuf, nl.psum, nl.shared_hbm, nl.private_hbm], "name": [None],
}  # fmt: skip


class Arguments:
    """Arguments of a call: mostly of the right kind, now and then anything."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.shape, self.dtype = self.draw.choice(SHAPES), self.draw.choice(TYPES)

    def tensor(self, shape=None):
        draw = self.draw
        shape = shape or (self.shape if draw.random() < 0.75 else draw.choice(SHAPES))
        dtype = self.dtype if draw.random() < 0.6 else draw.choice(TYPES)
        buffer = draw.choice([*[nl.sbuf] * 8, *[nl.psum] * 3, nl.private_hbm])
        made = nl.ndarray(shape, dtype, buffer=buffer)
        if buffer is not nl.private_hbm:
            nisa.memset(made, 0)
        changes = [
            lambda t: t[:, ::2],
            lambda t: t.expand_dim(1),
            lambda t: t[0:1],
            lambda t: t.view(draw.choice(TYPES)),
            lambda t: t[..., 0:1].broadcast(t.ndim - 1, 8),
            lambda t: t[..., nl.ds(self.chosen(), draw.choice([1, 4, t.shape[-1]]))],
        ]
        return draw.choice(changes)(made) if draw.random() < 0.2 else made

    def chosen(self):
        """A place that data choose: a tile or a register."""
        tile, register = nl.ndarray((1, 1), nl.int32), nisa.register_alloc()
        nisa.memset(tile, 0)
        nisa.register_load(register, tile)
        return self.draw.choice([tile, register])

    def anything(self):
        draw = self.draw
        values = [
            None,
            0,
            -1,
            1 << 40,
            0.5,
            float("inf"),
            float("nan"),
            True,
            "x",
            (),
            {},
            [1, 2],
            [[1, 8]],
            object(),
            np.float32(2),
            np.zeros((2, 2)),
            nl.float32,
            nl.sbuf,
            slice(0, 2),
            draw.choice(OPERATORS),
            draw.choice(MEMBERS),
            nisa.register_alloc(1),
            self.tensor(),
            [self.tensor(), self.tensor()],
        ]
        return draw.choice(values)

    def value(self, name):
        draw = self.draw
        if name in GIVEN:
            return draw.choice(GIVEN[name])
        if name in COLUMNS:
            column = self.tensor((self.shape[0], 1)) if draw.random() < 0.4 else None
            return draw.choice([0.5, 2, None, column])
        if name.startswith(("op", "comp_op", "cmp_op", "reduce_op")):
            return draw.choice(OPERATORS)
        if name in ("engine", "reduce_cmd", "oob_mode", "dge_mode", "perf_mode"):
            return draw.choice(MEMBERS)
        if name in ("shape", "dtype"):
            return getattr(self, name)
        if name in ("srcs", "dsts"):
            return [self.tensor()]
        whole = ("start", "size", "offset", "n", "num_elem_per_idx", "channel_multiplier")
        return draw.choice([0, 1, 2, 8]) if name in whole else self.tensor()

    def of(self, function):
        found = {}
        for one in inspect.signature(function).parameters.values():
            optional = one.default is not one.empty
            if optional and self.draw.random() < 0.6:
                continue
            found[one.name] = self.anything() if self.draw.random() < 0.06 else self.value(one.name)
        return found


def call(seed):
    """One call inside a kernel, executed, scheduled or in eager mode."""
    arguments = Arguments(seed)
    function = arguments.draw.choice(CALLED)

    @nki.jit
    def kernel(x):
        out = nl.ndarray((4, 8), nl.float32, buffer=nl.shared_hbm)
        function(**arguments.of(function))
        nisa.dma_copy(out, x)
        return out

    x = np.zeros((4, 8), np.float32)
    if seed % 7:
        kernel(x)
    else:
        schedule(kernel.trace(x))


def check_calls(seeds, generation, eager):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", generation)
        patch.setenv("NKI_CPU_EAGER", str(int(eager)))
        warnings.simplefilter("ignore", NkiWarning)
        done = 0
        for seed in seeds:
            try:
                call(seed)
                done += 1
            except NkiError as error:
                assert "\n" not in str(error) and "expected" in str(error), (seed, error)
        assert done > len(seeds) / 10  # some of them are legal


@pytest.mark.parametrize(
    ("generation", "eager"), [("trn1", False), ("trn3", False), ("trn3", True)]
)
def test_any_argument_is_taken_or_refused_in_one_sentence(generation, eager):
    check_calls(range(150), generation, eager)


@pytest.mark.full
@pytest.mark.parametrize("generation", ["trn1", "trn2", "trn3"])
def test_many_arguments(generation):
    check_calls(range(1000, 5000), generation, eager=False)
