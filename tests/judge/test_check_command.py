"""`neuron_cpu check --ref` and `--baseline` as a user types them."""

from __future__ import annotations

import json

import pytest

from neuron_cpu.__main__ import main

FILE = """
import functools

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch


@nki.jit
def scaled(x_hbm, factor=2.0):
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    rows_sb = nl.load(x_hbm)
    nl.store(out_hbm, rows_sb * factor)
    return out_hbm


@nki.jit
def detour(x_hbm, factor=2.0):
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    rows_sb = nl.load(x_hbm)
    rows_sb = nl.exp(nl.log(nl.abs(rows_sb))) * nl.sign(rows_sb)
    nl.store(out_hbm, rows_sb * factor)
    return out_hbm


@nki.jit
def broken(x_hbm, factor=2.0):
    raise ValueError("odd")


def twice(x, factor=2.0):
    return x * factor


def thrice(x, factor=2.0):
    return x * 3


def decorated(function):
    return functools.wraps(function)(lambda *arguments: function(*arguments))


made = decorated(nki.jit(scaled.function))


@nki.jit
def one(x_hbm):
    out_hbm = nl.ndarray((1, 1), x_hbm.dtype, buffer=nl.shared_hbm)
    nl.store(out_hbm, nl.load(x_hbm[0:1, 0:1]))
    return out_hbm


def first(x):
    return x[0, 0]


CONSTANT = 3


def turned(factor, x_hbm):
    return x_hbm * factor


def bare(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    nl.store(out_hbm, nl.load(x_hbm) * 2.0)
    return out_hbm


@nki.jit
def narrow(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, nl.bfloat16, buffer=nl.shared_hbm)
    nl.store(out_hbm, nl.load(x_hbm) * 2.0)
    return out_hbm


@nki.jit
def far(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    far_sb = nl.load(x_hbm) * 2.0 + 65536.0
    nl.store(out_hbm, far_sb - 65536.0)
    return out_hbm


@nki.jit
def whole(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, nl.int32, buffer=nl.shared_hbm)
    nl.store(out_hbm, nl.load(x_hbm) * 2.0)
    return out_hbm
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


def check(*arguments):
    return main(["check", *arguments])


@pytest.mark.parametrize(
    ("kernel", "status", "told"),
    [
        ("bare", 1, "mine.py:bare has no @nki.jit, so a call of it fails"),
        ("narrow", 0, "result 0 is bfloat16 where the reference returns float32"),
        ("far", 1, "something else than the reference, or values cancel in fp32"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_missing_decorator_and_other_types_are_told(kernel, status, told, path, capsys) -> None:
    arguments = ["--ref", "mine.py:twice", "--arg", "64x96:f32", "--values", "random"]
    assert check(f"mine.py:{kernel}", *arguments) == status
    said = " ".join("".join(capsys.readouterr()).split())
    assert told in said


def test_kernels_that_are_decorated_and_numbers_of_a_reference(path) -> None:
    arguments = ["--arg", "64x96:f32", "--values", "random"]
    assert check("mine.py:made", "--ref", "mine.py:twice", *arguments) == 0
    assert check("mine.py:one", "--ref", "mine.py:first", *arguments) == 0


def test_a_right_and_a_wrong_kernel(path, capsys):
    arguments = ["--arg", "64x96:bf16", "--case", "8x8:bf16 factor=0.5", "--dtype", "bf16"]
    arguments += ["--dtype", "f32", "--seed", "1", "--seed", "2", "--json", "found.json"]
    assert check("mine.py:scaled", "--ref", "mine.py:twice", *arguments) == 0
    content = json.loads((path / "found.json").read_text())
    cases = [one["case"] for one in content["cases"]]
    assert cases == ["64x96:bf16", "64x96:f32", "8x8:bf16 factor=0.5", "8x8:f32 factor=0.5"]
    assert content["passed"] and all(one["legal"] and one["correct"] for one in content["cases"])
    assert {r["seed"] for r in content["cases"][0]["results"]} == {1, 2}
    assert "correct" in capsys.readouterr().out
    assert check("mine.py:scaled", "--ref", "mine.py:thrice", *arguments) == 1
    told = capsys.readouterr().out
    assert "wrong" in told and "first wrong element: (0, 0)" in told


def test_before_and_after(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["--baseline", "mine.py:detour", "--arg", "64x96:f32", "--json", "found.json"]
    assert check("mine.py:scaled", *arguments) == 0  # without --ref: times alone
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines()[1:])) <= 80
    content = json.loads((path / "found.json").read_text())["baseline"]
    (ratio,) = content["speedups"]
    assert ratio > 1 and f"{ratio:.2f} times as fast as mine.py:detour" in " ".join(told.split())
    signs = {line["text"]: line["sign"] for line in content["lines"]}
    assert signs["rows_sb = nl.load(x_hbm)"] == " "
    assert signs["rows_sb = nl.exp(nl.log(nl.abs(rows_sb))) * nl.sign(rows_sb)"] == "-"
    total = sum(line["after_ns"] or 0 for line in content["lines"])
    assert total == pytest.approx(
        json.loads((path / "found.json").read_text())["cases"][0]["speed"]["time_ns"]
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["mine.py:scaled", "--ref", "mine.py:twice"], "without arguments"),
        (["mine.py:scaled", "--ref", "mine.py:absent", "--arg", "8x8:f32"], "no function 'absent'"),
        (["mine.py:scaled", "--ref", "mine.py", "--arg", "8x8:f32"], "write mine.py:twice or"),
        (["mine.py:scaled", "--ref", "mine.py:turned", "--arg", "8x8:f32", "--arg", "2.0"],
         "takes factor, x_hbm, expected the kernel's order"),
        (["mine.py:scaled", "--ref", "mine.py:CONSTANT", "--arg", "8x8:f32"], "no function"),
        (["mine.py:scaled", "--case", "8x8:f32"], "--case without a reference"),
        (["mine.py:scaled", "--ref-library", "torch"], "--ref-library without a reference"),
        (["mine.py:scaled", "--ref", "mine.py:twice", "--arg", "8x8:f32", "--values", "odd"],
         "--values odd, expected some of"),
        (["mine.py:scaled", "--ref", "mine.py:twice", "--arg", "8x8:f32", "--dtype", "i32"],
         "--dtype i32"),
        (["mine.py:scaled", "--ref", "mine.py:twice", "--arg", "8x8:f32", "--arg", "1", "--arg",
          "2"], "factor=2.0); give each as --arg, 128x512:bf16 or a constant"),
        (["mine.py:broken", "--arg", "8x8:f32"], "raises ValueError"),
        (["mine.py:scaled", "--ref", "mine.py:twice", "--case", "'"], "cannot be split"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(arguments, sentence, path, capsys):
    assert check(*arguments) == 2
    assert sentence in capsys.readouterr().err


CHOOSING = '''
import nki, nki.isa as nisa, nki.language as nl
import numpy as np


@nki.jit
def largest(x_hbm):
    """Eight places in each row with the largest values, the first of equal ones first."""
    out_hbm = nl.ndarray((x_hbm.shape[0], 8), dtype=nl.uint32, buffer=nl.shared_hbm)
    x_sb = nl.load(x_hbm)
    values_sb = nl.ndarray(out_hbm.shape, dtype=nl.float32, buffer=nl.sbuf)
    places_sb = nl.ndarray(out_hbm.shape, dtype=nl.uint32, buffer=nl.sbuf)
    nisa.max8(dst=values_sb, src=x_sb)
    nisa.nc_find_index8(dst=places_sb, data=x_sb, vals=values_sb)
    nl.store(out_hbm, places_sb)
    return out_hbm


def last_first(x):
    return np.argsort(x, axis=1, kind="stable")[:, ::-1][:, :8]


def worst(x):
    return np.argsort(x, axis=1)[:, :8]


def up_to_ties(got, right, x):
    same = np.take_along_axis(x, got.astype(int), 1) == np.take_along_axis(x, right.astype(int), 1)
    return np.where(same, right, got)


def sorted_rows(got, right):
    return np.sort(got, axis=1)


def one_too_many(got, right):
    return got, right
'''


@pytest.mark.parametrize(
    ("reference", "options", "status", "told"),
    [
        ("last_first", "", 1, "equal values may be chosen, let a function compare: --outputs"),
        ("last_first", "--outputs up_to_ties", 0, "correct"),
        ("worst", "--outputs up_to_ties", 1, "wrong"),
        ("last_first", "--outputs sorted_rows", 1, "wrong"),
        ("last_first", "--outputs one_too_many", 2, "2 results of 1"),
        ("last_first", "--outputs last_frist", 2, "; write last_first"),
    ],
)
def test_indices_up_to_ties(reference, options, status, told, tmp_path, capsys):
    path = tmp_path / "choosing.py"
    path.write_text(CHOOSING)
    arguments = f"check {path}:largest --ref {path}:{reference} --arg 8x24:f32 {options}".split()
    assert main([*arguments, "--values", "random", "--values", "ties"]) == status
    out, err = capsys.readouterr()
    assert told in " ".join((out + err).split())
