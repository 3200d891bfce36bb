"""Locks without files: names of abstract Unix sockets, which Linux gives to one socket at a time.

The kernel releases a name with the last descriptor of its socket, however the process ends. All
users of the machine share the names of a network namespace. Most containers have their own
namespace, and a lock does not work across namespaces.
"""

import errno
import socket
import struct
from pathlib import Path

from autotune.system.lock_holders import describe_process

_CREDENTIALS = struct.Struct("iII")
"""Process, user and group, as SO_PEERCRED returns them."""
_CONNECTIONS = 64
"""How many processes can find out the holder; their connections are never accepted."""


def acquire(name: str) -> int | None:
    """Returns a descriptor that holds the lock until its last copy is closed; None if it is taken.

    Forks inherit the descriptor, other programs do not. Raises OSError where there are no abstract
    sockets.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        try:
            bound.bind(f"\0{name}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise
        bound.listen(_CONNECTIONS)
        return bound.detach()


def lock_holder(name: str) -> str:
    """Returns who has the lock, as `process 17 of user ada, which runs since 2026-01-31 14:05`.

    Empty if the lock is free or the holder is not known.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(f"\0{name}")
            credentials = client.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
        except OSError:
            return ""
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return describe_process(pid, user)


def names_after(prefix: str) -> list[str]:
    """Returns what follows `prefix` in the names of all abstract sockets; empty without a list."""
    try:
        lines = Path("/proc/net/unix").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    return [line.partition(f"@{prefix}")[2] for line in lines if f" @{prefix}" in line]
