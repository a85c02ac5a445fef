"""Warnings of the simulator that tests let pass; all others are errors (pyproject.toml).

A test that is about one expects it: ``@pytest.mark.warns("sim_sbuf_capacity")``.
"""

import contextlib

import pytest


def allows(*identifiers):
    """The mark of a test, or of a module (`pytestmark`), whose kernels may give these warnings."""
    return pytest.mark.filterwarnings(*(f"ignore:.*{name}\\]" for name in identifiers))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """`@pytest.mark.warns(identifier, ...)`: the test fails where one of them is not given."""
    with contextlib.ExitStack() as stack:
        for mark in pyfuncitem.iter_markers("warns"):
            for identifier in mark.args:
                stack.enter_context(pytest.warns(UserWarning, match=rf"{identifier}\]$"))
        return (yield)
