"""The package as `pip install .` leaves it: a wheel in a fresh environment, no checkout near."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import neuron_cpu
from tests import pythons
from tests.conftest import REPOSITORY

KERNEL = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl


@nki.jit
def double(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    nl.store(out_hbm, nl.load(x_hbm) * 2.0)
    return out_hbm
"""

NOTEBOOK = """
import neuron_cpu
print(neuron_cpu.install())
import numpy, neuronxcc, torch_neuronx
from kernels import double
print(neuronxcc.__file__)
print(double(numpy.ones((2, 3), numpy.float32)).sum())
"""


def command(*arguments, cwd):
    """Run it as a user without this checkout would: nothing of it is on the path."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "NEURON_CPU")}
    return subprocess.run(
        [*map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,  # of a machine with much else to do
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The programs of an environment in which only the wheel is new; its parent is a work folder.

    The dependencies are those of the running environment, so nothing is fetched.
    """
    root = tmp_path_factory.mktemp("installed")
    source = root / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "neuron_cpu", source / "neuron_cpu", ignore=ignored)
    shutil.copytree(REPOSITORY / "stubs", source / "stubs")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    alone = ["--no-deps", "--no-index"]
    built = command(*pip, "wheel", *alone, "--no-build-isolation", source, cwd=root)
    assert built.returncode == 0, built.stderr
    (wheel,) = root.glob("*.whl")
    venv.create(root / "venv", symlinks=True)
    programs = root / "venv" / "bin"
    python = programs / "python"
    found = command(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=root
    )
    packages = Path(found.stdout.strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    done = command(*pip, "--python", python, "install", *alone, wheel, cwd=root)
    assert done.returncode == 0, done.stderr
    work = root / "work"
    work.mkdir()
    (work / "kernels.py").write_text(KERNEL)
    return programs


@pytest.mark.full  # 7 s; make test-pythons installs the wheel, too
def test_the_console_command_profiles_a_kernel_in_another_folder(installed):
    work = installed.parents[1] / "work"
    version = command(installed / "neuron_cpu", "--version", cwd=work)
    assert version.stdout.split() == ["neuron_cpu", neuron_cpu.__version__]
    arguments = ["profile", "kernels.py:double", "--arg", "128x64:bf16", "--html", "page.html"]
    done = command(installed / "neuron_cpu", *arguments, cwd=work)
    assert done.returncode == 0, done.stderr
    assert "double: " in done.stdout and "estimated, not measured" in done.stdout
    assert "kernels.py:double" in (work / "page.html").read_text(encoding="utf-8")


@pytest.mark.full
def test_a_notebook_finds_the_sdk_inside_the_wheel(installed):
    done = command(installed / "python", "-c", NOTEBOOK, cwd=installed.parents[1] / "work")
    assert done.returncode == 0, done.stderr
    line, place, total = done.stdout.splitlines()
    assert "the CPU stand-in" in line and total == "12.0"
    assert Path(place).is_relative_to(installed.parent)


@pytest.mark.full
def test_a_type_checker_finds_the_stubs_inside_the_wheel(installed):
    work = installed.parents[1] / "work"
    (work / "typed.py").write_text("import nki.language as nl\n\nnl.exp\nnl.expp\n")
    options = ["--config-file=", "--no-incremental", "--python-executable", installed / "python"]
    done = command(sys.executable, "-m", "mypy", *options, "typed.py", cwd=work)
    (error,) = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert error.startswith('typed.py:4: error: Module has no attribute "expp"')


@pytest.mark.full
def test_pytest_finds_the_plugin(installed):
    work = installed.parents[1] / "work"
    (work / "test_double.py").write_text(
        "import numpy\nfrom kernels import double\n\n\ndef test_double(assert_kernel):\n"
        "    assert_kernel(double, lambda x: x * 2.0, '64x32:bf16')\n\n\n"
        "def test_wrong(assert_kernel):\n    assert_kernel(double, lambda x: x, '64x32:bf16')\n\n\n"
        "def test_illegal():\n    double(numpy.zeros((200, 4), numpy.float32))\n"
    )
    done = command(installed / "python", "-m", "pytest", "-p", "no:cacheprovider", cwd=work)
    assert done.returncode == 1 and "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("Lesson 2 (masked tail) is about this: neuron_cpu learn 2") == 1
    assert "the CPU stand-in" in done.stdout and "first wrong element: (0, 0)" in done.stdout


def test_install_after_another_sdk_is_refused():
    code = (
        "import sys, types; sys.modules['neuronxcc'] = m = types.ModuleType('neuronxcc');"
        "m.__file__ = '/opt/real/neuronxcc/__init__.py'; import neuron_cpu; neuron_cpu.install()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1 and "came after neuronxcc was imported" in done.stderr


@pytest.mark.full
def test_other_pythons_compile_every_source_without_a_warning():
    found = [*filter(None, map(pythons.interpreter, pythons.SUPPORTED))]
    if not found:
        pytest.skip("no supported Python here beside that of the environment")
    code = (
        "import sys, pathlib, warnings; warnings.simplefilter('error')\n"
        "for path in pathlib.Path(sys.argv[1]).rglob('*.py'):\n"
        "    compile(path.read_bytes(), str(path), 'exec')"
    )
    for python in found:
        done = subprocess.run(
            [python, "-c", code, str(REPOSITORY / "neuron_cpu")], capture_output=True, text=True
        )
        assert done.returncode == 0, f"{python}: {done.stderr}"
