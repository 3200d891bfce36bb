"""Connects to a Ray cluster, or starts one on this machine.

A cluster that is not there costs the Ray client 30 s and a traceback, so that the address is tried
first. Ray's default temporary folder is shared by all users of a machine; a cluster that is started
here has its own, with a short name, since the addresses of the sockets in it have at most 107
bytes.
"""

import logging
import os
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from autotune.errors import InvalidInput, TrialLost
from autotune.execution.cluster.address import AUTO, LOCAL, host_and_port
from autotune.execution.cluster.nodes import alive_nodes, versions_here
from autotune.execution.cpu_shares import usable_cpus
from autotune.system import files

_SECONDS_TO_CONNECT = 5.0
SECONDS_WITHOUT_HEAD = 30.0
"""Less than the 60 s after which Ray ends the process of a driver that has lost its head."""
_SECONDS_BETWEEN_QUESTIONS = 2.0
_SECONDS_TO_DISCONNECT = 8.0
_FOLDER_PREFIX = "autotune-"
_LOCK = "held-by-its-search"
_WRONG_CLUSTER = "WrongClusterID"
"""What Ray says to a process that was connected to an earlier cluster at the same address."""


class Connection:
    """What the head of the cluster says, as it is asked again and again.

    A call that the head does not answer blocks for a minute, after which Ray ends the process. That
    is why it is asked in a thread of its own.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._nodes: dict[str, Mapping[str, Any]] | None = None
        self._last_answer = time.monotonic()
        self._is_another_cluster = False
        self._ended = threading.Event()
        threading.Thread(target=self._ask, name="ray head", daemon=True).start()

    def _ask(self) -> None:
        while not self._ended.is_set():
            try:
                nodes = alive_nodes()
                self._last_answer = time.monotonic()
                self._nodes = nodes
            except ray.exceptions.AuthenticationError as error:
                self._is_another_cluster = _WRONG_CLUSTER in str(error)
            except Exception:  # whatever gRPC or the client raises, there was no answer
                pass
            self._ended.wait(_SECONDS_BETWEEN_QUESTIONS)

    @property
    def nodes(self) -> Mapping[str, Mapping[str, Any]] | None:
        """The living nodes, as `alive_nodes` returns them; None before the first answer."""
        return self._nodes

    @property
    def is_lost(self) -> bool:
        """Whether the head has not answered for too long, or is that of another cluster."""
        return (
            self._is_another_cluster or time.monotonic() - self._last_answer > SECONDS_WITHOUT_HEAD
        )

    def loss(self, error: ray.exceptions.RayError) -> TrialLost:
        """Returns what a call of Ray that failed like this means for the search."""
        what = "was started anew" if _WRONG_CLUSTER in str(error) else f"is lost ({error!r:.200})"
        return TrialLost(
            f"the Ray cluster at {self._address} {what}",
            hint="run the same command again to continue",
        )

    def check(self) -> None:
        """Raises TrialLost where the connection is lost."""
        if self._is_another_cluster:
            raise TrialLost(
                f"the Ray cluster at {self._address} was started anew",
                hint="run the same command again to continue",
            )
        if self.is_lost:
            raise TrialLost(
                f"the head of the Ray cluster at {self._address} does not answer for "
                f"{SECONDS_WITHOUT_HEAD:.0f} s",
                hint="once it runs, run the same command again to continue",
            )

    def close(self) -> None:
        """Asks no more."""
        self._ended.set()


@contextmanager
def connected(address: str) -> Iterator[Connection]:
    """Connects this process to the cluster during the block; `local` is started and ended.

    Raises InvalidInput where there is no cluster, or one that this Ray cannot talk to, and
    TrialLost where a call of Ray in the block fails because the cluster is gone.
    """
    with ExitStack() as stack:
        if not ray.is_initialized():  # it is in a Python program that uses Ray itself
            folder = None
            if address == LOCAL:
                folder = stack.enter_context(_own_folder())
            elif address != AUTO:
                _check_reachable(address)
            with _own_signal_handlers(), _silent_ray():
                _connect(address, folder)
            stack.callback(_disconnect)
        connection = stack.enter_context(closing(Connection(address)))
        try:
            yield connection
        except ray.exceptions.RayError as error:
            raise connection.loss(error) from None


@contextmanager
def _own_folder() -> Iterator[str]:
    """Yields a temporary folder for a cluster; removes those that killed searches have left."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*/{_LOCK}"):
        with suppress(OSError):
            # The name is known to all users of the machine: only a folder of this one is removed.
            status = lock.parent.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_own and files.is_free(lock):
                shutil.rmtree(lock.parent, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
    held = files.create_locked(Path(folder) / _LOCK)
    try:
        yield folder
    finally:
        os.close(held)
        shutil.rmtree(folder, ignore_errors=True)


def _disconnect() -> None:
    """Disconnects; does not wait for a head that does not answer."""
    leaving = threading.Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(timeout=_SECONDS_TO_DISCONNECT)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keeps this process's handlers of the signals that end it, in place of those that Ray sets."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    known = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in known.items():
            signal.signal(number, handler)


@contextmanager
def _silent_ray() -> Iterator[None]:
    """Keeps what Ray says of a node that has ended, a hundred lines of its log, off stdout.

    Ray has no option for it: the thread that prints it is not begun.
    """
    printing = ray._private.worker.listen_error_messages
    ray._private.worker.listen_error_messages = lambda worker, threads_stopped: None
    try:
        yield
    finally:
        ray._private.worker.listen_error_messages = printing


def _check_reachable(address: str) -> None:
    host, port = host_and_port(address)
    try:
        socket.create_connection((host, port), timeout=_SECONDS_TO_CONNECT).close()
    except OSError as error:
        raise InvalidInput(
            f"there is no Ray cluster at {address}: {error.strerror or error}",
            hint="see ray status on its head; a client's port is 10001 unless ray start says "
            "otherwise",
        ) from None


def _connect(address: str, folder: str | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if folder is not None:
        options |= {
            "include_dashboard": False,
            "num_cpus": len(usable_cpus()),
            "_temp_dir": folder,
        }
    try:
        ray.init(address=address, **options)
    except ConnectionError as error:
        if address == AUTO:
            raise InvalidInput(
                "there is no Ray cluster on this machine",
                hint="start one with ray start --head, let RAY_ADDRESS name one, or use --ray "
                "local; one of another user needs the token of that user in RAY_AUTH_TOKEN",
            ) from None
        raise _not_connected(address, error) from None
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise _not_connected(address, error) from None


def _not_connected(address: str, error: Exception) -> InvalidInput:
    reason = " ".join(str(error).split()) or type(error).__name__
    if address == LOCAL:
        return InvalidInput(
            f"Ray could not be started on this machine: {reason[:300]}",
            hint="run the same command again where the machine was busy, or look into Ray's "
            "requirements",
        )
    return InvalidInput(
        f"the Ray cluster at {address} does not take this search: {reason[:300]}",
        hint=f"the cluster must have this machine's {versions_here()}, and where it was started "
        "with a token, that token is needed here, too: ray get-auth-token shows it, RAY_AUTH_TOKEN "
        "takes it",
    )
