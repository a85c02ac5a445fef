"""What only single tracing makes wrong: found in the source, with its line, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from neuronxcc import nki
from neuronxcc.nki import language as nl

from neuron_cpu.core import NkiError, NkiWarning
from neuron_cpu.core.check.lint import findings

ROWS = {(0, 0)}
total = 0


def found(function):
    """(identifier, line counted from the ``def``) of everything reported."""
    first = getattr(function, "function", function).__code__.co_firstlineno
    return [(f.identifier, f.line - first) for _, f in findings(function)]


# --- one construct a function, reported on the line given -----------------------------------------
def rebound_value(x, out):
    acc = nl.load(x)
    for i in nl.affine_range(4):
        acc = nl.add(acc, nl.load(x[i]))
    nl.store(out, acc)


def rebound_in_plain_range(x, out):
    offset = 0
    for _ in range(4):
        nl.store(out[offset], nl.load(x[offset]))
        offset = offset + 128


def local_used_after(x, out):
    for i in nl.affine_range(4):
        tile = nl.load(x[i])
    nl.store(out, tile)


def index_used_after(x, out):
    for i in nl.affine_range(4):
        nl.store(out[i], nl.load(x[i]))
    nl.store(out[i], nl.load(x[0]))


def global_assigned(x, out):
    global total
    for i in nl.affine_range(4):
        total = i


def nonlocal_written_by_a_callee(x, out):
    used = 0

    def count():
        nonlocal used
        used += 1

    for i in nl.affine_range(4):
        count()
        nl.store(out[i], nl.load(x[i]))


def minimum_of_index(x, out):
    for i in nl.affine_range(4):
        stop = min(i * 128 + 128, 500)
        nl.store(out[0:stop], nl.load(x[0:stop]))


def scalar_chosen_by_index(x, out):
    for i in nl.affine_range(4):
        if i == 0:  # noqa: SIM108 - the construct under test
            scale = 1.0
        else:
            scale = 2.0
        nl.store(out[i], nl.multiply(nl.load(x[i]), scale))


def expression_chosen_by_index(x, out):
    for i in nl.affine_range(4):
        scale = 1.0 if i == 0 else 2.0
        nl.store(out[i], nl.multiply(nl.load(x[i]), scale))


def integer_of_index(x, out):
    for i in nl.affine_range(4):
        nl.store(out[int(i / 2)], nl.load(x[i]))


def list_looked_up(x, out):
    rows = [3, 1, 0, 2]
    for i in nl.affine_range(4):
        nl.store(out[i], nl.load(x[rows[i]]))


def shape_looked_up(x, out):
    for i in nl.affine_range(2):
        nl.store(out[i], nl.load(x[0 : x.shape[i]]))


def dict_get(x, out):
    rows = {0: 1, 1: 0}
    for i in nl.affine_range(2):
        nl.store(out[i], nl.load(x[rows.get(i, 0)]))


def membership_of_index(x, out):
    for i in nl.affine_range(4):
        if (i, 0) not in ROWS:
            nl.store(out[i], nl.load(x[i]))


def range_of_index(x, out):
    for i in nl.affine_range(4):
        for k in range(i):
            nl.store(out[i, k], nl.load(x[i, k]))


def while_below_index(x, out):
    for i in nl.affine_range(4):
        k = 0
        while k < i:
            nl.store(out[i], nl.load(x[i]))


def round_left_by_index(x, out):
    for i in nl.affine_range(4):
        if i == 3:
            break
        nl.store(out[i], nl.load(x[i]))


def item_in_a_tuple_of_targets(x, out):
    kept = {}
    for i in nl.affine_range(4):
        tile, kept[i] = nl.load(x[i]), True
        nl.store(out[i], tile)


def tensor_of_either_side(x, out):
    for i in range(4):
        if i < 2:
            tile = nl.load(x[0])
            nl.store(out[i], tile)
        else:
            tile = nl.load(x[1])
        nl.store(out[i], tile)


def tensor_made_anew_on_one_side(x, out):
    for i in nl.affine_range(4):
        tile, rows = nl.load(x[i]), nl.ds(0, 64)
        if i == 0:
            tile, rows = nl.load(x[1]) * 2.0, nl.ds(64, 64)
        nl.store(out[i, 0:64], tile[0:64])
        nl.store(out[i, rows], tile[rows])


REPORTED = [
    (rebound_value, "sim_loop_rebinding", 3),
    (rebound_in_plain_range, "sim_loop_rebinding", 4),
    (local_used_after, "sim_loop_local_used_after", 3),
    (index_used_after, "sim_loop_index_used_after", 3),
    (global_assigned, "sim_loop_side_effect", 3),
    (nonlocal_written_by_a_callee, "sim_loop_side_effect", 8),
    (minimum_of_index, "sim_loop_min_max", 2),
    (scalar_chosen_by_index, "sim_loop_condition", 2),
    (expression_chosen_by_index, "sim_loop_condition", 2),
    (integer_of_index, "sim_loop_index_value", 2),
    (list_looked_up, "sim_loop_index_value", 3),
    (shape_looked_up, "sim_loop_index_value", 2),
    (dict_get, "sim_loop_index_value", 3),
    (membership_of_index, "sim_loop_index_value", 2),
    (range_of_index, "sim_loop_index_value", 2),
    (while_below_index, "sim_loop_index_value", 3),
    (round_left_by_index, "sim_loop_condition", 2),
    (tensor_of_either_side, "err_local_variable_used_out_of_scope", 7),
    (item_in_a_tuple_of_targets, "sim_loop_side_effect", 3),
]


@pytest.mark.parametrize(("function", "identifier", "line"), REPORTED)
def test_construct_is_reported_on_its_line(function, identifier, line):
    assert found(function) == [(identifier, line)]


def test_names_of_one_condition_are_told_apart():
    """A tensor made there is the documented error, an index range a doubt."""
    assert found(tensor_made_anew_on_one_side) == [
        ("sim_loop_condition", 3),
        ("err_local_variable_used_out_of_scope", 5),
    ]


@pytest.mark.parametrize("eager", ["0", "1"])
def test_tensor_used_behind_its_condition_is_refused(eager, monkeypatch):
    """The vendor's example, and the form that its page gives instead."""

    monkeypatch.setenv("NKI_CPU_EAGER", eager)
    x = np.arange(2 * 128 * 64, dtype=np.float32).reshape(2, 128, 64)
    assert np.array_equal(assigned_under_a_condition(x), x[[0, 0, 1, 1]])
    with pytest.raises(NkiError, match="'tile' is a tensor made under the condition") as caught:
        made_under_a_condition(x)
    assert caught.value.identifier == "err_local_variable_used_out_of_scope"


@nki.jit
def assigned_under_a_condition(x):
    out = nl.ndarray((4, 128, 64), nl.float32, buffer=nl.shared_hbm)
    for i in nl.affine_range(4):
        tile = nl.ndarray((128, 64), nl.float32)
        if i < 2:
            tile[...] = nl.load(x[0])
        else:
            tile[...] = nl.load(x[1])
        nl.store(out[i], tile)
    return out


@nki.jit
def made_under_a_condition(x):
    out = nl.ndarray((4, 128, 64), nl.float32, buffer=nl.shared_hbm)
    tensor_of_either_side(x, out)
    return out


# --- near misses: nothing is reported -------------------------------------------------------------
def assigned_elements(x, out):
    tile = nl.ndarray((128, 64), nl.float32)
    for i in nl.affine_range(4):
        tile[...] = nl.load(x[i])
        tile[0:64] += 1.0
    nl.store(out, tile)


def accumulated_products(a, b, out):
    acc = nl.zeros((128, 512), nl.float32, buffer=nl.psum)
    for k in nl.affine_range(4):
        acc += nl.matmul(nl.load(a[k]), nl.load(b[k]), transpose_x=True)
    nl.store(out, acc)


def temporary_of_an_earlier_loop(x, out):
    tile = nl.load(x[0])
    nl.store(out[0], tile)
    for i in nl.affine_range(4):
        tile = nl.load(x[i])
        nl.store(out[i], tile)
    tile = nl.load(x[1])
    nl.store(out[1], tile)


def unrolled_state(x, out):
    tiles, row, last = [], 0, None
    for i in nl.static_range(4):
        tiles.append(nl.load(x[min(i, 2)]))
        scale = 1.0 if i == 0 else 2.0
        row += 1
        last = nl.multiply(tiles[-1], scale)
    nl.store(out[row], last)


def statements_under_a_condition(x, out):
    acc = nl.zeros((128, 64), nl.float32)
    for i in nl.sequential_range(4):
        if i == 0:
            first = nl.load(x[0])
            acc[...] = first
        else:
            acc[...] = nl.add(acc, nl.load(x[i]))
    nl.store(out, acc)


def condition_passed_on(x, out):
    for i in nl.affine_range(4):
        helper(x, out, i, initialize=(i == 0))


def helper(x, out, row, initialize):
    if initialize:
        nl.store(out[row], nl.load(x[row]))


def affine_uses_of_a_plain_range(x, out):
    for i in range(4):
        start = i * 128 + 64
        nl.store(out[start : start + 64], nl.load(x[nl.ds(64 * i, 64)]))
        condition_passed_on(x[i], out[i])


def values_of_an_unrolled_index(x, out):
    rows, kept = [3, 1, 0, 2], {}
    for _ in nl.affine_range(2):
        for i in nl.static_range(4):
            tile, row = divmod(int(i), 2)
            kept_here = rows[i]
            nl.store(out[tile, row], nl.load(x[kept_here]))
    for i in nl.static_range(4):
        kept[i] = rows[i]


def unrolled_index_of_the_same_name(x, out):
    rows = [3, 1, 0, 2]
    for i in nl.affine_range(4):
        nl.store(out[i], nl.load(x[i]))
    for i in nl.static_range(4):
        nl.store(out[i], nl.load(x[rows[i]]))


def tensors_subscripted_by_index(x, out):
    tile, rows = nl.load(x), x.shape
    for i in nl.affine_range(4):
        row = tile[:, i]
        nl.store(out[i], nl.multiply(row, float(rows[0])))


def periodic_rows(x, out):
    for i in nl.sequential_range(4):
        nl.store(out[i // 2, i % 2], nl.load(x[i]))


def same_grid_in_each_round(x, out):
    i_f = nl.arange(64)[None, :]
    for i in nl.affine_range(4):
        i_p = nl.arange(128)[:, None]
        i_f = nl.arange(64)[None, :]
        nl.store(out[i, i_p, i_f], nl.load(x[i, i_p, i_f]))
    nl.store(out[0, nl.arange(128)[:, None], i_f], nl.load(x[0]))


SILENT = [
    same_grid_in_each_round,
    affine_uses_of_a_plain_range,
    values_of_an_unrolled_index,
    unrolled_index_of_the_same_name,
    tensors_subscripted_by_index,
    periodic_rows,
    assigned_elements,
    accumulated_products,
    temporary_of_an_earlier_loop,
    unrolled_state,
    statements_under_a_condition,
    condition_passed_on,
]


@pytest.mark.parametrize("function", SILENT)
def test_near_miss_is_silent(function):
    assert found(function) == []


# --- callees, missing source, severity ------------------------------------------------------------
def middle(x, out):
    counting_helper(x, out)


@nki.jit
def counting_helper(x, out):
    row = 0
    for _ in nl.affine_range(4):
        nl.store(out[row], nl.load(x[row]))
        row += 1  # noqa: SIM113 - the construct under test


def outermost(x, out):
    def inner(i):
        nl.store(out[i], nl.load(x[i]))

    for i in nl.affine_range(4):
        inner(i)
    middle(x, out)


def test_functions_that_the_kernel_calls_are_read_too():
    (place, finding), *rest = findings(outermost)
    assert rest == [] and finding.identifier == "sim_loop_rebinding"
    line = counting_helper.function.__code__.co_firstlineno + 5
    assert place == f"outermost ({__file__}:{line})"


class Cache:
    """Methods that a kernel reaches through a constructor; ``kept`` is a container, not ``tile``"""

    def __init__(self, x):
        self.x, self.kept = x, {}
        self.tile = nl.load(x[0])
        self.rounds = []

    def fill(self):
        for i in nl.affine_range(4):
            self.kept[i, 0] = nl.load(self.x[i])

    def count(self):
        rounds = self.rounds
        for i in nl.affine_range(4):
            self.rounds.append(i)
            rounds.append(i)

    def look_up(self):
        for i in nl.sequential_range(4):
            nl.store(self.x[i], self.kept[i])

    def right(self):
        for i in nl.affine_range(4):
            self.tile[i] = nl.load(self.x[i])
        for i in nl.static_range(4):
            self.kept[i] = self.tile[i]

    @staticmethod
    def fill_from_nowhere():
        rows = 0
        for _ in nl.affine_range(4):
            rows += 1
        return rows

    def unused(self):
        self.kept = {}
        for i in nl.affine_range(4):
            self.kept[i] = i


def filling(x):
    cache = Cache(x)
    cache.fill()


def counting(x):
    Cache(x).count()


def filling_from_nowhere(x):
    Cache(x).fill_from_nowhere()


def looking_up(x):
    Cache(x).look_up()


def right_methods(x):
    Cache(x).right()


def methods_of_a_parameter(cache):
    cache.fill()


@pytest.mark.parametrize(
    ("kernel", "method", "expected"),
    [
        (filling, Cache.fill, [("sim_loop_side_effect", 2)]),
        (counting, Cache.count, [("sim_loop_side_effect", 3), ("sim_loop_side_effect", 4)]),
        (filling_from_nowhere, Cache.fill_from_nowhere, [("sim_loop_rebinding", 4)]),
        (looking_up, Cache.look_up, [("sim_loop_index_value", 2)]),
        (right_methods, Cache.right, []),
        (methods_of_a_parameter, Cache.fill, []),
    ],
)
def test_methods_of_classes_that_the_kernel_makes(kernel, method, expected):
    first = method.__code__.co_firstlineno
    assert [(f.identifier, f.line - first) for _, f in findings(kernel)] == expected


def passing(x, out):
    applied(x, body=counted_rows)


def applied(x, body):
    body(x)


def counted_rows(x):
    rows = 0
    for _ in nl.affine_range(4):
        rows += 1
    return rows


def test_functions_passed_as_arguments_are_read():
    line = counted_rows.__code__.co_firstlineno + 3
    assert [(f.identifier, f.line) for _, f in findings(passing)] == [("sim_loop_rebinding", line)]


def nested_twice(x):
    def outer():
        def inner():
            rows = 0
            for _ in nl.affine_range(4):
                rows += 1
            return rows

        return inner()

    return outer()


def test_closures_are_reported_once():
    assert found(nested_twice) == [("sim_loop_rebinding", 5)]


def test_nested_functions_are_read_in_their_own_scope():
    def kernel(x, out):
        row = 5

        def step():
            for i in nl.affine_range(4):
                row = i
                nl.store(out[row], nl.load(x[row]))

        step()
        nl.store(out[row], nl.load(x[row]))

    assert found(kernel) == []


def test_function_without_source_is_skipped():
    scope: dict = {}
    exec("def made(x):\n    n = 0\n    for i in range(3):\n        n += 1\n    return n", scope)
    assert findings(scope["made"]) == [] and findings(lambda x: x) == []


@nki.jit
def summing(x):
    out = nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)
    acc = nl.zeros((128, 64), nl.float32)
    rounds = 0
    for _ in nl.sequential_range(2):
        acc[...] = nl.add(acc, nl.load(x))
        rounds += 1
    nl.store(out, nl.multiply(acc, 1.0 / rounds))
    return out


def test_strict_mode_refuses(monkeypatch):
    monkeypatch.setenv("NKI_CPU_STRICT", "1")
    with pytest.raises(NkiError) as caught:
        nki.jit(summing.function).trace(torch.empty(128, 64, device="meta"))
    assert caught.value.identifier == "sim_loop_rebinding"


def test_strict_mode_lets_pass_what_a_device_ran(monkeypatch):
    """The contest's winner of 2025 took min() of an index; preflight is strict."""
    monkeypatch.setenv("NKI_CPU_STRICT", "1")

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(4):
            first = min(i * 32, 96)
            nl.store(out[first : first + 32], nl.load(x[first : first + 32]))
        return out

    x = np.arange(1024, dtype=np.float32).reshape(128, 8)
    with pytest.warns(NkiWarning, match="sim_loop_min_max"):
        assert np.array_equal(kernel(x), x)
