"""The fork server leaves nothing, whenever its starter is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

KILLED = """
import os
from multiprocessing import forkserver
from neuron_cpu.sandbox import forked
forked.context()
forkserver.ensure_running()
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who has made a socket")
def test_a_starter_that_is_killed_before_its_server_is_up_leaves_no_folder(tmp_path):
    told = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", KILLED], env={**os.environ, **told})
    assert done.returncode == -9
    deadline = time.monotonic() + 60
    while os.listdir(tmp_path):
        assert time.monotonic() < deadline, os.listdir(tmp_path)
        time.sleep(0.05)


SLOW = """
import os, time
with open({told!r}, "w") as file:
    file.write(str(os.getpid()))
while True:
    time.sleep(0.1)
"""
KILLED_WHILE_IT_IMPORTS = """
import os, time
from multiprocessing import forkserver
from neuron_cpu.sandbox import forked
forked.context("slow_to_import")
forkserver.ensure_running()
while not (os.path.exists({told!r}) and os.path.getsize({told!r})):
    time.sleep(0.05)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is preloaded on macOS")
def test_a_server_that_imports_ends_with_its_starter(tmp_path):
    """Its module imports for ever, so nothing but a look at its parent ends it."""
    told = str(tmp_path / "pid")
    (tmp_path / "slow_to_import.py").write_text(SLOW.format(told=told))
    paths = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY)))}
    code = KILLED_WHILE_IT_IMPORTS.format(told=told)
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **paths})
    assert done.returncode == -9
    server, deadline = int(Path(told).read_text()), time.monotonic() + 60
    while Path(f"/proc/{server}/cmdline").exists() and Path(f"/proc/{server}/cmdline").read_bytes():
        if time.monotonic() > deadline:
            os.kill(server, 9)
            raise AssertionError("the server outlives its starter")
        time.sleep(0.05)
