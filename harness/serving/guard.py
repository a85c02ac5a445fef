"""The checks of every request (host, key, size), and the form of refusals."""

import asyncio
import hmac
import ipaddress
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

BODY_SECONDS = 30.0  # for a body to arrive
OPEN_PATHS = ("/", "/health")  # without a key: neither shows what anybody asks


@dataclass(frozen=True)
class Limits:
    """The limits on clients.

    Attributes:
        key: that every request must carry; None where everybody may ask.
        host: that the server binds to.
        body_bytes: of one request.
        waiting: answers in the queue that no slot has taken yet.
        connections: at once, idle ones included.
        drain_seconds: for answers that run when the server ends.
    """

    key: str | None = None
    host: str = "127.0.0.1"
    body_bytes: int = 1 << 20
    waiting: int = 64
    connections: int = 256
    drain_seconds: int = 30


class ApiError(Exception):
    """A refusal in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        known = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = kinds.get(self.status, known)
        told = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": told}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


class Guard:
    """Wraps the application: checks who may ask, and logs requests without their text.

    A page of another site must not use a browser as its way in: names of other hosts are refused
    (DNS rebinding), and so are bodies that a form could send without asking first.
    """

    def __init__(
        self, app: ASGIApp, limits: Limits, note: Callable[[str, str, int, float], None]
    ) -> None:
        self._app, self._limits, self._note = app, limits, note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(Request(scope))
        except ApiError as error:
            await error.response()(scope, receive, noted)
        else:
            await self._app(scope, receive, noted)
        finally:
            self._note(scope["method"], scope["path"], status, time.monotonic() - started)

    def _check(self, request: Request) -> None:
        name = request.headers.get("host")  # HTTP/1.0 may have none, a browser always has one
        if name is not None and not _names(name.lower(), self._limits.host):
            told = "The Host header names another server; call 127.0.0.1, or give --host 0.0.0.0."
            raise ApiError(403, told)
        if {"content-length", "transfer-encoding"} <= set(request.headers):
            # a proxy in front may take the other one, and what follows for another client's
            told = "Content-Length and Transfer-Encoding exclude each other; send one of them."
            raise ApiError(400, told, headers={"Connection": "close"})
        if self._limits.key is None or request.url.path in OPEN_PATHS:
            return
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, b"Bearer " + self._limits.key.encode()):
            told = "Give this server's key as Authorization: Bearer KEY."
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, told, code="invalid_api_key", headers=headers)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host to bind to."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _names(header: str, host: str) -> bool:
    """Whether a Host header may be a name of a server that binds to `host`.

    A server that others reach has names that it does not know.
    """
    if not is_loopback(host):
        return True
    found = _HOST.fullmatch(header)
    return found is not None and is_loopback(found[1].strip("[]"))


_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(?::[0-9]{1,5})?")


async def read_body(request: Request, most: int) -> bytes:
    """The JSON text of a request; ApiError where it is too long, too slow, or something else."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "The body must be JSON, sent as Content-Type: application/json.")
    too_long = ApiError(413, f"The body is longer than {most} bytes.")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise too_long
    try:
        return await asyncio.wait_for(_joined(request, most, too_long), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"The body did not arrive within {BODY_SECONDS:g} s.") from None
    except ClientDisconnect:
        raise ApiError(400, "The body ends too early.") from None


async def _joined(request: Request, most: int, too_long: ApiError) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise too_long
    return bytes(body)


HEAD_SECONDS = 15.0  # for a request's first line and headers to arrive


class Connection(H11Protocol):
    """Uvicorn's protocol with other limits. Beyond the limit each further connection gets an error
    in OpenAI's form, where uvicorn refuses requests of all; a slow head is cut.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._most is not None and len(self.connections) > self._most:
            self.app = _too_many
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        """A timer runs while a head is on its way; between requests uvicorn's own does."""
        waits = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if waits and self._slow is None:
            error = ApiError(408, f"The headers did not arrive within {HEAD_SECONDS:g} s.")
            self._slow = self.loop.call_later(HEAD_SECONDS, self._refuse, error)
        elif not waits and self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def send_400_response(self, msg: str) -> None:
        del msg
        self._refuse(ApiError(400, "This is no HTTP request that the server can read."))

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and close."""
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        head = h11.Response(status_code=error.status, headers=headers)
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    headers = {"Retry-After": "1", "Connection": "close"}
    told = "The server has as many connections as it takes; try again later."
    error = ApiError(503, told, code="too_many_connections", headers=headers)
    await error.response()(scope, receive, send)
