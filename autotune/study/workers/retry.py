"""How a search waits for its database: how long, what ends the waiting, and what it reports."""

from collections.abc import Callable

from autotune.storage.retry import RetryPolicy
from autotune.study.events import Listener, StorageBack, WaitingForStorage

_HINT = "finished results wait in the work folder"


def search_retry(
    *, limit_seconds: float, listener: Listener, check_stop: Callable[[], None]
) -> RetryPolicy:
    """Returns the policy of a search's store; `check_stop` raises what stops the search."""

    def report_waiting(message: str) -> None:
        listener(WaitingForStorage(message=message, limit_seconds=limit_seconds))

    def report_back(seconds: float) -> None:
        listener(StorageBack(seconds=seconds))

    return RetryPolicy(
        limit_seconds=limit_seconds,
        hint=_HINT,
        check_stop=check_stop,
        on_waiting=report_waiting,
        on_back=report_back,
    )
