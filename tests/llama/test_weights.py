"""How a Hugging Face checkpoint becomes the weights of llama.py, for any degree."""

from types import SimpleNamespace

import pytest
import torch

from tests.llama.every import llama

HEAD_DIM, GROUP, QUADRANT = 16, 3, 32


def config(tp_degree, nki_enabled, kv_heads=3, **more):
    return SimpleNamespace(
        neuron_config=SimpleNamespace(
            tp_degree=tp_degree,
            nki_enabled=nki_enabled,
            vocab_parallel=False,
            quantization_dtype="int8",
            torch_dtype=torch.bfloat16,
            lora_config=None,
        ),
        hidden_size=40,
        head_dim=HEAD_DIM,
        num_attention_heads=kv_heads * GROUP,
        num_key_value_heads=kv_heads,
        intermediate_size=56,
        vocab_size=48,
        num_hidden_layers=2,
        **more,
    )


def checkpoint(cfg, tied=False):
    torch.manual_seed(0)
    hidden, q = cfg.hidden_size, cfg.num_attention_heads * HEAD_DIM
    kv, f = cfg.num_key_value_heads * HEAD_DIM, cfg.intermediate_size
    state = {
        "embed_tokens.weight": torch.randn(cfg.vocab_size, hidden),
        "norm.weight": torch.randn(40),
    }
    if not tied:
        state["lm_head.weight"] = torch.randn(cfg.vocab_size, hidden)
    for layer in range(cfg.num_hidden_layers):
        at = f"layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{at}{norm}.weight"] = torch.randn(hidden)
        for name, rows, columns in (
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", f, hidden),
            ("mlp.up_proj", f, hidden),
            ("mlp.down_proj", hidden, f),
        ):
            state[f"{at}{name}.weight"] = torch.randn(rows, columns)
    return state


def from_layout(weight_hbm, n, k):
    """The [n, k] weight in kernel layout, by the layout's definition, element by element."""
    tiles = weight_hbm.reshape(128, -1, -(-k // 128), 128)
    weight = torch.empty(n, k)
    for row in range(n):
        tile, column = divmod(row, 128)
        weight[row] = tiles[:, tile, :, column].t().reshape(-1)[:k]
    return weight


def position_in_runs(feature, features):
    """Where the order of tiles has a feature: partition p of the tiles holds the p-th run."""
    tiles = -(-features // 128)
    partition, tile = divmod(feature, tiles)
    return tile * 128 + partition


@pytest.mark.parametrize(("n", "k"), [(1, 1), (960, 576), (515, 200), (49, 130), (512, 4096)])
def test_the_layout_holds_the_weight(n, k):
    weight = torch.randn(n, k)
    assert torch.equal(from_layout(llama.kernel_layout(weight), n, k), weight)


def heads_of(plain, name):
    """The heads of one projection of layer 1, [D, hidden] each, times the gain before them."""
    weight = plain[f"layers.1.self_attn.{name}_proj.weight"]
    if name == "o":
        return list(weight.t().split(HEAD_DIM))
    return list((weight * plain["layers.1.input_layernorm.weight"]).split(HEAD_DIM))


@pytest.mark.parametrize(
    ("kv_heads", "tp"), [(3, 1), (3, 2), (3, 4), (3, 8), (1, 2), (1, 8), (2, 4)]
)
def test_every_rank_gets_its_share(kv_heads, tp):
    """By definition, head by head: on each rank every query head stands beside its KV head.

    Lane by lane, of 32 partitions each, of a tile of KV heads: a KV head and zeros behind it, or
    zeros, and in each tile of queries one of its queries or zeros; values follow each other. Every
    query head is on exactly one rank, with its columns of the output weight; hidden features lie
    in runs.
    """
    cfg = config(tp, nki_enabled=True, kv_heads=kv_heads)
    plain = checkpoint(cfg)
    state = llama.NeuronLlamaForCausalLM.convert_hf_to_neuron_state_dict(plain, cfg)
    rank_heads = llama.SharedSizes.of(cfg).of_rank
    heads, group = {name: heads_of(plain, name) for name in "qkvo"}, rank_heads.group
    hidden = [position_in_runs(feature, 40) for feature in range(40)]
    found = []
    for rank in range(tp):
        blocks = state["layers.1.self_attn.qkv_proj.weight"].chunk(tp)[rank]
        tiles = from_layout(blocks, (group + 2) * 128, 128)[:, hidden].split(128)
        blocks = state["layers.1.self_attn.o_proj.weight"].chunk(tp)[rank]
        out = from_layout(blocks, 128, group * 128)[hidden].t().split(128)
        for lane in range(128 // QUADRANT):
            lanes = slice(lane * QUADRANT, lane * QUADRANT + HEAD_DIM)
            behind = slice(lanes.stop, (lane + 1) * QUADRANT)
            assert not any(rows[behind].any() for rows in (*tiles[: group + 1], *out))
            values = slice(lane * HEAD_DIM, (lane + 1) * HEAD_DIM)
            for q, o in zip(tiles[:group], out):
                if not q[lanes].any():
                    assert not o[lanes].any()
                    continue
                (head,) = (h for h, rows in enumerate(heads["q"]) if torch.equal(rows, q[lanes]))
                assert torch.equal(o[lanes], heads["o"][head])
                assert torch.equal(tiles[group][lanes], heads["k"][head // GROUP])
                assert torch.equal(tiles[group + 1][values], heads["v"][head // GROUP])
                found.append(head)
    assert sorted(found) == list(range(kv_heads * GROUP))


@pytest.mark.parametrize("nki_enabled", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_conversion_can_be_repeated(nki_enabled, tied):
    cfg = config(2, nki_enabled)
    plain = checkpoint(cfg, tied)
    before = {k: v.clone() for k, v in plain.items()}
    convert = llama.NeuronLlamaForCausalLM.convert_hf_to_neuron_state_dict
    first, second = convert(plain, cfg), convert(plain, cfg)
    assert plain.keys() == before.keys()
    assert all(torch.equal(plain[k], before[k]) for k in plain)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) for k in first)
    if tied:
        llama.NeuronLlamaForCausalLM.update_state_dict_for_tied_weights(first)
    head = plain.get("lm_head.weight", plain["embed_tokens.weight"])
    if nki_enabled:
        rows = [position_in_runs(row, 24) for row in range(24)]
        hidden = [position_in_runs(feature, 40) for feature in range(40)]
        shares = [from_layout(w, 128, 128)[rows] for w in first["lm_head.weight"].chunk(2)]
        assert torch.equal(torch.cat(shares)[:, hidden], head * plain["norm.weight"])
    else:
        assert torch.equal(first["lm_head.weight"], head)


def test_a_degree_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="intermediate_size 56 is not divisible .* 3"):
        llama.SharedSizes.of(config(3, nki_enabled=True))


@pytest.mark.parametrize(
    ("scaling", "unchanged", "divided"),
    [
        (None, 32, 0),
        ({"rope_type": "linear", "factor": 4.0}, 0, 32),
        (
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            15,
            14,
        ),
    ],
)
def test_rope_scaling(scaling, unchanged, divided):
    """Llama-3.2-1B's frequencies: 0 to 14 as they are, 18 to 31 divided, three in between."""
    positions = dict(max_position_embeddings=131072, neuron_config=SimpleNamespace(seq_len=128))
    cfg = SimpleNamespace(rope_theta=500000.0, rope_scaling=scaling, **positions)
    base, _ = llama.rope_frequencies(SimpleNamespace(**vars(cfg) | {"rope_scaling": None}), 64)
    scaled, amplitude = llama.rope_frequencies(cfg, 64)
    assert amplitude == 1.0
    factor = 1.0 if scaling is None else scaling["factor"]
    same = [a == pytest.approx(b, rel=1e-6) for a, b in zip(scaled, base)]
    less = [a == pytest.approx(b / factor, rel=1e-6) for a, b in zip(scaled, base)]
    assert same[:unchanged] == [True] * unchanged
    assert divided == 0 or less[-divided:] == [True] * divided


def test_unknown_rope_scaling_is_refused():
    scaling = {"rope_type": "longrope", "factor": 2.0}
    neuron_config = SimpleNamespace(seq_len=128)
    cfg = SimpleNamespace(
        rope_theta=1e4, rope_scaling=scaling, max_position_embeddings=8, neuron_config=neuron_config
    )
    with pytest.raises(
        ValueError, match="longrope, expected default, linear, dynamic, llama3, yarn"
    ):
        llama.rope_frequencies(cfg, 64)


def test_a_saved_configuration_keeps_the_kernels():
    made = llama.NeuronConfigNKI(enable_nki=True)
    again = llama.NeuronConfigNKI(nki_enabled=made.nki_enabled)
    assert made.nki_enabled and again.nki_enabled
    assert not llama.NeuronConfigNKI().nki_enabled
    assert not llama.NeuronConfigNKI().prompt_in_chunks
    unasked = SimpleNamespace(neuron_config=SimpleNamespace())  # NxDI's own, of another model
    assert not llama.is_nki_enabled(unasked)
