"""A server in a thread, and a model whose answers say which prompt they belong to."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from harness.errors import UserError
from harness.inputs.models import ModelFolder
from harness.serving.app import Api
from harness.serving.guard import Limits
from harness.serving.scheduler import Scheduler
from harness.session.opening import Session
from harness.settings import Settings

BYTES = range(3, 259)  # tokens of the tiny model's tokenizer that are one byte each
LINES, LENGTH = 3, 64
SIZE = 4  # tokens of a block of `Cache`
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def answer_to(ids, tokens):
    """What `Echo` answers a prompt: tokens that depend on all that came before."""
    seen = list(ids)
    for _ in range(tokens):
        seen.append(BYTES[65 + sum(n * token for n, token in enumerate(seen, 1)) % 26])
    return seen[len(ids) :]


class Echo:
    """Lines that keep what was put on them, and refuse what a cache would answer wrongly.

    `go` holds every call while it is clear; the next call raises `fail`.
    """

    def __init__(self, lines=LINES):
        self.lines: list[list[int]] = [[] for _ in range(lines)]
        self.calls: list[tuple[str, list[int]]] = []
        self.fail: Exception | None = None
        self.fail_recovery: Exception | None = None
        self.go = threading.Event()
        self.go.set()

    def prefill(self, line, ids, draw, adapter):
        assert draw.number == 0 and adapter == 0
        self._begin("prefill", [line])
        self.lines[line] = list(ids)
        return answer_to(ids, 1)[0]

    def decode(self, rows):
        assert [row.line for row in rows] == sorted({row.line for row in rows})
        self._begin("decode", [row.line for row in rows])
        for row in rows:
            assert row.position == len(self.lines[row.line])
            self.lines[row.line].append(row.token)
        return [answer_to(self.lines[row.line], 1)[0] for row in rows]

    def recover(self):
        self.calls.append(("recover", []))
        if self.fail_recovery is not None:
            error, self.fail_recovery = self.fail_recovery, None
            raise error

    def _begin(self, name, lines):
        self.calls.append((name, lines))
        assert self.go.wait(30)
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error


class Cache:
    """A cache of blocks that knows which token each slot holds, and answers from nothing else.

    `computed` counts the tokens that calls bring; a call is refused that reads what nobody has
    written. `go` and `fail` are Echo's.
    """

    def __init__(self):
        self.slots: dict[int, int] = {}
        self.computed = 0
        self.calls: list[tuple[str, int]] = []
        self.fail: Exception | None = None
        self.go = threading.Event()
        self.go.set()

    def _write(self, blocks, start, tokens):
        """All tokens up to the end, as the blocks have them."""
        assert self.go.wait(30)
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        self.computed += len(tokens)
        for place, token in enumerate(tokens, start):
            self.slots[blocks[place // SIZE] * SIZE + place % SIZE] = token
        end = start + len(tokens)
        return [self.slots[blocks[p // SIZE] * SIZE + p % SIZE] for p in range(end)]

    def prefill(self, line, ids, draw, adapter, **where):
        blocks, computed = where["blocks"], where["computed"]
        self.calls.append(("prefill", len(ids) - computed))
        assert 0 <= computed < len(ids) and computed % SIZE == 0
        seen = self._write(blocks, computed, ids[computed:])
        assert seen == list(ids)  # what was found is what the prompt says
        return answer_to(seen, 1)[0]

    def decode(self, rows):
        self.calls.append(("decode", len(rows)))
        return [answer_to(self._write(row.blocks, row.position, [row.token]), 1)[0] for row in rows]

    def chunk(self, parts):
        self.calls.append(("chunk", sum(len(part.tokens) for part in parts)))
        return [
            answer_to(self._write(part.blocks, part.start, part.tokens), 1)[0] for part in parts
        ]

    def recover(self):
        self.slots.clear()


def echo_api(
    tokenizer,
    lines,
    limits=Limits(waiting=4),  # noqa: B008
    blocks=None,
):
    """The application over such lines, or such a cache."""
    settings = Settings(mode="serve", seq_len=LENGTH, max_context_length=LENGTH)
    model = ModelFolder(Path(), "echo", {"vocab_size": 320})
    session = Session(settings, model, Path(), tokenizer, 0)
    scheduler = Scheduler(lines, LINES, limits.waiting, [2], blocks)
    return Api(session, scheduler, limits)


class Address:
    """Where a server listens on this machine; `ask` sends one request."""

    def __init__(self, port):
        self.port, self.url = port, f"http://127.0.0.1:{port}"

    @contextlib.contextmanager
    def connection(self):
        found = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            yield found
        finally:
            found.close()

    def ask(self, path, body=None, **headers):
        """(status, body, headers); JSON where the body is."""
        with self.connection() as to:
            if body is not None:
                headers = {"Content-Type": "application/json", **headers}
                text = body if isinstance(body, (bytes, str)) else json.dumps(body)
                to.request("POST", path, text, headers)
            else:
                to.request("GET", path, headers=headers)
            answer = to.getresponse()
            content = answer.read()
            kind = answer.headers.get("content-type", "")
            found: Any = json.loads(content) if kind == "application/json" else content.decode()
            return answer.status, found, answer.headers

    def events(self, path, body):
        """The events of a stream."""
        status, text, headers = self.ask(path, body)
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
        return [part.removeprefix("data: ") for part in text.split("\n\n") if part]


class Running(Address):
    """A server in a thread of this process; `said` has its log, which pytest's captures miss."""

    def __init__(self, server, listening):
        self.said: list[str] = []
        log = SimpleNamespace(say=self.said.append)
        self._quiet = mock.patch("harness.serving.app.console", log)
        self._quiet.start()
        super().__init__(listening.getsockname()[1])
        self.server = server
        self._thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        self._thread.start()
        self.until(lambda: server.started)

    def close(self):
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._quiet.stop()

    @staticmethod
    def until(true, seconds=30):
        """Wait for something that is about to happen."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end
            time.sleep(0.005)


def on_a_free_port():
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    return listening


def refusal(text):
    return UserError(text)
