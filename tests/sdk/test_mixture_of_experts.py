"""The SDK stand-in's experts, alone and in a Qwen3-MoE, against Hugging Face and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from neuronx_distributed.modules.moe.expert_mlps import ExpertMLPs
from neuronx_distributed.modules.moe.model import MoE
from neuronx_distributed.modules.moe.routing import RouterTopK
from torch.utils.flop_counter import FlopCounterMode

from neuron_cpu.runtime.ranks import Group, rank_context

# experts, best of each token, block, batch, tokens of a row, where the router sends the tokens,
# and the rows that experts compute
BLOCKWISE: list[Any] = [
    ("mixtral", 8, 2, 16, 1, 77, "anywhere", 272),
    ("mixtral", 8, 2, 512, 1, 641, "empty", 5120),
    ("qwen3_moe", 16, 8, 8, 1, 61, "empty", 600),
    ("qwen3_moe", 128, 8, 512, 1, 545, "anywhere", 69632),
    # all experts: fewer choices than a block, and fewer rows than blocks
    ("mixtral", 8, 2, 512, 1, 255, "anywhere", 2040),
    ("qwen3_moe", 16, 8, 8, 61, 1, "anywhere", 976),  # a step of tokens
]


def theirs(family, experts, best):
    """The block of transformers, with seeded weights."""
    sizes: dict[str, Any] = {"hidden_size": 12, "num_experts_per_tok": best}
    if family == "mixtral":
        config = transformers.MixtralConfig(
            intermediate_size=10, num_local_experts=experts, **sizes
        )
        made = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(config)
    else:
        config = transformers.Qwen3MoeConfig(
            moe_intermediate_size=10, num_experts=experts, norm_topk_prob=True, **sizes
        )
        made = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    torch.manual_seed(1)
    for weight in made.parameters():
        weight.data.normal_(0, 0.3)
    return made.eval()


def ours(model, experts, best, block):
    """The stand-in's, with the same weights."""
    with rank_context(Group(0, 1)):
        mlps = ExpertMLPs(
            experts,
            best,
            12,
            10,
            "silu",
            True,
            None,
            normalize_top_k_affinities=True,
            block_size=block,
        )
    made = MoE(RouterTopK(experts, best, 12), mlps).eval()
    made.router.linear_router.weight = model.gate.weight
    for number, expert in enumerate(model.experts):
        names = ("gate_proj", "up_proj", "down_proj") if hasattr(expert, "up_proj") else None
        gate, up, down = (getattr(expert, name).weight.t() for name in names or ("w1", "w3", "w2"))
        mlps.mlp_op.gate_up_proj.weight.data[number] = torch.cat((gate, up), 1)
        mlps.mlp_op.down_proj.weight.data[number] = down
    return made


@pytest.mark.parametrize(
    ("family", "experts", "best", "block", "batch", "length", "sent", "rows"), BLOCKWISE
)
def test_a_prompt_runs_in_blocks_where_they_have_fewer_rows(
    family, experts, best, block, batch, length, sent, rows
):
    model = theirs(family, experts, best)
    x = torch.randn((batch, length, 12), generator=torch.Generator().manual_seed(2))
    x[..., 0] = 9.0
    if sent != "anywhere":  # to expert 3, or nothing to it
        model.gate.weight.data[3] = torch.eye(12)[0] * (9 if sent == "one" else -9)
    made = ours(model, experts, best, block)
    counted = FlopCounterMode(display=False)
    with torch.no_grad(), rank_context(Group(0, 1)), counted:
        (found,) = made(x)
    products = counted.get_flop_counts()["Global"]
    assert products[torch.ops.aten.bmm] == 2 * rows * 3 * 12 * 10
    assert rows <= experts * batch * length
    with torch.no_grad(), rank_context(Group(0, 1)):
        torch.testing.assert_close(found, model(x)[0], rtol=1e-5, atol=1e-5)
        made.expert_mlps.block_size = 2 * best * batch * length  # all experts
        torch.testing.assert_close(found, made(x)[0], rtol=1e-5, atol=1e-5)


def experts(capacity_factor=None, glu_mlp=True, **options):
    with rank_context(Group(0, 1)):
        torch.manual_seed(0)
        return ExpertMLPs(4, 2, 8, 6, "silu", glu_mlp, capacity_factor, **options).eval()


def test_refusals():
    with pytest.raises(ValueError, match="needs a top_k above 1"), rank_context(Group(0, 1)):
        ExpertMLPs(4, 1, 8, 6, "silu", True, None, normalize_top_k_affinities=True)
    with pytest.raises(NotImplementedError, match="Experts got glu_mlp=False"):
        experts(glu_mlp=False)
    with pytest.raises(NotImplementedError, match="capacity_factor=0.5, expected True and None"):
        experts(0.5)
    with pytest.raises(
        NotImplementedError, match="RouterTopK got act_fn='sigmoid', expected 'soft"
    ):
        RouterTopK(4, 2, 3, act_fn="sigmoid")
    with pytest.raises(TypeError, match=r"unexpected keyword arguments \['topk'\]"):
        experts(topk=2)
