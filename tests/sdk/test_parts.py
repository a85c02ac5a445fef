"""Buckets, the cache manager, sampling, attention helpers and small modules."""

import math
from types import SimpleNamespace

import pytest
import torch
from neuronx_distributed_inference.contract import CONTRACTS
from neuronx_distributed_inference.models.config import NeuronConfig
from neuronx_distributed_inference.modules.attention.utils import preprocess_quantized_linear_layer
from neuronx_distributed_inference.modules.flashdecode.utils import calculate_num_cores_per_group
from neuronx_distributed_inference.modules.generation.sampling import (
    Sampler,
    prepare_sampling_params,
    validate_sampling_params,
)
from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager
from neuronx_distributed_inference.modules.lora_serving.lora_module import is_lora_module
from neuronx_distributed_inference.utils.random import set_random_seed

from neuron_cpu.errors import CompileError
from neuron_cpu.runtime.ranks import Group, rank_context


def cache_manager(padding_side="right", continuous=False, quant=False, dtype="float32"):
    neuron_config = NeuronConfig(
        batch_size=2,
        seq_len=6,
        padding_side=padding_side,
        is_continuous_batching=continuous,
        kv_cache_quant=quant,
        torch_dtype=dtype,
    )
    config = SimpleNamespace(
        neuron_config=neuron_config,
        num_hidden_layers=1,
        num_attention_heads=1,
        hidden_size=1,
        num_cores_per_group=1,
    )
    return KVCacheManager(config, num_kv_head=1)


def numbers(*rows):
    """(B, 1, S, 1) from rows of numbers."""
    return torch.tensor(rows, dtype=torch.float32)[:, None, :, None]


def update(manager, prefill, positions, keys, seq_ids=(0, 1)):
    return manager.update_cache(
        is_for_context_encoding=prefill,
        seq_ids=torch.tensor(seq_ids),
        position_ids=torch.tensor(positions),
        new_key_values=[(keys, -keys)],
        seq_len=keys.shape[2],
    )


def test_quantised_cache_is_fp8():
    manager = cache_manager(quant=True, dtype="bfloat16")
    assert manager.past_key_values[0].dtype == torch.float8_e4m3fn
    update(manager, True, [[0, 1]] * 2, numbers([1.0, 1.06], [2.0, 3.0]))
    update(manager, False, [[2], [2]], numbers([5.0], [6.0]))
    keys, _ = manager.get_cache(3)[0]
    assert keys.dtype == torch.bfloat16
    assert keys[:, 0, :, 0].tolist() == [[1.0, 1.0, 5.0], [2.0, 3.0, 6.0]]


def test_prepare_sampling_params():
    params = prepare_sampling_params(3, [1, 2, 3], [0.5] * 3, [2.0] * 3)
    assert params.dtype == torch.float32
    assert params.tolist() == [[1, 0.5, 2], [2, 0.5, 2], [3, 0.5, 2]]
    assert prepare_sampling_params(2, 5, 0.5, torch.tensor([2.0])).tolist() == [[5, 0.5, 2]] * 2
    for top_k in ([1, 2], [1, 2, 3]):  # the library takes no list beside a single value either
        with pytest.raises(AssertionError, match=r"\[\d, 1, 1\] values, expected one of each"):
            prepare_sampling_params(3, top_k)


ALL = 4.0  # top_k of the four tokens below


@pytest.mark.parametrize(("version", "zero"), [("0.1", False), ("0.6", True)])
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ((300, 1.0, 1.0), "top_k must be.*global_topk=256"),
        ((1.5, 1.0, 1.0), "a whole number"),
        ((1, 0.0, 1.0), "top_p must be above 0"),
        ((1, 1.0, -0.1), "temperature must"),
        ((-1, 1.0, 0.0), "temperature"),
    ],
)
def test_validate_sampling_params(version, zero, params, message):
    assert CONTRACTS[version].takes_zeros is zero
    config = NeuronConfig(on_device_sampling_config={}).on_device_sampling_config
    with pytest.raises(ValueError, match=message):
        validate_sampling_params(torch.tensor([params]), config, zero)
    validate_sampling_params(torch.tensor([[-1, 1.0, 0.1], [256, 0.1, 3.0]]), config, zero)
    for row in ([1, 1.0, 0.0], [0, 1.0, 1.0]):
        if zero:
            validate_sampling_params(torch.tensor([row]), config, zero)
            continue
        with pytest.raises(ValueError, match="from 1 to|be above 0"):
            validate_sampling_params(torch.tensor([row]), config, zero)


def sampler(**config):
    given = {"global_topk": 4, **config}
    return Sampler(NeuronConfig(on_cpu=True, on_device_sampling_config=given))


def test_sampler_keeps_what_top_p_holds():
    """Of 0.5, 0.3, 0.15, 0.05 top_p 0.7 keeps one, as the second passes it, and top_k 3 three; -1
    makes all four as likely. Hugging Face would keep the second."""
    logits = torch.log(torch.tensor([[0.05, 0.3, 0.5, 0.15]] * 4))
    params = prepare_sampling_params(4, [ALL, 3, 1, -1], [0.7, 1.0, 1.0, 1.0], [1.0] * 4)
    tokens, probabilities = sampler(dynamic=True)(logits, params, return_values=True)
    assert tokens.tolist() == [[2, 1, 3, 0]] * 4
    expected = [[1, 0, 0, 0], [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0], [1, 0, 0, 0], [0.25] * 4]
    torch.testing.assert_close(probabilities, torch.tensor(expected), atol=1e-5, rtol=0)
    tokens = sampler(dynamic=True)(logits, params)
    assert tokens.dtype == torch.int32
    assert int(tokens[2]) == 2


def test_a_static_graph_knows_only_what_its_configuration_has():
    """On the CPU the call's own values say what is done."""
    logits = torch.log(torch.tensor([[0.05, 0.3, 0.5, 0.15]]))
    params = prepare_sampling_params(1, [ALL], [0.7], [0.1])

    def best(**config):
        given = {"do_sample": True, "top_k": 2, "global_topk": 4, **config}
        with rank_context(Group(0, 1)):
            own = Sampler(NeuronConfig(on_device_sampling_config=given))
            return float(own(logits, params, return_values=True)[1][0, 0])

    assert best() == pytest.approx(0.5)
    assert best(temperature=0.5) == pytest.approx(1 / (1 + 0.6**10 + 0.3**10 + 0.1**10))
    assert best(top_p=0.9) == best(dynamic=True) == 1.0
    assert float(sampler(do_sample=True)(logits, params, return_values=True)[1][0, 0]) == 1.0


def test_more_candidates_than_a_rank_has_are_refused():
    with pytest.raises(CompileError, match="TopK asks for 5 of 4 .*lower global_topk"):
        sampler(dynamic=True, global_topk=5)(torch.zeros(1, 4), prepare_sampling_params(1))


def test_sampler_frequencies():
    """20,000 draws: frequencies within 4 standard deviations (0.015) of the probabilities."""
    torch.manual_seed(0)
    probabilities = torch.tensor([0.1, 0.2, 0.7])
    logits = torch.log(probabilities).expand(20000, 3)
    tokens = sampler(dynamic=True, global_topk=3)(logits, prepare_sampling_params(20000, [3]))
    frequencies = torch.bincount(tokens, minlength=3) / 20000
    assert (frequencies - probabilities).abs().max() < 0.015


def test_small_helpers():
    assert calculate_num_cores_per_group(32, 8, 16) == 2
    with pytest.raises(AssertionError, match="8 key-value heads among 2 ranks"):
        calculate_num_cores_per_group(32, 8, 2)
    assert not is_lora_module(torch.nn.Linear(1, 1))
    with pytest.raises(NotImplementedError, match="MLP kernel is the SDK's own"):
        preprocess_quantized_linear_layer(torch.nn.Linear(1, 1))
    set_random_seed(3)
    first = torch.rand(1).item()
    set_random_seed(3)
    assert torch.rand(1).item() == first
    assert not math.isnan(first)


def test_what_rounding_leaves_of_a_distribution_is_its_last_index():
    """Where the sum stays below the point, no index beyond the last is drawn."""
    sampler = SimpleNamespace(deterministic=True)
    assert Sampler.draw(sampler, torch.full((3, 4), 0.1)).flatten().tolist() == [3, 3, 3]
