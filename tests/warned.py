"""Warnings of the simulator that tests let pass; all others are errors (pyproject.toml).

A test that is about one expects it: ``@pytest.mark.warns("sim_sbuf_capacity")``.
"""

from __future__ import annotations

import pytest


def allows(*identifiers: str) -> pytest.MarkDecorator:
    """The mark of a test, or of a module (`pytestmark`), whose kernels may give these warnings."""
    return pytest.mark.filterwarnings(*(f"ignore:.*{name}\\]" for name in identifiers))
