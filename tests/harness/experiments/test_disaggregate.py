"""Prefill in one process, decode in another: the order of things, refusals, and whole runs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import sdk
from harness.errors import UserError
from harness.experiments import disaggregate, link, prefilling
from harness.experiments.prefilling import Beside, Decoder, Prefiller, PrefillFailed
from harness.inputs import command_line
from harness.processes import ranks
from harness.processes.worker import Answer
from harness.processes.workers import SubmissionFailed
from harness.session.rows import Draw
from harness.settings import Transfer
from neuron_cpu.processes.torchrun import Place
from tests.conftest import REPOSITORY

VOCABULARY = 50
BYTES_A_TOKEN = 8


def parse(*arguments):
    return command_line.parse(["--mode", "disaggregate", *arguments])


def test_settings_of_each_side():
    assert parse("--prompt", "a").transfer == Transfer()
    both = parse("--prompt", "a", "--prompt", "b")
    assert both.batch_size == 2 and both.is_continuous_batching and both.ctx_batch_size == 1
    assert not both.takes_chunks and both.max_context_length == both.seq_len
    producer = parse("--kv-role", "kv_producer", "--kv-port", "0", "--kv-ip", "0.0.0.0").transfer
    assert producer == Transfer("kv_producer", "0.0.0.0", 0, 600.0)
    consumer = parse("--kv-role", "kv_consumer", "--kv-timeout", "3", "--prompt", "a").transfer
    assert consumer == Transfer("kv_consumer", kv_timeout=3.0)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--kv-port 5", "--kv-port is about a side that runs by itself; give --kv-role"),
        ("--kv-role kv_producer --prompt a", "give --prompt and --prompt-file to the kv_consumer"),
        ("--kv-role kv_consumer --kv-port 0", "--kv-port must be the kv_producer's"),
        ("--padding-side left", "does not go with --padding-side left|needs --padding-side right"),
        ("--flash-decoding-enabled", "does not go with --flash-decoding-enabled"),
        ("--on-device-sampling --async-mode", "does not go with --async-mode"),
        ("--no-isolate", "does not go with --no-isolate"),
        ("--is-prefix-caching", "works with --mode"),
        ("--speculate lookup", "works with --mode"),
        ("--benchmark", "--benchmark works with --mode generate or validate"),
    ],
)
def test_what_a_pair_cannot_do_is_refused(arguments, told):
    with pytest.raises(UserError, match=told):
        parse(*arguments.split())


def test_the_sdk_and_torchrun_are_refused(monkeypatch):
    with pytest.raises(UserError, match="--mode disaggregate has a process for prefill"):
        ranks.over_ranks(parse("--prompt", "a"), Place(0, 2, "localhost", 1))
    monkeypatch.setattr(sdk, "platform", lambda: sdk.DEVICE)
    with pytest.raises(UserError, match="between processes of the stand-in"):
        disaggregate.run(parse("--prompt", "a"))


# --- the decoder, without a model -----------------------------------------------------------------
class Model:
    """A `Loaded` of both sides: each token is the sum of all before it, as its caches say."""

    def __init__(self, lines, log):
        self.session = SimpleNamespace(
            settings=SimpleNamespace(batch_size=lines), vocabulary=VOCABULARY, stop_tokens=[7]
        )
        self.lines, self.log, self.sent = [None] * lines, log, deque()
        self.busiest = 0
        self.lies = {}

    def call(self, function, what, **given):
        name = function.rpartition(":")[2]
        self.log.append(name)
        found = getattr(self, name)(**given)
        return Answer(self.lies.get(name, found))

    def prefill(self, ids, draw, adapter):
        assert draw == Draw(0, 1, 1, 0, 0) and adapter == 3
        self.lines[0] = list(ids)
        return [sum(ids) % VOCABULARY, 0.5]

    def send(self, length, token):
        assert len(self.lines[0]) == length
        self.wire.append((self.lines[0], token))
        return BYTES_A_TOKEN * length

    def receive(self, line):
        while not self.wire:
            time.sleep(0.001)
        ids, token = self.wire.popleft()
        self.lines[line] = list(ids)
        return [len(ids), token, BYTES_A_TOKEN * len(ids), 0.25]

    def decode(self, rows):
        self.busiest = max(self.busiest, len(rows))
        assert [row.line for row in rows] == sorted({row.line for row in rows})
        tokens = []
        for row in rows:
            cache = self.lines[row.line]
            assert row.position == len(cache) and row.adapter == 3
            cache.append(row.token)
            tokens.append(sum(cache) % VOCABULARY)
        return tokens


def alone(ids, count):
    tokens, cache = [], list(ids)
    while len(tokens) < count and 7 not in tokens:
        tokens.append(sum(cache) % VOCABULARY)
        cache.append(tokens[-1])
    return tokens


def paired(lines):
    log = []
    far, near = Model(1, log), Model(lines, log)
    far.wire = near.wire = deque()
    prefills = Beside(Prefiller(far))
    decoder = Decoder(near, prefills, lambda number: Draw(0, 1, 1, 0, number), 3)
    return far, near, decoder


PROMPTS = [[1, 2], [5, 6, 7, 8], [3], [20, 20, 17], [9, 9], [4, 4, 4, 4, 4]]  # the fourth: 7


@pytest.mark.parametrize("lines", [1, 2, 4, 9])
def test_answers_are_those_of_one_process(lines):
    far, near, decoder = paired(lines)
    got = [[] for _ in PROMPTS]
    ends = [0] * len(PROMPTS)

    def on_token(number, token, last):
        got[number].append(token)
        ends[number] += last

    found = decoder.run(PROMPTS, lambda length: 9 - length, on_token)
    assert got == [alone(ids, 9 - len(ids)) for ids in PROMPTS]
    assert got[3] == [7] and ends == [1] * len(PROMPTS)
    assert near.busiest <= lines and (lines == 1 or near.busiest > 1)
    assert [a.nbytes for a in found] == [BYTES_A_TOKEN * len(ids) for ids in PROMPTS]
    assert {(a.prefill_s, a.transfer_s) for a in found} == {(0.5, 0.25)}
    assert [a.tokens for a in found] == [len(tokens) for tokens in got]
    if lines == 2:  # the third prompt was prefilled before the first answers had ended
        order = [name for name in near.log if name in ("prefill", "decode")]
        assert order.index("decode") < len(order) - order[::-1].index("prefill")


def run(decoder, prompts=((1, 2), (3, 4))):
    return decoder.run(prompts, lambda length: 4, lambda *_: None)


@pytest.mark.parametrize(
    ("name", "lie", "told"),
    [
        ("prefill", [VOCABULARY, 0.5], "expected a token below 50 and seconds, got"),
        ("prefill", [3, float("nan")], "expected a token below 50 and seconds, got"),
        ("prefill", "abc", "expected a token below 50 and seconds, got abc"),
        ("receive", [9, 3, 16, 0.1], r"sent were \[2, 3, 16\]"),
        ("receive", [2, 3, 16, -1.0], "expected seconds"),
        ("receive", None, "None arrived"),
        ("decode", [1, 2], "one token id below 50 for each of 1 rows"),
    ],
)
def test_nothing_else_is_believed(name, lie, told):
    far, near, decoder = paired(1)
    (far if name == "prefill" else near).lies[name] = lie
    with pytest.raises(SubmissionFailed, match=told):
        run(decoder)


def test_the_side_that_failed_gives_the_reason(monkeypatch):
    far, near, decoder = paired(1)

    def broken(**_):
        raise SubmissionFailed("No caches today.")

    def lost(**_):
        raise SubmissionFailed("Moved: The prefill side is gone or mute (x), expected it.")

    monkeypatch.setattr(far, "send", broken)
    monkeypatch.setattr(near, "receive", lost)
    with pytest.raises(PrefillFailed, match="No caches today."):
        run(decoder)
    monkeypatch.setattr(far, "send", lost)
    far, near, decoder = paired(1)
    monkeypatch.setattr(near, "receive", lost)
    monkeypatch.setattr(prefilling, "OTHERS_SECONDS", 0.1)
    with pytest.raises(SubmissionFailed, match="Moved: The prefill side is gone"):
        run(decoder)


def test_orders_that_are_none_are_refused():
    prefiller = Prefiller(Model(1, []))
    for ids in ([], [VOCABULARY], [-1], [True], ["a"]):
        with pytest.raises(UserError, match="no list of tokens below 50"):
            prefiller.do("fill", {"ids": ids, "draw": [0, 1, 1, 0, 0], "adapter": 3})
    with pytest.raises(UserError, match="asks for 'fly'"):
        prefiller.do("fly", {})


def test_sides_that_differ_say_in_what(tiny_model, tmp_path):
    from tests.tiny_model import write_tiny_model

    assert disaggregate._digest(tiny_model) == disaggregate._digest(tiny_model)
    other = write_tiny_model(tmp_path / "other", seed=5)  # one value more or less is another model
    assert disaggregate._digest(other) != disaggregate._digest(tiny_model)
    terms = {"--tp-degree": 2, "--seq-len": 64}
    hello = {"kind": "hello", "protocol": disaggregate.PROTOCOL, "terms": dict(terms)}
    disaggregate._compare(terms, hello)
    with pytest.raises(UserError, match="differ in --tp-degree: 2 where prompts are prefilled, 4"):
        disaggregate._compare(terms, hello | {"terms": terms | {"--tp-degree": 4}})
    with pytest.raises(UserError, match="differ in version of the driver: 1 .*, None where"):
        disaggregate._compare(terms, {"kind": "hello", "terms": terms})


# --- whole runs -----------------------------------------------------------------------------------
ASKED = ["--prompt", "Hello there", "--prompt", "Some other words", "--prompt", "a b c"]


def text_of(stdout):
    return stdout.partition("Keys and values")[0]


def bytes_of(stdout):
    rows = [line.split() for line in stdout.splitlines() if re.match(r" +\d+ +\d", line)]
    return [int(row[4].replace(",", "")) for row in rows]


def common(folder, tmp_path, *more):
    compiled = ["--compiled-model-path", str(tmp_path / "compiled")]
    return ["--model-path", str(folder), "--max-new-tokens", "6", *compiled, *more]


@pytest.mark.parametrize(
    "more",
    [
        ("--tp-degree", "2", "--batch-size", "2"),
        pytest.param(("--enable-nki", "--batch-size", "2"), marks=pytest.mark.full),
        pytest.param(("--enable-nki", "--tp-degree", "1"), marks=pytest.mark.full),
        pytest.param(("--tp-degree", "1", "--batch-size", "1"), marks=pytest.mark.full),
        pytest.param(("--tp-degree", "2", "--torch-dtype", "float32"), marks=pytest.mark.full),
        pytest.param(("--enable-nki", "--kv-cache-quant"), marks=pytest.mark.full),
        pytest.param(("--enable-nki", "--on-device-sampling"), marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_the_text_is_that_of_one_process(more, tiny_model, tmp_path, run_main):
    arguments = [*ASKED, *common(tiny_model, tmp_path, *more)]
    got = run_main("--mode", "disaggregate", *arguments, cwd=tmp_path)
    assert got.returncode == 0, got.stderr
    expected = run_main("--mode", "generate", *arguments, cwd=tmp_path)
    assert text_of(got.stdout) == expected.stdout
    item = 4 if "float32" in more else 1 if "--kv-cache-quant" in more else 2
    layers, heads, head_dim = 2, 2, 64
    sizes = [2 * layers * heads * head_dim * item * length for length in (11, 16, 5)]
    assert bytes_of(got.stdout) == sizes
    assert "estimated (cost model) with 30 µs and 3.125 GB/s a rank" in got.stdout
    assert not list((tmp_path / "compiled").glob(".work*"))


class Side:
    """A driver of its own, whose standard error is read while it runs."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, str(REPOSITORY / "main.py"), "--mode", "disaggregate", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def until(self, pattern):
        """The match in the first line that has one; the process's end ends this, too."""
        for line in self.process.stderr:
            found = re.search(pattern, line)
            if found:
                return found
        raise AssertionError(f"{pattern!r} never came")

    def end(self, seconds=180):
        out, told = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, told.strip().splitlines()[-1] if told.strip() else ""


@pytest.fixture
def sides(tiny_model, tmp_path):
    """Starts the two drivers; what still runs at the end of a test is killed."""
    started = []

    def begin(*more, produce=(), consume=()):
        compiled = tmp_path / f"compiled{len(started)}"
        arguments = ["--model-path", str(tiny_model), "--compiled-model-path", str(compiled), *more]
        producer = Side(*arguments, "--kv-role", "kv_producer", "--kv-port", "0", *produce)
        started.append(producer)
        port = producer.until(r"Waiting for the decode side at 127.0.0.1 port (\d+)")[1]
        consumer = Side(*arguments, "--kv-role", "kv_consumer", "--kv-port", port, *consume)
        started.append(consumer)
        return producer, consumer

    yield begin
    for side in started:
        if side.process.poll() is None:
            os.killpg(side.process.pid, signal.SIGKILL)
            side.process.wait(30)
        side.process.stdout.close()
        side.process.stderr.close()


def alive(tmp_path):
    """Processes that were started for a test's folder."""
    return [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(tmp_path).encode() in path.read_bytes()
    ]


@pytest.mark.full
def test_two_drivers_answer_as_one(sides, tiny_model, tmp_path, run_main):
    producer, consumer = sides("--enable-nki", consume=[*ASKED, "--max-new-tokens", "6"])
    status, out, told = consumer.end()
    assert status == 0, told
    assert producer.end()[0] == 0
    plain = [*ASKED, *common(tiny_model, tmp_path, "--enable-nki")]
    expected = run_main("--mode", "generate", *plain, cwd=tmp_path)
    assert text_of(out) == expected.stdout and len(bytes_of(out)) == 3
    assert not alive(tmp_path)


LONG = [*ASKED, "--max-new-tokens", "100", "--batch-size", "1"]


@pytest.mark.full
@pytest.mark.parametrize("victim", ["producer", "consumer"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_side_that_ends_ends_the_other_one(victim, number, sides, tmp_path):
    producer, consumer = sides("--enable-nki", consume=LONG)
    consumer.process.stdout.read(len("Output 0"))  # the first prompt has been moved
    ends, stays = (producer, consumer) if victim == "producer" else (consumer, producer)
    os.killpg(ends.process.pid, number)
    status, _, told = stays.end()
    assert status == 2
    words = "is gone" if number == signal.SIGKILL else "has failed: it was interrupted"
    other = "prefill side" if victim == "producer" else "decode side"
    assert f"The {other} {words}" in told
    assert ends.end()[0] == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    deadline = time.monotonic() + 30
    while alive(tmp_path) and time.monotonic() < deadline:  # those of a killed driver end, too
        time.sleep(0.2)
    assert not alive(tmp_path)


def test_whole_answers_are_a_success_when_the_other_side_ends_behind_them(monkeypatch):
    """The prefill side is gone before it hears that this is the end."""
    listening = link.listen("127.0.0.1", 0)
    arrivals = link.Arrivals(listening, "decode side")
    ends = []

    def answer(*_):
        ends[0].close()
        arrivals.close()
        while True:  # until this side would notice
            try:
                ends[1].send("anything")
            except link.LinkLost:
                return

    def connect(*given):
        ends.append(arrivals.next(time.monotonic() + 30))
        return ends[1]

    ours = link.connect(*listening.getsockname(), 30, "prefill side")
    ends.append(ours)
    settings = SimpleNamespace(
        time_limit=5, transfer=SimpleNamespace(kv_ip="", kv_port=0, kv_timeout=5, kv_key_file=None)
    )
    session = SimpleNamespace(workers=SimpleNamespace(close=lambda: None))
    for name, stub in {
        "open_session": lambda _: session, "_terms": lambda _: {}, "_port": lambda *_: 1,
        "_paired": lambda *_: session, "build": lambda _: None, "_answer": answer,
        "_key": lambda _: b"",
    }.items():  # fmt: skip
        monkeypatch.setattr(disaggregate, name, stub)
    monkeypatch.setattr(disaggregate.link, "connect", connect)
    assert disaggregate._decode(settings) == 0


@pytest.mark.full
def test_a_side_with_other_sizes_is_sent_away(sides):
    producer, consumer = sides(consume=[*ASKED, "--tp-degree", "1"], produce=["--tp-degree", "2"])
    told = "The two sides differ in --tp-degree: 2 where prompts are prefilled, 1 where they are"
    status, _, said = consumer.end()
    assert status == 2 and told in said
    assert producer.process.poll() is None  # another one may come
    os.killpg(producer.process.pid, signal.SIGINT)
    status, _, said = producer.end()
    assert status == 130 and told in said


def test_whoever_says_no_right_hello_is_dropped():
    listening = link.listen("127.0.0.1", 0)
    arrivals = link.Arrivals(listening, "decode side")
    terms, place = {"a": 1}, listening.getsockname()
    stranger = socket.create_connection(place)
    stranger.sendall(b"anything\n")
    strangers = [link.connect(*place, 10, "prefill side") for _ in range(3)]
    strangers[0].send("goodbye")
    strangers[1].send("hello", protocol=disaggregate.PROTOCOL, terms={"a": 2})
    strangers[2].send("hello", protocol=disaggregate.PROTOCOL, terms=terms)
    other = disaggregate._welcome(arrivals, terms, time.monotonic() + 30)
    other.send("welcome")
    assert strangers[2].receive(10) == {"kind": "welcome"}
    assert "differ in a: 1" in strangers[1].receive(10)["why"]
    arrivals.close()
    for one in (stranger, other, *strangers):
        one.close()
