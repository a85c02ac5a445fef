"""Speed is guarded: estimates of llama.py's kernels and graphs stay what docs/kernels.md says."""

from __future__ import annotations

import pytest

from benchmarks import kernel_docs

TIMES = {"kernels": "time, µs", "graphs": "estimate, ms"}


@pytest.mark.parametrize("name", TIMES)
def test_no_estimate_has_grown(name: str) -> None:
    """By more than 2 %; what has got faster by as much is to be published."""
    said = kernel_docs.column(kernel_docs.published(name), TIMES[name])
    found = kernel_docs.column(getattr(kernel_docs, name)(), TIMES[name])
    assert found.keys() == said.keys()
    slower = {row: (said[row], time) for row, time in found.items() if time > 1.02 * said[row]}
    assert not slower, "(published, now); python benchmarks/kernel_docs.py publishes what is meant"
    faster = {row: (said[row], time) for row, time in found.items() if time < 0.98 * said[row]}
    assert not faster, "(published, now); python benchmarks/kernel_docs.py publishes it"
