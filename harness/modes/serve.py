"""`--mode serve`: the model behind OpenAI's HTTP interface, until a signal ends it."""

import socket

from harness import console
from harness.errors import UserError
from harness.files import read_key
from harness.modes.compile import report_outside_nki
from harness.serving.app import Api, Server
from harness.serving.blocks import BlockPool
from harness.serving.guard import Limits, is_loopback
from harness.serving.scheduler import LoadedLines, Scheduler
from harness.session.building import build
from harness.session.opening import Session, open_session
from harness.settings import Settings


def run(settings: Settings) -> int:
    """Build the model and serve it; 0 where a signal has ended it in order."""
    server, listening, session = opened(settings)
    server.run([listening])
    session.workers.close()
    return 0


def opened(settings: Settings) -> tuple[Server, socket.socket, Session]:
    """The server, the socket that it is to listen on, and the session of its model."""
    limits = Limits(
        key=read_key(settings.api_key_file),
        host=settings.host,
        waiting=settings.max_waiting,
        drain_seconds=settings.drain_seconds,
    )
    listening = _listen(settings.host, settings.port)
    session = open_session(settings, ())
    loaded = build(session)
    if settings.enable_nki:
        report_outside_nki(loaded.folder)
    lines, stops = LoadedLines(loaded), session.stop_tokens
    scheduler = Scheduler(lines, settings.batch_size, limits.waiting, stops, *_blocks(settings))
    api = Api(session, scheduler, limits)
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    served = f"Serving {session.model.name} at {url}"
    return Server(api, lambda: console.say(served)), listening, session


def _blocks(settings: Settings) -> tuple[BlockPool | None, int | None]:
    """The cache's number of blocks and the tokens of a chunk; None where absent."""
    asked = settings.blocks
    if asked is None:
        return None, None
    count = asked.count(settings.batch_size, settings.seq_len)
    if asked.chunks:  # the last slot takes what has no place
        return BlockPool(count - 1, asked.size, shares=False), settings.max_context_length
    return BlockPool(count, asked.size, shares=True), None


def _listen(host: str, port: int) -> socket.socket:
    """A socket that is bound before the model is built: a port in use is refused at once."""
    listening = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        if listening is not None:
            listening.close()
        named, _, number = host.partition(":")
        others = f"write --host {named} --port {number}" * (named != "" and number.isdigit())
        raise UserError(
            f"Cannot listen on {host} port {port}: {(error.strerror or str(error)).rstrip('.')}; "
            f"{others or 'name others with --host and --port'}."
        ) from error
    if not is_loopback(host):
        console.say(f"Others can reach this server: it listens on {host}, without encryption.")
    return listening
