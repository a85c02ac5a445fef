"""llama.py looks ahead over every release of NxD Inference that it covers: its own tests there."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.real import releases
from tests.real.test_contracts import FOLDER, checkouts

# The submission's tests, behind a check that the sources of the release answer in that process.
INSIDE = """
import sys, neuron_cpu, pytest
neuron_cpu.ensure_sdk()
from neuronx_distributed_inference.models import config
assert sys.argv[1] in config.__file__, config.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""


@checkouts
@pytest.mark.parametrize("release", ["0.1", "0.2", "0.3", "0.4", "0.5", "0.6"])
def test_text_and_logits_are_those_of_plain_steps(release):
    given = releases.RELEASES[release]
    asked = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "tests/llama/test_look_ahead.py"]
    command = [sys.executable, "-c", INSIDE, given.nxdi_at, *asked, "-k", "not see_the_cache"]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=releases.environment(given, Path(FOLDER)),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
