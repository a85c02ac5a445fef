"""Plugin of pytest: the SDK's names for test files, and a fixture `assert_kernel`.

pytest finds it where the package is installed; elsewhere: ``pytest -p neuron_cpu.pytest_plugin``.
"""

import sys
from collections.abc import Callable

import pytest

from . import ensure_sdk
from .lessons import pointers

_PATH = pytest.StashKey[list[str]]()  # of modules, before there are folders of tests


def pytest_report_header() -> str:
    return ensure_sdk()


def pytest_configure(config: pytest.Config) -> None:
    ensure_sdk()  # before test files are imported
    config.stash[_PATH] = sys.path[:]


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
def assert_kernel(pytestconfig: pytest.Config) -> Callable[..., bool]:
    """`neuron_cpu.judge.assert_kernel`: legal, and right on adversarial values."""
    # pytest has put the tests' folders first, and what this imports is not to come from there.
    tests = sys.path[:]
    sys.path[:] = pytestconfig.stash[_PATH]  # type: ignore[index]
    try:
        from .judge import assert_kernel as found  # PyTorch, too: only where it is used
    finally:
        sys.path[:] = tests
    return found
