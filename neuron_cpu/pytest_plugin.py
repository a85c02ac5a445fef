"""Plugin of pytest: the SDK's names for test files, and a fixture `assert_kernel`.

pytest finds it where the package is installed; elsewhere: ``pytest -p neuron_cpu.pytest_plugin``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from . import ensure_sdk


def pytest_report_header() -> str:
    return ensure_sdk()


def pytest_configure() -> None:
    ensure_sdk()  # before test files are imported


@pytest.fixture(scope="session")
def assert_kernel() -> Callable[..., None]:
    """`neuron_cpu.judge.assert_kernel`: legal, and right on adversarial values."""
    from .judge import assert_kernel as found  # PyTorch and the simulator: only where it is used

    return found
