"""The server under load: is every answer whole and its own, and how long do clients wait?

    python benchmarks/serve.py [--enable-nki] [--requests 200 --clients 16 --slots 8]

Starts `main.py --mode serve` (the embedded model unless --model-path names another), sends greedy
requests of mixed lengths from several clients at once, then each different one again alone, and
compares the texts. The same number of prompts is then answered by a server of one slot, which tells
what decoding together gains. Times are the clients' wall clock: on the stand-in the simulator's own
speed, not a device's.
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
SEQ_LEN, MOST_NEW = 192, 24  # of a cache line, and of an answer unless the command line says so
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain"]


@dataclass(frozen=True)
class Asked:
    """One request, its text known to the tokenizer only."""

    prompt: str
    tokens: int


@dataclass(frozen=True)
class Answered:
    """What came back, and when: seconds to the first token, and between two."""

    text: str
    first: float
    between: list[float]
    tokens: int


@dataclass(frozen=True)
class Server:
    """A running server."""

    port: int
    model: str

    def ask(self, asked: Asked) -> Answered:
        """One streamed completion; an error where it is no success."""
        body = {
            "model": self.model,
            "prompt": asked.prompt,
            "max_tokens": asked.tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=3600)
        started, times, text, made = time.monotonic(), [], "", 0
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {answer.read().decode()}")
            for line in answer:
                event = line.decode().strip().removeprefix("data: ")
                if not event or event == "[DONE]":
                    continue
                piece = json.loads(event)
                if "error" in piece:
                    raise RuntimeError(piece["error"]["message"])
                made = piece.get("usage", {}).get("completion_tokens", made)
                for choice in piece["choices"]:
                    text += choice["text"]
                    if choice["text"]:
                        times.append(time.monotonic())
        first = (times[0] if times else time.monotonic()) - started
        return Answered(text, first, [b - a for a, b in zip(times, times[1:])], made)


@contextlib.contextmanager
def serving(arguments: argparse.Namespace, slots: int) -> Iterator[Server]:
    """A server with so many slots, as a process of its own."""
    command = [sys.executable, str(REPOSITORY / "main.py"), "--mode", "serve", "--port", "0"]
    command += [
        "--batch-size",
        str(slots),
        "--seq-len",
        str(arguments.seq_len),
        "--max-waiting",
        "1000",
    ]
    command += ["--token-generation-buckets", str(arguments.seq_len)]
    command += ["--enable-nki"] if arguments.enable_nki else []
    command += ["--model-path", str(arguments.model_path)] if arguments.model_path else []
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next((line for line in process.stderr if line.startswith("Serving ")), None)
        if line is None:
            raise SystemExit("The server has not started; run the command above by itself.")
        # its log goes on, and a full pipe would stop it
        threading.Thread(target=process.stderr.read, daemon=True).start()
        _, model, _, address = line.split()
        yield Server(int(address.rpartition(":")[2]), model)
    finally:
        process.kill()
        process.wait()


def mixed(arguments: argparse.Namespace) -> list[Asked]:
    """Requests of mixed lengths, each of the different ones about equally often."""
    chosen, different = random.Random(arguments.seed), arguments.different
    most_words = (arguments.seq_len - arguments.tokens) // 2  # a word may be two tokens
    kinds = [
        Asked(
            f"{number}. " + " ".join(chosen.choices(WORDS, k=chosen.randint(3, most_words))),
            chosen.randint(2, arguments.tokens),
        )
        for number in range(different)
    ]
    found = [kinds[number % different] for number in range(arguments.requests)]
    chosen.shuffle(found)
    return found


def load(server: Server, asked: Sequence[Asked], clients: int) -> tuple[list[Answered], float]:
    """All answers in the order of the requests, and the seconds that they took together."""
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        answers = []
        for answer in pool.map(server.ask, asked):
            answers.append(answer)
            print(f"\r{len(answers)} of {len(asked)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return answers, time.monotonic() - started


def percentiles(seconds: Sequence[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in np.percentile(seconds, (50, 95)))


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--different", type=int, default=40, help="requests among them")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=MOST_NEW, help="new tokens of one, at most")
    parser.add_argument("--seq-len", type=int, default=SEQ_LEN)
    parser.add_argument("--enable-nki", action="store_true")
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    asked = mixed(arguments)
    together = [Asked(f"{n}. " + " ".join(WORDS), MOST_NEW) for n in range(arguments.slots)]
    with serving(arguments, arguments.slots) as server:
        server.ask(asked[0])  # warm
        answers, seconds = load(server, asked, arguments.clients)
        alone = {one: server.ask(one).text for one in sorted(set(asked), key=lambda a: a.prompt)}
        many, many_seconds = load(server, together, arguments.slots)
    with serving(arguments, 1) as server:
        server.ask(together[0])
        few, few_seconds = load(server, together, arguments.slots)
    wrong = sum(alone[one] != answer.text for one, answer in zip(asked, answers, strict=True))
    others = sum(a.text != b.text for a, b in zip(many, few, strict=True))
    rates = [sum(a.tokens for a in found) for found in (many, few)]
    speeds = rates[0] / many_seconds, rates[1] / few_seconds
    between = [gap for answer in answers for gap in answer.between]
    made = sum(answer.tokens for answer in answers)
    print(f"{server.model}, {'NKI kernels' if arguments.enable_nki else 'PyTorch'}, by wall clock")
    print(
        f"requests                    {len(answers)} of {len(asked)}, {arguments.clients} clients"
    )
    print(f"other than alone            {wrong} of {len(asked)}")
    print(f"other than with one slot    {others} of {len(few)}")
    print(f"to the first token, s       {percentiles([a.first for a in answers])} (p50 / p95)")
    print(f"from token to token, s      {percentiles(between)} (p50 / p95)")
    print(f"tokens/s                    {made / seconds:.2f} ({made} tokens in {seconds:.0f} s)")
    print(
        f"slots {arguments.slots} and 1, tokens/s      {speeds[0]:.2f} and {speeds[1]:.2f}: "
        f"{speeds[0] / speeds[1]:.2f} times"
    )
    sys.exit(1 if wrong or len(answers) != len(asked) else 0)


if __name__ == "__main__":
    main()
