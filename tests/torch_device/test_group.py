"""Process groups of the device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from neuron_cpu.torch_device import group

REPOSITORY = Path(__file__).resolve().parents[2]
JOBS = ["eager", "data_parallel", "kernels", "subgroups", "in_graphs", "sharded", "tensor_parallel"]


@pytest.mark.full  # 17 s
def test_each_rank_gets_what_gloo_gives_it_on_the_cpu():
    """AWS's tutorial compares its job on gloo with neuron, rank by rank."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(Path(__file__).with_name("ranks_job.py")), *JOBS],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert done.stdout.split() == JOBS, done.stderr


def test_a_group_after_the_device_was_used_is_refused():
    torch.ones(1, device="neuron")
    for kind in (AssertionError, RuntimeError):
        with pytest.raises(kind, match="before the first tensor on neuron"):
            dist.init_process_group("neuron", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized() and group.STATE.rank is None
