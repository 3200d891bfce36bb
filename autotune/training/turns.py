"""Turns of trainings that share a device: each computes only while the search lets it.

Trainings that step one after the other within a fraction of a second meet the same disturbances, so
that the ratio of their speeds is known better than each speed. Two that compute at the same time
would measure each other instead.

The search listens on a socket. A training builds and warms up, then connects and waits. Messages
are lines of JSON:

    training    {"step_seconds": 0.4}               has warmed up; its last step took that long
    search      {"steps": 3}                        take these steps; 0: end
    training    {"seconds": 1.2, "tokens": 6144}    has taken them

A training that has ended closes the connection. So does a search that has ended, which ends the
training. Does not import torch: the search imports this, too (`execution/in_turn.py`).

A training runs code of the user, which can send anything: the search reads its messages with
`step_seconds_of` and `block_of`, and any other message raises MalformedMessage.
"""

import json
import reprlib
import socket
import time
from collections.abc import Mapping
from typing import Any, Self

from autotune.spec.training_request import ReportsStage

SETTLE_SECONDS = 0.01
"""How long a training waits at the beginning of its turn: the threads of the one before are still
spinning (OpenMP), and the trial server is told whose turn it is."""

_LARGEST_MESSAGE_BYTES = 4096
_LARGEST_NUMBER = 2**53
"""Of seconds or tokens of one turn: what a float holds exactly."""


class MalformedMessage(Exception):
    """A message that no training sends; the text says what is wrong, without a full stop."""


def step_seconds_of(message: Mapping[str, Any]) -> float:
    """Returns how long the last step of a warmed-up training took. Raises MalformedMessage."""
    return _above_zero(message, "step_seconds")


def block_of(message: Mapping[str, Any]) -> tuple[float, int]:
    """Returns the seconds and the tokens of the steps of a turn. Raises MalformedMessage."""
    tokens = _above_zero(message, "tokens")
    if tokens != int(tokens):
        raise MalformedMessage(f"tokens is {tokens}")
    return _above_zero(message, "seconds"), int(tokens)


def _above_zero(message: Mapping[str, Any], name: str) -> float:
    value: Any = message.get(name)
    if type(value) not in (int, float) or not 0 < value < _LARGEST_NUMBER:
        raise MalformedMessage(f"{name} is {reprlib.repr(value)}")
    return float(value)


class Connection:
    """A connected socket that sends and receives dictionaries, as JSON."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received = b""

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; does nothing where the other side has ended."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # `receive` says so

    def receive(self) -> dict[str, Any] | None:
        """Waits for a message; returns None when the other side has ended.

        Raises TimeoutError after the socket's timeout; what has arrived is then kept. Raises
        MalformedMessage for what is no JSON object.
        """
        while b"\n" not in self._received:
            try:
                data = self._socket.recv(4096)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._received += data
            if len(self._received) > _LARGEST_MESSAGE_BYTES:
                raise MalformedMessage(f"it is longer than {_LARGEST_MESSAGE_BYTES} bytes")
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise MalformedMessage(f"{reprlib.repr(line)} is not a JSON object")
        return message

    def close(self) -> None:
        self._socket.close()


class Turns:
    """The turns of one training, which the search grants at the Unix socket `address`."""

    def __init__(self, *, address: str, progress: ReportsStage) -> None:
        self._address = address
        self._progress = progress
        self._connection: Connection | None = None

    def begin(self, *, step_seconds: float) -> int:
        """Waits for the first turn after the warm-up; returns its number of steps, 0 to end.

        `step_seconds` is about what a step takes.
        """
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.connect(self._address)
        except OSError:  # the search has ended
            return 0
        self._connection = Connection(connected)
        return self._wait_after({"step_seconds": step_seconds})

    def next(self, *, seconds: float, tokens: int) -> int:
        """Ends a turn whose steps took `seconds` and waits for the next; returns as `begin`."""
        return self._wait_after({"seconds": seconds, "tokens": tokens})

    def _wait_after(self, message: dict[str, Any]) -> int:
        assert self._connection is not None
        self._progress("waiting")
        self._connection.send(message)
        turn = self._connection.receive()
        self._progress("step")  # the limits of time count again, also for its end
        if turn is None:
            return 0
        time.sleep(SETTLE_SECONDS)
        return int(turn["steps"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()
