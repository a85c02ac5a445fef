"""How a Hugging Face checkpoint becomes the weights of llama.py, for any degree."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import llama

HEAD_DIM, GROUP = 16, 3


def config(tp_degree: int, nki_enabled: bool, kv_heads: int = 3, **more: object) -> SimpleNamespace:
    return SimpleNamespace(
        neuron_config=SimpleNamespace(
            tp_degree=tp_degree, nki_enabled=nki_enabled, vocab_parallel=False
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


def checkpoint(cfg: SimpleNamespace, tied: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    hidden, q = cfg.hidden_size, cfg.num_attention_heads * HEAD_DIM
    kv, f = cfg.num_key_value_heads * HEAD_DIM, cfg.intermediate_size
    state = {
        "embed_tokens.weight": torch.randn(cfg.vocab_size, hidden),
        "norm.weight": torch.ones(40),
    }
    if not tied:
        state["lm_head.weight"] = torch.randn(cfg.vocab_size, hidden)
    for layer in range(cfg.num_hidden_layers):
        at = f"layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", q, hidden), ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden), ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", f, hidden), ("mlp.up_proj", f, hidden), ("mlp.down_proj", hidden, f),
        ):  # fmt: skip
            state[f"{at}{name}.weight"] = torch.randn(rows, columns)
    return state


def unblock(blocks: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The [n, k] weight that ``blocks`` hold, by the layout's definition, element by element."""
    layout = llama.BlockLayout.of(n, k)
    tiles = blocks.reshape(layout.blocks, 128, layout.k_tiles, layout.nb)
    weight = torch.empty(n, k)
    for row in range(n):
        block, column = divmod(row, layout.nb)
        weight[row] = tiles[block, :, :, column].t().reshape(-1)[:k]
    return weight


@pytest.mark.parametrize(("n", "k"), [(1, 1), (960, 576), (515, 200), (49, 130), (512, 4096)])
def test_blocks_hold_the_weight(n: int, k: int) -> None:
    weight = torch.randn(n, k)
    assert torch.equal(unblock(llama.block_weight(weight), n, k), weight)


@pytest.mark.parametrize(("n", "k"), [(960, 576), (1536, 576), (64128, 2048), (2048, 4096)])
def test_rows_are_long_enough_for_dma(n: int, k: int) -> None:
    """2 KiB to 16 KiB of bf16 per partition: rows of 2048 B reach 82 % of the DMA peak."""
    layout = llama.BlockLayout.of(n, k)
    assert 2048 <= 2 * layout.k_tiles * layout.nb <= 16384


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_rank_gets_its_share(tp: int) -> None:
    """q, k, v rows of a rank together; padded heads are zero and meet zero output columns."""
    cfg = config(tp, nki_enabled=True)
    plain = checkpoint(cfg)
    state = llama.NeuronLlamaForCausalLM.convert_hf_to_neuron_state_dict(plain, cfg)
    sizes = llama.Sizes.of(cfg)
    q_rows, kv_rows = sizes.q_rank * HEAD_DIM, sizes.kv_rank * HEAD_DIM
    qkv = state["layers.1.self_attn.qkv_proj.weight"].chunk(tp)
    out = state["layers.1.self_attn.o_proj.weight"].chunk(tp)
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    for rank in range(tp):
        mine = unblock(qkv[rank], q_rows + 2 * kv_rows, 40)
        for k, part in enumerate(torch.split(mine, [q_rows, kv_rows, kv_rows])):
            parts[k].append(part)
        parts[3].append(unblock(out[rank], 40, q_rows))
    for k, name in enumerate("qkv"):
        whole, wanted = torch.cat(parts[k]), plain[f"layers.1.self_attn.{name}_proj.weight"]
        assert torch.equal(whole[: len(wanted)], wanted)
        assert not whole[len(wanted) :].any()
    whole, wanted = torch.cat(parts[3], 1), plain["layers.1.self_attn.o_proj.weight"]
    assert torch.equal(whole[:, : wanted.shape[1]], wanted)
    assert not whole[:, wanted.shape[1] :].any()
    down = [unblock(w, 40, 56 // tp) for w in state["layers.0.mlp.down_proj.weight"].chunk(tp)]
    assert torch.equal(torch.cat(down, 1), plain["layers.0.mlp.down_proj.weight"])


@pytest.mark.parametrize("nki_enabled", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_conversion_can_be_repeated(nki_enabled: bool, tied: bool) -> None:
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
        shares = [unblock(w, 24, 40) for w in first["lm_head.weight"].chunk(2)]
        assert torch.equal(torch.cat(shares), head)
    else:
        assert torch.equal(first["lm_head.weight"], head)


def test_without_kernels_parameters_keep_the_plain_layout() -> None:
    cfg = config(1, nki_enabled=False)
    plain = checkpoint(cfg)
    state = llama.NeuronLlamaForCausalLM.convert_hf_to_neuron_state_dict(plain, cfg)
    assert all(torch.equal(state[k], v) for k, v in plain.items())


def test_a_degree_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="intermediate_size 56 is not divisible .* 3"):
        llama.Sizes.of(config(3, nki_enabled=True))


@pytest.mark.parametrize(
    ("scaling", "unchanged", "divided"),
    [
        (None, 32, 0),
        ({"rope_type": "linear", "factor": 4.0}, 0, 32),
        ({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}, 15, 14),
    ],
)  # fmt: skip
def test_rope_scaling(scaling: dict | None, unchanged: int, divided: int) -> None:
    """Llama-3.2-1B's frequencies: 0 to 14 as they are, 18 to 31 divided, three in between."""
    cfg = SimpleNamespace(rope_theta=500000.0, rope_scaling=scaling)
    base = llama._inverse_frequencies(SimpleNamespace(rope_theta=500000.0, rope_scaling=None), 64)
    scaled = llama._inverse_frequencies(cfg, 64)
    factor = 1.0 if scaling is None else scaling["factor"]
    same = [a == pytest.approx(b, rel=1e-12) for a, b in zip(scaled, base)]
    less = [a == pytest.approx(b / factor, rel=1e-12) for a, b in zip(scaled, base)]
    assert same[:unchanged] == [True] * unchanged
    assert divided == 0 or less[-divided:] == [True] * divided


def test_unknown_rope_scaling_is_refused() -> None:
    cfg = SimpleNamespace(rope_theta=1e4, rope_scaling={"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(ValueError, match="yarn, expected llama3, linear or default"):
        llama._inverse_frequencies(cfg, 64)


def test_a_saved_configuration_keeps_the_kernels() -> None:
    made = llama.NeuronConfigNKI(enable_nki=True)
    again = llama.NeuronConfigNKI(nki_enabled=made.nki_enabled)
    assert made.nki_enabled and again.nki_enabled
    assert not llama.NeuronConfigNKI().nki_enabled
