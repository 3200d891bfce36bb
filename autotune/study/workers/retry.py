"""Retries calls while the database is away, with exponential backoff and a time limit."""

import time
from collections.abc import Callable
from typing import TypeVar

from autotune.errors import StorageUnreachable
from autotune.study.events import Listener, StorageBack, WaitingForStorage
from autotune.units import format_duration

DEFAULT_DATABASE_WAIT_SECONDS = 300.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0
_CHECKS_PER_SECOND = 10
"""How often a pause checks whether the search was stopped."""

_HINT = "finished results wait in the work folder"

T = TypeVar("T")


class DatabaseRetry:
    """Calls functions that use the database, and repeats them while it is away.

    The functions must be idempotent. Raises StorageUnreachable after `limit_seconds` without
    success, and what `check_stop` raises while waiting.
    """

    def __init__(
        self,
        *,
        limit_seconds: float,
        listener: Listener,
        check_stop: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limit_seconds = limit_seconds
        self._listener = listener
        self._check_stop = check_stop
        self._clock = clock
        self._sleep = sleep

    def __call__(self, call: Callable[[], T]) -> T:
        """Returns what `call` returns, as soon as it succeeds."""
        began = self._clock()
        pause = _FIRST_PAUSE_SECONDS
        is_away = False
        while True:
            try:
                result = call()
            except StorageUnreachable as error:
                seconds = self._clock() - began
                if seconds >= self._limit_seconds:
                    raise StorageUnreachable(
                        f"{error.message}; waited {format_duration(seconds)} for it",
                        hint=f"{error.hint}; {_HINT}" if error.hint else _HINT,
                    ) from None
                if not is_away:
                    self._listener(
                        WaitingForStorage(message=error.message, limit_seconds=self._limit_seconds)
                    )
                is_away = True
                self._pause(min(pause, self._limit_seconds - seconds))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                if is_away:
                    self._listener(StorageBack(seconds=self._clock() - began))
                return result

    def _pause(self, seconds: float) -> None:
        end = self._clock() + seconds
        while (left := end - self._clock()) > 0:
            self._check_stop()
            self._sleep(min(left, 1 / _CHECKS_PER_SECOND))
