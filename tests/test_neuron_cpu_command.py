"""`python -m neuron_cpu` with bad files, arguments and kernels: one sentence and status 2."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from neuron_cpu.__main__ import main

KERNEL = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import numpy as np
import torch

@nki.jit
def k(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.load(x)
    {}
    nl.store(out, t)
    return out

def r(x):
    return x
"""


@pytest.fixture
def target(tmp_path):
    def write(statement="pass", text=KERNEL):
        path = tmp_path / "kernels.py"
        path.write_text(text.format(statement))
        return f"{path}:k"

    return write


def told(capsys):
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("k.py", "write check k.py, or run k.py"),
        (
            "profile k.py:k --input-shape 128x64 --dtype f32",
            "there is no --input-shape; write --arg 128x64:bf16. There is no --dtype; write the ty",
        ),
        ("profile k.py:k --targt trn1", "there is no --targt; write --target"),
        ("profile k.py:k 128x64", "'128x64' is one argument too many; write --arg 128x64:bf16"),
        ("profile --file k.py --kernel k --grid 2 4", "write k.py:k in the place of both"),
        ("benchmark k.py:k", "there is no command 'benchmark'; write profile"),
        ("profile k.py:k --html", "--html: expected one argument; write --html PATH"),
        ("compare k.py:k k.py:l", "for two kernels write check and --baseline"),
        ("check k.py:k --values ties zeros", "one argument too many; write --values zeros"),
        ("check k.py k --arg 8x8:f32", "write k.py:k"),
        ("profile k.py:k --trace k.py", "expected a file to write, got the source k.py"),
        (
            "profile k.py:k --target trn2n",
            "choose from 'trn1', 'inf2', 'trn2', 'trn3'); write --target trn2",
        ),
        ("sweep k.py:k --sizes 4", "with N in --arg. There is no --sizes; write --range N=4"),
        ("compare k.py:k --against fp32", "'noise'); leave it out for shadow: reference"),
        ("oracle requests.json", "write oracle < requests.json"),
        ("learn scale hint", "write --hint"),
        ("learn 1 --hint --solution", "--hint; leave one of them out"),
        ("sweep k.py:k --range N 8..16", "write --range N=8..16"),
        ("check k.py:k --output o.json --tile 4", "write --json. There is no --tile; leave it out"),
        ("check k.py:k[2] --arg 8x8:f32", "write k.py:k --grid 2"),
        (
            "compare k.py:k --seed -1 --tolerance nan --rtol 1",
            "as 1. Argument --tolerance: expected",
        ),
    ],
)
def test_what_a_command_does_not_take(command, advice, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["neuron_cpu"])
    with pytest.raises(SystemExit, match="2"):
        main(command.split())
    assert advice in told(capsys)


def test_a_file_is_no_folder_of_answers(target, capsys):
    assert main(["judge", target().removesuffix(":k")]) == 2
    assert "is a file, expected a folder" in told(capsys)


@pytest.mark.parametrize(
    ("statement", "advice"),
    [
        (
            "t = nl.sqroot(t)",
            "nl.sqroot does not exist, expected a name of neuronxcc.nki.language; use nl.sqrt",
        ),
        ("t = np.exp(t)", "use nl.exp"),
        ("t = nl.sum(t, dim=1)", "write axis= for dim="),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("tt = 1; t = t2", "write t"),
        ("t = t.unheard_of()", "a tile has no .unheard_of"),
        ("print(f'{t:.2f}')", "use nl.device_print"),
        ("t = (lambda f: f(f))(lambda f: f(f))", "loop over a range"),
        ("t = t.astype(np.float64)", "is not an NKI type"),
        ("t = t * int(t[0, 0])", "as a Python number"),
    ],
)
def test_errors_inside_a_kernel_have_their_line(statement, advice, target, capsys):
    assert main(["profile", target(statement), "--arg", "128x64:bf16"]) == 2
    error = told(capsys)
    assert advice in error and "kernels.py:11" in error and "with these arguments" not in error


def test_a_kernel_without_an_end_is_ended(target, capsys):
    endless = target("while True: pass")
    for command in (["profile"], ["check", "--ref", f"{endless[:-1]}r"]):
        arguments = [*command, endless, "--arg", "128x64:bf16", "--time-limit", "1"]
        assert main(arguments) == 2
        error = told(capsys)
        assert "does not come to its end (it takes longer than 1 s)" in error
        assert "kernels.py:11" in error


def test_time_outside_of_the_kernel_is_bounded_too(target, monkeypatch, capsys):
    from neuron_cpu.judge import verdict

    def endless(*_):
        while True:
            pass

    monkeypatch.setattr(verdict, "_try", endless)
    kernel = target()
    arguments = ["--ref", f"{kernel[:-1]}r", "--arg", "128x64:bf16", "--time-limit", "1"]
    assert main(["check", kernel, *arguments]) == 2
    assert "it takes longer than 1 s" in (error := told(capsys)) and "--time-limit" in error


def test_an_interrupt_says_where_the_kernel_was(target, capsys):
    stop = "import signal; signal.raise_signal(signal.SIGINT)"
    assert main(["profile", target(stop), "--arg", "128x64:bf16"]) == 130
    assert "interrupted in " in (error := told(capsys)) and "kernels.py:11." in error
    assert main(["profile", target(text=f"{stop}\n"), "--arg", "128x64:bf16"]) == 130
    assert "kernels.py:1." in told(capsys)


def test_wrong_arguments_are_told_as_such(target, capsys):
    assert main(["profile", target(), "--arg", "128x64:bf16", "--arg", "3"]) == 2
    said = told(capsys)
    assert "a call does not fit the parameters" in said and "give each as --arg" in said
    assert main(["profile", target(), "--arg", "128,64"]) == 2
    assert "a tensor is 128x64:bf16" in told(capsys)


def test_a_misspelt_file_is_answered_with_the_nearest(target, capsys):
    assert main(["profile", target().replace("kernels.py", "kernel.py")]) == 2
    assert "expected a Python file; write " in (said := told(capsys)) and "kernels.py." in said


def test_names_alone_and_folders_are_answered_with_files(target, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    Path(target().removesuffix(":k")).rename("sub/kernels.py")
    for wrong, right in (("k", "write sub/kernels.py:k."), ("sub:k", "write sub/kernels.py.")):
        assert main(["profile", wrong, "--arg", "8x8:f32"]) == 2
        assert right in told(capsys)
    assert main(["check", "sub/kernels.py:k", "--values", "zeros"]) == 2
    assert "--values without a reference" in told(capsys)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NKI_CPU_STRICT", "yes", "'yes', expected 0 or 1"),
        ("NKI_CPU_EAGR", "1", "write NKI_CPU_EAGER"),
        ("NKI_CPU_MERGE", "off", "write NKI_CPU_MERGE=0"),
        ("NKI_CPU_SILENCE", "sim_skewed,sim_spil", "names 'sim_skewed', expected"),
        ("NKI_CPU_PACKED_MIB", "lots", "write NKI_CPU_PACKED_MIB=4096"),
    ],
)
def test_variables_that_nothing_reads(name, value, said, target, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    assert main(["profile", target(), "--arg", "128x64:bf16"]) == 2
    assert said in told(capsys)


def test_a_file_that_exits_is_refused(target, capsys):
    assert main(["profile", target(text="import sys\nsys.exit(0)\n")]) == 2
    assert "cannot be imported (SystemExit" in told(capsys)


@pytest.mark.parametrize("value", ["9" * 30 + "x4:bf16", "[" * 10_000, "f("])
def test_values_that_are_none(value, target, capsys):
    assert main(["profile", target(), "--arg", value]) == 2
    assert "argument " in told(capsys)


def test_places_that_are_none(target, tmp_path, capsys):
    file = target().removesuffix(":k")
    assert main(["judge", file, "--template"]) == 2
    assert f"Cannot use {file}: File exists; correct the path." in told(capsys)
    (tmp_path / "none").mkdir()
    assert main(["judge", str(tmp_path / "none")]) == 2
    assert "has no column_sum.py or other, expected one file an operator" in told(capsys)


ARGS = "--arg=128x8:f32"
JSON = ("--json", "-")


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("profile", ARGS, "--html=page.html"), "time_ns"),
        (("compare", ARGS), "worst"),
        (("check", ARGS), 0),
        (("check", "--baseline=BASE", ARGS, "--values=zeros", "--values=ties"), "cases"),
        (("sweep", "--arg=128xN:f32", "--range=N=8,16"), "N"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_figures_go_to_standard_output(arguments, key, target, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, *options = [str(word).replace("BASE", target()) for word in arguments]
    assert main([command, target(), *options, *JSON]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)[key] is not None and "k" in shown.err
    assert main([command, target(), *options, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_completion_needs_its_library(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit, match="2"):
        main(["--print-completion", "bash"])
    assert "needs shtab, which is not installed: pip install shtab" in told(capsys)
    made = SimpleNamespace(complete=lambda parser, shell: f"{parser.prog} {shell}")
    monkeypatch.setitem(sys.modules, "shtab", made)
    with pytest.raises(SystemExit, match="0"):
        main(["--print-completion", "zsh"])
    assert capsys.readouterr().out.endswith(" zsh\n")
