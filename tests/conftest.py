"""Fixtures of the whole suite: SDK names, a tiny Llama folder, the driver as a subprocess."""

import contextlib
import functools
import gc
import io
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from unittest import mock

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

# A shell without job control ignores SIGINT in what it puts into the background, children inherit
# that, and Python then raises no KeyboardInterrupt: tests that interrupt would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A suite that fails by chance teaches people to run it again: the same draws in every run, except
# where somebody asks for others (make fuzz).
if "FUZZ_EXAMPLES" not in os.environ:
    hypothesis.settings.register_profile("fixed", derandomize=True, database=None)
    hypothesis.settings.load_profile("fixed")

# Collecting makes 300,000 objects that stay. The garbage collector would look through them again,
# which is a quarter of the time.
gc.disable()

# No test cuts the power; compiled folders alone would wait for disks some thousand times.
os.fsync = lambda handle: None

import neuron_cpu  # noqa: E402

neuron_cpu.ensure_sdk()

from neuron_cpu import libraries  # noqa: E402
from neuron_cpu.core import Kernel, release_thread  # noqa: E402
from neuron_cpu.core.device import target  # noqa: E402
from neuron_cpu.sandbox import forked  # noqa: E402
from tests.tiny_model import write_tiny_model  # noqa: E402
from tests.warned import pytest_pyfunc_call  # noqa: E402, F401 - a hook

# A process has one fork server, with what its first starter preloads. Were that a test of the
# judge, each submission of the driver's tests would import PyTorch and transformers itself: 4 s.
forked.context = functools.partial(
    forked.context, "harness.processes.preload", "transformers.modeling_utils", "neuron_cpu.judge"
)


def pytest_collection_modifyitems(items):
    """Tests of what only the real libraries have are left out where there is the imitation."""
    found = libraries.find(neuron_cpu.ROOTS)
    reason = f"needs the real libraries; {libraries.real_ones()}, or run make real."
    for item in items:
        if found is None and item.get_closest_marker("libraries") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def target_of_one_test(monkeypatch):
    """A program that a test calls may choose a chip in the environment, as it does for itself."""
    monkeypatch.delenv(target.ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_module():
    """The submissions' kernels keep the programs of all shapes that they have met.

    Over a whole run these are gigabytes, through which the garbage collector looks again and again.
    """
    yield
    for name in [name for name in sys.modules if name.startswith(("llama", "models"))]:
        for value in vars(sys.modules[name]).values():
            if isinstance(value, Kernel):
                value.programs.clear()
    release_thread()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of a seeded two-layer Llama."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def embedded_model():
    """The folder of SmolLM2-135M-Instruct, converted into the user's cache where it is not yet."""
    from harness.inputs.models import embedded_model as convert_once

    return convert_once()


@pytest.fixture(scope="session")
def run_script():
    """Runs a script of the repository as a user would; environment additions by keyword."""

    def run(script, *arguments, cwd=REPOSITORY, **environment):
        return subprocess.run(
            [sys.executable, str(REPOSITORY / script), *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture(scope="session")
def run_main():
    """Runs the driver with the given arguments, in this process.

    Submissions have processes of their own all the same, which the fork server of this one makes:
    a run is spared the seconds that PyTorch's import takes. What a process of its own is about
    (signals, streams, exit statuses of the shell) is tested with `run_script`.
    """
    import main
    from harness.processes.workers import Workers

    Workers().prepare()  # in this folder: those of the tests go

    def run(*arguments, cwd=REPOSITORY, **environment):
        out, errors, before = io.StringIO(), io.StringIO(), Path.cwd()
        gc.freeze()  # what there is now is not looked through below: seconds of a long run's heap
        os.chdir(cwd)
        try:
            with (
                mock.patch.dict(os.environ, environment),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(errors),
            ):
                status = _status(lambda: main.main([str(word) for word in arguments]))
                gc.collect()  # ends the session's processes, which may still print
        finally:
            os.chdir(before)
            gc.unfreeze()
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), errors.getvalue())

    return run


def _status(call):
    """What a process that ends with a call would have for its exit status."""
    try:
        return call()
    except SystemExit as error:
        return int(error.code or 0)
    except Exception:
        traceback.print_exc()
        return 1
