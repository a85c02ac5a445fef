"""Parallel layers against dense ones, sharded by the checkpoint sharder, over several degrees."""

import pytest
import torch
import torch.nn.functional as F
from neuronx_distributed.deferred import deferred_parameters
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from neuronx_distributed.parallel_layers.utils import (
    get_padding_length,
    set_tensor_model_parallel_attributes,
)
from neuronx_distributed.trace.trace import (
    create_local_weight,
    get_sharded_checkpoint,
    preprocess_checkpoint,
)
from torch import nn

from neuron_cpu.errors import CheckpointError, CompileError
from neuron_cpu.runtime.ranks import RankPool

DEGREES = [1, 2, 4, 8]


class Holder(nn.Module):
    """A model of one layer, so that keys have a prefix."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer


def run_sharded(degree, build, checkpoint, inputs):
    """Build `build()` on each rank, load its shard of `checkpoint`, call it; outputs by rank."""
    pool = RankPool(degree)

    def run(rank):
        with deferred_parameters():
            model = Holder(build()).eval()
        full = {key: tensor.clone() for key, tensor in checkpoint.items()}
        preprocess_checkpoint(model, full)
        local, missing = get_sharded_checkpoint(full, model, rank, degree)
        assert not missing
        model.load_state_dict(local, assign=True)
        return model.layer(inputs[rank] if isinstance(inputs, list) else inputs)

    try:
        return pool.run([lambda rank=rank: run(rank) for rank in range(degree)])
    finally:
        pool.close()


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("width", [16, 21])
@pytest.mark.parametrize("parallel_input", [False, True])
def test_row_parallel(degree, width, parallel_input):
    """A whole input is cut by the rank of the trace: every rank gets the slice of rank 0."""
    x, weight, bias = tensors((2, 3, width), (5, width), (5,))
    checkpoint = {"layer.weight": weight, "layer.bias": bias}
    padded = F.pad(x, (0, get_padding_length(width, degree)))
    inputs = list(padded.chunk(degree, dim=-1)) if parallel_input else x
    got = run_sharded(
        degree,
        lambda: RowParallelLinear(width, 5, pad=True, input_is_parallel=parallel_input),
        checkpoint,
        inputs,
    )
    if not parallel_input:
        x = padded.chunk(degree, dim=-1)[0].repeat(1, 1, degree)[..., :width]
    for result in got:
        torch.testing.assert_close(result, F.linear(x, weight, bias))


def test_a_sequence_that_ranks_share_is_refused():
    for layer in (ColumnParallelLinear, RowParallelLinear, ParallelEmbedding):
        with pytest.raises(NotImplementedError, match="sequence_parallel_enabled=True"):
            layer(4, 4, sequence_parallel_enabled=True)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("across_embedding", [False, True])
@pytest.mark.parametrize("spmd_rank", [False, True])
def test_embedding(degree, across_embedding, spmd_rank):
    """Without a rank tensor every rank of a sharded vocabulary looks for the tokens of rank 0."""
    (table,) = tensors((37, 10))
    ids = torch.tensor([[0, 36, 5], [18, 19, 36]], dtype=torch.int32)
    checkpoint = {"layer.weight": table}
    if spmd_rank and not across_embedding:
        checkpoint["layer.rank_util.rank"] = torch.arange(degree, dtype=torch.int32)
    got = run_sharded(
        degree,
        lambda: ParallelEmbedding(
            37, 10, pad=True, shard_across_embedding=across_embedding, use_spmd_rank=spmd_rank
        ),
        checkpoint,
        ids,
    )
    expected = table[ids.long()]
    if not (across_embedding or spmd_rank):
        rows = -(-37 // degree)
        shards = F.pad(table, (0, 0, 0, rows * degree - 37)).view(degree, rows, 10)
        expected = shards.sum(0)[ids.long().clamp_max(rows - 1)] * (ids < rows)[..., None]
    for result in got:
        torch.testing.assert_close(result, expected)


def test_wrong_shape_names_the_tensor_and_both_shapes():
    pool = RankPool(2)

    def run(rank):
        model = Holder(ColumnParallelLinear(6, 16, bias=False))
        return get_sharded_checkpoint({"layer.weight": torch.zeros(17, 6)}, model, rank, 2)

    with pytest.raises(CheckpointError, match=r"layer\.weight .*\[17, 6\], expected \[16, 6\]"):
        pool.run([lambda rank=rank: run(rank) for rank in range(2)])
    pool.close()


def test_strided_shards_interleave():
    """Two fused matrices (stride 2): each is cut by itself."""
    full = torch.arange(8)[:, None]
    assert create_local_weight(0, 2, full, 0, 4, stride=2).T.tolist() == [[0, 1, 4, 5]]
    assert create_local_weight(1, 2, full, 0, 4, stride=2).T.tolist() == [[2, 3, 6, 7]]


def test_padding_refuses_training():
    pool = RankPool(1)
    layer = pool.run([lambda: ColumnParallelLinear(4, 4, pad=True)])[0]
    assert layer.training
    with pytest.raises(RuntimeError, match="call eval"):
        pool.run([lambda: layer(torch.ones(1, 4))])


def test_unknown_keywords_are_refused_and_later_ones_accepted():
    pool = RankPool(1)
    later = {"rank_ordering": None, "tile_cc": False}
    pool.run([lambda: RowParallelLinear(4, 4, **later)])
    with pytest.raises(TypeError, match="ColumnParallelLinear.*'gather_ouput'"):
        pool.run([lambda: ColumnParallelLinear(4, 4, gather_ouput=False)])


def test_parameters_are_tagged_once_and_behind_their_assignment():
    """NxD makes an assigned parameter anew on the meta device, with its tags as arguments, and
    asserts that one that it tags has none."""
    weight = nn.Parameter(torch.zeros(2, 3))
    set_tensor_model_parallel_attributes(weight, True, 0, 1, num_partitions=2)
    with pytest.raises(AssertionError, match="tags twice"):
        set_tensor_model_parallel_attributes(weight, True, 0, 1, num_partitions=2)
    with deferred_parameters():
        with pytest.raises(
            CompileError, match="weight of Linear has tensor_model_parallel, .*anew"
        ):
            nn.Linear(3, 2).weight = weight
        layer = nn.Linear(3, 2)
        layer.weight = nn.Parameter(torch.zeros(2, 3))
        set_tensor_model_parallel_attributes(layer.weight, True, 0, 1, num_partitions=2)
    assert layer.weight.is_meta and layer.weight.num_partitions == 2
