"""Draft and target in one graph: the text of plain decoding, whatever the draft guesses."""

from __future__ import annotations

import copy
import importlib
import itertools
import json

import pytest
import torch
from neuronx_distributed_inference.contract import VERSIONS
from neuronx_distributed_inference.models import fused_speculation
from neuronx_distributed_inference.models.config import FusedSpecNeuronConfig, NeuronConfig
from neuronx_distributed_inference.models.llama import modeling_llama
from neuronx_distributed_inference.modules.eagle.acceptance import accept_by_sampling
from neuronx_distributed_inference.modules.eagle.hidden_state import HiddenStateRollingBuffer
from neuronx_distributed_inference.modules.eagle.token_tree import TokenTree
from neuronx_distributed_inference.modules.generation.sampling import (
    Sampler,
    prepare_sampling_params,
)
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

from harness.session.speculation import InGraph
from neuron_cpu.errors import CheckpointError

PROMPT = [7, 3, 9, 11, 200, 7, 3, 9]
LENGTH, STEPS = 48, 14


def eagle_head(folder, path, seed=3, norm=False):
    """A folder with an EAGLE head for the model of `folder`: its embedding and head, one layer."""
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    kept = {k: v for k, v in state.items() if k.startswith("model.layers.0.")}
    kept["model.embed_tokens.weight"] = state["model.embed_tokens.weight"]
    kept["lm_head.weight"] = state["lm_head.weight"]
    if not norm:
        kept.pop("model.layers.0.input_layernorm.weight")
    hidden = state["lm_head.weight"].shape[1]
    generator = torch.Generator().manual_seed(seed)
    kept["model.fc.weight"] = torch.randn((hidden, 2 * hidden), generator=generator) / hidden**0.5
    path.mkdir()
    save_file(kept, path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return path


@pytest.fixture
def fused():
    """Factory of a compiled and loaded application of fused speculation."""

    def make(folder, draft_folder, length=4, eagle=False, module=modeling_llama, load=True, **more):
        model_cls = module.NeuronLlamaForCausalLM
        config_cls = model_cls.get_config_cls()
        sampling = {"do_sample": False, **more.pop("sampling", {})}
        norm = more.pop("norm", False)
        options = dict(
            seq_len=LENGTH,
            max_context_length=24,
            torch_dtype="float32",
            speculation_length=length,
            enable_fused_speculation=True,
            enable_eagle_speculation=eagle,
            on_device_sampling_config=sampling,
            trace_tokengen_model=False,
        )
        target = config_cls.get_neuron_config_cls()(**{**options, **more})
        draft = copy.deepcopy(target)
        draft.enable_fused_speculation = False
        draft.on_device_sampling_config.do_sample = False
        if eagle:
            draft.is_eagle_draft, draft.enable_eagle_draft_input_norm = True, norm
        else:
            draft.speculation_length = 0
        draft_config = config_cls(draft, load_config=load_pretrained_config(str(draft_folder)))
        spec = FusedSpecNeuronConfig(model_cls._model_cls, draft_config, str(draft_folder))
        config = config_cls(
            target, load_config=load_pretrained_config(str(folder)), fused_spec_config=spec
        )
        app = model_cls(str(folder), config)
        app.compile(folder / "compiled")
        if load:
            app.load(folder / "compiled")
        return app

    return make


class Told(InGraph):
    """The driver's loop, with more arguments for each call."""

    def forward(self, *args, **inputs):
        return super().forward(*args, **inputs, **self.more)


def rounds(app, generate, steps, **more):
    """The generated tokens, and how often the fused graph ran."""
    calls = []
    handle = app.fused_spec_model.register_forward_hook(lambda *_: calls.append(1))
    adapter = Told(app, app.neuron_config.enable_eagle_speculation)
    adapter.more = more
    got = generate(app, [PROMPT], steps, adapter=adapter, eos_token_id=0)
    handle.remove()
    return got, len(calls)


def cases(quick):
    """Every version with 0 and 1; all but one of them in the full suite only."""
    every = itertools.product(VERSIONS, (0, 1))
    return [pytest.param(*c, marks=[] if c == quick else pytest.mark.full) for c in every]


@pytest.mark.parametrize(("version", "seed"), cases(("0.1", 0)))
def test_the_text_is_the_greedy_one(
    tiny_llama, fused, generate, reference, monkeypatch, version, seed
):
    """The same model guesses all right; another one hardly anything."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama()
    _, draft = tiny_llama(seed=seed)
    app = fused(folder, draft, tp_degree=2)
    assert [m.tag for m in app.models] == ["context_encoding_model", "fused_speculation_model"]
    expected = reference(model, PROMPT, STEPS)[0].tolist()
    for _ in range(2):
        got, count = rounds(app, generate, STEPS)
        assert got[0].tolist() == expected
    assert (count == 4) if seed == 0 else (count > 8)


@pytest.mark.parametrize(("version", "norm"), cases(("0.6", 1)))
def test_any_eagle_head_gives_the_greedy_text(
    tiny_llama, fused, generate, reference, monkeypatch, tmp_path, version, norm
):
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama()
    head = eagle_head(folder, tmp_path / "head", norm=norm)
    app = fused(folder, head, eagle=True, norm=norm, tp_degree=2)
    got, _ = rounds(app, generate, STEPS)
    assert got[0].tolist() == reference(model, PROMPT, STEPS)[0].tolist()


TREE = {"0": ["1", "2", "3"], "1": ["4", "5"], "3": ["6"], "4": ["7"]}


@pytest.mark.parametrize(
    "version", [pytest.param(v, marks=[] if v == "0.6" else pytest.mark.full) for v in VERSIONS[1:]]
)
def test_any_tree_of_guesses_gives_the_greedy_text(
    tiny_llama, fused, generate, reference, monkeypatch, tmp_path, version
):
    """A head guesses hardly anything, but one of sixty of its 256 tokens often is the next."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama()
    head = eagle_head(folder, tmp_path / "head")
    wide = {"0": list(range(1, 61)), **{str(n): [60 + n] for n in range(1, 31)}}
    needed = {}
    for name, tree, nodes, most in (("deep", TREE, 8, 128), ("wide", wide, 91, 192)):
        app = fused(folder, head, nodes, True, token_tree_config=tree, max_length=most, tp_degree=2)
        got, needed[name] = rounds(app, generate, STEPS)
        assert got[0].tolist() == reference(model, PROMPT, STEPS)[0].tolist(), name
    assert needed["wide"] < needed["deep"] <= STEPS - 1


def test_guesses_behind_a_wrong_one_do_not_count():
    """They were made for another text, even where they happen to be the target's tokens."""
    tokens = torch.tensor([[1, 2, 3, 4]] * 4)
    guessed = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 9]])
    assert fused_speculation._agreed(guessed, tokens).tolist() == [[3], [1], [0], [2]]


def test_a_tree_in_tensors():
    tree = TokenTree(TREE)
    assert (tree.num_nodes, tree.depth, tree.level) == (8, 4, [1, 3, 3, 1])
    assert tree.drafted_nums == [0, 1, 4, 7]
    assert tree.level_child == [[3], [2, 0, 1], [1, 0, 0], [0]]
    ancestors = [row.nonzero()[:, 0].tolist() for row in tree.full_tree_attn_mask]
    assert ancestors == [[0], [0, 1], [0, 2], [0, 3], [0, 1, 4], [0, 1, 5], [0, 3, 6], [0, 1, 4, 7]]
    assert tree.draft_tree_attn_mask[2].sum(dim=1).tolist() == [2, 2, 2]
    own = [row[:n].tolist() for row, n in zip(tree.path, tree.path_length)]
    assert own == [[0, 2], [0, 1, 5], [0, 3, 6], [0, 1, 4, 7]]
    for order, rows in zip(tree.path_permute_mask, tree.cache_scatter_indices):
        assert order[rows].tolist() == list(range(8))
    assert tree.rotary_position_id_offset.tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
    assert (tree.children_of(1), tree.parents_of(1)) == ([0, 1, 4], [0, 0, 2])


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"0": []},
        {"0": ["2"]},
        {"0": ["1"], "1": ["0"]},
        {"0": ["1", "2"], "2": ["3"], "1": ["4"]},
        {"0": ["1"], "1": ["2"], "2": ["1"]},
        {"1": ["2"]},
        {"0": 1},
        {"0": ["one"]},
        [[0]],
    ],
)
def test_what_is_no_tree_is_refused(tree):
    with pytest.raises(ValueError, match="is no tree whose nodes are numbered from 0"):
        TokenTree(tree)


# The submission's shapes: heads of 64, three query heads over one KV head, padded at degree 2.
HEADS_OF_64 = dict(
    hidden_size=192,
    intermediate_size=200,
    num_attention_heads=3,
    num_key_value_heads=1,
    num_hidden_layers=1,
    vocab_size=212,
    initializer_range=0.1,
)
QUICK = {("0.1", True, True, 2)}
SUBMISSION = itertools.product(VERSIONS, (False, True), (False, True), (1, 2))
SUBMISSION = [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.full) for c in SUBMISSION]


@pytest.mark.parametrize(("version", "eagle", "enable_nki", "tp_degree"), SUBMISSION)
def test_the_submission_speculates_with_kernels_and_without(
    tiny_llama, fused, generate, reference, monkeypatch, tmp_path, version, eagle, enable_nki,
    tp_degree,
):  # fmt: skip
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama(**HEADS_OF_64)
    draft = eagle_head(folder, tmp_path / "head") if eagle else tiny_llama(1, **HEADS_OF_64)[1]
    more = dict(module=importlib.import_module("llama_extended"), enable_nki=enable_nki)
    app = fused(folder, draft, eagle=eagle, tp_degree=tp_degree, **more)
    got, _ = rounds(app, generate, 16)
    assert got[0].tolist() == reference(model, PROMPT, 16)[0].tolist()


def hopeful_head(folder, path):
    """An EAGLE head that hardly changes the hidden state, so it guesses the newest token once more:
    often wrong, and right for a while where the text repeats itself."""
    from safetensors.torch import load_file, save_file

    head = eagle_head(folder, path)
    state = load_file(head / "model.safetensors")
    hidden = len(state["model.fc.weight"])
    state["model.fc.weight"] = torch.cat((torch.eye(hidden) / 2, torch.eye(hidden)), dim=1)
    save_file(state, head / "model.safetensors")
    return head


@torch.no_grad()
def plain_chain(model, head, text, features, count):
    """A head's logits [count, V] behind a text, without a cache and without the stand-in.

    Token t + 1 goes with the target's normalised hidden state of token t, `features` [T, H], and
    stands at place t; a guess goes with what the head made of the token in front of it.
    """
    from safetensors.torch import load_file
    from transformers.models.llama import modeling_llama as hf

    state = load_file(head / "model.safetensors")
    layer = hf.LlamaDecoderLayer(model.config, 0)
    layer.input_layernorm = torch.nn.Identity()
    name = "model.layers.0."
    layer.load_state_dict({k[len(name) :]: v for k, v in state.items() if k.startswith(name)})
    rotary = hf.LlamaRotaryEmbedding(model.config)
    tokens, features, logits = text[1:], features[: len(text) - 1], []
    for _ in range(count):
        embedding = state["model.embed_tokens.weight"][torch.tensor(tokens)]
        x = (torch.cat((embedding, features), dim=1) @ state["model.fc.weight"].T)[None]
        places = torch.arange(len(tokens))[None]
        unseen = torch.full((len(tokens), len(tokens)), -1e9).triu(1)[None, None]
        near = rotary(x, places)
        found = layer(x, attention_mask=unseen, position_ids=places, position_embeddings=near)
        features = torch.cat((features, found[0][0, -1:]))
        logits.append(state["lm_head.weight"] @ features[-1])
        tokens = [*tokens, int(logits[-1].argmax())]
    return torch.stack(logits)


CHAINS = itertools.product(VERSIONS, ("stand-in", "kernels", "plain"), (1, 2))
QUICK = {("0.1", "kernels", 2), ("0.6", "stand-in", 1)}
CHAINS = [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.full) for c in CHAINS]


@pytest.mark.parametrize(("version", "kind", "tp_degree"), CHAINS)
def test_an_eagle_chain_guesses_what_plain_pytorch_does(
    tiny_llama, fused, monkeypatch, tmp_path, version, kind, tp_degree
):
    """Behind the prompt, and behind rounds of which nothing, a part and everything was right: one
    hidden state too early, too late or of the head's own changes the logits of all guesses."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    shape = HEADS_OF_64 | {"initializer_range": 0.05}
    model, folder = tiny_llama(2, **shape)  # a text that repeats tokens once, twice and often
    head = hopeful_head(folder, tmp_path / "head")
    module = importlib.import_module("llama_extended") if kind != "stand-in" else modeling_llama
    more = {} if kind == "stand-in" else dict(enable_nki=kind == "kernels")
    app = fused(folder, head, 4, True, module, tp_degree=tp_degree, output_logits=True, **more)
    early = version == "0.1"
    prompt = torch.tensor([PROMPT])
    given = dict(attention_mask=torch.ones_like(prompt), position_ids=torch.arange(8)[None])
    outputs = app(input_ids=prompt, **given).fused_outputs
    text, counts = [*PROMPT, int(outputs[1 if early else 0].reshape(-1)[0])], set()
    while len(text) < 32:
        place = len(text) - 1
        outputs = app(
            input_ids=torch.tensor([text[-1:]]),
            attention_mask=torch.ones((1, place), dtype=torch.int64),
            position_ids=torch.tensor([[place]]),
        ).fused_outputs
        states = model.model(torch.tensor([text])).last_hidden_state[0].detach()
        expected = plain_chain(model, head, text, states, 3)
        found = outputs[2 if early else 4][0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
        guesses = expected.argmax(-1).tolist()
        target = outputs[3 if early else 5][0].argmax(-1).tolist()
        count = next((i for i in range(3) if guesses[i] != target[i]), 3)
        counts.add(count)
        text += target[: count + 1]
    assert counts == {0, 1, 2, 3}


TREES = itertools.product(VERSIONS[1:], (False, True), (1, 2))
QUICK_TREE = ("0.3", True, 2)
TREES = [pytest.param(*c, marks=[] if c == QUICK_TREE else pytest.mark.full) for c in TREES]


@pytest.mark.parametrize(("version", "enable_nki", "tp_degree"), TREES)
def test_the_submission_takes_a_tree(
    tiny_llama, fused, generate, reference, monkeypatch, tmp_path, version, enable_nki, tp_degree
):
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama(**HEADS_OF_64)
    wide = {"0": list(range(1, 41)), **{str(n): [40 + n] for n in range(1, 21)}}
    more = dict(module=importlib.import_module("llama_extended"), enable_nki=enable_nki)
    more.update(tp_degree=tp_degree, token_tree_config=wide, max_length=128)
    app = fused(folder, eagle_head(folder, tmp_path / "head"), 61, True, **more)
    got, count = rounds(app, generate, 16)
    assert got[0].tolist() == reference(model, PROMPT, 16)[0].tolist()
    assert count < 14  # without a guess that is right: 15


@pytest.mark.parametrize("version", ["0.1", pytest.param("0.6", marks=pytest.mark.full)])
def test_a_round_leaves_the_caches_of_single_steps(
    tiny_llama, fused, application, monkeypatch, version
):
    """Both models' keys and values in front of the next position, and what the round returns."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    _, folder = tiny_llama()
    _, draft = tiny_llama(seed=1)
    app = fused(folder, draft)
    ids, ones = torch.tensor([PROMPT]), torch.ones((1, 8), dtype=torch.int64)
    first = app(input_ids=ids, attention_mask=ones, position_ids=torch.arange(8)[None])
    token = first.fused_outputs[0 if version != "0.1" else 1].reshape(1, -1)[:, :1]
    step = dict(attention_mask=ones, position_ids=torch.tensor([[8]]))
    found = app(input_ids=token, **step).fused_outputs
    plain = application(folder)
    plain(input_ids=ids, attention_mask=ones, position_ids=torch.arange(8)[None])
    text = [int(token)]
    for place in range(8, 12):
        mask = torch.ones((1, place), dtype=torch.int64)
        inputs = torch.tensor([[text[-1]]])
        logits = plain(input_ids=inputs, attention_mask=mask, position_ids=torch.tensor([[place]]))
        text.append(int(logits.logits[0, -1].argmax()))
    if version == "0.1":
        guesses, tokens = (output[0].tolist() for output in found)
        count = 1 + next(i for i, pair in enumerate(zip(guesses, tokens)) if len(set(pair)) > 1)
        assert tokens[:count] == text[1 : 1 + count]
    else:
        accepted, next_ids, next_mask, next_positions = found
        count = int(next_positions) - 8
        assert accepted.tolist() == [text[1 : 1 + count] + [0] * (4 - count)]
        assert int(next_ids) == text[count] and int(next_mask.sum()) == 8 + count
    own = app.fused_spec_model.model.modules[0].target_model.kv_mgr.past_key_values
    other = plain.models[0].model.modules[0].kv_mgr.past_key_values
    for a, b in zip(own, other, strict=True):
        torch.testing.assert_close(a[:, :, : 8 + count], b[:, :, : 8 + count])


@pytest.mark.full
@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_k": 50, "deterministic": True}])
def test_eagle_samples_as_it_is_told(
    tiny_llama, fused, generate, reference, monkeypatch, tmp_path, sampling
):
    """Among one token it is greedy; without chance two runs are the same."""
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    model, folder = tiny_llama()
    head = eagle_head(folder, tmp_path / "head")
    sampling = {"do_sample": True, "global_topk": 64, **sampling}
    app = fused(folder, head, eagle=True, tp_degree=2, sampling=sampling)
    params = torch.tensor([[sampling["top_k"], 1.0, 9.0]])
    first, again = (rounds(app, generate, 12, sampling_params=params)[0] for _ in range(2))
    assert first.tolist() == again.tolist()
    greedy = reference(model, PROMPT, 12)[0].tolist()
    assert (first[0].tolist() == greedy) is (sampling["top_k"] == 1)


@pytest.mark.parametrize("guess", [0, 3])
def test_accepted_samples_have_the_distribution_of_plain_ones(guess):
    """Chi-square of pairs against the product of the target's own probabilities: a likely guess
    and an unlikely one. With 7 degrees of freedom 40 has a probability of 1e-6."""
    torch.manual_seed(0)
    rows, k = 20_000, 3
    config = {"do_sample": True, "global_topk": 8, "top_k": 8}
    sampler = Sampler(NeuronConfig(on_cpu=True, on_device_sampling_config=config))
    logits = torch.randn(1, k, 8, generator=torch.Generator().manual_seed(2)).expand(rows, k, 8)
    params = prepare_sampling_params(rows, [-1], [0.9], [1.5])
    tokens, probabilities = sampler.candidates(logits[:1], params[:1])
    exact = torch.zeros(k, 8).scatter(1, tokens[0], probabilities[0])
    names = exact.argsort(dim=1, descending=True)
    guessed = torch.stack([names[0, guess], names[1, 0]]).expand(rows, 2)
    got = accept_by_sampling(sampler, logits, guessed, params, pad_token_id=0)
    assert got.dtype == torch.int32 and got.shape == (rows, k)
    firsts = torch.bincount(got[:, 0], minlength=8)
    likely = exact[0] > 0
    assert not firsts[~likely].any()
    assert chi_square(firsts[likely], exact[0][likely]) < 40
    # Behind an accepted first guess the second token follows the second distribution.
    went_on = got[got[:, 0] == guessed[0, 0]]
    seconds = torch.bincount(went_on[:, 1], minlength=8)
    likely = exact[1] > 0
    assert not seconds[~likely].any()
    if len(went_on):
        assert chi_square(seconds[likely], exact[1][likely]) < 40


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_rolling_buffer_keeps_rounds_by_their_position():
    config = NeuronConfig(speculation_length=3, max_batch_size=2, torch_dtype="float32")
    buffer = HiddenStateRollingBuffer(config, 4)
    rows, place = torch.tensor([1, 0]), torch.tensor([[5], [11]])
    kept = torch.arange(8.0).view(2, 1, 4)
    buffer.set_state(rows, place, kept)
    assert torch.equal(buffer.get_state(rows, place), kept)
    assert torch.equal(buffer.get_state(rows, place + 6), kept)  # 2k places
    assert not buffer.get_state(rows, place + 1).any()


@pytest.mark.parametrize("version", ["0.1", "0.6"])
def test_a_saved_configuration_brings_its_draft_back(tiny_llama, fused, monkeypatch, version):
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    _, folder = tiny_llama()
    app = fused(folder, folder, load=False)
    loaded = type(app.config).load(folder / "compiled")
    assert loaded.fused_spec_config.worker_cls is modeling_llama.NeuronLlamaModel
    assert loaded.fused_spec_config.draft_config.vocab_size == 211
    again = modeling_llama.NeuronLlamaForCausalLM(str(folder), loaded)
    again.load(folder / "compiled")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"speculation_length": 1}, "speculation_length of at least 2, got 1"),
        ({"sampling": {"do_sample": True}}, "do_sample False, .* got True"),
        ({"padding_side": "left"}, "right padding"),
        ({"trace_tokengen_model": True}, "trace_tokengen_model False, .* got True"),
        ({"max_context_length": 4}, "speculation_length 4 is a context-encoding bucket"),
    ],
)
def test_settings_that_the_graph_cannot_have_are_refused(tiny_llama, fused, changes, told):
    _, folder = tiny_llama()
    with pytest.raises(ValueError, match=told):
        fused(folder, folder, load=False, **changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "speculation_length 3, the nodes of its token_tree_config, got 4"),
        ({"eagle": False}, "a token_tree_config with enable_eagle_speculation only"),
        ({"sampling": {"do_sample": True}}, "do_sample False with a token_tree_config, got True"),
        ({"output_logits": True}, "output_logits with EAGLE only, and without a token_tree"),
        ({"output_logits": True, "eagle": False}, "output_logits with EAGLE only"),
        ({"length": 3, "sampling": {"global_topk": 1}}, "global_topk of at least 2, a node's"),
    ],
)
def test_trees_that_the_graph_cannot_have_are_refused(
    tiny_llama, fused, monkeypatch, changes, told
):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.2")
    _, folder = tiny_llama()
    options = {"eagle": True, "token_tree_config": {"0": ["1", "2"]}} | changes
    with pytest.raises(ValueError, match=told):
        fused(folder, folder, load=False, **options)


def test_drafts_that_do_not_fit_are_refused(tiny_llama, fused, tmp_path):
    _, folder = tiny_llama()
    _, words = tiny_llama(vocab_size=212)
    with pytest.raises(ValueError, match="a draft of vocab_size 211, got 212"):
        fused(folder, words, load=False)
    _, wide = tiny_llama(hidden_size=96)
    with pytest.raises(ValueError, match="an EAGLE draft of hidden_size 48, got 96"):
        fused(folder, wide, eagle=True, load=False)
    with pytest.raises(CheckpointError, match=r"for 1 parameters.*draft_model\.fc\.weight"):
        fused(folder, folder, eagle=True, norm=True, load=False)
    assert not (folder / "compiled").exists()
