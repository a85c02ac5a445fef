"""Limits on connections below the application: their number, slow heads, and bytes that are no
HTTP."""

import asyncio
from typing import Any, Optional

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from harness.serving.guard import ApiError

HEAD_SECONDS = 15.0  # for a request's first line and headers to arrive


class Connection(H11Protocol):
    """Uvicorn's protocol with other limits. Beyond the limit each further connection gets an error
    in OpenAI's form, where uvicorn refuses requests of all; a slow head is cut.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._slow: Optional[asyncio.TimerHandle] = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._most is not None and len(self.connections) > self._most:
            self.app = _too_many
        self._watch()

    def connection_lost(self, exc: Optional[Exception]) -> None:
        super().connection_lost(exc)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        """A timer runs while a head is on its way; between requests uvicorn's own does."""
        waits = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if waits and self._slow is None:
            self._slow = self.loop.call_later(HEAD_SECONDS, self._give_up)
        elif not waits and self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _give_up(self) -> None:
        self._refuse(ApiError(408, f"The headers did not arrive within {HEAD_SECONDS:g} s."))

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
