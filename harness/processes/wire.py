"""Messages from a submission's process: plain data, each with its size and form checked.

A message is a JSON object and any number of fp32 arrays. Nothing that arrives is ever unpickled.
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from neuron_cpu.quoting import all_quoted
from neuron_cpu.sandbox.pipes import Pipe

MOST_HEADER_BYTES = 1 << 26
MOST_ARRAY_BYTES = 1 << 34  # of all arrays of a message
_LENGTH = struct.Struct("<Q")


class WireError(Exception):
    """The bytes received are no message; `str(error)` says why."""


@dataclass(frozen=True)
class Message:
    """One message: the request that it answers, its kind, its data and its arrays."""

    request: int
    kind: str
    body: Any
    arrays: list[np.ndarray] = field(default_factory=list)


def send(
    connection: Connection, request: int, kind: str, body: Any, arrays: Sequence[np.ndarray] = ()
) -> None:
    """Write one message."""
    shapes = [list(array.shape) for array in arrays]
    head = {"request": request, "kind": kind, "body": body, "shapes": shapes}
    connection.send_bytes(json.dumps(head).encode())
    for array in arrays:
        data = np.ascontiguousarray(array, dtype=np.float32).tobytes()
        connection.send_bytes(_LENGTH.pack(len(data)))
        for start in range(0, len(data), MOST_HEADER_BYTES):
            connection.send_bytes(data[start : start + MOST_HEADER_BYTES])


def receive(pipe: Pipe, deadline: float) -> Message:
    """Read one message until a point in time (monotonic).

    Raises:
        TimeoutError: it is not whole by then.
        EOFError: the other side is gone.
        WireError: what arrived is no message.
    """
    try:
        head = json.loads(pipe.receive(MOST_HEADER_BYTES, deadline))
        request, kind, body, shapes = (head[k] for k in ("request", "kind", "body", "shapes"))
        if not isinstance(kind, str) or type(request) is not int:
            raise ValueError("the kind is no text or the request no number")
        if 4 * sum(map(_elements, shapes)) > MOST_ARRAY_BYTES:
            raise ValueError(f"arrays of more than {MOST_ARRAY_BYTES} bytes")
        words = all_quoted(body, MOST_HEADER_BYTES, lines=True)
        return Message(request, kind, words, [_array(pipe, shape, deadline) for shape in shapes])
    except (EOFError, TimeoutError):
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise WireError(f"{type(error).__name__}: {error}") from error


def _elements(shape: Any) -> int:
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{str(shape)[:80]} is no shape")
    return math.prod(shape)


def _array(pipe: Pipe, shape: Any, deadline: float) -> np.ndarray:
    """One fp32 array whose bytes follow."""
    (length,) = _LENGTH.unpack(pipe.receive(_LENGTH.size, deadline))
    if length != 4 * _elements(shape):
        raise ValueError(f"{length} bytes do not make an array of shape {shape}")
    parts = bytearray()
    while len(parts) < length:
        part = pipe.receive(MOST_HEADER_BYTES, deadline)
        if not part or len(parts) + len(part) > length:
            raise ValueError("an array has other bytes than it says")
        parts += part
    return np.frombuffer(parts, dtype=np.float32).reshape(shape)
