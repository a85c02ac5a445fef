"""docs/simulator.md is what docs/generate.py makes of the instruction table and the examples."""

from __future__ import annotations

import inspect

from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "simulator.md"


def test_generated_blocks_are_up_to_date(run_script):
    done = run_script("docs/generate.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_function_is_listed_and_documented():
    text = PAGE.read_text(encoding="utf-8")
    for prefix, module in (("nl", nl), ("nisa", nisa)):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                assert f"| `{prefix}.{name}` |" in text, name
                assert inspect.getdoc(value), name
