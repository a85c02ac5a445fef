"""Uvicorn around the application: its limits, and how it ends."""

import logging
import math
import socket
import time
from collections.abc import Callable
from typing import Any, Optional

import uvicorn

from harness.serving.app import Api, application
from harness.serving.connections import Connection


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

    async def startup(self, sockets: Optional[list[socket.socket]] = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: Optional[list[socket.socket]] = None) -> None:
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
