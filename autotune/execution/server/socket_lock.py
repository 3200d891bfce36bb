"""Locks that need no file: names of abstract Unix sockets, which Linux gives to one socket at a time.

The kernel frees a name with the last descriptor of its socket, however the process ends. Every user
of the machine sees the same names, except from another network namespace, as most containers have
one: those have names of their own, and a lock does not reach from one to another.
"""

import errno
import pwd
import socket
import struct

_CREDENTIALS = struct.Struct("iII")
"""Process, user and group, as SO_PEERCRED answers."""
_CONNECTIONS = 64
"""Those who asked for the holder; nobody accepts them, and beyond that the holder is not known."""


def take(name: str) -> int | None:
    """A descriptor that holds the lock until its last copy is closed; None where another socket has the name.

    It is not inherited by other programs, but by forks. Raises OSError where there are no abstract
    sockets.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        try:
            made.bind(f"\0{name}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise
        made.listen(_CONNECTIONS)
        return made.detach()


def holder_of(name: str) -> str:
    """Who has the lock, as `process 17 of user ada`; empty where nobody has it or it is not known."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(f"\0{name}")
            answer = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return ""
    process, user, _ = _CREDENTIALS.unpack(answer)
    # A process of another process namespace has no number here.
    return f"{f'process {process}' if process else 'a process'} of user {_name_of(user)}"


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
