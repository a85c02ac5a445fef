"""A client of the oracle: starts one and asks it."""

import json
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any

from ..sandbox import interpreter


class Client:
    """An oracle of this process; `with Client() as oracle: oracle.ask({...})`."""

    def __init__(self, *options: str) -> None:
        command, pipe = interpreter.command("-m", "neuron_cpu", "oracle", *options), subprocess.PIPE
        self.process: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        return next(self.answers([request]))

    def answers(self, requests: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Answers as they come; without an `id` a request is called by its number."""
        every = [requests] if isinstance(requests, dict) else requests
        asked = [{"id": number, **one} for number, one in enumerate(every)]
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        self.process.stdin.flush()
        for _ in asked:
            yield json.loads(self.process.stdout.readline())

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
