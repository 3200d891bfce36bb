"""The sockets that a server listens on, bound before anything else of it is loaded."""

import errno
import socket
from collections.abc import Sequence

from autotune.errors import InvalidInput

_WAITING_CONNECTIONS = 1024
_ANOTHER_PORT = "stop the other program, or choose another port with --port"


def listening_sockets(host: str, port: int) -> Sequence[socket.socket]:
    """Returns a socket for each address of `host`; with port 0 all have one that is free.

    They listen already, so that no other program can take the port while the server starts. Raises
    InvalidInput for a host that is none of this machine's, and a port that cannot be used.
    """
    if not 0 <= port <= 65535:
        raise InvalidInput(f"Invalid port: {port}", hint="choose a number from 1 to 65535")
    sockets: list[socket.socket] = []
    try:
        for family, address in _addresses(host, port):
            if sockets and port == 0:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            sockets.append(_listening(family, address))
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise _explained(error, host=host, port=port) from None
    return sockets


def _addresses(host: str, port: int) -> list[tuple[int, tuple[object, ...]]]:
    """Returns the family and the address of each socket. Raises InvalidInput."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError):
        raise InvalidInput(
            f"Invalid host: {host!r} is no address of a machine",
            hint="choose 127.0.0.1 for this machine alone, or 0.0.0.0 for every network of it",
        ) from None
    return list(dict.fromkeys((int(family), address) for family, *_, address in found))


def _listening(family: int, address: tuple[object, ...]) -> socket.socket:
    # asyncio sends small answers at once (TCP_NODELAY) only where the protocol is named. Otherwise
    # each answer but the first of a connection waits 40 ms for an acknowledgement.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # A port that a server has just left can be used at once.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # The addresses of IPv4 have a socket of their own.
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
        opened.listen(_WAITING_CONNECTIONS)
    except OSError:
        opened.close()
        raise
    return opened


def _explained(error: OSError, *, host: str, port: int) -> InvalidInput:
    if error.errno == errno.EADDRINUSE:
        return InvalidInput(f"port {port} of {host} is in use", hint=_ANOTHER_PORT)
    if error.errno == errno.EACCES:
        return InvalidInput(
            f"port {port} of {host} needs the rights of an administrator",
            hint="choose a port from 1024 on with --port",
        )
    return InvalidInput(
        f"the server cannot listen on {host}, port {port}: {error.strerror or error}",
        hint="choose an address of this machine with --host, such as 127.0.0.1 or 0.0.0.0",
    )
