"""Releases 2.27 to 2.33 of the current language: what came, and spellings of before."""

import importlib.util
import warnings

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError, NkiWarning

X = np.arange(32, dtype=np.float32).reshape(4, 8)


def run(body, release, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NKI", release)
    monkeypatch.setenv("NKI_CPU_SILENCE", "sim_parser_subset")  # a kernel in a function

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(tile, x)
        body(tile)
        nisa.dma_copy(out, tile)
        return out

    return kernel(X)


# Names and keywords by the release notes of each (nki 0.3.0 to 0.7.0).
NOTES = {
    "2.29": "load store exp mean softmax rms_norm isa.dropout nc_matmul(accumulate) "
    "nc_matmul_mx(accumulate) dma_copy(engine) sendrecv(dma_engine) ndarray(address)",
    "2.30": "abs_max abs_min activate2 dma_copy(priority) dma_transpose(priority) "
    "dma_compute(oob_mode) tensor_scalar_reduce(reduce_cmd) tensor_scalar_reduce(reduce_init) "
    "all_gather(priority) all_to_all_v(priority) reduce_scatter(priority)",
    "2.31": "get_nc_sub_version all_reduce(name) collective_permute(name) all_to_all(name)",
    "2.32": "topk fori_loop while_loop all_gather_v tensor_scalar_reduce(reduce_res_negate)",
    "2.33": "tiles blocks alloc_tiles alloc_blocks all_gather_v_prepare all_gather_v_trigger "
    "all_to_all_v_prepare all_to_all_v_trigger scalar_tensor_tensor(reduce_op) "
    "scalar_tensor_tensor(reduce_cmd) scalar_tensor_tensor(reduce_res)",
}


@pytest.mark.parametrize(
    ("release", "told"), [(release, one) for release, all in NOTES.items() for one in all.split()]
)
def test_every_name_is_refused_until_the_release_that_brought_it(release, told, monkeypatch):
    name, _, word = told.removeprefix("isa.").rstrip(")").partition("(")
    modules = (nisa, nl, ncc) if told.startswith("isa.") else (nl, nisa, ncc)
    function = next(getattr(m, name) for m in modules if name in m.__all__)
    given = {word: None} if word else {}
    for chosen, refused in ((f"2.{int(release[2:]) - 1}", True), (release, False)):
        monkeypatch.setenv("NEURON_CPU_NKI", chosen)
        try:
            said = str(function(**given))
        except Exception as error:  # other arguments are missing
            said = str(error)
        assert (f"is there from SDK {release} on" in said) is refused, said


FORMER = {
    "dtype": lambda t: nisa.tensor_copy(t, t, dtype=nl.float32),
    "imm": lambda t: nisa.register_move(nisa.register_alloc(0), imm=3),
}


@pytest.mark.parametrize("word", FORMER)
def test_former_spellings_are_taken_and_told(word, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(run(FORMER[word], "2.28", monkeypatch), X)
    with pytest.warns(NkiWarning, match=rf"{word}=.*2.28.*sim_former_spelling"):
        run(FORMER[word], "2.33", monkeypatch)


def test_the_order_of_before(monkeypatch):
    """`affine_select` had the offset third, memory had names as strings."""

    def body(tile):
        assert nl.ndarray((2, 2), nl.float32, buffer="sbuf").buffer is nl.sbuf
        nisa.affine_select(tile, [[1, 8]], -2, 0, tile, 0.0, nl.greater_equal)

    found = run(body, "2.28", monkeypatch)
    assert (found[:, :2] == 0).all() and np.array_equal(found[:, 2:], X[:, 2:])
    with pytest.raises(NkiError, match="sim_buffer"):
        run(lambda t: nl.ndarray((2, 2), nl.float32, buffer="sbuf"), "2.29", monkeypatch)


@pytest.mark.parametrize("release", ["2.27", "2.28", "2.29", "2.33"])
def test_axis_1_was_the_last_one(release, monkeypatch):
    """The order of sums is of no matter here: whole numbers. numpy says what they are."""

    def body(tile):
        sums = nl.ndarray((4, 2), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(sums, nl.add, tile.reshape((4, 2, 4)), axis=1)
        nisa.tensor_copy(tile[:, 0:2], sums)

    if release in ("2.27", "2.28"):
        found = run(body, release, monkeypatch)
        assert np.array_equal(found[:, 0:2], X.reshape(4, 2, 4).sum(axis=2))
    else:
        with pytest.raises(NkiError, match="sim_reduce_axis"):
            run(body, release, monkeypatch)


@pytest.mark.parametrize("release", ["2.28", "2.33"])
def test_a_kernel_names_its_target(release, monkeypatch, target):
    target("trn1")
    monkeypatch.setenv("NEURON_CPU_NKI", release)

    def plain(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        assert nisa.get_nc_version() == nisa.nc_version.gen4
        nisa.dma_copy(out, x)
        return out

    if release == "2.28":
        kernel = nki.jit(plain, platform_target="trn3")
    else:
        with pytest.warns(NkiWarning, match="which 2.33 refuses"):
            kernel = nki.jit(plain, platform_target="trn3")
    assert np.array_equal(kernel(X), X)


SOURCE = """
import nki, nki.isa as nisa, nki.language as nl
NEURON_CPU_NKI = "{release}"

@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x))
    return out
"""


@pytest.mark.parametrize("release", ["2.28", "2.30", "1.0"])
def test_a_file_says_its_release(release, tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NKI", "2.29")
    path = tmp_path / "own.py"
    path.write_text(SOURCE.format(release=release))
    spec = importlib.util.spec_from_file_location("own", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if release == "2.30":
        assert np.array_equal(module.kernel(X), X)
        return
    rule = "sim_newer_release" if release == "2.28" else "sim_unknown_release"
    with pytest.raises(NkiError, match=rule):
        module.kernel(X)


def test_a_launch_of_one_number_in_a_tuple():
    """As triton-viz's examples of 2.27 launch: kernel[(1,)]."""

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, x)
        return out

    x = np.ones((4, 4), np.float32)
    assert (kernel[(1,)](x) == x).all()
