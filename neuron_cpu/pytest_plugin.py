"""Plugin of pytest: the SDK's names for test files, and a fixture `assert_kernel`.

pytest finds it where the package is installed; elsewhere: ``pytest -p neuron_cpu.pytest_plugin``.
"""

from collections.abc import Callable

import pytest

from . import ensure_sdk
from .lessons import pointers


def pytest_report_header() -> str:
    return ensure_sdk()


def pytest_configure() -> None:
    ensure_sdk()  # before test files are imported


def pytest_exception_interact(
    call: pytest.CallInfo, report: pytest.CollectReport | pytest.TestReport
) -> None:
    """A test that fails by an error of a kernel names the lesson that is about it."""
    assert call.excinfo is not None
    said = str(call.excinfo.value)
    lines = [line for line in pointers(said) if line not in said]
    if lines:
        report.sections.append(("lessons", "\n".join(lines)))


@pytest.fixture(scope="session")
def assert_kernel() -> Callable[..., None]:
    """`neuron_cpu.judge.assert_kernel`: legal, and right on adversarial values."""
    from .judge import assert_kernel as found  # PyTorch and the simulator: only where it is used

    return found
