"""The SDK stand-in's experts, alone and in a Qwen3-MoE, against Hugging Face and by hand."""

from __future__ import annotations

import pytest
import torch
from neuronx_distributed.modules.moe.expert_mlps import ExpertMLPs
from neuronx_distributed.modules.moe.routing import RouterTopK
from neuronx_distributed_inference.models.qwen3_moe import modeling_qwen3_moe

from neuron_cpu.runtime.ranks import Group, rank_context

MODELS = modeling_qwen3_moe
SHAPE = dict(
    hidden_size=48,
    head_dim=8,
    moe_intermediate_size=52,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=208,
    max_position_embeddings=512,
    num_experts=4,
    norm_topk_prob=True,
    num_experts_per_tok=2,
    initializer_range=0.2,
    tie_word_embeddings=False,
)


PROMPT = [5, 17, 101, 3, 44, 9]


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.full), {"tp_degree": 2}])
def test_logits_equal_hugging_face(options, qwen, generate, reference):
    model, app = qwen(**options)
    tokens, logits = reference(model, PROMPT, 5)
    output = generate(app, [PROMPT], 5, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(output.sequences[0, len(PROMPT) :], tokens)
    torch.testing.assert_close(torch.cat(output.logits), logits, rtol=0, atol=1e-4)


def experts(capacity_factor=None, glu_mlp=True, **options):
    with rank_context(Group(0, 1)):
        torch.manual_seed(0)
        return ExpertMLPs(4, 2, 8, 6, "silu", glu_mlp, capacity_factor, **options).eval()


def test_the_router_chooses_by_logits_and_its_affinities_cover_all_experts():
    router = RouterTopK(4, 2, 3)
    router.linear_router.weight.data = torch.tensor(
        [[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [-1, -1, -1]]
    )
    logits, affinities, indices = router(torch.tensor([[3.0, 1, 2], [-5, -1, -2]]))
    assert indices.tolist() == [[0, 2], [3, 1]] and logits.shape == (2, 4)
    torch.testing.assert_close(affinities.sum(-1), torch.ones(2))


def test_refusals(qwen):
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
    with pytest.raises(NotImplementedError, match="NeuronConfig.quantized is not supported"):
        qwen(load=False, quantized=True, quantized_checkpoints_path="somewhere")
