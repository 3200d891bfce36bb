"""Waits for a database that is away: what failed for that reason is done again until it succeeds or time is up."""

import time
from collections.abc import Callable
from typing import TypeVar

from autotune.errors import StorageAway
from autotune.study.events import Listener, StorageBack, WaitingForStorage
from autotune.units import format_duration

DEFAULT_DATABASE_WAIT_SECONDS = 300.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0
_LOOKS_A_SECOND = 10

_WAITS = "finished results wait in the work folder"

T = TypeVar("T")


class DatabaseRetry:
    """Calls what uses the database. Every call must be one that does no harm when it is repeated.

    Raises StorageAway after `limit_seconds` without success, and what `check_stop` raises
    meanwhile.
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
        self._listener, self._check_stop = listener, check_stop
        self._clock, self._sleep = clock, sleep

    def __call__(self, call: Callable[[], T]) -> T:
        began, pause = self._clock(), _FIRST_PAUSE_SECONDS
        is_away = False
        while True:
            try:
                result = call()
            except StorageAway as error:
                seconds = self._clock() - began
                if seconds >= self._limit_seconds:
                    raise StorageAway(
                        f"{error.message}; waited {format_duration(seconds)} for it",
                        hint="; ".join(filter(None, (error.hint, _WAITS))),
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
            self._sleep(min(left, 1 / _LOOKS_A_SECOND))
