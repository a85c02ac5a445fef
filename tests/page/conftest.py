"""Schedules to show, and the browser that shows them where the machine has one."""

import os
import shutil

import pytest

from neuron_cpu.core.time.schedule import schedule
from neuron_cpu.judge import cases
from tests.page import kernels

SHAPES = ["512x128:bf16", "512x1024:bf16"]
BROWSERS = ("chromium", "google-chrome", "google-chrome-stable")
# Nothing of the browser's own goes to the network; as root it has no sandbox.
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def scheduled(kernel):
    """The schedule of a kernel of this folder."""
    positional, named = cases.parse_case(SHAPES).meta()
    return schedule(kernel.trace(*positional, **named))


@pytest.fixture(scope="session")
def matmul():
    return scheduled(kernels.matmul)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A copy of the kernels, as a user names it: in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(kernels.__file__, tmp_path / "mine.py")
    return "mine.py"


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window; a new profile of its own, which goes with it.

    It ends with the module: while playwright is open, its event loop counts as the one that is
    running in this thread, and tests of other folders could start none.
    """
    named = os.environ.get("BROWSER_PROGRAM")
    found = named or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(
            f"no browser: none of {', '.join(BROWSERS)} is on the path; make test-browser installs "
            "Debian's, BROWSER_PROGRAM names another"
        )
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=list(QUIET))
        yield running
        running.close()
