"""The simulator's own tests under every other Python of this machine: `make test-pythons`.

Each Python gets an environment of its own with the package's wheel in it. PyTorch comes from its
index of CPU builds or from a folder of wheels that pip is told of (PIP_FIND_LINKS), never from
PyPI, whose build for Linux brings gigabytes of CUDA. Where neither has one, tests that compute are
skipped (tests/without_torch.py): kernels are traced, verified, timed and reported all the same.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
REQUIREMENTS = [REPOSITORY / f"requirements{part}.txt" for part in ("", "-test", "-torch")]
SUPPORTED = tuple(f"3.{minor}" for minor in range(10, 15))
PACKAGES = ("numpy", "ml_dtypes", "rich")
OF_TESTS = ("pytest", "pytest-xdist", "hypothesis", "import-linter")
OF_TORCH = ("filelock", "fsspec", "Jinja2", "networkx", "sympy", "typing_extensions", "setuptools")
# Of a machine without an index; an index that exists answers within seconds.
SETTINGS = {"UV_HTTP_CONNECT_TIMEOUT": "5", "UV_HTTP_RETRIES": "0"}


class Environment(NamedTuple):
    """One Python's environment, or why there is none.

    Attributes:
        trouble: what its installation said where it failed.
    """

    version: str
    python: Path
    has_torch: bool
    trouble: str = ""


def interpreter(version):
    """A Python of that version, also of pyenv's or uv's, whose names are not on PATH."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local/share/uv/python"))
    managed = [path for root in (pyenv, uv) for path in sorted(root.glob(f"*/bin/{name}"))]
    for path in filter(None, (shutil.which(name), *map(str, managed))):
        code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([path, "-c", code], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:
            return path
    return None


def main(arguments=None):
    """Set up what is missing, side by side; then test one Python after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=SUPPORTED, help="such as 3.10 3.13")
    args = parser.parse_args(arguments)
    own = ".".join(map(str, sys.version_info[:2]))
    found = {version: interpreter(version) for version in args.versions if version != own}
    for version in (version for version, path in found.items() if path is None):
        print(f"Python {version}: none here.", flush=True)
    started = time.monotonic()
    wheel = _wheel()
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda one: _set_up(*one, wheel), _present(found))
    environments = list(made)
    if environments:
        print(f"Environments: {time.monotonic() - started:.0f} s", flush=True)
    return max(map(_test, environments), default=0)


def _present(found):
    for version, path in found.items():
        if path is not None:
            yield version, path


def _wheel():
    """The package as users install it."""
    with tempfile.TemporaryDirectory() as copy:
        source = Path(copy) / "source"  # a build leaves its own files beside its sources
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / "neuron_cpu", source / "neuron_cpu", ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(REPOSITORY / name, source)
        folder = REPOSITORY / ".venv-wheel"
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
        alone = ["--no-deps", "--no-index", "--no-build-isolation"]
        subprocess.run([*pip, *alone, "-w", folder, source], check=True)
    (made,) = folder.glob("*.whl")
    return made


def _set_up(version, path, wheel):
    """An environment with the wheel and what its tests need; an earlier one is taken up again."""
    folder = REPOSITORY / f".venv-{version}"
    python, stamp = folder / "bin" / "python", folder / ".pinned"
    pinned = "".join(file.read_text() for file in REQUIREMENTS)
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    # Without their hashes, which pip takes for requirements that are pinned themselves only.
    pins = ["-c", folder / "pins.txt"]
    told = "\n".join(re.findall(r"^[\w.-]+==[^\\\n]+", pinned, re.MULTILINE))
    try:
        if not stamp.is_file() or stamp.read_text() != pinned:
            _run(path, "-m", "venv", folder)
            (folder / "pins.txt").write_text(told)
            _run(*pip, *pins, *PACKAGES, *OF_TESTS)
            if _install_torch(python, pip):
                _run(*pip, *pins, *OF_TORCH)
            stamp.write_text(pinned)
        _run(*pip, "--no-deps", "--no-index", "--force-reinstall", wheel)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip()
        return Environment(version, python, False, said or str(error))
    has_torch = subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0
    return Environment(version, python, has_torch)


def _install_torch(python, pip):
    """PyTorch without CUDA, alone; whether there is one."""
    torch = re.findall(r"^torch==[0-9.]+", REQUIREMENTS[2].read_text(), re.MULTILINE)[0]
    alone, index = ["--no-deps", torch], os.environ.get("TORCH_INDEX")
    uv = Path(sys.executable).with_name("uv")
    ways: list[list[str | Path]] = []
    if index:
        ways.append([*pip, "--index-url", index, *alone])
    elif sys.platform != "linux":
        ways.append([*pip, *alone])  # there PyPI's is one for the CPU
    elif uv.is_file():
        ways.append([uv, "pip", "install", "-q", "--python", python, "--torch-backend", "cpu"])
        ways[0] += alone
    for way in (*ways, [*pip, "--no-index", *alone]):
        done = subprocess.run(way, capture_output=True, env={**os.environ, **SETTINGS})
        if done.returncode == 0:
            return True
    return False


def _run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


def _test(one):
    """Run the tests in an environment; their exit status."""
    if one.trouble:
        print(f"Python {one.version}: its environment fails.\n{one.trouble}", flush=True)
        return 1
    how = [] if one.has_torch else ["-p", "tests.without_torch", "--confcutdir", "tests/core"]
    told = (
        ""
        if one.has_torch
        else (
            ": no CPU build of PyTorch for it here, so kernels are traced, verified and timed, and "
            "tests that compute are skipped"
        )
    )
    program = one.python.with_name("neuron_cpu")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    print(f"Python {one.version}, {version.stdout.strip()}{told}.", flush=True)
    pytest = [one.python, "-m", "pytest", "-n", "2", "--dist", "worksteal", *how, "tests/core"]
    quiet = ["-p", "no:cacheprovider", "--disable-warnings"]
    return subprocess.run([*pytest, *quiet], cwd=REPOSITORY).returncode


if __name__ == "__main__":
    sys.exit(main())
