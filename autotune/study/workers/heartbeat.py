"""Renews the lease of this worker's attempt from a background thread."""

import threading

from autotune.errors import StorageUnavailable
from autotune.spec.attempt import RENEWAL_SECONDS
from autotune.storage.attempts import Attempts


class LeaseHeartbeat:
    """Renews a lease every `renewal_seconds`. Use it as a context manager around the work."""

    def __init__(
        self, attempts: Attempts, attempt_id: str, *, renewal_seconds: float = RENEWAL_SECONDS
    ) -> None:
        self._attempts = attempts
        self._attempt_id = attempt_id
        self._renewal_seconds = renewal_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.is_lost = False
        """Whether another worker has ended the attempt: a result would be rejected."""

    def __enter__(self) -> "LeaseHeartbeat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()  # not joined: the thread may be waiting for a database that is away

    def _renew(self) -> None:
        while not self._ended.wait(self._renewal_seconds):
            try:
                is_renewed = self._attempts.renew(self._attempt_id)
            except StorageUnavailable:
                continue  # if the lease runs out meanwhile, the result may be rejected
            self.is_lost = not is_renewed and not self._ended.is_set()
            if self.is_lost:
                return
