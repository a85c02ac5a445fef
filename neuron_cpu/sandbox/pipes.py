"""Bytes to and from a process that may stop in the middle of them: every wait has a deadline.

Messages have the form of `multiprocessing.connection`, so it may serve either end.
"""

import contextlib
import os
import select
import struct
import time
from multiprocessing.connection import Connection

_SHORT, _LONG = struct.Struct("!i"), struct.Struct("!Q")
_MOST_SHORT = 0x7FFFFFFF
_PART = 1 << 20


class Pipe:
    """The driver's end of the pipes to one process.

    Every method raises a TimeoutError where it is not done at `deadline` (monotonic).

    Args:
        sentinel: ready once the process has ended, whoever else holds its end of the pipe open.
    """

    def __init__(self, connection: Connection, sentinel: int) -> None:
        self._connection, self._sentinel = connection, sentinel
        os.set_blocking(self._handle, False)

    @property
    def _handle(self) -> int:
        """An OSError once it is closed: its number may be another file's."""
        return self._connection.fileno()

    def receive(self, most: int, deadline: float) -> bytearray:
        """The next message.

        Raises:
            EOFError: the other side is gone.
            ValueError: the message has more than `most` bytes, or says so.
        """
        (length,) = _SHORT.unpack(self._read(_SHORT.size, deadline))
        if length == -1:
            (length,) = _LONG.unpack(self._read(_LONG.size, deadline))
        if not 0 <= length <= most:
            raise ValueError(f"a message of {length} bytes, expected at most {most}")
        return self._read(length, deadline)

    def send(self, data: bytes, deadline: float) -> None:
        """Write a message, whether or not the other side reads; EOFError where it is gone."""
        short = len(data) <= _MOST_SHORT
        head = _SHORT.pack(len(data)) if short else _SHORT.pack(-1) + _LONG.pack(len(data))
        left = memoryview(head + data)
        while left:
            self._wait(select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(self._handle, left[:_PART]) :]

    def _read(self, size: int, deadline: float) -> bytearray:
        parts = bytearray()
        while len(parts) < size:
            self._wait(select.POLLIN, deadline)
            with contextlib.suppress(BlockingIOError):
                part = os.read(self._handle, min(size - len(parts), _PART))
                if not part:
                    raise EOFError
                parts += part
        return parts

    def _wait(self, event: int, deadline: float) -> None:
        seconds = deadline - time.monotonic()
        watched = select.poll()
        watched.register(self._handle, event)
        watched.register(self._sentinel, select.POLLIN)
        ready = dict(watched.poll(1000 * max(0.0, seconds)))
        if seconds <= 0 or not ready:  # what floods the pipe is late, too
            raise TimeoutError("no answer in time")
        if self._handle not in ready:
            raise EOFError
