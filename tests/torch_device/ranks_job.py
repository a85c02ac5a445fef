"""One rank of tests of process groups: each job on the CPU and on the device, compared.

Started by `python -m torch.distributed.run --nproc-per-node 2` with names of jobs; rank 0 prints
each when it is done.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import neuron_cpu

neuron_cpu.install()

import nki  # noqa: E402
import nki.collectives as ncc  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import _functional_collectives as functional  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GROUP = ncc.ReplicaGroup([list(range(WORLD))])


def mine(device, *shape):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(RANK))
    return made.to(device)


def eager(device):
    summed, told = mine(device, 5), mine(device, 3)
    dist.all_reduce(summed)
    dist.broadcast(told, 1)
    gathered = [torch.empty(2, device=device) for _ in range(WORLD)]
    dist.all_gather(gathered, mine(device, 2))
    joined, part, swapped = (torch.empty(n, device=device) for n in (2 * WORLD, 2, WORLD))
    work = dist.all_gather_into_tensor(joined, mine(device, 2), async_op=True)
    work.wait()
    dist.reduce_scatter_tensor(part, mine(device, 2 * WORLD))
    dist.all_to_all_single(swapped, mine(device, WORLD))
    sent = mine(device, 4)
    if RANK == 0:
        dist.send(sent, 1)
    elif RANK == 1:
        dist.recv(sent, 0)
    one, other = mine(device, 2), mine(device, 3)
    with dist._coalescing_manager(device=device if device.type == "neuron" else None):
        dist.all_reduce(one)
        dist.all_reduce(other)
    kept = [torch.empty(2, device=device) for _ in range(WORLD)]
    dist.gather(mine(device, 2), kept if RANK == 0 else None, 0)
    dealt = torch.empty(2, device=device)
    dist.scatter(dealt, [mine(device, 2) + n for n in range(WORLD)] if RANK == 0 else None, 0)
    fewest, mean = mine(device, 3), mine(device, 3)
    dist.all_reduce(fewest, dist.ReduceOp.MIN)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.barrier()
    rest = [one, other, dealt, fewest, mean, *(kept if RANK == 0 else [])]
    return [*rest, summed, told, *gathered, joined, part, swapped, sent]


def subgroups(device):
    gloo, own = dist.new_group([0, 1], backend="gloo"), dist.new_group([0, 1])
    objects: list[Any] = [None] * 2
    dist.all_gather_object(objects, {"rank": RANK}, group=gloo)
    assert objects == [{"rank": 0}, {"rank": 1}]
    summed = mine(device, 3)
    dist.all_reduce(summed, group=own)
    return [summed]


def in_graphs(device):
    def step(x):
        summed = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return functional.all_gather_tensor(summed + 1, 0, dist.group.WORLD) * 3

    run = torch.compile(step, fullgraph=True) if device.type == "neuron" else step
    part = functional.reduce_scatter_tensor(mine(device, 4), "sum", 0, dist.group.WORLD)
    return [run(mine(device, 3)) + 0, part + 0]


def mlp(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(device)


def data_parallel(device):
    model = mlp(device)
    run = nn.parallel.DistributedDataParallel(model)
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        steps.zero_grad()
        run(mine(device, 4, 8)).square().mean().backward()
        steps.step()
    return [one.detach() for one in model.parameters()]


def sharded(device):
    mesh = init_device_mesh(device.type, (WORLD,))
    model = mlp(device)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    steps = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        steps.zero_grad()
        model(mine(device, 4, 8)).square().mean().backward()
        steps.step()
    return [one.full_tensor().detach() for one in model.parameters()]


def tensor_parallel(device):
    mesh = init_device_mesh(device.type, (WORLD,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(mlp(device), mesh, plan)
    x = torch.ones(2, 8, device=device)
    out = model(x)
    out.sum().backward()
    whole = distribute_tensor(torch.arange(8.0, device=device).view(4, 2), mesh, [Shard(0)])
    moved = whole.redistribute(placements=[Replicate()]).to_local()
    return [out.detach(), moved, whole.sum().full_tensor(), model[0].weight.grad.full_tensor()]


@nki.jit
def summed_over_ranks(x: Any) -> Any:
    inside, outside = (nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.hbm) for _ in range(2))
    nisa.dma_copy(dst=inside, src=x)
    ncc.all_reduce(srcs=[inside], dsts=[outside], replica_group=GROUP, op=nl.add)
    y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=y, src=outside)
    return y


def kernels(device):
    x = mine(device, 2, 4)
    if device.type == "cpu":
        dist.all_reduce(x)
        return [x, x]
    return [summed_over_ranks(x), torch.compile(summed_over_ranks, backend="neuron")(x)]


def main():
    dist.init_process_group("neuron")
    local = int(os.environ["LOCAL_RANK"])
    torch.neuron.set_device(local)
    device = torch.device("neuron", local)
    assert torch.neuron.device_count() == 1 and dist.get_backend() == "neuron"
    for name in sys.argv[1:]:
        job: Callable[[torch.device], list[torch.Tensor]] = globals()[name]
        expected, got = job(torch.device("cpu")), job(device)
        assert len(expected) == len(got)
        for theirs, ours in zip(expected, got):
            assert ours.device == device
            torch.testing.assert_close(ours.cpu(), theirs)
        dist.barrier()
        if RANK == 0:
            print(name, flush=True)
    dist.destroy_process_group()


main()
