"""Keeps the lease of this worker's attempt from running out, from a thread of its own."""

import threading

from autotune.errors import StorageUnavailable
from autotune.spec.attempt import RENEWAL_SECONDS
from autotune.storage.attempts import Attempts


class LeaseHeartbeat:
    """Use as a context manager round the work on an attempt."""

    def __init__(
        self, attempts: Attempts, attempt_id: str, *, renewal_seconds: float = RENEWAL_SECONDS
    ) -> None:
        self._attempts, self._attempt_id = attempts, attempt_id
        self._renewal_seconds = renewal_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self.is_lost = False
        """Whether another worker has given the attempt up: a result would be refused."""

    def __enter__(self) -> "LeaseHeartbeat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()  # not joined: it may be waiting for a database that is away

    def _keep(self) -> None:
        while not self._ended.wait(self._renewal_seconds):
            try:
                self.is_lost = (
                    not self._attempts.renew(self._attempt_id) and not self._ended.is_set()
                )
            except StorageUnavailable:
                continue  # away; the lease may run out, and the result is then refused or not
            if self.is_lost:
                return
