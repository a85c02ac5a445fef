"""tests/mutation.py: which tests a mutant needs, and where it can be put in memory."""

from __future__ import annotations

import gc
import importlib.util
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytest.importorskip("cosmic_ray", reason="requirements-mutation.txt is not installed")
pytest.importorskip("coverage", reason="requirements-mutation.txt is not installed")

SOURCE = '''LIMIT = 3


def outer(x, *, low=0):
    """Two steps."""
    if x < low:
        x = (
            low
            + 1
        )
    else:
        x = 2

    @decorated
    def inner(y):
        return y + x

    try:
        return inner(x)
    except ValueError:
        return 0
'''


@pytest.fixture(scope="module")
def mutation():
    spec = importlib.util.spec_from_file_location("mutation", REPOSITORY / "tests" / "mutation.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutation"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutation"]


def line_of(text: str) -> int:
    (found,) = (n for n, line in enumerate(SOURCE.splitlines(), 1) if text in line)
    return found


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("if x < low", "if x < low", "if x < low"),  # the head, not what stands below it
        ("+ 1", "x = (", "        )"),
        ("x = 2", "x = 2", "x = 2"),
        ("return y + x", "return y + x", "return y + x"),
        ("except ValueError", "try:", "return 0"),
    ],
)
def test_tests_are_chosen_by_the_statement(mutation, text, first, last):
    lines = mutation.statement_at(SOURCE, line_of(text))
    assert (lines[0], lines[-1]) == (line_of(first), line_of(last))


def test_tests_for_what_importing_executes_are_those_of_the_definition(mutation):
    inner = mutation.definition_at(SOURCE, line_of("@decorated"))
    assert (inner[0], inner[-1]) == (line_of("@decorated"), line_of("return y + x"))
    assert len(mutation.definition_at(SOURCE, line_of("LIMIT"))) == 0


@pytest.mark.parametrize(
    ("before", "after", "functions"),
    [
        ("return y + x", "return y - x", ["outer", "inner"]),  # a function is a constant of its own
        ("x = 2", "x = 3", ["outer"]),
        ("LIMIT = 3", "LIMIT = 4", None),  # has to be imported anew
        ("low=0", "low=1", None),
    ],
)
def test_only_changes_inside_functions_are_made_in_memory(mutation, before, after, functions):
    path = Path("source.py")
    one, other = (mutation.compiled(text, path) for text in (SOURCE, SOURCE.replace(before, after)))
    found = mutation.changes(one, other)
    assert functions == (None if found is None else [old.co_name for old, _ in found])


def test_no_mutant_is_chosen_that_is_not_python(mutation, tmp_path):
    """The star before ``low`` is a product to the tool."""
    (tmp_path / "llama.py").write_text(SOURCE, encoding="utf-8")
    found = mutation.sample(tmp_path, 100, 0, ["llama"])
    assert 8 < len(found) < 30
    stars = [m for m in found if "Mul" in m.operator]
    assert not stars
    for mutant in found:
        compile(mutation.mutated(SOURCE, mutant), "llama.py", "exec")


def test_short_tests_that_do_little_else_come_first(mutation, tmp_path):
    (tmp_path / "llama.py").touch()
    tests = mutation.Tests(tmp_path)
    tests.known = {
        "wide": mutation.Test(0.1, {"llama.py": 0b110, "other.py": (1 << 200) - 1}),
        "slow": mutation.Test(9.0, {"llama.py": 0b110}),
        "close": mutation.Test(0.1, {"llama.py": 0b110}),
        "elsewhere": mutation.Test(0.1, {"llama.py": 0b1000}),
    }
    assert tests.executing("llama.py", [1, 2]) == ["close", "slow", "wide"]
    assert tests.around("llama.py", []) == ["close", "elsewhere", "slow", "wide"]


def test_functions_are_found_where_the_collector_has_frozen_them(mutation):
    """Without them no mutant replaces anything, and all survive."""
    gc.freeze()
    try:
        assert line_of in mutation.live_functions()[mutation.key_of(line_of.__code__)]
    finally:
        gc.unfreeze()
