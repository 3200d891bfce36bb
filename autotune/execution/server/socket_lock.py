"""Locks without files: names of abstract Unix sockets, which Linux gives to one socket at a time.

The kernel releases a name with the last descriptor of its socket, however the process ends. All
users of the machine share the names of a network namespace. Most containers have their own
namespace, and a lock does not work across namespaces.
"""

import errno
import os
import pwd
import socket
import struct
import time
from pathlib import Path

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
    # A process of another pid namespace has the number 0 here.
    process = f"process {pid}" if pid else "a process"
    return f"{process} of user {_user_name(user)}{_since(pid)}"


def _since(pid: int) -> str:
    """Returns when a process began, in local time; empty where it is not known."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        kernel = Path("/proc/stat").read_text(encoding="utf-8")
        # The name of the program, in parentheses, may hold anything; the begin is field 22 of all.
        ticks = int(status.rpartition(")")[2].split()[19])
        booted = int(kernel.partition("\nbtime ")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return ""  # no /proc, or a process that has ended or is not visible here
    began = time.localtime(booted + ticks / os.sysconf("SC_CLK_TCK"))
    return f", which runs since {time.strftime('%Y-%m-%d %H:%M', began)}"


def _user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
