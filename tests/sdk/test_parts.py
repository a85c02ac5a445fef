"""Buckets, the cache manager, sampling, attention helpers and small modules."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from neuronx_distributed_inference.contract import CONTRACTS
from neuronx_distributed_inference.models.config import NeuronConfig
from neuronx_distributed_inference.models.llama.modeling_llama import Llama3RotaryEmbedding
from neuronx_distributed_inference.models.model_wrapper import ModelWrapper
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
from neuronx_distributed_inference.modules.attention.gqa import (
    GQA,
    determine_sharding_strategy,
    get_shardable_head_counts,
    maybe_pad_interleaved,
)
from neuronx_distributed_inference.modules.attention.utils import (
    RotaryEmbedding,
    apply_rotary_pos_emb,
    manual_softmax,
    move_heads_front,
    preprocess_quantized_linear_layer,
    repeat_kv,
)
from neuronx_distributed_inference.modules.autobucketing import generate_buckets
from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm
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


@pytest.mark.parametrize(
    ("longest", "buckets"),
    [
        (64, [64]),
        (128, [128]),
        (256, [128, 256]),
        (512, [128, 256, 512]),
        (640, [128, 256, 640]),
        (1024, [128, 256, 512, 1024]),
        (8192, [128, 256, 512, 1024, 2048, 4096, 8192]),
    ],
)
def test_generate_buckets(longest, buckets):
    assert generate_buckets(128, longest) == buckets


@pytest.mark.parametrize(
    ("tp", "heads", "kv", "strategy", "counts"),
    [
        (2, 32, 8, GQA.CONVERT_TO_MHA, (32, 8)),
        (8, 32, 8, GQA.REPLICATE_TO_TP_DEGREE, (32, 8)),
        (16, 32, 8, GQA.REPLICATE_TO_TP_DEGREE, (32, 16)),
        (8, 12, 2, GQA.REPLICATE_TO_TP_DEGREE, (16, 8)),
        (2, 9, 3, GQA.CONVERT_TO_MHA, (10, 10)),
        (3, 9, 3, GQA.REPLICATE_TO_TP_DEGREE, (9, 3)),
        (4, 5, 5, GQA.CONVERT_TO_MHA, (8, 8)),
    ],
)
def test_head_counts(tp, heads, kv, strategy, counts):
    assert determine_sharding_strategy(tp, kv) is strategy
    assert get_shardable_head_counts(tp, heads, kv, strategy) == counts


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


def written(manager):
    return manager.past_key_values[0][:, 0, :, 0].tolist()


def update(manager, prefill, positions, keys, seq_ids=(0, 1)):
    return manager.update_cache(
        is_for_context_encoding=prefill,
        seq_ids=torch.tensor(seq_ids),
        position_ids=torch.tensor(positions),
        new_key_values=[(keys, -keys)],
        seq_len=keys.shape[2],
    )


def test_cache_right_padding():
    """Prefill overwrites the prefix, padding included; decode writes at each row's position."""
    manager = cache_manager()
    update(manager, True, [[0, 1, 2, 1]] * 2, numbers([1, 2, 3, 9], [4, 9, 9, 9]))
    assert written(manager) == [[1, 2, 3, 9, 0, 0], [4, 9, 9, 9, 0, 0]]
    caches = update(manager, False, [[3], [1]], numbers([5], [6]))
    assert written(manager) == [[1, 2, 3, 5, 0, 0], [4, 6, 9, 9, 0, 0]]
    assert caches[0] is manager.past_key_values[0]
    keys, values = manager.get_cache(4)[0]
    assert keys[:, 0, :, 0].tolist() == [[1, 2, 3, 5], [4, 6, 9, 9]]
    assert torch.equal(keys, -values)


def test_cache_left_padding():
    """A prompt is written from the start, so it has to be whole; decode shifts by one; a bucket is
    read from the end."""
    manager = cache_manager("left")
    update(manager, True, [[0, 1, 2]] * 2, numbers([1, 2, 3], [0, 0, 4]))
    assert written(manager) == [[1, 2, 3, 0, 0, 0], [0, 0, 4, 0, 0, 0]]
    update(manager, True, [range(6)] * 2, numbers([9, 9, 9, 1, 2, 3], [9, 9, 9, 9, 9, 4]))
    update(manager, False, [[3], [1]], numbers([5], [6]))
    assert written(manager) == [[9, 9, 1, 2, 3, 5], [9, 9, 9, 9, 4, 6]]
    assert manager.get_cache(2)[0][0][:, 0, :, 0].tolist() == [[3, 5], [4, 6]]


def test_cache_lines_by_sequence_id():
    manager = cache_manager(continuous=True)
    update(manager, True, [[0, 1]], numbers([7, 8]), seq_ids=(1,))
    assert written(manager) == [[0] * 6, [7, 8, 0, 0, 0, 0]]


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
        ((-2, 1.0, 1.0), "top_k must be"),
        ((1.5, 1.0, 1.0), "a whole number"),
        ((1, 0.0, 1.0), "top_p must be above 0"),
        ((1, 1.5, 1.0), "top_p must be above 0"),
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


def test_several_places_of_a_row_have_a_distribution_each():
    """(B, T, V) as T calls with (B, V), the parameters being a row's."""
    logits = torch.randn((2, 3, 5), generator=torch.Generator().manual_seed(0))
    params = prepare_sampling_params(2, [ALL, 2], [0.9, 1.0], [1.0, 0.5])
    tokens, probabilities = sampler(dynamic=True)(logits, params, return_values=True)
    for place in range(3):
        alone = sampler(dynamic=True)(logits[:, place], params, return_values=True)
        assert torch.equal(tokens[:, place], alone[0])
        assert torch.equal(probabilities[:, place], alone[1])


def test_sampler_frequencies():
    """20,000 draws: frequencies within 4 standard deviations (0.015) of the probabilities."""
    torch.manual_seed(0)
    probabilities = torch.tensor([0.1, 0.2, 0.7])
    logits = torch.log(probabilities).expand(20000, 3)
    tokens = sampler(dynamic=True, global_topk=3)(logits, prepare_sampling_params(20000, [3]))
    frequencies = torch.bincount(tokens, minlength=3) / 20000
    assert (frequencies - probabilities).abs().max() < 0.015


def test_sampler_zero_temperature_and_determinism():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    cold = prepare_sampling_params(1, [1], [1.0], [0.0])
    assert sampler(dynamic=True, global_topk=3)(logits, cold).tolist() == [1]
    middle = sampler(dynamic=True, deterministic=True, global_topk=3)
    warm = prepare_sampling_params(1, [3], [1.0], [100.0])  # nearly uniform: the middle one
    assert {int(middle(logits, warm)) for _ in range(20)} == {2}


def test_static_greedy_sampler_ignores_the_parameters():
    logits = torch.tensor([[1.0, 5.0, 5.0]])
    assert sampler(top_k=1)(logits, prepare_sampling_params(1, [50])).tolist() == [1]


def test_rotary_embedding_needs_no_buffer():
    rotary = RotaryEmbedding(8, base=100.0)
    assert dict(rotary.named_buffers()) == {}
    positions = torch.tensor([[0, 5, 131071]])
    cos, sin = rotary(torch.empty(0), positions)
    exponents = torch.arange(0, 8, 2, dtype=torch.float64) / 8
    angles = positions[0, :, None].double() * (100.0**-exponents)
    angles = torch.cat([angles, angles], dim=-1)[None]
    torch.testing.assert_close(cos.double(), angles.cos(), atol=2e-2, rtol=0)
    torch.testing.assert_close(sin[:, :2].double(), angles[:, :2].sin(), atol=1e-6, rtol=0)


def test_llama3_frequencies_of_the_1b_model():
    """Indices 0-14 stay, 15-17 are blended, 18-31 are divided by 32."""
    rotary = Llama3RotaryEmbedding(64, factor=32.0)
    assert rotary.old_context_len == 8192
    plain = RotaryEmbedding(64, base=500000.0).get_inv_freqs()
    ratio = rotary.get_inv_freqs() / plain
    torch.testing.assert_close(ratio[:15], torch.ones(15))
    torch.testing.assert_close(ratio[18:], torch.full((14,), 1 / 32))
    blend = (ratio[15:18] - 1 / 32) / (1 - 1 / 32)
    torch.testing.assert_close(blend, torch.tensor([0.5928, 0.2813, 0.0745]), atol=1e-4, rtol=0)


def test_rotation_is_by_halves():
    q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    cos, sin = torch.zeros(1, 1, 4), torch.ones(1, 1, 4)
    rotated, _ = apply_rotary_pos_emb(q, q, cos, sin)
    assert rotated.flatten().tolist() == [-3, -4, 1, 2]


def test_head_layouts():
    x = torch.arange(2 * 3 * 8.0).view(2, 3, 8)
    heads = move_heads_front(x, 2, 3, 4, 2)
    assert heads.shape == (2, 4, 3, 2)
    assert torch.equal(heads[1, 2, 0], x[1, 0, 4:6])
    repeated = repeat_kv(heads, 3)
    assert repeated.shape == (2, 12, 3, 2)
    assert torch.equal(repeated[:, 3:6], heads[:, 1:2].expand(2, 3, 3, 2))


@pytest.mark.parametrize("largest", [-1e4, 0.0, 1e4])
def test_manual_softmax_is_one_softmax(largest):
    torch.manual_seed(0)
    prior, active = torch.randn(2, 3, 1, 7), torch.randn(2, 3, 1, 1) + largest
    prior[0, 0] = torch.finfo(torch.float32).min  # a fully masked row
    left, right = manual_softmax(prior, active, False)
    expected = torch.softmax(torch.cat([prior, active], dim=-1), dim=-1)
    torch.testing.assert_close(torch.cat([left, right], dim=-1), expected)


def test_custom_rms_norm():
    torch.manual_seed(0)
    norm = CustomRMSNorm(5, eps=1e-5)
    norm.weight.data.normal_()
    x = (torch.randn(2, 3, 5) * 100).bfloat16()
    wide = x.double()
    mean_square = (wide**2).mean(-1, keepdim=True)
    expected = wide / (mean_square + 1e-5).sqrt() * norm.weight.double()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).double(), expected, rtol=2**-8, atol=1e-6)
    unscaled = CustomRMSNorm(eps=1e-5)(x.float()).double()
    torch.testing.assert_close(unscaled, wide / (mean_square + 1e-5).sqrt(), rtol=1e-5, atol=1e-6)


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


def test_zero_heads_end_each_group() -> None:
    """Four heads of two features in two groups become six: a zero head behind each pair."""
    rows = torch.arange(1.0, 25.0).reshape(8, 3)
    padded = maybe_pad_interleaved(rows, 4, 6, 2, 2)
    zeros = torch.zeros(2, 3)
    assert torch.equal(padded, torch.cat([rows[:4], zeros, rows[4:], zeros]))


@pytest.mark.parametrize(
    ("tag", "holds", "position", "width", "bucket"),
    [
        ("token_generation_model", True, 63, 64, 128),
        ("token_generation_model", True, 100, 60, 128),
        ("token_generation_model", True, 10, 60, 64),
        ("speculation_model", False, 10, 60, 64),
        ("speculation_model", True, 10, 60, 128),
    ],
)
def test_a_step_takes_the_bucket_that_holds_it(
    tag: str, holds: bool, position: int, width: int, bucket: int
) -> None:
    """Its last position and a mask below the bucket; from some release on its guesses, too."""
    wrapper = SimpleNamespace(
        neuron_config=SimpleNamespace(buckets=[64, 128]),
        is_prefill=False,
        tag=tag,
        contract=SimpleNamespace(pads_to_bucket=True, bucket_holds_speculation=holds),
    )
    given = torch.zeros(1, 5), torch.ones(1, width), torch.tensor([[position]])
    assert ModelWrapper.choose_bucket(wrapper, *given) == bucket


def test_a_position_beyond_all_buckets_is_refused() -> None:
    wrapper = SimpleNamespace(
        neuron_config=SimpleNamespace(buckets=[64, 128]), is_prefill=False, tag="step"
    )
    with pytest.raises(ValueError, match="position 128, expected less than the largest bucket 128"):
        ModelWrapper.choose_bucket(
            wrapper, torch.zeros(1, 1), torch.ones(1, 9), torch.tensor([[128]])
        )


def test_what_rounding_leaves_of_a_distribution_is_its_last_index() -> None:
    """Where the sum stays below the point, no index beyond the last is drawn."""
    sampler = SimpleNamespace(deterministic=True)
    assert Sampler.draw(sampler, torch.full((3, 4), 0.1)).flatten().tolist() == [3, 3, 3]


@pytest.mark.parametrize("name", ["apply_seq_ids_mask", "allow_input_truncation"])
def test_later_settings_are_off_unasked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    assert getattr(NeuronConfig(), name) is False


def test_cosines_that_are_given_are_not_made_anew() -> None:
    made = []
    angles = torch.zeros(1, 2, 4), torch.ones(1, 2, 4)
    model = SimpleNamespace(rotary_emb=lambda *given: made.append(given) or angles)
    states = [torch.randn(1, 2, 2, 4) for _ in range(3)]
    rotate = NeuronAttentionBase.apply_rotary_embedding
    unasked = rotate(model, *states, torch.zeros(1, 2), None, None, False)
    assert len(made) == 1 and unasked[2:] == angles
    given = rotate(model, *states, torch.zeros(1, 2), *angles, False)
    assert len(made) == 1 and torch.equal(given[0], unasked[0])


@pytest.mark.parametrize("tokens", [1, 2])
def test_several_new_tokens_are_masked_among_themselves(tokens: int) -> None:
    """One token sees itself, whatever the mask among new ones says."""
    masks = []
    model = SimpleNamespace(
        num_key_value_groups=1,
        k_cache_transposed=False,
        scaled_qk=lambda q, k, mask: masks.append(mask) or q @ k.mT,
    )
    states = [torch.randn(1, 2, tokens, 4) for _ in range(3)]
    past = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    places = torch.zeros(1, tokens)
    NeuronAttentionBase.compute_for_token_gen(model, *states, places, past, "seen", "among new")
    assert masks == ["seen", "among new" if tokens > 1 else None]
