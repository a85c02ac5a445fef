"""Prompts longer than the largest prefill graph: the text of a whole prefill."""

import json

import pytest
import torch
from neuronx_distributed_inference.contract import VERSIONS
from transformers import LlamaForCausalLM

from harness.errors import UserError
from harness.inputs import chunks, command_line, submission
from harness.model_shapes import MODEL_SHAPES
from harness.processes.worker import Host, Job
from harness.session import model as session_model
from harness.settings import LONGEST_PREFILL
from neuron_cpu.runtime import graph
from tests.crossed import full
from tests.tiny_model import write_tiny_model

LENGTH = 160


def settings_of(folder, *more):
    arguments = [
        "--mode",
        "generate",
        "--enable-nki",
        "--model-path",
        str(folder),
        "--seq-len",
        str(LENGTH),
        "--torch-dtype",
        "float32",
        "--tp-degree",
        "1",
    ]
    return command_line.parse([*arguments, *more])


class Running:
    """A model compiled and loaded in this process, as the driver's worker does it."""

    def __init__(self, folder, scratch, *more, role="nki"):
        config = json.loads((folder / "config.json").read_text())
        settings = chunks.with_chunks(settings_of(folder, *more), config)
        job = Job(
            settings, folder, 0, None, submission.find("models.extended"), scratch, None, False
        )
        self.steps, self.role = [], role
        self.host = Host(job, self.steps.append)
        self.buckets = session_model.construct(self.host, role)
        name = session_model.compile(self.host, role)
        session_model.load(self.host, role, scratch / name)

    def tokens(self, prompts, new_tokens=6):
        self.steps.clear()
        session_model.generate(self.host, self.role, prompts, new_tokens, True, True, False)
        return [tokens for tokens, _ in self.steps]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.fixture(autouse=True)
def private_work_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "nxd_model") + "/")


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 259, (length,), generator=generator).tolist()


@pytest.mark.parametrize("version", [full(VERSIONS[0]), VERSIONS[-1]])
def test_text_is_that_of_a_whole_prefill(tiny, tmp_path, monkeypatch, version):
    """One chunk and many, prompts that end with a chunk and where the last one begins earlier."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    whole = Running(tiny, tmp_path, "--max-context-length", str(LENGTH))
    prompts = [prompt(length) for length in (30, 33, 56, 57, 58, 100, 153)]
    expected = [whole.tokens([ids]) for ids in prompts]
    chunked = Running(tiny, tmp_path, "--max-context-length", "32", "--prefill-chunk", "24")
    assert chunked.buckets["speculation_model"] == chunked.buckets["token_generation_model"]
    assert [chunked.tokens([ids]) for ids in prompts] == expected


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_tokens_are_the_best_ones_where_a_release_draws_unasked(
    tiny, tmp_path, monkeypatch, version
):
    """NxDI 0.1 draws among the best 50 where `do_sample` is False."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    llama = LlamaForCausalLM.from_pretrained(str(tiny), torch_dtype=torch.float32).eval()
    asked = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = llama.generate(torch.tensor([prompt(20)]), **asked)[0, 20:].tolist()
    running = Running(tiny, tmp_path, "--max-context-length", str(LENGTH), role="torch")
    assert [token for [token] in running.tokens([prompt(20)])] == expected


@pytest.mark.parametrize("more", [(), full(("--on-device-sampling",))])
def test_rows_of_a_batch_end_in_different_chunks(tiny, tmp_path, more):
    prompts = [prompt(150), prompt(20, 1), prompt(81, 2)]
    batch = "--batch-size", "3", *more
    whole = Running(tiny, tmp_path, "--max-context-length", str(LENGTH), *batch)
    expected = whole.tokens(prompts)
    sizes = "--max-context-length", "32", "--prefill-chunk", "40"
    assert Running(tiny, tmp_path, *sizes, *batch).tokens(prompts) == expected


@pytest.mark.full  # 3 s and more
@pytest.mark.parametrize("length", [2500, 131072])
def test_a_prompt_that_fills_a_long_cache(tmp_path, length):
    """The driver's own sizes of graphs, and Hugging Face's model in one pass beside them."""
    folder = write_tiny_model(
        tmp_path / "model",
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        hidden_size=64,
        intermediate_size=64,
        max_position_embeddings=length,
    )
    running = Running(folder, tmp_path, "--seq-len", str(length))
    assert running.buckets["context_encoding_model"][-1] == LONGEST_PREFILL
    assert running.buckets["speculation_model"][-1] == length
    ids = prompt(length - 3)
    got = [step[0] for step in running.tokens([ids], 3)]
    whole = LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    with torch.inference_mode():
        tokens = torch.tensor([[*ids, *got]])
        hidden = whole.model(tokens).last_hidden_state[0, len(ids) - 1 : -1]
        assert whole.lm_head(hidden).argmax(-1).tolist() == got


def test_a_model_without_a_single_token_graph_is_refused(tiny, tmp_path, monkeypatch):
    """NxDI's own Llama of 0.6, where its baseline cannot be prefilled whole."""
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    monkeypatch.setattr(session_model, "MOST_PREFILL", 100)
    source = tmp_path / "plain.py"
    source.write_text(
        "from neuronx_distributed_inference.models.llama.modeling_llama import (\n"
        "    NeuronLlamaForCausalLM,\n)\n"
    )
    asked = settings_of(tiny, "--max-context-length", "32", "--prefill-chunk", "24")
    host = Host(Job(asked, tiny, 0, None, source, tmp_path, None, False), print)
    with pytest.raises(UserError, match=r"no single-token graph.*--max-context-length 160\.$"):
        session_model.construct(host, "torch")


def test_a_graph_that_is_too_large_says_which_chunk_fits(tiny, tmp_path, monkeypatch):
    """Limits just below what the prefill and the chunks need."""
    sizes = "--max-context-length", "32", "--prefill-chunk", "130"
    Running(tiny, tmp_path, *sizes)
    record = json.loads((tmp_path / "nki" / "operators.json").read_text())
    counts = {g["submodel"]: g["instructions"] for g in record["graphs"]}
    assert counts["speculation_model"] > counts["context_encoding_model"] > 0
    for name, words in (
        ("speculation_model", "choose a --prefill-chunk of 64, and"),
        ("context_encoding_model", "choose a --max-context-length of 25, and"),
    ):
        monkeypatch.setattr(graph, "MOST_INSTRUCTIONS", counts[name] - 1)
        with pytest.raises(UserError, match=rf"{name}, bucket .* instructions .* {words}"):
            Running(tiny, tmp_path, *sizes)


@pytest.mark.parametrize(
    ("mode", "more", "told"),
    [
        ("generate", ("--padding-side", "left"), "--padding-side left"),
        ("serve", (), "--mode serve, which has --is-chunked-prefill"),
        ("compile", ("--is-prefix-caching",), "a cache of blocks"),
    ],
)
def test_what_keeps_a_prompt_whole_is_named(mode, more, told):
    sizes = "--seq-len", "256", "--max-context-length", "64", "--prefill-chunk", "48"
    with pytest.raises(UserError, match=f"--prefill-chunk does not go with {told}"):
        command_line.parse(["--mode", mode, *sizes, *more])


# --- how prompts are cut --------------------------------------------------------------------------
@pytest.mark.parametrize("longest", [8, 30, 64])
@pytest.mark.parametrize("chunk", [2, 7, 33])
@pytest.mark.parametrize("tokens", [65, 66, 99, 100])
def test_calls_cover_the_prompt(longest, chunk, tokens):
    """Every position but the last is in the prefill or in a chunk that follows what is cached."""
    cached = longest
    for start in chunks.chunk_starts(tokens, longest, chunk, 100):
        assert 0 < start <= cached and start + chunk <= 100
        cached = start + chunk
    assert cached >= tokens - 1


def test_a_cache_without_a_size_for_chunks_is_refused(tiny):
    asked = settings_of(tiny, "--seq-len", "64", "--max-context-length", "32")
    with pytest.raises(UserError, match="--seq-len 64 leaves no size for chunks .* raise --max-"):
        chunks.with_chunks(asked, MODEL_SHAPES["llama-3.2-1b"], [list(range(40))])


@pytest.mark.parametrize(
    "more",
    [
        ("--prefill-chunk", "24"),  # nothing is left for it
        ("--max-context-length", "32", "--prefill-chunk", "32"),
        ("--max-context-length", "32", "--prefill-chunk", "1"),
        ("--max-context-length", "32", "--prefill-chunk", "160"),
        ("--max-context-length", "32", "--prefill-chunk", "24", "--padding-side", "left"),
        ("--seq-len", "16384", "--max-context-length", "16384"),
    ],
)
def test_sizes_that_cannot_be(tiny, more):
    with pytest.raises(UserError, match="--prefill-chunk|--max-context-length"):
        settings_of(tiny, *more)
