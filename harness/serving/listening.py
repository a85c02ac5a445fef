"""Where a server listens, bound before anything long."""

import socket

from harness.errors import UserError


def bound(host: str, port: int, remedy: str, heard: bool = False) -> socket.socket:
    """A bound socket, that listens where it is ``heard`` at once, before anything long: a port in
    use is refused, and the user told the ``remedy``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            if heard:
                listening.listen()
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise UserError(
            f"Cannot listen on {host} port {port}: {(error.strerror or str(error)).rstrip('.')}; "
            f"{remedy}."
        ) from error
    return listening
