"""Uvicorn around the application: its limits, and how it ends."""

from __future__ import annotations

from typing import Any

import uvicorn

from harness.serving.app import Api, application


class Server(uvicorn.Server):
    """Ends in order at the first signal, and at once at the second one."""

    def __init__(self, api: Api) -> None:
        limits = api.limits
        super().__init__(
            uvicorn.Config(
                application(api),
                http="h11",
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
        self._scheduler = api.scheduler

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Take no new answers, and wait for those that run; not noted, so that nobody raises it."""
        del sig, frame
        self.force_exit = self.should_exit
        self.should_exit = True
        self._scheduler.drain()
