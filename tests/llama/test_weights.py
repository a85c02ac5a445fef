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


def heads_of(plain: dict[str, torch.Tensor], name: str) -> list[torch.Tensor]:
    """The heads of one projection of layer 1, [D, hidden] each."""
    weight = plain[f"layers.1.self_attn.{name}_proj.weight"]
    return list((weight.t() if name == "o" else weight).split(HEAD_DIM))


@pytest.mark.parametrize(
    ("kv_heads", "tp"), [(3, 1), (3, 2), (3, 4), (3, 8), (1, 2), (1, 8), (2, 4)]
)
def test_every_rank_gets_its_share(kv_heads: int, tp: int) -> None:
    """By definition, head by head: on each rank every query head stands beside its KV head.

    A rank's KV slot holds KV head h or zeros; its ``group`` query slots hold queries of h or zeros.
    Every query head is on exactly one rank, with its columns of the output weight.
    """
    cfg = config(tp, nki_enabled=True, kv_heads=kv_heads)
    plain = checkpoint(cfg)
    state = llama.NeuronLlamaForCausalLM.convert_hf_to_neuron_state_dict(plain, cfg)
    sizes = llama.Sizes.of(cfg)
    heads = {name: heads_of(plain, name) for name in "qkvo"}
    widths = [sizes.q_rank * HEAD_DIM, sizes.kv_rank * HEAD_DIM, sizes.kv_rank * HEAD_DIM]
    found = []
    for rank in range(tp):
        blocks = state["layers.1.self_attn.qkv_proj.weight"].chunk(tp)[rank]
        parts = torch.split(unblock(blocks, sum(widths), 40), widths)
        q, k, v = (part.split(HEAD_DIM) for part in parts)
        blocks = state["layers.1.self_attn.o_proj.weight"].chunk(tp)[rank]
        out = unblock(blocks, 40, sizes.q_rank * HEAD_DIM).t().split(HEAD_DIM)
        for slot in range(sizes.q_rank):
            if not q[slot].any():
                assert not out[slot].any()
                continue
            (head,) = (h for h, rows in enumerate(heads["q"]) if torch.equal(rows, q[slot]))
            mine = slot // sizes.group
            assert torch.equal(out[slot], heads["o"][head])
            assert torch.equal(k[mine], heads["k"][head // GROUP])
            assert torch.equal(v[mine], heads["v"][head // GROUP])
            found.append(head)
    assert sorted(found) == list(range(kv_heads * GROUP))


@pytest.mark.parametrize(
    ("kv_heads", "tp", "per_rank"),
    [
        (3, 1, (9, 3)),
        (3, 2, (6, 2)),  # a fourth, zero KV head: replicas would take three a rank
        (3, 4, (3, 1)),
        (3, 8, (2, 1)),  # two replicas of each: three queries in parts of at most two
        (1, 2, (2, 1)),
        (1, 8, (1, 1)),
        (2, 4, (2, 1)),
    ],
)
def test_replicas_spread_the_work(kv_heads: int, tp: int, per_rank: tuple[int, int]) -> None:
    """Query and KV heads of a rank: no rank waits while another computes a head's whole group."""
    sizes = llama.Sizes.of(config(tp, nki_enabled=True, kv_heads=kv_heads))
    assert (sizes.q_rank, sizes.kv_rank) == per_rank


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_mlp_of_every_rank(tp: int) -> None:
    cfg = config(tp, nki_enabled=True)
    plain = checkpoint(cfg)
    state = llama.NeuronLlamaForCausalLM.convert_hf_to_neuron_state_dict(plain, cfg)
    state = llama.NeuronLlamaForCausalLM.convert_hf_to_neuron_state_dict(plain, cfg)
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
