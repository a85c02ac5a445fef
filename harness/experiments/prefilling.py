"""Prompts that one process prefills and another one decodes, several of them at once.

`Decoder` is the side that decodes: it has the other one prefill the next prompt while it decodes
those that it has, takes the prompt's keys and values into a free line, and goes on with all lines.
`Prefiller` is the side that prefills, in this driver (`Beside`) or behind a connection (`Behind`).
"""

import math
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Protocol

from harness.errors import UserError, is_refusal
from harness.experiments.answered import Answered
from harness.experiments.link import Link, LinkLost
from harness.processes.workers import SubmissionFailed
from harness.serving.lines import LoadedLines
from harness.session.building import Loaded
from harness.session.rows import Draw, Row

_TRANSFER = "harness.experiments.transfer"
_FAILED = "Keys and values cannot be moved"
OTHERS_SECONDS = 5.0  # for the reason of the other side, once this side's own call has failed
GONE = " is gone or mute"  # in the reason of a side that failed because of the other one
OnToken = Callable[[int, int, bool], None]


class PrefillFailed(UserError):
    """The side that prefills has failed: its own sentence."""


class Prefiller:
    """The model that prefills: one prompt after the other, each sent before the next one."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def do(self, kind: str, values: dict[str, Any]) -> Any:
        """`fill` a prompt: [token, seconds]; `send` it: bytes."""
        if kind == "fill":
            return self._fill(**values)
        if kind == "send":
            return self._loaded.call(f"{_TRANSFER}:send", _FAILED, **values).body
        raise UserError(f"The decode side asks for {kind[:40]!r}; start both from one version.")

    def _fill(self, ids: Sequence[int], draw: Sequence[Any], adapter: int) -> list[Any]:
        vocabulary = self._loaded.session.vocabulary
        if not ids or not all(type(token) is int and 0 <= token < vocabulary for token in ids):
            raise UserError(
                f"The decode side sends a prompt that is no list of tokens below {vocabulary}; "
                "start both sides with one model."
            )
        what = "The model fails while it prefills"
        answer = self._loaded.call(
            f"{_TRANSFER}:prefill", what, ids=list(ids), draw=Draw(*draw), adapter=adapter
        ).body
        return _checked_fill(answer, vocabulary)


def _checked_fill(answer: Any, vocabulary: int) -> list[Any]:
    """[token, seconds] as they should be; nothing else is believed."""
    whole = isinstance(answer, list) and len(answer) == 2 and type(answer[0]) is int
    if not whole or not 0 <= answer[0] < vocabulary or not _is_time(answer[1]):
        raise SubmissionFailed(
            f"The model fails while it prefills: expected a token below {vocabulary} and seconds, "
            f"got {str(answer)[:80]}."
        )
    return answer


def _is_time(value: object) -> bool:
    return type(value) is float and math.isfinite(value) and value >= 0


class Prefills(Protocol):
    """A `Prefiller` that works while somebody else does something: one request at a time."""

    def start(self, kind: str, **values: Any) -> None:
        """Begin what `Prefiller.do` does."""

    @property
    def ready(self) -> bool:
        """Whether `result` would return at once."""

    def result(self) -> Any:
        """Wait for what was begun; raises what it has raised."""

    def failure(self, seconds: float) -> Optional[str]:
        """Why what was begun has failed, where it has within some seconds."""


class Beside:
    """The prefiller of this driver, in a thread: what computes is a process of its own."""

    def __init__(self, prefiller: Prefiller) -> None:
        self._prefiller = prefiller
        self._done: queue.SimpleQueue[tuple[Any, Optional[Exception]]] = queue.SimpleQueue()

    def start(self, kind: str, **values: Any) -> None:
        threading.Thread(target=self._do, args=(kind, values), daemon=True).start()

    def _do(self, kind: str, values: dict[str, Any]) -> None:
        try:
            self._done.put((self._prefiller.do(kind, values), None))
        except Exception as error:  # the caller's thread raises it
            self._done.put((None, error))

    @property
    def ready(self) -> bool:
        return not self._done.empty()

    def result(self) -> Any:
        while True:  # an interrupt gets in between
            try:
                value, error = self._done.get(timeout=0.1)
                break
            except queue.Empty:
                continue
        if error is not None:
            raise error
        return value

    def failure(self, seconds: float) -> Optional[str]:
        try:
            _, error = self._done.get(timeout=seconds)
        except queue.Empty:
            return None
        return None if error is None else str(error)


class Behind:
    """The prefiller of another driver."""

    def __init__(self, link: Link, seconds: float) -> None:
        self._link, self._seconds = link, seconds

    def start(self, kind: str, **values: Any) -> None:
        self._link.send(kind, **values)

    @property
    def ready(self) -> bool:
        return self._link.ready

    def result(self) -> Any:
        message = self._link.receive(self._seconds)
        if message["kind"] == "failed":
            raise PrefillFailed(f"The {self._link.other} has failed: {message.get('why')}")
        return message.get("value")

    def failure(self, seconds: float) -> Optional[str]:
        try:
            message = self._link.receive(seconds)
        except LinkLost as error:
            return str(error)
        return str(message.get("why")) if message["kind"] == "failed" else None


def serve(prefiller: Prefiller, link: Link) -> None:
    """Prefill what the other side asks for, until it says that this is the end.

    A failure is told to the other side, and ends this one, too.
    """
    while True:
        message = link.receive(math.inf)
        kind = message.pop("kind")
        if kind == "end":
            return
        if kind == "failed":
            raise UserError(f"The {link.other} has failed: {message.get('why')}")
        try:
            value = prefiller.do(kind, message)
        except Exception as error:
            if is_refusal(error):
                link.send("failed", why=str(error))
            raise
        link.send("done", value=value)


@dataclass
class _Line:
    """One line of the cache in use: whose, its newest token, and where that one stands."""

    number: int
    token: int
    position: int


class Decoder:
    """Answers prompts whose keys and values come from elsewhere; `draw` says how the token with a
    number of an answer is chosen, `adapter` is that of all answers."""

    def __init__(
        self, loaded: Loaded, prefills: Prefills, draw: Callable[[int], Draw], adapter: int
    ) -> None:
        self._loaded, self._prefills, self._draw = loaded, prefills, draw
        self._adapter = adapter
        self._lines = LoadedLines(loaded)
        self._free = list(range(loaded.session.settings.batch_size))[::-1]
        self._active: dict[int, _Line] = {}

    def run(
        self, prompts: Sequence[Sequence[int]], limit: Callable[[int], int], on_token: OnToken
    ) -> list[Answered]:
        """All prompts, as many at once as there are lines; tokens as they come, with the number of
        their prompt and whether they are its last ones.

        `limit` says how many tokens may come behind a prompt of some length.
        """
        found = [Answered(len(ids), 0.0) for ids in prompts]
        stops = frozenset(self._loaded.session.stop_tokens)
        begun = arrived = 0  # prompts that are being prefilled, and that are in a line

        def add(line: int, number: int, token: int) -> None:
            found[number].tokens += 1
            last = token in stops or found[number].tokens >= limit(len(prompts[number]))
            on_token(number, token, last)
            if last:
                del self._active[line]
                self._free.append(line)

        while arrived < len(prompts) or self._active:
            if begun == arrived < len(prompts):
                ids = list(prompts[begun])
                self._prefills.start("fill", ids=ids, draw=self._draw(0), adapter=self._adapter)
                begun += 1
            waits = arrived < len(prompts) and self._free
            if waits and (self._prefills.ready or not self._active):
                line = self._take(arrived, found[arrived])
                add(line, arrived, self._active[line].token)
                arrived += 1
            elif self._active:
                self._step(found, add)
        return found

    def _take(self, number: int, answered: Answered) -> int:
        """Bring the prompt with a number, which is prefilled, into a free line; which one."""
        vocabulary = self._loaded.session.vocabulary
        token, answered.prefill_s = _checked_fill(self._prefills.result(), vocabulary)
        line = self._free.pop()
        self._prefills.start("send", length=answered.length, token=token)
        try:
            got = self._loaded.call(f"{_TRANSFER}:receive", _FAILED, line=line).body
        except SubmissionFailed as error:
            reason = self._prefills.failure(OTHERS_SECONDS) if GONE in str(error) else None
            if reason is None or GONE in reason:
                raise
            raise PrefillFailed(reason) from error
        sent = self._prefills.result()
        if not isinstance(got, list) or got[:3] != [answered.length, token, sent]:
            raise SubmissionFailed(
                f"{_FAILED}: sent were {[answered.length, token, sent]} (tokens, the next one, "
                f"bytes), and {str(got)[:80]} arrived."
            )
        if len(got) != 4 or not _is_time(got[3]):
            raise SubmissionFailed(f"{_FAILED}: expected seconds, got {str(got[3:])[:80]}.")
        answered.nbytes, answered.transfer_s = got[2], got[3]
        self._active[line] = _Line(number, token, answered.length)
        return line

    def _step(self, found: list[Answered], add: Callable[[int, int, int], None]) -> None:
        """One token of every line in use."""
        lines = sorted(self._active)
        rows = [
            Row(line, now.token, now.position, self._draw(found[now.number].tokens), self._adapter)
            for line, now in ((line, self._active[line]) for line in lines)
        ]
        for line, token in zip(lines, self._lines.decode(rows), strict=True):
            now = self._active[line]
            now.token, now.position = token, now.position + 1
            add(line, now.number, token)
