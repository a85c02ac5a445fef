"""`python -m neuron_cpu run SCRIPT ARGS...`, and `ensure_sdk` called from sitecustomize."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

SCRIPT = """
import multiprocessing, subprocess, sys
from pathlib import Path
import numpy
import neuronxcc.nki as nki, neuronxcc.nki.language as nl
import beside


@nki.jit
def double(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    nl.store(out_hbm, nl.load(x_hbm) * 2.0)
    return out_hbm


def main():
    print(__name__, sys.argv, beside.NAME, Path(sys.path[0]) == Path(__file__).parent)
    print(double(numpy.ones((2, 3), numpy.float32)).sum())
    child = "import neuronxcc; print(neuronxcc.__file__)"
    sys.stdout.flush()
    subprocess.run([sys.executable, "-c", child], check=True)
    process = multiprocessing.get_context("spawn").Process(target=report, args=(double.__name__,))
    process.start()
    process.join()
    sys.exit(process.exitcode)


def report(name):
    print("spawned", name, __name__, flush=True)
    sys.exit(3)


if __name__ == "__main__":
    main()
"""


def python(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", ""), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def run(*arguments, cwd):
    return python("-m", "neuron_cpu", "run", *arguments, cwd=cwd, PYTHONPATH=str(REPOSITORY))


@pytest.fixture
def scripts(tmp_path):
    folder = tmp_path / "contest"
    folder.mkdir()
    (folder / "main.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    return folder


def test_a_script_sees_what_it_sees_on_the_device(scripts, tmp_path):
    """Arguments, module name, own folder and exit status; children find the SDK's names, too."""
    ran = run("contest/main.py", "--mode", "-h", "run", cwd=tmp_path)
    assert ran.returncode == 3, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "__main__ ['contest/main.py', '--mode', '-h', 'run'] beside True"
    assert lines[1] == "12.0"
    assert lines[2] == str(REPOSITORY / "neuron_cpu" / "sdk" / "neuronxcc" / "__init__.py")
    assert lines[3:] == ["spawned double __mp_main__"]
    assert "CPU stand-in neuron_cpu (NEURON_CPU asks for it)" in ran.stderr


def test_a_working_folder_that_pythonpath_names_stays(tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "script.py").write_text("import beside\n")
    (tmp_path / "beside.py").write_text("print('beside')\n")
    paths = os.pathsep.join((str(tmp_path), str(REPOSITORY)))
    ran = python("-m", "neuron_cpu", "run", "tools/script.py", cwd=tmp_path, PYTHONPATH=paths)
    assert ran.stdout == "beside\n", ran.stderr


def test_a_module(tmp_path):
    (tmp_path / "mine.py").write_text("import sys, neuronxcc\nprint(__name__, sys.argv[1:])\n")
    ran = run("-m", "mine", "-q", cwd=tmp_path)
    assert ran.stdout == "__main__ ['-q']\n", ran.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "run names no script, expected run SCRIPT"),
        (("mine.ipynb",), "script mine.ipynb is a notebook, expected a Python file; run it with"),
        (("absent.py",), "script absent.py does not exist, expected a Python file; correct it."),
        (
            ("-m", "absent"),
            "module absent does not exist, expected one that Python finds here; correct it.",
        ),
    ],
)
def test_what_cannot_be_run(arguments, sentence, tmp_path):
    (tmp_path / "mine.ipynb").write_text('{"nbformat": null}')
    ran = run(*arguments, cwd=tmp_path)
    assert ran.returncode == 2
    assert sentence in ran.stderr and "Traceback" not in ran.stderr


def test_ensure_sdk_from_sitecustomize(tmp_path):
    """The names are there before the script's first line."""
    site = tmp_path / "site"
    site.mkdir()
    insert = f"import sys\nsys.path.append({str(REPOSITORY)!r})\n"
    (site / "sitecustomize.py").write_text(f"{insert}import neuron_cpu\nneuron_cpu.ensure_sdk()\n")
    script = "import sys, neuronxcc; print(neuronxcc.__file__, 'torch' in sys.modules)"
    ran = python("-c", script, cwd=tmp_path, PYTHONPATH=str(site))
    assert ran.stdout.startswith(str(REPOSITORY)) and ran.stderr == "", ran.stderr


def test_the_file_that_a_contest_lacks_is_named(tmp_path):
    """test.py of aws-neuron/nki-moe reads it, and its repository has it under two other names."""
    script = tmp_path / "test.py"
    script.write_text("open('prompt_data.txt')\n")
    ended = subprocess.run(
        [sys.executable, "-m", "neuron_cpu", "run", str(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert ended.returncode == 1 and "FileNotFoundError" in ended.stderr
    assert "run_script" not in ended.stderr and f'File "{script}", line 1' in ended.stderr
    assert ended.stderr.endswith("prompt_data_trn3.csv of aws-neuron/nki-moe to this name.\n")


@pytest.mark.full  # Dynamo alone takes a second
def test_a_compiled_function_calls_a_kernel(tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch, nki, nki.language as nl\n\n@nki.jit\ndef twice(x):\n"
        "    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)\n"
        "    nl.store(out, nl.multiply(nl.load(x), 2.0))\n    return out\n\n"
        "x = torch.ones(4, 8)\nrun = torch.compile(lambda x: twice(x) * 2, backend='eager')\n"
        "print(torch.equal(run(x), x * 4))\n"
    )
    ran = run("script.py", cwd=tmp_path)
    assert ran.stdout == "True\n", ran.stderr


def test_an_undefined_hook_of_an_adapter_is_none(tmp_path):
    """NxDI 0.7 to 0.9: the adapter hands on what nothing defines, and the model refuses it."""
    package = tmp_path / "neuronx_distributed_inference"
    for name, text in (
        ("__init__", ""),
        ("utils/__init__", ""),
        ("models/__init__", ""),
        ("utils/hf_adapter", "def hand():\n    return tensor_capture_hook\n"),
        (
            "models/model_base",
            "class NeuronBaseForCausalLM:\n    def forward(self, ids):\n        return ids\n",
        ),
    ):
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "script.py").write_text(
        "import sys; sys.path.insert(0, '.')\n"
        "from neuronx_distributed_inference.utils import hf_adapter\n"
        "from neuronx_distributed_inference.models import model_base\n"
        "model = model_base.NeuronBaseForCausalLM()\n"
        "print(model.forward(3, tensor_capture_hook=hf_adapter.hand()))\n"
    )
    done = run("script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
