"""Short forms of plans, and products with packed weights."""

import contextlib
import mmap
import os
import subprocess
import sys
import threading
import time

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
import pytest
import torch

from neuron_cpu.core import keep_packed
from neuron_cpu.core.run import execute, packing, selections
from neuron_cpu.core.run import threads as sharing
from neuron_cpu.core.run.execute import Plan
from tests.repeated import in_all_forms  # noqa: F401 - runs every kernel below in all forms


def numbers(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@nki.jit
def moved_about(x_hbm, y_hbm):
    """Copies of copies and onto itself, a tile written twice, a fill that is partly overwritten."""
    rows, columns = x_hbm.shape
    out_hbm = nl.ndarray((4, rows, 2 * columns), x_hbm.dtype, buffer=nl.shared_hbm)
    x_sb, y_sb = nl.load(x_hbm), nl.load(y_hbm)
    wide_sb = nl.ndarray((rows, 2 * columns), nl.bfloat16, buffer=nl.sbuf)
    wide_sb[...] = nisa.memset((rows, 2 * columns), 3.0, nl.bfloat16)
    wide_sb[:, 0:columns] = nisa.tensor_copy(x_sb)
    again_sb = nisa.tensor_copy(wide_sb)
    nl.store(out_hbm[0], again_sb)
    wide_sb[:, 1 : columns + 1] = nisa.tensor_tensor(x_sb, y_sb, nl.add)
    nl.store(out_hbm[1], wide_sb)
    again_sb[:, 0:columns] = nisa.tensor_copy(wide_sb[:, 1 : columns + 1])
    nl.store(out_hbm[2], nisa.activation(nl.exp, again_sb))
    again_sb[:, 1:] = nisa.tensor_copy(again_sb[:, : 2 * columns - 1])
    nl.store(out_hbm[3], again_sb)
    return out_hbm


# tiles that are rounded as halves, beside their fp32 elements, and a plan of large tiles
@pytest.mark.parametrize("shape", [(7, 5), (128, 64), (128, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_copies_fills_and_overwritten_tiles(shape, dtype):
    x, y, columns = numbers(*shape, dtype=dtype), numbers(*shape, seed=1, dtype=dtype), shape[1]
    found = moved_about(x, y)
    narrow = x.bfloat16()
    assert torch.equal(found[0, :, :columns], narrow.to(dtype))
    assert (found[0, :, columns:] == 3).all()
    both = (x.float() + y.float()).bfloat16()  # rounded once
    assert torch.equal(found[1, :, 1 : columns + 1], both.to(dtype))
    assert torch.equal(found[1, :, 0], narrow[:, 0].to(dtype))
    assert torch.equal(found[3, :, 1 : columns + 1], both.to(dtype))
    assert torch.equal(found[3, :, 0], both[:, 0].to(dtype))


@nki.jit
def cleared(x_hbm, roots=False):
    """The lower triangle of x, zeros above it; or their roots."""
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    row, column = nl.mgrid[0 : x_hbm.shape[0], 0 : x_hbm.shape[1]]
    kept_sb = nisa.affine_select(row >= column, nl.load(x_hbm), 0.0)
    if roots:
        nl.store(out_hbm, nisa.activation(nl.sqrt, nisa.tensor_copy(kept_sb)))
    else:
        nl.store(out_hbm, nisa.tensor_scalar(kept_sb, nl.multiply, 1.0))
    return out_hbm


@pytest.mark.parametrize("special", [float("inf"), float("nan"), -0.0])
def test_choices_of_zeros_clear_whatever_lies_there(special):
    x = numbers(8, 12, dtype=torch.float32)
    x[2, 1] = x[3, 9] = special
    found, wanted = cleared(x), x.where(torch.ones(8, 12).tril().bool(), 0.0)
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def test_a_short_form_has_no_call_that_only_moves_and_looks_at_its_values(monkeypatch):
    monkeypatch.undo()
    x = numbers(8, 12, dtype=torch.float32).abs()
    plan = Plan(cleared.trace(x, roots=True))
    for _ in range(7):
        found = plan.run([x])[0]
    assert torch.equal(found, x.tril().sqrt())
    assert len(plan._short.lines) == 3  # choose, look, take the root
    with pytest.warns(UserWarning, match="sqrt"):
        plan.run([-x])


@nki.jit
def gained(x_hbm, gain_hbm):
    """x times a row in bf16 that goes to all partitions."""
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    gain_sb = nl.load(gain_hbm).broadcast_to(x_hbm.shape)
    nl.store(out_hbm, nl.multiply(nl.load(x_hbm), gain_sb))
    return out_hbm


def test_a_row_of_all_partitions_is_rounded_once():
    x, gain = numbers(128, 128), numbers(1, 128, seed=1)
    assert torch.equal(gained(x, gain), x * gain)


# --- products with constants ----------------------------------------------------------------------
MATRICES = {  # [K 24, N 20], stationary
    "identity": np.eye(24, 20),
    "permutation with signs and factors": np.eye(24)[::-1, 2:22] * np.linspace(-3, 4, 20).round(),
    "rows chosen twice, and none": np.eye(24)[:, [5] * 7 + [23] * 6] @ np.eye(13, 20),
    "ones": np.ones((24, 20)),
    "equal columns": np.linspace(-2, 1, 24).round(1)[:, None] * np.ones((24, 20)),
    "zeros": np.zeros((24, 20)),
    "two numbers in a column": np.eye(24, 20) + np.eye(24, 20, k=-1),
    "one column": np.eye(24, 1),
}
SPECIAL = [1.0, -0.0, float("inf"), float("nan"), 3e38]


@nki.jit
def by_a_constant(x_hbm, name):
    """x [K, 2, 4], but for its last column, and one of MATRICES [K, N]: as stationary operand, as
    moving one, and summed over two steps."""
    k, n = MATRICES[name].shape
    first_hbm = nl.ndarray((n, 6), nl.float32, buffer=nl.shared_hbm)
    second_hbm = nl.ndarray((6, n), nl.float32, buffer=nl.shared_hbm)
    both_hbm = nl.ndarray((n, 6), nl.float32, buffer=nl.shared_hbm)
    matrix_hbm = nl.shared_constant(MATRICES[name].astype(np.float32), x_hbm.dtype)
    matrix_sb, whole_sb, x_sb = nl.load(matrix_hbm), nl.load(x_hbm), nl.load(x_hbm[:, :, 0:3])
    part_sb = whole_sb[:, :, 0:3]
    nl.store(first_hbm, nisa.tensor_copy(nisa.nc_matmul(matrix_sb, part_sb)))
    nl.store(second_hbm, nisa.tensor_copy(nisa.nc_matmul(x_sb.reshape((k, 6)), matrix_sb)))
    both_psum = nl.zeros((n, 6), nl.float32, buffer=nl.psum)
    for _ in nl.affine_range(2):
        both_psum[...] += nisa.nc_matmul(matrix_sb, part_sb)
    nl.store(both_hbm, nisa.tensor_copy(both_psum))
    return first_hbm, second_hbm, both_hbm


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MATRICES)
def test_products_with_constants(monkeypatch, name, dtype, special):
    monkeypatch.setattr(selections, "LEAST", 0)
    x = numbers(24, 2, 4, dtype=dtype)
    x[7, 1, 2] = special
    found = by_a_constant(x, name)
    exact = torch.from_numpy(MATRICES[name].copy()).to(dtype).double().t() @ x[
        :, :, :3
    ].double().reshape(24, 6)
    for one, wanted in zip(found, (exact, exact.t(), 2 * exact)):
        wanted = wanted.float()
        assert torch.allclose(one, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert not ((one == 0) & one.signbit()).any()


# --- packed weights -------------------------------------------------------------------------------
def spans(length):
    return [(at, min(128, length - at)) for at in range(0, length, 128)]


@nki.jit
def linear(x_hbm, weight_hbm):
    """x [K, M] and weight [K, N] -> [N, M], weights stationary, K and N in tiles."""
    k, m = x_hbm.shape
    n = weight_hbm.shape[1]
    out_hbm = nl.ndarray((n, m), nl.float32, buffer=nl.shared_hbm)
    x_sb = [nl.load(x_hbm[at : at + size, :]) for at, size in spans(k)]
    for first, columns in spans(n):
        sum_psum = nl.zeros((columns, m), nl.float32, buffer=nl.psum)
        for (at, size), moving in zip(spans(k), x_sb):
            w_sb = nl.load(weight_hbm[at : at + size, first : first + columns])
            sum_psum[...] += nisa.nc_matmul(w_sb, moving)
        nl.store(out_hbm[first : first + columns, :], nisa.tensor_copy(sum_psum))
    return out_hbm


def adverse(k, n):
    """Weights of all sizes: large ones, ones that fp16 lacks, zeros of both signs."""
    weight = numbers(k, n).float()
    weight[0, 0], weight[1 % k, 0], weight[2 % k, 1 % n] = 100.0, 2.0**-40, -(2.0**-126)
    weight[3 % k, 0], weight[4 % k, 1 % n] = 0.0, -0.0
    return weight.bfloat16()


def packs(weight):
    found = (packing.packs_of(weight) or {}).values()
    return [one for one in found if isinstance(one, packing.Pack)]


packed_here = pytest.mark.skipif(not packing.AVAILABLE, reason="PyTorch here has no such product")


@packed_here
@pytest.mark.parametrize("sizes", [(6, 1, 2), (128, 1, 128), (200, 3, 130), (256, 64, 384)])
@pytest.mark.parametrize("dtype", packing.PACKED)
def test_packed_products_are_those_of_fp32_sums(sizes, dtype, monkeypatch):
    monkeypatch.setattr(packing, "_PIECE", 1 << 14)
    k, m, n = sizes
    x, weight = numbers(k, m, seed=4), adverse(k, n).to(dtype)
    plain = Plan(linear.trace(x, weight), False).run([x, weight])[0]
    keep_packed(weight)
    found = linear(x, weight)
    assert packs(weight), "no product was packed"
    assert (len(packs(weight)[0].pieces) > 1) == (n == 384)
    exact = weight.double().t() @ x.double()
    bound = 2.0**-22 * k * (weight.double().abs().t() @ x.double().abs())
    assert ((found.double() - exact).abs() <= bound).all()
    assert ((plain.double() - exact).abs() <= bound).all()


@packed_here
def test_one_product_alone_is_exact_to_the_bit():
    """One row: every result is a single product, rounded once, if nothing was rounded before."""
    x, weight = numbers(1, 1, seed=5), adverse(1, 300)
    keep_packed(weight)
    assert torch.equal(linear(x, weight), (weight.float().t() * x.float()))


@packed_here
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_weights_that_do_not_fit_stay_as_they_are(value):
    x, weight = numbers(128, 2), numbers(128, 128)
    weight[5, 7] = value
    (wanted,) = Plan(linear.trace(x, weight), False).run([x, weight])
    keep_packed(weight)
    assert torch.allclose(linear(x, weight), wanted, rtol=1e-5, equal_nan=True)
    assert not packs(weight)


@packed_here
def test_the_limit_of_packed_weights_holds(monkeypatch):
    monkeypatch.setenv(packing.VARIABLE, "0")
    weight = numbers(128, 128)
    keep_packed(weight)
    linear(numbers(128, 2), weight)
    assert not packs(weight)


@nki.jit
def in_two_parts(x_hbm, weight_hbm):
    """``linear`` for K of 128, with a first part of columns on its own."""
    k, m = x_hbm.shape
    out_hbm = nl.ndarray((weight_hbm.shape[1], m), nl.float32, buffer=nl.shared_hbm)
    x_sb = nl.load(x_hbm)
    w_sb = nl.load(weight_hbm[:, 0:128])
    nl.store(out_hbm[0:128, :], nisa.tensor_copy(nisa.nc_matmul(w_sb, x_sb)))
    for first in range(128, weight_hbm.shape[1], 128):
        w_sb = nl.load(weight_hbm[:, first : first + 128])
        nl.store(out_hbm[first : first + 128, :], nisa.tensor_copy(nisa.nc_matmul(w_sb, x_sb)))
    return out_hbm


@packed_here
@pytest.mark.parametrize("m", [1, 8])
@pytest.mark.parametrize("first, other", [(linear, in_two_parts), (in_two_parts, linear)])
def test_products_of_one_weight_share_its_pieces(first, other, m):
    """A piece becomes two where another product takes a part of it."""
    x, weight = numbers(128, m, seed=7), adverse(128, 384)
    keep_packed(weight)
    wanted, before = first(x, weight), packing.held()
    assert torch.equal(other(x, weight), wanted) and torch.equal(first(x, weight), wanted)
    assert packing.held() == before
    assert sorted(len(pack.pieces) for pack in packs(weight)) == [1, 1, 2]


@nki.jit
def in_halves(x_hbm, weight_hbm):
    """``linear`` for K of 256 and N of 128, whose weights come in two loads."""
    x_sb = [nl.load(x_hbm[at : at + 128, :]) for at in (0, 128)]
    w_sb = nl.ndarray((128, 2, 128), weight_hbm.dtype)
    for half in nl.static_range(2):
        w_sb[:, half, :] = nl.load(weight_hbm[half * 128 : half * 128 + 128, :])
    out_hbm = nl.ndarray((128, x_hbm.shape[1]), nl.float32, buffer=nl.shared_hbm)
    sum_psum = nl.zeros(out_hbm.shape, nl.float32, buffer=nl.psum)
    for half in nl.static_range(2):
        sum_psum[...] += nisa.nc_matmul(w_sb[:, half, :], x_sb[half])
    nl.store(out_hbm, nisa.tensor_copy(sum_psum))
    return out_hbm


@packed_here
def test_weights_that_come_in_parts_are_read_where_they_lie():
    x, weight = numbers(256, 2, seed=8), numbers(256, 128)
    wanted = linear(x, weight)
    keep_packed(weight)
    assert torch.allclose(in_halves(x, weight), wanted, atol=1e-4) and packs(weight)


@nki.jit
def by_parity(x_hbm, weight_hbm):
    """``linear`` for K of 128 and N of 256, even columns before odd ones."""
    out_hbm = nl.ndarray((256, x_hbm.shape[1]), nl.float32, buffer=nl.shared_hbm)
    x_sb = nl.load(x_hbm)
    rows, columns = nl.arange(128)[:, None], nl.arange(128)[None, :]
    for odd in nl.affine_range(2):
        w_sb = nl.load(weight_hbm[rows, 2 * columns + odd])
        nl.store(
            out_hbm[odd * 128 : odd * 128 + 128, :], nisa.tensor_copy(nisa.nc_matmul(w_sb, x_sb))
        )
    return out_hbm


@packed_here
@pytest.mark.parametrize("m", [1, 8])
@pytest.mark.parametrize("columns", [32, 256])
@pytest.mark.parametrize("first, other", [(linear, by_parity), (by_parity, linear)])
def test_pieces_serve_columns_in_another_order(first, other, columns, m, monkeypatch):
    monkeypatch.setattr(packing, "_PIECE", columns * 128)
    x, weight = numbers(128, m, seed=7), adverse(128, 256)
    keep_packed(weight)
    made = {first: first(x, weight)}
    before = packing.held()
    made[other] = other(x, weight)
    in_order = made[linear].view(128, 2, m).transpose(0, 1).flatten(0, 1)
    assert torch.equal(in_order, made[by_parity]) and packing.held() == before


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "m, busy, one_dnn, threads",
    [(128, 0.0, True, 1), (512, 0.0, True, 3), (512, 1e99, True, 1), (512, 0.0, False, 1)],
)
def test_large_operations_take_the_threads_of_the_caller(
    monkeypatch, m, busy, one_dnn, threads, fails
):
    """After a run that waited they take one, and products of BLAS always; one that fails leaves
    the caller's number, too."""
    monkeypatch.undo()  # of all forms
    x, weight, taken, before = numbers(128, m), numbers(128, m), {}, torch.get_num_threads()

    def noted(op, arena):
        def step():
            taken[op.instruction.op.multiplies] = torch.get_num_threads()
            time.sleep(0.004)
            if fails and op.instruction.op.multiplies:
                raise ValueError

        return step

    monkeypatch.setattr(execute, "make_step", noted)
    monkeypatch.setattr(sharing, "SHARED", 1 << 23)
    monkeypatch.setattr(sharing, "ONE_DNN", one_dnn)
    monkeypatch.setattr(sharing, "_busy_until", busy)
    monkeypatch.setattr(sharing, "_waited", 0.0)
    torch.set_num_threads(3)
    try:
        with pytest.raises(ValueError) if fails else contextlib.nullcontext():
            Plan(linear.trace(x, weight)).run([x, weight])
        assert torch.get_num_threads() == 3
        assert (sharing._busy_until > busy) == (3 in taken.values())
    finally:
        torch.set_num_threads(before)
    assert taken.pop(True) == threads and set(taken.values()) <= {1, threads if one_dnn else 3}


@packed_here
@pytest.mark.parametrize("one_dnn", [True, False])
@pytest.mark.parametrize("m, threads", [(128, 1), (512, 3)])
def test_large_packed_products_take_the_threads_of_the_caller(monkeypatch, m, threads, one_dnn):
    """In every run, the recorded ones among them, with the same results."""
    monkeypatch.undo()  # of all forms
    x, weight, taken, before = numbers(128, m), numbers(128, m), [], torch.get_num_threads()
    product = packing._LINEAR
    keep_packed(weight)

    def noted(*given):
        taken.append(torch.get_num_threads())
        return product(*given)

    monkeypatch.setattr(packing, "_LINEAR", noted)
    monkeypatch.setattr(sharing, "SHARED", 1 << 23)
    monkeypatch.setattr(sharing, "ONE_DNN", one_dnn)
    monkeypatch.setattr(sharing, "_busy_until", 0.0)
    plan = Plan(linear.trace(x, weight))
    torch.set_num_threads(3)
    try:
        wanted = plan.run([x, weight])[0]
        for _ in range(execute.RECORDED + 1):
            monkeypatch.setattr(sharing, "_busy_until", 0.0)
            assert torch.equal(plan.run([x, weight])[0], wanted)
        assert plan._short is not None
    finally:
        torch.set_num_threads(before)
    assert taken and set(taken) == {threads}


@nki.jit
def both(x_hbm, first_hbm, other_hbm):
    """``linear`` with K of 128, of two weights."""
    out_hbm = nl.ndarray((2, 128, x_hbm.shape[1]), nl.float32, buffer=nl.shared_hbm)
    x_sb = nl.load(x_hbm)
    for at, weight_hbm in enumerate((first_hbm, other_hbm)):
        w_sb = nl.load(weight_hbm)
        nl.store(out_hbm[at], nisa.tensor_copy(nisa.nc_matmul(w_sb, x_sb)))
    return out_hbm


@packed_here
def test_weights_of_one_run_are_packed_by_several_threads(monkeypatch):
    x, weights, took = numbers(128, 2), [adverse(128, 128), numbers(128, 128)], []
    pack = packing.Packable._pack

    def noted(*given):
        took.append((threading.current_thread(), torch.get_num_threads()))
        return pack(*given)

    def found():
        copies = [weight.clone() for weight in weights]
        for weight in copies:
            keep_packed(weight)
        return both(x, *copies)

    monkeypatch.setattr(packing.Packable, "_pack", noted)
    by_several = found()
    assert len(took) == 2 and threading.current_thread() not in dict(took)
    assert {count for _, count in took} == {1}
    monkeypatch.setattr(sharing, "at_once", lambda job, parts: list(map(job, parts)))
    assert torch.equal(found(), by_several) and took[-1][0] is threading.current_thread()


@packed_here
def test_a_weight_that_is_written_after_all_is_packed_anew(monkeypatch):
    monkeypatch.undo()  # of all forms, whose copies may lie where an older one lay
    x, weight = numbers(128, 2), numbers(128, 128)
    keep_packed(weight)
    once = linear(x, weight)
    weight.mul_(2.0)
    assert torch.equal(linear(x, weight), 2 * once)


@packed_here
@pytest.mark.skipif(sys.platform != "linux", reason="pages are Linux's")
@pytest.mark.parametrize("written", [False, True])
def test_pages_of_a_file_are_let_go_unless_somebody_wrote_them(monkeypatch, tmp_path, written):
    monkeypatch.undo()  # all forms would run on copies
    (tmp_path / "weight").write_bytes(numbers(256, 512).view(torch.uint8).numpy().tobytes())
    weight = torch.from_file(str(tmp_path / "weight"), size=256 * 512, dtype=torch.bfloat16)
    weight, x = weight.view(256, 512), numbers(256, 2, seed=6)
    if written:
        weight[77, 5] = 3.0
    kept = weight.clone()

    def resident():
        first = -(-weight.data_ptr() // mmap.PAGESIZE)
        pages = np.fromfile("/proc/self/pagemap", np.uint64, 60, offset=8 * first)
        return int((pages >> np.uint64(63)).sum())

    assert resident() == 60
    keep_packed(weight)
    linear(x, weight)
    assert packs(weight) and (resident() > 0) == written
    assert torch.equal(weight, kept)


@pytest.mark.full
def test_without_the_product_of_pytorch_results_are_the_same():
    """Where PyTorch lacks the product, in a process of its own."""
    code = (
        "import torch; torch.ops.quantized.linear_dynamic_fp16 = None; "
        "import neuron_cpu; neuron_cpu.ensure_sdk(); "
        "from tests.core import test_short as t; "
        "w = t.numbers(128, 128); t.keep_packed(w); "
        "assert t.packing.packs_of(w) is None; print(float(t.linear(t.numbers(128, 1), w).sum()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    wanted = float(linear(numbers(128, 1), numbers(128, 128)).sum())
    assert float(done.stdout) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    "maker, name", [("_jit_get_operation", ""), ("_get_operation_overload", "default")]
)
def test_threads_that_meet_an_operator_first_share_it(
    monkeypatch: pytest.MonkeyPatch, maker: str, name: str
) -> None:
    """PyTorch's dispatcher holds no reference to what it was given first: recording from several
    ranks at once ended in SIGSEGV."""
    make, found = getattr(torch._C, maker), []

    def look_up():
        packet = torch.ops.of_threads.first
        found.append(getattr(packet, name) if name else packet)

    other = threading.Thread(target=look_up)

    def meanwhile(*args):
        monkeypatch.undo()
        other.start()
        other.join(0.2)  # it has to wait for this thread; PyTorch alone lets it go ahead
        return make(*args)

    with torch.library._scoped_library("of_threads", "FRAGMENT") as library:
        library.define("first(Tensor x) -> Tensor")
        monkeypatch.setattr(torch._C, maker, meanwhile)
        look_up()
        other.join()
        look_up()
    assert found[0] is found[1] is found[2]
