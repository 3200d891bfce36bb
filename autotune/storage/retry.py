"""Repeats calls of a store while its database is away, with exponential backoff and a time limit.

A store that is opened with a `RetryPolicy` repeats its idempotent calls: those where a caller that
lost the connection, and does not know whether the call was carried out, may make it again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from autotune.errors import StorageUnreachable
from autotune.units import format_duration

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0
_CHECKS_PER_SECOND = 10
"""How often a pause checks whether the caller was stopped."""

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How a store waits for a database that is away, and whom it tells."""

    limit_seconds: float | None
    """After this long without success a call raises StorageUnreachable; None: it is called once."""
    hint: str = ""
    """Added to the hint of that error."""
    check_stop: Callable[[], None] = lambda: None
    """Called while waiting; what it raises ends the call."""
    on_waiting: Callable[[str], None] = lambda message: None
    """Called once with the error's message when a call begins to wait."""
    on_back: Callable[[float], None] = lambda seconds: None
    """Called with the seconds since the call began, when it succeeds after waiting."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def repeat(
        self, call: Callable[[], T], *, before_retry: Callable[[], None] = lambda: None
    ) -> T:
        """Returns what `call` returns, as soon as it succeeds.

        `before_retry` is called before every call but the first. Raises StorageUnreachable after
        the limit, and at once every other error.
        """
        began = self.clock()
        pause = _FIRST_PAUSE_SECONDS
        is_away = False
        while True:
            try:
                result = call()
            except StorageUnreachable as error:
                if self.limit_seconds is None:
                    raise
                seconds = self.clock() - began
                if seconds >= self.limit_seconds:
                    raise self._error_at_limit(error, seconds) from None
                if not is_away:
                    self.on_waiting(error.message)
                is_away = True
                self._pause(min(pause, self.limit_seconds - seconds))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                before_retry()
            else:
                if is_away:
                    self.on_back(self.clock() - began)
                return result

    def _error_at_limit(self, error: StorageUnreachable, seconds: float) -> StorageUnreachable:
        hints = [hint for hint in (error.hint, self.hint) if hint]
        return StorageUnreachable(
            f"{error.message}; waited {format_duration(seconds)} for it", hint="; ".join(hints)
        )

    def _pause(self, seconds: float) -> None:
        end = self.clock() + seconds
        while (left := end - self.clock()) > 0:
            self.check_stop()
            self.sleep(min(left, 1 / _CHECKS_PER_SECOND))


ONCE = RetryPolicy(limit_seconds=None)


class _Retrying(Protocol):
    """What has methods that are `retried`."""

    _retry: RetryPolicy


Self = TypeVar("Self", bound=_Retrying)


def retried(
    method: Callable[Concatenate[Self, P], T],
) -> Callable[Concatenate[Self, P], T]:
    """Repeats an idempotent method by the policy of its object.

    The method must not call another one that is retried, which would wait, and report it, twice.
    """

    @wraps(method)
    def repeated(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._retry.repeat(lambda: method(self, *args, **kwargs))

    return repeated
