"""What a kernel file uses, and who has shown that a device takes it."""

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import pytest

import neuron_cpu.core.current  # noqa: F401 - its functions have rows
from neuron_cpu.__main__ import main
from neuron_cpu.core.check import provenance
from neuron_cpu.core.device import evidence

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = """
import torch
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import neuronxcc.nki.compiler as ncc
"""


TODAY = """
import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
"""


def kernel(body, before="", imports=IMPORTS):
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"{imports}\n{before}\n@nki.jit\ndef k(x):\n    t = nl.load(x)\n{lines}\n"


def constructs(body, before="", imports=IMPORTS):
    return set(provenance.in_source(kernel(body, before, imports)))


def test_every_function_of_the_language_has_a_row_and_so_have_its_keywords():
    rows = provenance.table()
    for short, module in (("nl", nl), ("nisa", nisa)):
        for name, value in vars(module).items():
            if not inspect.isfunction(value) or name.startswith("_") or name == "label_all":
                continue
            named = (p for p in inspect.signature(value).parameters.values() if p.kind < 4)
            keywords = [p.name for p in named if p.kind != p.VAR_POSITIONAL]
            wanted = {f"{short}.{name}", *(f"{short}.{name}({k}=)" for k in keywords)}
            assert wanted <= set(rows), name


@pytest.mark.parametrize("name", ["language", "isa", "collectives"])
def test_every_name_of_today_has_a_row_and_so_have_keywords_and_methods(name):
    module, rows = importlib.import_module(f"nki.{name}"), provenance.table()
    for one in set(module.__all__) - {"bool", "range"}:
        value = getattr(module, one)
        wanted = {f"nki.{name}.{one}"}
        if inspect.isfunction(value):
            given = inspect.signature(value).parameters.values()
            keywords = [p.name for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            wanted |= {f"nki.{name}.{one}({k}=)" for k in keywords}
        assert wanted <= set(rows), one
    for method in ("ap", "reshape", "permute", "view", "select", "slice", "broadcast"):
        assert f"nki.language.NkiTensor.{method}" in rows
    assert "nki.language.NkiTensor.ap(scalar_offset=)" in rows


def data():
    return json.loads(evidence.DATA.read_text(encoding="utf-8"))


def published(name):
    return json.loads((ROOT / "lab" / "data" / name).read_text(encoding="utf-8"))


def test_the_page_counts_what_ran():
    page = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    assert f"names {len(published('provenance_ran.json')['ran'])} checkouts" in page
    seen = [row for row in provenance.table().values() if row.status == provenance.SEEN]
    assert f"{len(seen)} constructs and {len(data()['uses'])} uses" in page


OF_TODAY = [
    ("nki.isa.activation(bias=)", "nisa.activation(t, nl.exp, t, bias=t)",
     "nisa.activation(t, nl.exp, t, t)"),
    ("nki.language.exp", "nisa.activation(t, nl.exp, t)", "nl.exp(t)"),
    ("nki.language.exp()", "nl.exp(t)", "nisa.activation(t, nl.exp, t)"),
    ("nki.language.NkiTensor.ap(scalar_offset=)", "t.ap([[1, 1]], scalar_offset=r)",
     "t.ap([[1, 1]], 0)"),
    ("nki.language.NkiTensor.permute", "v = t.permute((0, 1))", "v = t.shape"),
    ("nki.collectives.all_reduce(op=)", "ncc.all_reduce([t], [t], g, op=nl.add)",
     "ncc.all_reduce([t], [t], g, nl.add)"),
    ("nki.isa.dge_mode.hwdge", "nisa.dma_copy(t, x, dge_mode=nisa.dge_mode.hwdge)",
     "nisa.dma_copy(t, x, dge_mode=nisa.dge_mode.swdge)"),
    ("nki.isa.dge_mode.hwdge", "nisa.dma_copy(t, x, dge_mode=nisa.dge_mode.hwdge.value)",
     "nisa.dma_copy(t, x, dge_mode=nisa.dge_mode.swdge.value)"),
    ("nki.isa.NkiInstruction.depends_on", "a = nisa.dma_copy(t, x)\na.depends_on(a)",
     "a = nisa.dma_copy(t, x)"),
    ("nki.index: slice of a slice", "v = t[0:64, :][0:32, :]", "v = t[:, :][0:32, :]"),
    ("nki.while on Python values", "while n > 1: n //= 2", "if x.shape[0] > 1: pass"),
    ("nki.PSUM tile of nl.bfloat16", "p = nl.ndarray((8, 8), nl.bfloat16, buffer=nl.psum)",
     "p = nl.ndarray((8, 8), nl.bfloat16, buffer=nl.sbuf)"),
]  # fmt: skip


@pytest.mark.parametrize(("construct", "body", "near_miss"), OF_TODAY)
def test_what_today_s_kernels_use_is_found_and_near_misses_are_not(construct, body, near_miss):
    assert construct in constructs(body, imports=TODAY)
    assert construct not in constructs(near_miss, imports=TODAY)
    assert construct in provenance.table()


def test_views_of_aws_s_library_are_no_tensors():
    views = "from ..utils.tensor_view import TensorView"
    assert "nki.language.NkiTensor.slice" in constructs("t.slice(0, 1, 2)", imports=TODAY)
    assert "nki.language.NkiTensor.slice" not in constructs("t.slice(0, 1, 2)", views, TODAY)


FORMS = [
    ("index: slice of a slice", "u = t[0:64, :]\nv = u[0:32, :]", "v = t[0:64, :]"),
    ("index: slice of a slice", "v = t[0:64, :][0:32, :]", "v = t[:, :][0:32, :]"),
    ("index: slice of a slice", "s = nl.ds(0, 8)\nu = t[:, s]\nv = u[:, s]", "v = t[:, s]"),
    ("index: slice with a step", "v = t[:, 0:8:2]", "v = t[:, 0:8]"),
    ("nl.affine_range(start, stop)", "for i in nl.affine_range(1, 3): pass",
     "for i in nl.affine_range(3): pass"),
    ("while on Python values", "while n > 1: n //= 2", "if x.shape[0] > 1: pass"),
    ("tile of a static_range body used after it",
     "for i in nl.static_range(3):\n    v = nisa.tensor_copy(t)\nnl.store(x, v)",
     "for i in nl.static_range(3):\n    v = nisa.tensor_copy(t)\nv = t\nnl.store(x, v)"),
    ("HBM scratch tensor created in a loop",
     "for i in nl.affine_range(3):\n    h = nl.ndarray((8, 8), nl.float32, buffer=nl.hbm)",
     "h = nl.ndarray((8, 8), nl.float32, buffer=nl.hbm)\nfor i in nl.affine_range(3): pass"),
    ("PSUM tile of nl.bfloat16", "p = nl.ndarray((8, 8), nl.bfloat16, buffer=nl.psum)",
     "p = nl.ndarray((8, 8), nl.bfloat16, buffer=nl.sbuf)"),
    ("function defined in a kernel", "def f(): pass", "f = 1"),
    ("ncc.sbuf.mod_alloc(base_addr=)", "b = ncc.sbuf.mod_alloc(base_addr=0)",
     "b = ncc.sbuf.mod_alloc(0)"),
    ("nisa.activation(bias=)", "nisa.activation(nl.exp, t, bias=t)", "nisa.activation(nl.exp, t)"),
]  # fmt: skip


@pytest.mark.parametrize(("construct", "body", "near_miss"), FORMS)
def test_forms_are_found_and_near_misses_are_not(construct, body, near_miss):
    assert construct in constructs(body)
    assert construct not in constructs(near_miss)
    assert construct in provenance.table()


HELPER = "def use(tile, f):\n    return f(nisa.tensor_copy(tile))\n"


def test_functions_that_are_passed_on():
    closure = "def inner(u): return u\nuse(t, inner)"
    assert "closure passed as an argument" in constructs(closure, HELPER)
    assert "closure passed as an argument" not in constructs("v = sorted(x, key=lambda i: i)")
    passed = "def plain(u): return nl.exp(u)\n" + HELPER
    assert "function of the file passed as an argument" in constructs("use(t, plain)", passed)
    assert "function of the file passed as an argument" not in constructs("plain(t)", passed)


def test_objects_that_hold_tiles():
    holder = "class Holder:\n    def __init__(self):\n        self.{}\n"
    held = "tile = nl.ndarray((8, 8), nl.float32)"
    assert "tile in an attribute of an object" in constructs("Holder()", holder.format(held))
    other = "size = nl.tile_size.pmax"
    assert "tile in an attribute of an object" not in constructs("Holder()", holder.format(other))


def test_the_submission_uses_nothing_unproven_but_what_its_winner_had():
    """Which is no evidence: the commit that the contest scored is not known."""
    findings = provenance.judge(provenance.in_source((ROOT / "llama.py").read_text("utf-8")))
    assert len(findings) > 40
    unproven = {f.construct for f in findings if f.status == provenance.UNPROVEN}
    assert unproven <= {"while on Python values"}


@pytest.mark.full
def test_the_table_is_what_its_script_makes(tmp_path):
    """Without checkouts rows of published files stay; all else is made anew, and is the same."""
    done = subprocess.run(
        [sys.executable, "-m", "lab.provenance_table", "--public", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "its rows stay" in done.stderr


@nki.jit
def transpose_kernel(x, psum_dtype, start):
    out = nl.ndarray((32, 64), x.dtype, buffer=nl.shared_hbm)
    turned_psum = nl.ndarray((64, 128), psum_dtype, buffer=nl.psum)
    turned_psum[...] = nisa.nc_transpose(nl.load(x), dtype=psum_dtype)
    turned_sb = nl.ndarray((64, 128), x.dtype, buffer=nl.sbuf)
    turned_sb[...] = nisa.tensor_copy(turned_psum)
    part_sb = nl.ndarray((32, 64), x.dtype, buffer=nl.sbuf)
    part_sb[...] = nisa.tensor_copy(turned_sb[nl.ds(start, 32), 0:64])
    nl.store(out, part_sb)
    return out


@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        ({}, provenance.SEEN, "trn1"),
        ({"start": "77"}, provenance.DOCUMENTED, "nearest: start "),
        ({"memory": "hbm"}, provenance.DOCUMENTED, "nearest: memory "),
        ({"dtype": "int8", "role": "result"}, provenance.DOCUMENTED, "nearest: "),
        ({"instruction": "nonzero_with_count"}, provenance.DOCUMENTED, "no public run"),
    ],
)
def test_a_use_that_ran_is_seen_and_another_is_told_what_differs(change, status, told):
    use = evidence.Use("neuronxcc", "nc_matmul", "TensorE", "operand", "sbuf", "bfloat16", "0")
    (found,) = provenance.judge({use._replace(**change): [3]})
    assert found.status == status and told in found.source and found.line == 3


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    path, listed = tmp_path / "kernels.py", tmp_path / "list.json"
    path.write_text(kernel("nl.store(x, t)"))
    assert main(["check", str(path), "--json", str(listed)]) == 0
    assert "0 unproven" in capsys.readouterr().out
    assert {one["construct"] for one in json.loads(listed.read_text())} >= {"nl.load", "nl.store"}
    path.write_text(kernel("nl.invented(t)"))
    assert main(["check", f"{path}::k"]) == 1
    told = capsys.readouterr().out
    assert "(nl.invented)" in told and "kernels.py:k --arg x=128x512:f32 --ref FILE" in told


@pytest.mark.parametrize(
    ("target", "text", "arguments", "told"),
    [
        ("missing.py", "", [], "does not exist"),
        ("kernels.py", "def k(:", [], "is no Python"),
        ("kernels.py", "a\0b", [], "is no Python"),
        ("kernels.py:other", "def k(): pass", [], "no function 'other'"),
        ("kernels.py", "def k(): pass", ["--arg", "8x8:bf16"], "names no kernel"),
    ],
)
def test_bad_input_is_one_sentence(target, text, arguments, told, tmp_path, capsys):
    (tmp_path / "kernels.py").write_text(text)
    assert main(["check", str(tmp_path / target), *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error


def test_arguments_add_what_the_trace_shows(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")  # names of constructs on one line, however long the path
    path = tmp_path / "turning.py"
    source = inspect.getsource(transpose_kernel.function)
    path.write_text(f"{IMPORTS}\n{source}")
    given = ["--arg", "128x64:f32", "--arg", "'float32'", "--arg", "0"]
    main(["check", f"{path}:transpose_kernel"])
    assert "nc_transpose on TensorE" not in capsys.readouterr().out
    main(["check", f"{path}:transpose_kernel", *given])
    assert "nc_transpose on TensorE: result in psum, float32" in capsys.readouterr().out


def test_what_compilers_refuse_in_every_form_is_refused(tmp_path, capsys):
    path = tmp_path / "kernels.py"
    path.write_text(kernel("nisa.tensor_scalar(t, t, nl.divide, 2.0)", imports=TODAY))
    assert main(["check", str(path)]) == 1
    told = capsys.readouterr().out
    assert "1 refused" in told and "(nki.language.divide)" in told
