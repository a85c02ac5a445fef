"""Who runs when: answers wait in one queue, take a line of the cache each, and decode together.

Everything here happens in one event loop; only the calls of the model run in a thread, one at a
time. A round is a prefill, where somebody waits and a line is free, and a decode step of all lines
in use. So answers that run never wait for more than one prefill, and since the queue is served in
order and every answer has an end, nobody waits for ever.
"""

import asyncio
import collections
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.errors import is_refusal, words_of
from harness.processes.worker import Draw, Part, Row
from harness.processes.workers import SubmissionFailed
from harness.serving.blocks import BlockPool, Lease
from harness.session.building import Loaded, build
from harness.session.generation import FAILED, check_step

_RATE_SECONDS = 5.0  # over which tokens a second are counted


class Lines(Protocol):
    """Cache lines of a model; each call returns when the device is done.

    An error of a call has ended all requests in flight; call `recover` before the next one.
    """

    def prefill(self, line: int, ids: Sequence[int], draw: Draw, adapter: int, **where: Any) -> int:
        """Cache a prompt; the token behind it. `where` are the `blocks` that it gets and how many
        of its tokens they hold already, `computed`, where the cache has no lines."""

    def decode(self, rows: Sequence[Row]) -> list[int]:
        """One step of all lines in use, in ascending order; a token for each."""

    def chunk(self, parts: Sequence[Part]) -> list[int]:
        """Tokens of several sequences at once; a token behind each part."""

    def recover(self) -> None:
        """Make the lines usable again, all of them free."""


class QueueFull(Exception):
    """The queue is full; `str(error)` says how many answers wait."""


class Draining(Exception):
    """The server ends and takes nothing new."""


@dataclass(frozen=True)
class End:
    """The last event of an answer: "stop" behind an end token, "length", or why it failed."""

    reason: str
    failure: str | None = None


@dataclass(eq=False)
class Answer:
    """One prompt's continuation; `events` has its tokens as they come, and an End.

    Attributes:
        most: new tokens.
        adapter: number of a low-rank adapter; 0 is the model itself.
        line: of the cache, while it runs.
        lease: its blocks, where the cache has no lines.
        cached: tokens of the prompt that chunks have brought there.
    """

    ids: list[int]
    most: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    adapter: int = 0
    events: asyncio.Queue[int | End] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    line: int | None = None
    lease: Lease | None = None  # of blocks, where the cache has no lines
    cached: int = 0  # tokens of the prompt, where it comes in chunks
    left: str | None = None  # why nobody listens any more
    arrived: float = field(default_factory=time.monotonic)

    def draw(self) -> Draw:
        """How the next token is chosen."""
        return Draw(self.temperature, self.top_k, self.top_p, self.seed, len(self.tokens))

    def row(self) -> Row:
        """The decode step that takes the newest token."""
        assert self.line is not None
        position = len(self.ids) + len(self.tokens) - 1
        blocks = () if self.lease is None else self.lease.blocks
        return Row(self.line, self.tokens[-1], position, self.draw(), self.adapter, blocks)

    def part(self, most: int) -> Part:
        """Part of a chunk: the newest token, or at most `most` tokens that the cache lacks."""
        assert self.lease is not None
        start = self.cached if self.cached < len(self.ids) else self.row().position
        tokens = self.tokens[-1:] if self.tokens else self.ids[start : start + most]
        return Part(tuple(tokens), start, self.draw(), self.lease.blocks)


class Scheduler:
    """Answers on the lines of one model.

    Args:
        lines: of the model's cache, `count` of them.
        most_waiting: answers that may wait when all lines are taken.
        stop_tokens: end an answer; they are not handed out.
        blocks: of a cache that has them in the place of lines.
        chunk: tokens of a call that takes parts of prompts beside the steps of others; None where
            prompts are taken whole.
    """

    def __init__(
        self,
        lines: Lines,
        count: int,
        most_waiting: int,
        stop_tokens: Sequence[int],
        blocks: BlockPool | None = None,
        chunk: int | None = None,
    ) -> None:
        self._blocks, self._chunk = blocks, chunk
        self._lines, self._count, self._most_waiting = lines, count, most_waiting
        self._stop_tokens = frozenset(stop_tokens)
        self._waiting: collections.deque[Answer] = collections.deque()
        self._running: dict[int, Answer] = {}
        self._broken = False  # a call has failed since the last recovery
        self._draining = self._cut = False
        self._wake = asyncio.Event()
        self._recent: collections.deque[float] = collections.deque()  # times of tokens
        self.failures = self._new_tokens = 0
        self._ends: collections.Counter[str] = collections.Counter()

    # -- what requests do ------------------------------------------------------------------------

    def submit(self, answers: Sequence[Answer]) -> None:
        """Put all of them into the queue, or none: QueueFull, Draining."""
        if self._draining:
            raise Draining("The server ends and takes no new requests.")
        free = self._count - len(self._running)
        if len(self._waiting) + len(answers) > self._most_waiting + free:
            raise QueueFull(
                f"{len(self._waiting)} answers wait for {self._count} slots already, and at most "
                f"{self._most_waiting} may; try again later."
            )
        self._waiting.extend(answers)
        self._wake.set()

    def leave(self, answer: Answer, reason: str = "left") -> None:
        """Free the place in the queue, or the line, of an answer whose client has left."""
        answer.left = answer.left or reason
        if answer in self._waiting:
            self._waiting.remove(answer)
            self._ends[answer.left] += 1
        self._wake.set()

    def drain(self) -> None:
        """Take no new answers; `run` returns when the accepted ones are done."""
        self._draining = True
        self._wake.set()

    def cut(self) -> None:
        """End answers that drain too long, between two steps, with an error to their clients."""
        self._draining = self._cut = True
        self._wake.set()

    def state(self) -> dict[str, Any]:
        """The page's data: slots, queue, tokens a second; no text."""
        now = time.monotonic()
        while self._recent and self._recent[0] < now - _RATE_SECONDS:
            self._recent.popleft()
        slots = [
            {
                "slot": line,
                "prompt_tokens": len(answer.ids) if answer else 0,
                "new_tokens": len(answer.tokens) if answer else 0,
                "most_new_tokens": answer.most if answer else 0,
            }
            for line in range(self._count)
            for answer in [self._running.get(line)]
        ]
        return {
            "slots": slots,
            "running": len(self._running),
            "waiting": len(self._waiting),
            "most_waiting": self._most_waiting,
            "tokens_per_second": len(self._recent) / _RATE_SECONDS,
            "failures": self.failures,
            "answers": dict(self._ends),
            "new_tokens": self._new_tokens,
            "draining": self._draining,
            "blocks": self._blocks.state() if self._blocks is not None else None,
        }

    # -- the loop --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until drained."""
        while True:
            self._free_left()
            if self._cut:
                for answer in [*self._running.values(), *self._waiting]:
                    self._end(answer, End("error", "The server ends before this answer is whole."))
                self._waiting.clear()
            if not self._running and not self._waiting:
                if self._draining:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._round()

    async def _round(self) -> None:
        """A prefill and a decode step; what they raise ends all that is in flight."""
        try:
            if self._broken:
                if self._blocks is not None:
                    self._blocks.forget()
                await asyncio.to_thread(self._lines.recover)
                self._broken = False
            if self._chunk is not None:
                await self._mixed(self._chunk)
                return
            await self._prefill()
            self._free_left()
            await self._decode()
        except Exception as error:
            self._fail(error)

    def _begin(self) -> Answer | None:
        """Give the first waiting answer a line, and blocks where the cache has blocks."""
        free = [line for line in range(self._count) if line not in self._running]
        if not free or not self._waiting:
            return None
        answer = self._waiting[0]
        if self._blocks is not None:
            answer.lease = self._blocks.take(answer.ids, answer.most, answer.adapter)
            if answer.lease is None:  # those that run will give some back
                return None
        self._waiting.popleft()
        answer.line = free[0]
        self._running[answer.line] = answer
        return answer

    async def _prefill(self) -> None:
        answer = self._begin()
        if answer is None:
            return
        lease = answer.lease
        where: dict[str, Any] = {}
        if lease is not None:
            where = {"blocks": lease.blocks, "computed": lease.computed}
        call = functools.partial(self._lines.prefill, **where)
        token = await asyncio.to_thread(
            call, answer.line, answer.ids, answer.draw(), answer.adapter
        )
        if self._blocks is not None and lease is not None:
            self._blocks.fill(lease, answer.ids)
        self._take(answer, token)

    async def _mixed(self, most: int) -> None:
        """One chunk: a token of each that has begun to answer, and prompts in the order in which
        they came, as far as there is room."""
        while self._begin() is not None:
            pass
        came = sorted(self._running.values(), key=lambda answer: answer.arrived)
        came.sort(key=lambda answer: not answer.tokens)
        parts: list[tuple[Answer, Part]] = []
        for answer in came:
            if most:
                parts.append((answer, answer.part(most)))
                most -= len(parts[-1][1].tokens)
        if not parts:
            return
        tokens = await asyncio.to_thread(self._lines.chunk, [part for _, part in parts])
        for (answer, part), token in zip(parts, tokens, strict=True):
            answer.cached = max(answer.cached, part.start + len(part.tokens))
            if answer.cached >= len(answer.ids):
                self._take(answer, token)

    async def _decode(self) -> None:
        answers = [self._running[line] for line in sorted(self._running)]
        if not answers:
            return
        tokens = await asyncio.to_thread(self._lines.decode, [a.row() for a in answers])
        for answer, token in zip(answers, tokens, strict=True):
            self._take(answer, token)

    def _take(self, answer: Answer, token: int) -> None:
        """Pass on a new token, or the end that it means."""
        self._recent.append(time.monotonic())
        self._new_tokens += 1
        if token in self._stop_tokens:
            self._end(answer, End("stop"))
            return
        answer.tokens.append(token)
        answer.events.put_nowait(token)
        if len(answer.tokens) == answer.most:
            self._end(answer, End("length"))

    def _end(self, answer: Answer, end: End) -> None:
        answer.events.put_nowait(end)
        self._ends[answer.left or end.reason] += 1
        if answer.line is not None:
            del self._running[answer.line]
        if self._blocks is not None and answer.lease is not None:
            if answer.tokens and end.failure is None:  # the newest one's keys are not there yet
                self._blocks.fill(answer.lease, [*answer.ids, *answer.tokens[:-1]])
            self._blocks.give_back(answer.lease)

    def _free_left(self) -> None:
        for answer in [answer for answer in self._running.values() if answer.left]:
            self._end(answer, End("left"))

    def _fail(self, error: Exception) -> None:
        """End the answers in flight with the reason; the loop recovers and goes on."""
        self._broken = True
        self.failures += 1
        told = words_of(error)
        if not is_refusal(error):
            told = f"{type(error).__name__}: {told}"
        hit = list(self._running.values())
        if not hit and self._waiting:  # the recovery itself has failed: the next one hears of it
            hit = [self._waiting.popleft()]
        for answer in hit:
            self._end(answer, End("error", told))


_SLOTS = "harness.session.slots"


class LoadedLines:
    """Lines of a loaded model; the submission's process is started anew where it ended."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def prefill(self, line: int, ids: Sequence[int], draw: Draw, adapter: int, **where: Any) -> int:
        given = dict(line=line, ids=list(ids), draw=draw, adapter=adapter, **where)
        return self._tokens("prefill", 1, **given)[0]

    def decode(self, rows: Sequence[Row]) -> list[int]:
        return self._tokens("decode", len(rows), rows=list(rows))

    def chunk(self, parts: Sequence[Part]) -> list[int]:
        return self._tokens("chunk", len(parts), parts=list(parts))

    def recover(self) -> None:
        worker = self._loaded.worker
        if not worker.ended:
            try:
                self._loaded.call(f"{_SLOTS}:forget", FAILED)
                return
            except SubmissionFailed:
                worker.close()
        self._loaded = build(self._loaded.session, self._loaded.role)

    def _tokens(self, function: str, count: int, **arguments: Any) -> list[int]:
        """A call that gives a token of the vocabulary for each row."""
        tokens: Any = self._loaded.call(f"{_SLOTS}:{function}", FAILED, **arguments).body
        check_step(self._loaded.session, tokens, count)
        return tokens
