"""Caches of blocks: prompts behind cached prefixes."""

from __future__ import annotations

import importlib

import pytest
import torch
from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params

from tests.sdk.test_submission import SHAPE, build

BLOCK = 16
BEHIND_A_PREFIX = {
    "pa_block_size": BLOCK, "pa_num_blocks": 8, "seq_len": 64, "max_context_length": 48,
    "enable_bucketing": True, "context_encoding_buckets": [16, 48], "prefix_buckets": [32],
    "is_block_kv_layout": True, "is_prefix_caching": True, "batch_size": 2, "ctx_batch_size": 1,
}  # fmt: skip


class Blocks:
    """Greedy requests over a cache of blocks: what a front end would hold."""

    def __init__(self, app) -> None:
        self.app, config = app, app.neuron_config
        self.block, self.width = config.pa_block_size, config.max_length // config.pa_block_size
        self.free = list(range(config.pa_num_blocks - 1, -1, -1))  # in an order of their own
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}

    def slots(self, row: int, start: int, end: int) -> list[int]:
        """Of positions of a sequence; it gets the blocks that it lacks."""
        table = self.tables.setdefault(row, [])
        while len(table) * self.block < end:
            table.append(self.free.pop(0))
        return [table[p // self.block] * self.block + p % self.block for p in range(start, end)]

    def padded(self, *rows: int) -> torch.Tensor:
        return torch.tensor([(self.tables[r] + [0] * self.width)[: self.width] for r in rows])

    def start(self, row: int, prompt: list[int], computed: int = 0) -> torch.Tensor:
        slots = self.slots(row, computed, len(prompt))
        output = self.app(
            input_ids=torch.tensor([prompt]),
            position_ids=torch.arange(len(prompt))[None],
            slot_mapping=torch.tensor([slots]),
            block_table=self.padded(row),
            full_context_lens=torch.tensor([[len(prompt)]]),
            computed_context_lens=torch.tensor([[computed]]),
            sampling_params=prepare_sampling_params(1),
        )
        self.tokens[row] = [*prompt, int(output.logits[0, -1].argmax())]
        return output.logits[0, -1]

    def share_a_prefix(self, prompt: list[int], wanted: torch.Tensor) -> None:
        """The second row begins behind the first one's two first blocks, with the logits that are
        ``wanted`` of the whole prompt, and both go on alike."""
        self.start(0, prompt)
        self.tables[1] = self.tables[0][:2]
        found = self.start(1, prompt, 2 * self.block)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        self.step(0, 1)
        assert self.tokens[0] == self.tokens[1]

    def step(self, *rows: int) -> None:
        lengths = [len(self.tokens[row]) for row in rows]
        slots = [self.slots(row, n - 1, n) for row, n in zip(rows, lengths)]
        output = self.app(
            input_ids=torch.tensor([self.tokens[row][-1:] for row in rows]),
            position_ids=torch.tensor([[n - 1] for n in lengths]),
            slot_mapping=torch.tensor(slots),
            block_table=self.padded(*rows),
            full_context_lens=torch.tensor(lengths)[:, None],
            computed_context_lens=torch.tensor(lengths)[:, None] - 1,
        )
        for row, logits in zip(rows, output.logits[:, -1]):
            self.tokens[row].append(int(logits.argmax()))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 200, (length,), generator=generator).tolist()


def made(of: str | None, application, folder, **options):
    """The SDK's own application, or that of llama.py, with kernels or without."""
    if of is None:
        return application(folder, **options)
    options = {"torch_dtype": "float32", "enable_nki": of == "kernels", **options}
    return build(importlib.import_module("models.extended"), folder, **options)


@pytest.fixture
def blocks(tiny_llama, application, monkeypatch):
    """Factory of (reference model, requests) under a version."""

    def make(version: str = "0.6", of: str | None = None, **options):
        monkeypatch.setenv("NEURON_CPU_NXDI", version)
        model, folder = tiny_llama(**(SHAPE if of else {}))
        given = {
            "seq_len": 128, "max_context_length": 128, "batch_size": 3, "ctx_batch_size": 1,
            "is_block_kv_layout": True, "is_prefix_caching": True, "pa_block_size": BLOCK,
            "pa_num_blocks": 20, "enable_bucketing": True, "token_generation_buckets": [64, 128],
            "context_encoding_buckets": [16, 64, 128], "prefix_buckets": [16, 64, 112],
        }  # fmt: skip
        return model, Blocks(made(of, application, folder, **{**given, **options}))

    return make


def alone(reference, model, prompt, got):
    return [*prompt, *reference(model, prompt, len(got) - len(prompt))[0].tolist()]


@pytest.mark.parametrize(
    ("version", "degree", "of"),
    [
        ("0.6", 1, None),
        ("0.6", 2, "kernels"),
        pytest.param("0.6", 2, "llama", marks=pytest.mark.full),
        pytest.param("0.6", 2, None, marks=pytest.mark.full),
        pytest.param("0.6", 1, "llama", marks=pytest.mark.full),
        pytest.param("0.6", 1, "kernels", marks=pytest.mark.full),
    ],
)
def test_requests_over_blocks_get_their_text_alone(blocks, reference, version, degree, of):
    """Of all lengths around a block, in a batch that changes, two of them behind shared blocks;
    with the SDK's modules and with the submission's, whose kernels read blocks by themselves."""
    model, live = blocks(version, of=of, tp_degree=degree)
    prompts = [prompt_of(2 * BLOCK), prompt_of(2 * BLOCK + 1), prompt_of(BLOCK - 1, 1)]
    for row, prompt in enumerate(prompts):
        if row == 1:  # its first two blocks are those of the first prompt
            live.tables[1] = live.tables[0][:2]
        live.start(row, prompt, computed=2 * BLOCK if row == 1 else 0)
        live.step(*range(row + 1))
    live.step(2, 0)
    for _ in range(18):
        live.step(1, 2, 0)
    for row, prompt in enumerate(prompts):
        assert live.tokens[row] == alone(reference, model, prompt, live.tokens[row])


def test_a_cached_prefix_is_read_and_neither_written_nor_needed_whole(blocks):
    """The logits are those of the whole prompt, whether or not the graph has room to compute some
    of the prefix again; blocks of the prefix keep every bit."""
    _, live = blocks()
    prompt = prompt_of(90)
    whole = live.start(0, prompt)
    caches = live.app.models[0].model.modules[0].kv_mgr.past_key_values
    before = [cache.clone() for cache in caches]
    for row, computed in enumerate((16, 80, 64), 1):
        live.tables[row] = live.tables[0][: computed // BLOCK]
        logits = live.start(row, prompt, computed)
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
    shared = live.tables[0][:5]
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[shared], old[shared])
    for computed in (33, 89):  # in the middle of a block, which then is the sequence's own
        torch.testing.assert_close(live.start(0, prompt, computed), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("computed", "total", "expected"),
    [
        (0, 1000, ([1024, 0], 0)),
        (128, 800, ([1024, 0], 128)),
        (640, 900, ([512, 512], 252)),
        (256, 400, ([512, 0], 256)),
        (200, 256, ([512, 0], 200)),
        (512, 1024, ([512, 512], 0)),
        (511, 1024, ([1024, 0], 511)),
    ],
)
def test_buckets_are_chosen_as_documented(computed, total, expected):
    from neuronx_distributed_inference.modules import autobucketing

    buckets = autobucketing.prefix_caching_buckets([512, 1024], [512, 1024])
    assert buckets == [[n, p] for n in (512, 1024) for p in (0, 512, 1024)]
    found = autobucketing.prefix_caching_bucket(total - computed, computed, buckets)
    assert found == expected


def test_a_prefix_beyond_the_largest_bucket_is_refused():
    from neuronx_distributed_inference.modules import autobucketing

    buckets = autobucketing.prefix_caching_buckets([512, 1024], [512, 1024])
    with pytest.raises(AssertionError, match="Prefix length 1088 .*at most 1024"):
        autobucketing.prefix_caching_bucket(320, 1280, buckets)


WRONG_CALLS = [
    ({"computed_context_lens": [[40]]}, "expected fewer in every sequence"),
    ({"computed_context_lens": [[-1]]}, "expected fewer in every sequence"),
    ({"full_context_lens": [[600]]}, "expected enough for 600 tokens"),
    ({"block_table": [[20] * 8]}, "reaches block 20 .*less than 20 blocks"),
    ({"block_table": [[1] * 8] * 2}, "for contexts of 1 and 1 sequences"),
    ({"block_table": None}, "got no block_table"),
    ({"slot_mapping": [[3]]}, "1 slots, expected one for each of 40"),
    ({"slot_mapping": [[320] * 40]}, "slot 320"),
]


def test_calls_that_would_read_or_write_elsewhere_are_refused(blocks):
    _, live = blocks(context_encoding_buckets=None, prefix_buckets=None)
    given = {
        "slot_mapping": [live.slots(0, 0, 40)],
        "block_table": live.padded(0).tolist(),
        "full_context_lens": [[40]],
        "computed_context_lens": [[0]],
    }
    ids = torch.tensor([prompt_of(40)])
    for changes, message in WRONG_CALLS:
        tensors = {k: None if v is None else torch.tensor(v) for k, v in (given | changes).items()}
        with pytest.raises(ValueError, match=message):
            params = prepare_sampling_params(1)
            places = torch.arange(40)[None]
            live.app(input_ids=ids, position_ids=places, sampling_params=params, **tensors)


@pytest.mark.parametrize(
    ("version", "options", "message"),
    [
        ("0.6", {"is_prefix_caching": False}, "takes is_block_kv_layout with is_prefix_caching"),
        ("0.6", {"is_block_kv_layout": False}, "got is_prefix_caching alone"),
        ("0.6", {"pa_block_size": 24}, "power of two"),
        ("0.6", {"pa_num_blocks": 7}, "pa_num_blocks of at least 8"),
        ("0.6", {"prefix_buckets": [40]}, "prefix_buckets of whole blocks"),
        ("0.6", {"ctx_batch_size": 3}, "ctx_batch_size 1"),
        ("0.6", {"padding_side": "left"}, "padding_side 'right'"),
        ("0.6", {"speculation_length": 4}, "meets speculation_length=4"),
        ("0.6", {"lora_config": {}}, "meets lora_config="),
        ("0.6", {"is_chunked_prefill": True}, "runs over the real libraries only"),
    ],
)
def test_settings_that_no_graph_has_are_refused_with_a_sentence(blocks, version, options, message):
    with pytest.raises((NotImplementedError, AssertionError), match=message):
        blocks(version, **options)


def test_lines_take_no_blocks(tiny_llama, application):
    app = application(tiny_llama()[1])
    with pytest.raises(ValueError, match="this model's cache has lines"):
        app(
            input_ids=torch.tensor([[5, 6]]),
            position_ids=torch.arange(2)[None],
            block_table=torch.tensor([[0]]),
        )


def test_the_caches_have_the_shapes_of_nxdi(blocks):
    """Fewer than 128 blocks a sequence are cut, here 8 into 16 parts of one token."""
    manager = blocks()[1].app.models[0].model.modules[0].kv_mgr
    assert manager.past_key_values[0].shape == (21, 16, 1, 2, 8)


def test_a_cache_of_fp8_blocks_gives_the_text_of_fp8_lines(blocks, tiny_llama, application):
    _, live = blocks("0.6", kv_cache_quant=True)
    prompt = prompt_of(40)
    live.start(0, prompt)
    for _ in range(8):
        live.step(0)
    lines = application(tiny_llama()[1], seq_len=128, max_context_length=64, kv_cache_quant=True)
    text = list(prompt)
    for at in (0, *range(40, 48)):
        ids = text[at:]
        output = lines(
            input_ids=torch.tensor([ids]),
            position_ids=torch.arange(at, len(text))[None],
            sampling_params=prepare_sampling_params(1),
        )
        text.append(int(output.logits[0, -1].argmax()))
    assert live.tokens[0] == text


def test_warming_up_leaves_no_trace(blocks, reference):
    model, live = blocks()
    live.app.warmup()
    prompt = prompt_of(21)
    live.start(0, prompt)
    live.step(0)
    assert live.tokens[0] == alone(reference, model, prompt, live.tokens[0])


def test_arguments_as_vllm_pads_them(blocks):
    """Prompts behind their end with 0, slots with -1 to the longest model, tables with -1."""
    _, live = blocks()
    prompt = prompt_of(40)
    wanted = live.start(0, prompt)
    table = torch.tensor([(live.tables[0] + [-1] * 8)[:8]])
    slots = live.slots(0, 32, 40) + [-1] * 120
    output = live.app(
        input_ids=torch.tensor([prompt + [0] * 6]),
        position_ids=torch.tensor([[*range(40), *[0] * 6]]),
        seq_ids=torch.tensor([2]),
        slot_mapping=torch.tensor([slots]),
        block_table=table,
        full_context_lens=torch.tensor([[40]]),
        computed_context_lens=torch.tensor([[32]]),
        sampling_params=prepare_sampling_params(1),
    )
    torch.testing.assert_close(output.logits[0, -1], wanted, rtol=1e-4, atol=1e-4)
    live.start(1, prompt_of(20, 1))
    live.step(1, 0)  # rows in any order
    output = live.app(
        input_ids=torch.tensor([live.tokens[0][-1:], live.tokens[1][-1:]]),
        position_ids=torch.tensor([[41], [21]]),
        seq_ids=torch.tensor([2, 0]),
        slot_mapping=torch.tensor([live.slots(0, 41, 42), live.slots(1, 21, 22)]),
        block_table=torch.where(live.padded(0, 1) > 0, live.padded(0, 1), -1),
        full_context_lens=torch.tensor([[42], [22]]),
        computed_context_lens=torch.tensor([[41], [21]]),
    )
    own = [output.logits[row, -1].argmax() for row in range(2)]
    live.step(0, 1)
    assert [live.tokens[row][-1] for row in range(2)] == [int(token) for token in own]
