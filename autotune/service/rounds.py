"""Does something again and again in a thread, whatever goes wrong meanwhile."""

import logging
import threading
from typing import Self

from autotune.errors import AutotuneError

_LOG = logging.getLogger("autotune.service")

_ROUND_SECONDS = 1.0
_JOIN_SECONDS = 60.0


class Rounds:
    """A thread that calls `_round` every second, and `_finish` at its end.

    Use it as a context manager. Woken by a request, it begins a round at once.
    """

    def __init__(self, *, name: str) -> None:
        self._woken = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._woken.set()
        self._thread.join(timeout=_JOIN_SECONDS)

    def wake(self) -> None:
        """Have the queue looked at now."""
        self._woken.set()

    def _work(self) -> None:
        while not self._ended.is_set():
            self._woken.clear()
            try:
                self._round()
            except AutotuneError as error:
                _LOG.warning("the queue waits: %s", error.message)
            except Exception:
                _LOG.exception("the queue has failed; it is tried again")
            self._woken.wait(_ROUND_SECONDS)
        self._finish()

    def _round(self) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError
