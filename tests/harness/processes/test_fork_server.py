"""The fork server leaves nothing, whenever its starter is killed."""

from __future__ import annotations

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
from neuron_cpu.processes import forked
forked.context()
forkserver.ensure_running()
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who has made a socket")
def test_a_starter_that_is_killed_before_its_server_is_up_leaves_no_folder(tmp_path: Path) -> None:
    told = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", KILLED], env={**os.environ, **told})
    assert done.returncode == -9
    deadline = time.monotonic() + 60
    while os.listdir(tmp_path):
        assert time.monotonic() < deadline, os.listdir(tmp_path)
        time.sleep(0.05)
