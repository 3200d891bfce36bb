"""Renews the leases of this worker's attempts from a background thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from autotune.errors import StorageUnavailable
from autotune.spec.attempt import RENEWAL_SECONDS
from autotune.storage.attempts import Attempts


class HeldLease:
    """The lease of one attempt of this worker."""

    def __init__(self) -> None:
        self.is_lost = False
        """Whether another worker has ended the attempt: a result would be rejected."""


class LeaseHeartbeat:
    """Renews all leases of a worker every `renewal_seconds`, in one transaction.

    Use it as a context manager around the work.
    """

    def __init__(self, attempts: Attempts, *, renewal_seconds: float = RENEWAL_SECONDS) -> None:
        self._attempts = attempts
        self._renewal_seconds = renewal_seconds
        self._leases: dict[str, HeldLease] = {}
        """Those that are held, by attempt id."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="leases", daemon=True)

    def __enter__(self) -> "LeaseHeartbeat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()  # not joined: the thread may be waiting for a database that is away

    @contextmanager
    def holding(self, attempt_id: str) -> Iterator[HeldLease]:
        """Renew the lease of an attempt while the block runs."""
        lease = self._leases[attempt_id] = HeldLease()
        try:
            yield lease
        finally:
            del self._leases[attempt_id]

    def _renew(self) -> None:
        while not self._ended.wait(self._renewal_seconds):
            leases = {id_: lease for id_, lease in self._leases.copy().items() if not lease.is_lost}
            if not leases:
                continue
            try:
                renewed = self._attempts.renew(leases)
            except StorageUnavailable:
                continue  # if a lease runs out meanwhile, the result may be rejected
            for attempt_id, lease in leases.items():
                lease.is_lost = attempt_id not in renewed and attempt_id in self._leases
