"""The HTTP application: OpenAI's paths over a scheduler, a page, and paths for monitoring."""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import secrets
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from harness import console, sdk
from harness.errors import UserError
from harness.inputs.prompts import MIN_PROMPT_TOKENS, encode, encode_messages
from harness.serving import schema
from harness.serving.answers import AnswerText, Choice, EventStream, Left, Reply, unless_left
from harness.serving.guard import ApiError, Connection, Guard, Limits, read_body
from harness.serving.scheduler import Answer, Draining, QueueFull, Scheduler
from harness.session.opening import Session

PAGE = Path(__file__).with_name("page.html")
STATUS_SECONDS = 0.5  # between two looks of the page at the scheduler
_Form = TypeVar("_Form", bound=schema._Request)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of Prometheus' form
_CLIENT_GONE = 499  # nginx's status for it; nobody reads it


@dataclass(eq=False)
class Api:
    """The handlers of one model's paths."""

    session: Session
    scheduler: Scheduler
    limits: Limits

    @property
    def names(self) -> dict[str, int]:
        """Names that requests may have: the model's, and of adapters, with their numbers."""
        adapters = enumerate(self.session.settings.adapter_folders, 1)
        return {self.session.model.name: 0} | {name: row for row, name in adapters}

    def _listed(self, name: str) -> dict[str, Any]:
        """The entry of a model in OpenAI's form; an adapter's parent is the model itself."""
        parent = {"parent": self.session.model.name} if self.names[name] else {}
        return {"id": name, "object": "model", "created": 0, "owned_by": "local", **parent}

    # -- OpenAI's paths --------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        form = await self._form(request, schema.CompletionRequest)
        prompts = [await self._ids(prompt) for prompt in form.prompts]
        return await self._answer(request, form, prompts, form.max_tokens or 16, chat=False)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        form = await self._form(request, schema.ChatRequest)
        if not self.session.tokenizer.chat_template:
            raise ApiError(400, "This model has no chat template; use /v1/completions.", "messages")
        messages = [message.as_template_takes_it() for message in form.messages]
        ids = await self._encoded("messages", encode_messages, messages)
        asked = form.max_completion_tokens or form.max_tokens
        return await self._answer(request, form, [ids], asked, chat=True)

    async def models(self, _: Request) -> Response:
        """GET /v1/models and /v1/models/NAME."""
        return JSONResponse({"object": "list", "data": [self._listed(name) for name in self.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._check_model(name)
        return JSONResponse(self._listed(name))

    async def _form(self, request: Request, kind: type[_Form]) -> _Form:
        """The body as a form; ApiError for one of another form or for another model."""
        body = await read_body(request, self.limits.body_bytes)
        try:
            form = kind.model_validate_json(body)
        except ValidationError as error:
            message, param = schema.told(error, kind)
            raise ApiError(400, message, param) from None
        form.model = form.model or self.session.model.name
        self._check_model(form.model)
        if form.stream_options is not None and not form.stream:
            raise ApiError(
                400, "stream_options needs stream; set it, or leave them out.", "stream_options"
            )
        asked, settings = (form.temperature, form.top_p, form.seed), self.session.settings
        fixed = settings.on_device_sampling and not settings.dynamic
        if fixed and any(value is not None for value in asked):
            told = "This server's graphs draw tokens in one way; leave temperature, top_p and seed "
            raise ApiError(400, told + "out.", "temperature")
        if settings.on_device_sampling and form.seed is not None:
            raise ApiError(400, "The device draws, and takes no seed; leave it out.", "seed")
        return form

    def _check_model(self, name: str) -> None:
        if name not in self.names:
            told = f"This server has no such model; write one of {', '.join(self.names)}."
            raise ApiError(404, told, "model", "model_not_found")

    async def _ids(self, prompt: str | list[int]) -> list[int]:
        """Tokens of one prompt of /v1/completions."""
        if isinstance(prompt, str):
            return await self._encoded("prompt", _encode_text, prompt)
        if any(token >= self.session.vocabulary for token in prompt):
            told = f"prompt: tokens are ids; write ones below {self.session.vocabulary}."
            raise ApiError(400, told, "prompt")
        return prompt

    async def _encoded(self, param: str, encode: Callable[..., list[int]], what: Any) -> list[int]:
        """Tokens in a thread: long texts take a while, and others wait for the loop."""
        try:
            return await asyncio.to_thread(encode, self.session.tokenizer, what)
        except UserError as error:
            raise ApiError(400, str(error), param) from None

    async def _answer(
        self,
        request: Request,
        form: schema._Request,
        prompts: Sequence[list[int]],
        asked: int | None,
        chat: bool,
    ) -> Response:
        """Queue the answers, and send them whole or while they come."""
        param = "messages" if chat else "prompt"
        answers = [
            self._planned(form, ids, asked, number, param)
            for ids in prompts
            for number in range(form.n or 1)
        ]
        choices = [
            Choice(index, answer, AnswerText(self.session.tokenizer, form.stops))
            for index, answer in enumerate(answers)
        ]
        usage = form.stream_options is not None and form.stream_options.include_usage
        reply = Reply(form.model, chat, choices, usage, sum(map(len, prompts)))
        try:
            self.scheduler.submit(answers)
        except QueueFull as error:
            headers = {"Retry-After": "1"}
            raise ApiError(429, str(error), code="queue_full", headers=headers) from None
        except Draining as error:
            raise ApiError(503, str(error), code="draining") from None
        return await self._sent(request, reply, bool(form.stream))

    async def _sent(self, request: Request, reply: Reply, stream: bool) -> Response:
        """The response to a reply that is queued; whatever happens, nothing of it runs on."""

        def leave() -> None:
            reply.leave(self.scheduler)

        try:
            if stream:
                events = reply.stream()
                first = await unless_left(request, anext(events))
                return EventStream(first, events, leave)
            texts = await unless_left(request, reply.text())
        except Left:
            leave()
            return Response(status_code=_CLIENT_GONE)
        except BaseException:
            leave()
            raise
        leave()
        return JSONResponse(reply.whole(texts))

    def _planned(
        self, form: schema._Request, ids: list[int], asked: int | None, number: int, param: str
    ) -> Answer:
        """One choice's answer; ApiError for a prompt that the cache does not hold."""
        settings, padding = self.session.settings, self.session.pad_token_id
        most = settings.seq_len - 1
        if settings.blocks is None or not settings.blocks.chunks:  # a prompt is one prefill
            most = min(settings.max_context_length, most)
        if not MIN_PROMPT_TOKENS <= len(ids) <= most:
            told = f"{param}: {len(ids)} tokens, expected {MIN_PROMPT_TOKENS} to {most}; "
            told += "make it longer." if len(ids) < most else "cut it, or raise --seq-len."
            raise ApiError(400, told, param, "context_length_exceeded")
        if padding in ids:
            told = (
                f"{param}: token {padding} is the padding, which no prompt may hold; leave it out."
            )
            raise ApiError(400, told, param)
        room = settings.seq_len - len(ids)
        default = settings.temperature if settings.samples else 0.0
        return Answer(
            ids=ids,
            most=min(asked or room, room),
            temperature=default if form.temperature is None else form.temperature,
            top_k=settings.top_k if settings.samples else 0,
            top_p=settings.top_p if form.top_p is None else form.top_p,
            seed=secrets.randbits(62) if form.seed is None else _seed(form.seed, number),
            adapter=self.names[form.model],
        )

    # -- the page and monitoring -----------------------------------------------------------------

    async def page(self, _: Request) -> Response:
        """GET /: a page that needs nothing but this server."""
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        )
        text = PAGE.read_text(encoding="utf-8").replace("NONCE", nonce)
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(text, headers=headers)

    async def health(self, _: Request) -> Response:
        """GET /health: 200, or 503 while the server ends."""
        draining = self.scheduler.state()["draining"]
        return JSONResponse({"status": "draining" if draining else "ok"}, 503 if draining else 200)

    async def show_metrics(self, _: Request) -> Response:
        """GET /metrics: the numbers of the scheduler's state in Prometheus' form."""
        lines = []
        for name, value in self.scheduler.state().items():
            if isinstance(value, dict):
                lines += [f'nki_{name}{{of="{part}"}} {number}' for part, number in value.items()]
            elif isinstance(value, (int, float)):
                lines.append(f"nki_{name} {float(value)}")
        return Response("\n".join([*lines, ""]), headers={"Content-Type": CONTENT_TYPE})

    async def status(self, request: Request) -> Response:
        """GET /status: the scheduler's state as events, while somebody listens."""
        if request.method == "HEAD":
            return Response(media_type=EventStream.media_type)
        return EventStream(self._state(), self._states(), lambda: None)

    async def _states(self) -> AsyncGenerator[str, None]:
        while not self.scheduler.state()["draining"]:
            await asyncio.sleep(STATUS_SECONDS)
            yield self._state()

    def _state(self) -> str:
        chat = bool(self.session.tokenizer.chat_template)
        known = {"model": self.session.model.name, "models": list(self.names), "chat": chat}
        known["times"] = sdk.platform().times.label
        return json.dumps(known | self.scheduler.state())


def _encode_text(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text without the chat template."""
    return encode(tokenizer, [text], raw=True)[0]


def application(api: Api) -> Starlette:
    """The ASGI application; its lifespan runs the scheduler."""
    routes = [
        Route("/", api.page),
        Route("/health", api.health),
        Route("/metrics", api.show_metrics),
        Route("/status", api.status),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
    ]
    paths = {route.path for route in routes}

    def note(method: str, path: str, status: int, seconds: float) -> None:
        """Log a request: never its text, and no path of the client's own."""
        shown = path if path in paths else "another path"
        if shown not in ("/health", "/metrics"):
            method = method if method in ("GET", "POST") else "another method"
            console.say(f"{method} {shown}: {status}, {seconds:.2f} s")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        running = asyncio.create_task(api.scheduler.run())
        yield
        api.scheduler.drain()
        await running

    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, limits=api.limits, note=note)],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _told),
        lifespan=lifespan,
    )


async def _told(_: Request, error: Exception) -> Response:
    """A refusal; paths and methods that there are none of; or a bug."""
    if isinstance(error, HTTPException):
        allow = (error.headers or {}).get("Allow")
        told = {
            404: "There is no such path; POST a prompt to /v1/completions, or messages to "
            "/v1/chat/completions.",
            405: f"This path has another method; write curl -X {allow}.",
        }
        message = told.get(error.status_code, str(error.detail))
        error = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    elif not isinstance(error, ApiError):
        error = ApiError(500, f"The server has failed ({type(error).__name__}).")
    return error.response()


def _seed(asked: int, number: int) -> int:
    """The seed of a choice: the first has the request's, and no two choices share a seed."""
    if number == 0:
        return asked
    return int.from_bytes(hashlib.sha256(f"{asked} {number}".encode()).digest()[:7], "big")


class Server(uvicorn.Server):
    """Calls `on_start` once it answers; ends in order at the first signal, at once at the second.

    Exit status 0: no signal is raised again.
    """

    def __init__(self, api: Api, on_start: Callable[[], object] = lambda: None) -> None:
        limits = api.limits
        super().__init__(
            uvicorn.Config(
                application(api),
                http=Connection,
                ws="none",
                lifespan="on",
                loop="asyncio",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=limits.connections,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=limits.drain_seconds,
            )
        )
        self._scheduler, self._on_start = api.scheduler, on_start
        self._patience, self._cut_at = limits.drain_seconds, math.inf

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # nobody waits for the scheduler: its end with the loop is no error
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Refuse new answers, and wait for the running ones."""
        del sig, frame
        self.should_exit = self.force_exit = self._cut_at < math.inf
        self._cut_at = time.monotonic() + self._patience
        self._scheduler.drain()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end. The listener stays open while answers run."""
        if self._cut_at < math.inf:
            state = self._scheduler.state()
            if not state["running"] and not state["waiting"]:
                self.should_exit = True
            elif time.monotonic() > self._cut_at:
                self._scheduler.cut()
        return await super().on_tick(counter)
