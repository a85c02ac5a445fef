"""`--mode serve` on a model whose kernels are simulated: its clients, and what happens to it."""

import concurrent.futures
import json
import os
import random
import signal

import pytest

from harness.errors import UserError
from harness.inputs import command_line
from harness.modes import serve
from tests import greedy
from tests.adapters import ATTENTION, as_peft, write_adapter
from tests.conftest import REPOSITORY
from tests.crossed import full
from tests.serving.parts import Running


class Served(Running):
    """What the mode makes of a command line, in a thread of this process."""

    def __init__(self, *arguments):
        settings = command_line.parse(["--mode", "serve", "--port", "0", *arguments])
        self.opened, self.listening, self.session = serve.opened(settings)
        super().__init__(self.opened, self.listening)

    @property
    def process(self):
        """The submission's process."""
        ((_, worker),) = [one for one in self.session.workers._open if not one[1].ended]
        return worker._talk.process

    def close(self):
        super().close()
        self.session.workers.close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def served(tiny_model, cache):
    """Three slots, kernels, no end token within reach of short answers; llama.py's own text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        running = Served(
            *["--enable-nki", "--model-path", str(tiny_model), "--seq-len", "64"],
            *["--batch-size", "3", "--tp-degree", "1", "--token-generation-buckets", "32", "64"],
        )
        yield running
        running.close()


def asked(prompt, tokens, **more):
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, **more}


def text(served, body):
    status, found, _ = served.ask("/v1/completions", body)
    assert status == 200, found
    return found["choices"][0]["text"]


@pytest.mark.full
def test_the_text_is_that_of_the_driver(served, tiny_model, run_main, cache):
    """`--mode generate` feeds one prompt through a graph of one row."""
    done = run_main(
        *["--mode", "generate", "--enable-nki", "--model-path", tiny_model, "--seq-len", "64"],
        *["--tp-degree", "1", "--prompt", "hello", "--max-new-tokens", "9", "--raw"],
        XDG_CACHE_HOME=cache,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Output 0: hello{text(served, asked('hello', 9))}\n"


def test_each_of_many_requests_gets_its_text_alone(served):
    """Greedy and drawn ones of mixed lengths, more clients than slots."""
    random_ = random.Random(0)
    bodies = []
    for number in range(10):
        prompt = "".join(random_.choices("abcdefghij ", k=random_.randint(3, 40)))
        draw = {"temperature": 0.8, "top_p": 0.9, "seed": number} if number % 3 == 0 else {}
        bodies.append(asked(prompt, random_.randint(1, 12), **draw))
    with concurrent.futures.ThreadPoolExecutor(6) as clients:
        together = list(clients.map(lambda body: text(served, body), bodies))
    assert together == [text(served, body) for body in bodies]
    assert len(set(together)) > 6


def test_the_official_client(served):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.completions.create(model="tiny", prompt="hello", max_tokens=6)
        pieces = client.completions.create(model="tiny", prompt="hello", max_tokens=6, stream=True)
        streamed = "".join(piece.choices[0].text for piece in pieces)
        assert whole.choices[0].text == streamed and whole.usage.completion_tokens == 6
        with pytest.raises(openai.NotFoundError, match="write one of tiny"):
            client.completions.create(model="gpt", prompt="hello")
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            messages = [{"role": "user", "content": "hello"}]
            client.chat.completions.create(model="tiny", messages=messages)


@pytest.mark.libraries
@pytest.mark.parametrize("kernels", [full(False), True])
def test_adapters_are_models_of_their_own(tiny_model, tmp_path, monkeypatch, kernels):
    """Three models at once, each as peft has it, with NKI kernels and without."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    base = LlamaForCausalLM.from_pretrained(tiny_model, torch_dtype=torch.float32).eval()
    folders = {
        "one": write_adapter(tmp_path / "one", base, rank=4, seed=1, strength=1.0),
        "two": write_adapter(tmp_path / "two", base, ATTENTION, rank=8, seed=2, strength=1.0),
    }
    models = {"tiny": base} | {name: as_peft(base, path) for name, path in folders.items()}
    paths = [("--lora-ckpt-path", f"{name}:{path}") for name, path in folders.items()]
    options = ["--model-path", str(tiny_model), "--seq-len", "32", "--torch-dtype", "float32"]
    options += [word for pair in paths for word in pair]
    running = Served(*options, *(["--enable-nki"] if kernels else []))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    asked_of = [(name, prompt) for prompt in ("hello", "a longer prompt") for name in models]
    try:
        listed = running.ask("/v1/models")[1]["data"]
        assert [(one["id"], one.get("parent")) for one in listed] == [
            ("tiny", None),
            ("one", "tiny"),
            ("two", "tiny"),
        ]
        bodies = [asked(prompt, 8) | {"model": name} for name, prompt in asked_of]
        with concurrent.futures.ThreadPoolExecutor(6) as clients:
            found = list(clients.map(lambda body: text(running, body), bodies))
    finally:
        running.close()
    expected = []
    for name, prompt in asked_of:
        new = greedy.tokens(models[name], [tokenizer(prompt)["input_ids"]], 8)[0]
        expected.append(tokenizer.decode(new, skip_special_tokens=True))
    assert found == expected and len(set(found)) == 6


def test_a_killed_process_costs_what_was_in_flight_and_nothing_else(served):
    before = text(served, asked("hello", 4))
    with served.connection() as client:
        body = json.dumps(asked("hello there", 50, stream=True))
        client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = client.getresponse()
        assert answer.readline().startswith(b"data: ")
        os.kill(served.process.pid, signal.SIGKILL)
        events = answer.read().decode().strip().split("\n\n")
    told = json.loads(events[-1].removeprefix("data: "))["error"]
    assert told["code"] == "model_failure" and "ended by SIGKILL" in told["message"]
    assert text(served, asked("hello", 4)) == before


FAULTY = """
import sys
sys.path.insert(0, {repository!r})
import llama

class NeuronLlamaModel(llama.NeuronLlamaModel):
    def forward(self, input_ids, *inputs, **named):
        if not input_ids.is_meta and int(input_ids.max()) == 3 + {trigger}:
            {fault}
        return super().forward(input_ids, *inputs, **named)

class NeuronLlamaForCausalLM(llama.NeuronLlamaForCausalLM):
    _model_cls = NeuronLlamaModel
"""


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise RuntimeError('a kernel raised')", "a kernel raised"),
        full("raise SystemExit(3)", "SystemExit"),
    ],
    ids=["a kernel raises", "a rank's thread ends"],
)
def test_a_fault_of_a_rank_fails_its_request_with_the_reason(
    tiny_model, tmp_path, monkeypatch, fault, reason
):
    """Two ranks; a prompt with the byte 0xff breaks one call, and the next one is whole."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "faulty.py"
    source.write_text(FAULTY.format(repository=str(REPOSITORY), trigger=255, fault=fault))
    running = Served(
        *["--llama", str(source), "--model-path", str(tiny_model), "--seq-len", "32"],
        *["--batch-size", "2", "--tp-degree", "2"],
    )
    try:
        before = text(running, asked("hello", 4))
        status, found, _ = running.ask("/v1/completions", asked([70, 258, 71], 4))  # type: ignore
        assert status == 500 and reason in found["error"]["message"]
        assert text(running, asked("hello", 4)) == before
    finally:
        running.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--prompt", "hello"),
        ("--speculate", "lookup"),
        ("--prefill-chunk", "16"),
        ("--padding-side", "left"),
    ],
)
def test_arguments_that_a_server_would_ignore_are_refused(arguments):
    with pytest.raises(UserError):
        command_line.parse(["--mode", "serve", *arguments])
    with pytest.raises(UserError, match="--port"):
        command_line.parse(["--mode", "generate", "--port", "80"])


def test_what_it_cannot_open_is_refused_before_anything_long(tiny_model, tmp_path, served):
    def opened(*arguments):
        options = ["--mode", "serve", "--model-path", str(tiny_model), *arguments]
        serve.opened(command_line.parse(options))

    with pytest.raises(UserError, match=f"port {served.port}.*--port"):
        opened("--port", str(served.port))
    with pytest.raises(UserError, match="Cannot read the key"):
        opened("--port", "0", "--api-key-file", str(tmp_path / "none"))
    (tmp_path / "key").write_text("\nsecond line")
    with pytest.raises(UserError, match="must be a key"):
        opened("--port", "0", "--api-key-file", str(tmp_path / "key"))
