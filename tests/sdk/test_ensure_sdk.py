"""Which SDK `ensure_sdk` chooses, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_cpu import libraries

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = """
import neuron_cpu
print(neuron_cpu.ensure_sdk())
assert neuron_cpu.ensure_sdk()
import neuronxcc
print(neuronxcc.__file__)
"""


def run(path, **environment):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.splitlines()


@pytest.fixture
def installed_sdk(tmp_path):
    """A folder with a package that looks like the real compiler."""
    package = tmp_path / "site" / "neuronxcc" / "nki"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package.parent / "__init__.py").write_text("")
    return tmp_path / "site"


def test_without_an_sdk_the_stand_in_serves():
    line, origin = run(str(REPOSITORY))
    assert "CPU stand-in neuron_cpu (no neuronxcc is installed)" in line
    assert "estimates" in line
    assert origin.startswith(str(REPOSITORY / "neuron_cpu" / "sdk"))


def test_an_installed_sdk_comes_first(installed_sdk):
    line, origin = run(f"{REPOSITORY}{os.pathsep}{installed_sdk}")
    assert "the installed one" in line
    assert origin.startswith(str(installed_sdk))


def test_the_environment_can_ask_for_the_stand_in(installed_sdk):
    path = f"{REPOSITORY}{os.pathsep}{installed_sdk}"
    line, origin = run(path, NEURON_CPU="1")
    assert "NEURON_CPU asks for it" in line
    assert origin.startswith(str(REPOSITORY / "neuron_cpu" / "sdk"))
    assert "the installed one" in run(path, NEURON_CPU="0")[0]


def test_processes_of_a_run_over_the_real_libraries_find_four_cores(tmp_path):
    """NxD asks for them by torchrun's variable on trn1, with a KeyError where it lacks."""
    for name, version in (("neuronx_distributed", "0.15.0"), (libraries.NXDI, "0.6.1")):
        package = tmp_path / "src" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "_version.py").write_text(f'__version__ = "{version}"\n')
    for name in libraries.BESIDE:
        (tmp_path / f"{name}.py").write_text("")
    script = SCRIPT + "import os; print(os.environ['LOCAL_WORLD_SIZE'])"
    path = f"{REPOSITORY}{os.pathsep}{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, libraries.VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "4"
