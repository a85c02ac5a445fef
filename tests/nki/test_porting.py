"""Both sides of every pair in docs/porting.md give the same results."""

from __future__ import annotations

import re
import textwrap
import warnings
from pathlib import Path

import neuronxcc.nki as old_nki
import neuronxcc.nki.isa as old_nisa
import neuronxcc.nki.language as old_nl
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core.time.schedule import schedule

PAGE = Path(__file__).resolve().parents[2] / "docs" / "porting.md"
TEXT = PAGE.read_text(encoding="utf-8")
FRAME = re.search(r"```python frame\n(.*?)```", TEXT, re.S)[1]
PAIRS = {
    name: (old, new)
    for name, old, new in re.findall(
        r"^\*\*(.*?)\*\*[^`]*?(?:`[^`\n]*`[^`]*?)*```python\n# old\n(.*?)# current\n(.*?)```",
        TEXT,
        re.S | re.M,
    )
}
NAMES = {
    "old": {"nki": old_nki, "nl": old_nl, "nisa": old_nisa, "np": np},
    "current": {"nki": nki, "nl": nl, "nisa": nisa},
}


def kernel(side, body):
    """The kernel of one side of a pair, in its frame."""
    source = FRAME.replace("    ...\n", textwrap.indent(body, "    "))
    scope = dict(NAMES[side])
    exec(compile(source, side, "exec"), scope)
    return scope["kernel"]


def inputs():
    random = np.random.default_rng(1)
    x, y = (random.uniform(-1, 1, (128, 512)).astype(np.float32) for _ in range(2))
    return x, y, random.permutation(128).astype(np.int32).reshape(128, 1)


def test_every_pair_is_found():
    assert len(PAIRS) == TEXT.count("# current\n") >= 28


@pytest.mark.parametrize("name", PAIRS)
def test_both_sides_agree(name):
    results = []
    for side, body in zip(("old", "current"), PAIRS[name]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of releases after 2.21, which the old side may need
            results.append(kernel(side, body)(*inputs()))
    assert np.allclose(results[0], results[1], rtol=0, atol=2e-5)
    assert not np.allclose(results[0], 0)


@pytest.mark.parametrize(
    "name", ["Loads and stores", "Accumulation in PSUM", "Operators", "Reductions", "Scans"]
)
def test_both_sides_take_the_same_time(name):
    times = [
        schedule(kernel(side, body).trace(*inputs())).total
        for side, body in zip(("old", "current"), PAIRS[name])
    ]
    assert abs(times[1] / times[0] - 1) < 0.03
