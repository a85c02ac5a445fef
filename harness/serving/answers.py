"""OpenAI's answers from a scheduler's: whole, or as server-sent events while they come."""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from harness.serving.guard import ApiError
from harness.serving.scheduler import Answer, End, Scheduler
from harness.streaming import RowText

DONE = "[DONE]"


class AnswerText:
    """Turns tokens into text that ends before the first of `stops`."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._row = RowText(tokenizer)
        self._stops = list(stops)
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain with this token."""
        return self._until_stop(self._row.add(token))

    def rest(self) -> str:
        """Return the text held back, when no further token comes."""
        text = self._until_stop(self._row.rest())
        if self.stopped:
            return text
        held, self._held = self._held, ""
        return text + held

    def _until_stop(self, text: str) -> str:
        text, self._held = self._held + text, ""
        found = [place for place in map(text.find, self._stops) if place >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many of the last letters of `text` a stop string may begin with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Left(Exception):
    """The client has closed its connection."""


@dataclass
class Choice:
    """One answer of a request, and its text so far."""

    index: int
    answer: Answer
    text: AnswerText
    tokens: int = 0
    finish: str | None = None


@dataclass
class Reply:
    """All answers to one request.

    Attributes:
        chat: which of the two forms it has.
        usage: whether a stream tells it.
    """

    model: str
    chat: bool
    choices: list[Choice]
    usage: bool = False
    prompt_tokens: int = 0
    identity: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    # -- forms -----------------------------------------------------------------------------------

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.identity}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def whole(self, texts: Sequence[str]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [self._whole_choice(c, text) for c, text in zip(self.choices, texts, strict=True)]
        head = self._head("chat.completion" if self.chat else "text_completion")
        return head | {"choices": choices, "usage": self._usage()}

    def _whole_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"text": text}
        if self.chat:
            message = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": choice.index, "logprobs": None, "finish_reason": choice.finish} | message

    def _chunk(self, choices: Sequence[dict[str, Any]], **more: Any) -> str:
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        return json.dumps(head | {"choices": list(choices)} | more)

    def _piece(
        self, choice: Choice, text: str, *, first: bool = False, finish: str | None = None
    ) -> str:
        """A chunk with some text of one choice, or with its beginning or end."""
        piece: dict[str, Any] = {"text": text}
        if self.chat:
            delta = {} if finish else {"content": text}
            piece = {"delta": {"role": "assistant", **delta} if first else delta}
        return self._chunk(
            [{"index": choice.index, "logprobs": None, "finish_reason": finish} | piece]
        )

    def _usage(self) -> dict[str, Any]:
        leases = {tuple(one.answer.ids): one.answer.lease for one in reversed(self.choices)}
        cached = [lease.computed for lease in leases.values() if lease is not None]
        made = sum(choice.tokens for choice in self.choices)
        prompt = self.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            **({"prompt_tokens_details": {"cached_tokens": sum(cached)}} if cached else {}),
        }

    def leave(self, scheduler: Scheduler) -> None:
        """Stop the choices that still run: the answer is whole, or the client has left."""
        for choice in self.choices:
            scheduler.leave(choice.answer, "left" if choice.finish is None else choice.finish)

    # -- events ----------------------------------------------------------------------------------

    async def text(self) -> list[str]:
        """Wait for all of it; ApiError where it failed."""
        texts = [""] * len(self.choices)
        async for choice, text in self._pieces():
            texts[choice.index] += text
        return texts

    async def stream(self) -> AsyncGenerator[str, None]:
        """JSON of each chunk, then `[DONE]`; a failure ends it with an error in OpenAI's form."""
        begun: set[int] = set()
        try:
            async for choice, text in self._pieces():
                if self.chat and choice.index not in begun:
                    yield self._piece(choice, "", first=True)
                begun.add(choice.index)
                if text:
                    yield self._piece(choice, text)
                if choice.finish:
                    yield self._piece(choice, "", finish=choice.finish)
        except ApiError as error:
            if not begun:
                raise
            yield json.dumps(error.body())
            return
        if self.usage:
            yield self._chunk([], usage=self._usage())
        yield DONE

    async def _pieces(self) -> AsyncIterator[tuple[Choice, str]]:
        """Text of the choices in the order in which it comes."""
        queue: asyncio.Queue[tuple[Choice, int | End]] = asyncio.Queue()
        tasks = [asyncio.create_task(_forward(choice, queue)) for choice in self.choices]
        try:
            while any(choice.finish is None for choice in self.choices):
                choice, event = await queue.get()
                if choice.finish is not None:  # behind a stop string
                    continue
                if isinstance(event, End) and event.failure is not None:
                    raise ApiError(500, event.failure, code="model_failure")
                yield choice, _text_of(choice, event)
        finally:
            for task in tasks:
                task.cancel()


def _text_of(choice: Choice, event: int | End) -> str:
    """The text that one event adds to a choice; sets its end."""
    if isinstance(event, End):
        text = choice.text.rest()
        choice.finish = "stop" if choice.text.stopped else event.reason
        return text
    choice.tokens += 1
    text = choice.text.add(event)
    if choice.text.stopped:
        choice.finish = "stop"
    return text


async def _forward(choice: Choice, queue: asyncio.Queue[tuple[Choice, int | End]]) -> None:
    event: int | End = 0
    while not isinstance(event, End):
        event = await choice.answer.events.get()
        queue.put_nowait((choice, event))


async def unless_left(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`; Left, and `work` cancelled, where the client goes first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_left(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Left
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events; ends with the events, or as soon as the client has gone."""

    media_type = "text/event-stream"

    def __init__(
        self, first: str, events: AsyncGenerator[str, None], at_end: Callable[[], None]
    ) -> None:
        async def lines() -> AsyncIterator[str]:
            yield f"data: {first}\n\n"
            async for event in events:
                yield f"data: {event}\n\n"

        super().__init__(lines(), headers={"Cache-Control": "no-store"})
        self._events, self._at_end = events, at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(OSError):
                await super().__call__(scope, receive, send)
        finally:
            self._at_end()
            await self._events.aclose()
