"""Who may import whom: the contracts of pyproject.toml, and imports that a reader would not see."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "neuron_cpu" / "core"
FILES = sorted(CORE.rglob("*.py"))


def lint_imports(folder):
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
    ]
    path = os.pathsep.join([str(folder), str(folder / "neuron_cpu" / "sdk")])
    return subprocess.run(
        [*command, "--no-cache", "--no-logo"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_contracts_are_kept():
    found = lint_imports(ROOT)
    assert found.returncode == 0, found.stdout
    assert "11 kept, 0 broken" in found.stdout


def imports_in_functions(tree):
    """Line and top-level name of each import that stands inside of a function."""
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                found += [(node.lineno, name.name.split(".")[0]) for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                found.append(
                    (node.lineno, "." if node.level else (node.module or "").split(".")[0])
                )
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(CORE)))
def test_imports_stand_at_the_top(path):
    assert imports_in_functions(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_every_file_says_what_it_holds():
    """architecture.md names rooms and leaves their files to these lines."""
    silent = [
        path.relative_to(ROOT)
        for folder in ("neuron_cpu", "harness", "models", "lab")
        for path in (ROOT / folder).rglob("*.py")
        if (text := path.read_text(encoding="utf-8")).strip()
        and not ast.get_docstring(ast.parse(text))
    ]
    assert silent == []


def test_the_architecture_names_what_stands_beside_core():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## Tools for kernels")[1].split("\n## ")[0]
    modules = {path.stem for path in (ROOT / "neuron_cpu").glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in (ROOT / "neuron_cpu").glob("*/__init__.py")}
    assert modules | packages <= set(re.findall(r"`(\w+)`", section))
