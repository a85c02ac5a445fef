"""Two drivers that work together: JSON messages over TCP, with a sign of life now and then.

What arrives is data: each message has a limited length and is checked where it is used. A side
that closes the connection, or that is mute for `MUTE_SECONDS`, is gone.
"""

import contextlib
import hashlib
import hmac
import itertools
import json
import queue
import socket
import threading
import time
from typing import Any, Optional

from harness.errors import UserError
from harness.serving.listening import bound

BEAT_SECONDS = 5.0  # between signs of life
MUTE_SECONDS = 30.0
RETRY_SECONDS = 0.5  # between two tries to connect
MOST_WAITING = 256  # messages that have come and nobody has taken: a side asks, and waits
MOST_GUESTS = 8  # connections whose hello nobody has looked at yet
MOST_BYTES = 1 << 22  # of a message: a prompt of half a million tokens
Message = dict[str, Any]


class LinkLost(UserError):
    """The other side is gone, or sent something else than messages."""


class Link:
    """One end of a connection; `other` names the other one in messages.

    With a `key` every message carries a digest of its place in the connection and its text, and
    one without it ends the link: both sides have to know the key.
    """

    def __init__(
        self, connection: socket.socket, other: str, key: bytes = b"", accepted: bool = False
    ) -> None:
        self.other, self._key, self._accepted = other, key, accepted
        self._sent = itertools.count()
        self._socket = connection
        self._sending = threading.Lock()
        self._arrived: queue.Queue[Message] = queue.Queue(MOST_WAITING)
        self._lost: Optional[str] = None  # why nothing comes any more
        self._closed = threading.Event()
        connection.settimeout(MUTE_SECONDS)
        for body in (self._read, self._beat):
            threading.Thread(target=body, daemon=True).start()

    @property
    def own_address(self) -> str:
        """This machine's, as the other side reaches it."""
        return str(self._socket.getsockname()[0])

    @property
    def other_address(self) -> str:
        """The other machine's, as it is reached from here."""
        return str(self._socket.getpeername()[0])

    def send(self, kind: str, **values: Any) -> None:
        """Write one message; LinkLost where nobody is there."""
        text = json.dumps({"kind": kind, **values}).encode()
        try:
            with self._sending:
                self._socket.sendall(self._digest(next(self._sent), False, text) + text + b"\n")
        except OSError as error:
            raise self._gone(f"{error.strerror or error}") from error

    @property
    def ready(self) -> bool:
        """Whether `receive` would return, or raise, at once."""
        return not self._arrived.empty() or self._lost is not None

    def receive(self, seconds: float) -> Message:
        """The next message; LinkLost where none comes in time."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(queue.Empty):
                return self._arrived.get(timeout=0.05)
            if self._lost is not None and self._arrived.empty():
                raise self._gone(self._lost)
            if time.monotonic() > deadline:
                raise LinkLost(
                    f"The {self.other} has not answered within {seconds:g} s; --time-limit "
                    "changes that."
                )

    def _gone(self, why: str) -> LinkLost:
        return LinkLost(
            f"The {self.other} is gone ({why.rstrip('.')}); see what it says, and start both sides "
            "anew."
        )

    def _read(self) -> None:
        """Body of the thread that reads."""
        try:
            with self._socket.makefile("rb") as stream:
                for number in itertools.count():
                    line = stream.readline(MOST_BYTES)
                    if not line:
                        break
                    message = json.loads(self._checked(number, line.rstrip(b"\n")))
                    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                        raise ValueError("a message without a kind")
                    if message["kind"] != "beat":
                        self._arrived.put(message, timeout=MUTE_SECONDS)
            self._lost = "it has closed the connection"
        except TimeoutError:
            self._lost = f"it was mute for {MUTE_SECONDS:g} s"
        except OSError as error:
            self._lost = f"{error.strerror or error}"
        except queue.Full:
            self._lost = f"it sent more than {MOST_WAITING} messages that nobody asked for"
        except PermissionError as error:
            self._lost = str(error)
        except (ValueError, RecursionError):
            self._lost = "what it sent is no message of this driver"

    def _digest(self, number: int, received: bool, text: bytes) -> bytes:
        """What stands before a message; it differs by direction, so that none can be sent back."""
        if not self._key:
            return b""
        said = f"{number} {self._accepted != received} ".encode() + text
        return hmac.new(self._key, said, hashlib.sha256).hexdigest().encode() + b" "

    def _checked(self, number: int, line: bytes) -> bytes:
        """The text of a line; PermissionError where it does not carry the key's digest."""
        given, space, text = line.partition(b" ") if self._key else (b"", b"", line)
        if not hmac.compare_digest(given + space, self._digest(number, True, text)):
            raise PermissionError("it does not know the key of --kv-key-file")
        return text

    def _beat(self) -> None:
        """Body of the thread that tells that this side lives."""
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self.send("beat")
            except LinkLost:
                return

    def close(self) -> None:
        """End the connection; the other side sees that at once."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(host: str, port: int, seconds: float, other: str, key: bytes = b"") -> Link:
    """Meet who listens at an address, trying for some seconds; UserError where nobody does."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            return Link(socket.create_connection((host, port), max(0.1, left)), other, key)
        except OSError as error:
            unknown = isinstance(error, socket.gaierror)
            if unknown or time.monotonic() + RETRY_SECONDS > deadline:
                why = (error.strerror or str(error)).rstrip(".")
                raise UserError(
                    f"The {other} cannot be reached at {host} port {port} ({why}), tried for "
                    f"{0 if unknown else seconds:g} s; start it there, or name another place with "
                    "--kv-ip and --kv-port."
                ) from error
        time.sleep(RETRY_SECONDS)


class Arrivals:
    """Those who connect to a listening socket, which live from then on, whatever runs here."""

    def __init__(self, listening: socket.socket, other: str, key: bytes = b"") -> None:
        self._listening, self._other, self._key = listening, other, key
        self._come: queue.Queue[Link] = queue.Queue(MOST_GUESTS)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                guest = self._listening.accept()[0]
                if self._come.full():  # each has two threads
                    guest.close()
                else:
                    self._come.put(Link(guest, self._other, self._key, True))

    def next(self, deadline: float) -> Link:
        """The next one; UserError where none comes before `deadline` (monotonic)."""
        try:
            return self._come.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty as error:
            host, port = self._listening.getsockname()[:2]
            raise UserError(
                f"No {self._other} has come to {host} port {port} in time; start it with --kv-ip "
                "and --kv-port of this side, or give this one more --kv-timeout."
            ) from error

    def close(self) -> None:
        """Let nobody in any more."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        while not self._come.empty():
            self._come.get().close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for ranks or servers of the other side, as ``bound`` makes it."""
    return bound(host, port, "name another place with --kv-ip and --kv-port", heard=True)
