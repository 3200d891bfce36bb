"""One try at a trial: who has it, until when, and how it ended.

A trial gets its result from exactly one attempt.
"""

import uuid
from dataclasses import dataclass
from typing import Literal

AttemptState = Literal["running", "finished", "lost", "forgiven", "given_up", "given_back", "late"]
"""How an attempt stands. Of those that ended:

- finished: its result is the trial's
- lost: the machine's fault, not the configuration's: killed from outside, device lost, trial server
  lost
- forgiven: lost, and a later search lets the trial be tried anew
- given_up: its worker died, or let the lease run out
- given_back: its search was stopped
- late: given up, lost or given back, and then a result came after all, which was refused and is
  kept with the attempt
"""

LEASE_SECONDS = 60.0
"""A worker that has not renewed its lease for so long is taken for dead, where nothing else says
whether it is."""
RENEWAL_SECONDS = 10.0
MOST_RETRIES = 3
"""Attempts after the first that a trial gets where it was lost each time."""


def new_attempt_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A trial that this worker has taken."""

    id: str
    study: str
    number: int
    name: str | None
    ordinal: int
    """1 for the first attempt at the trial."""

    @property
    def log_name(self) -> str:
        """Of the trial's log: every attempt leaves its own."""
        return f"trial-{self.number}" + (f"-attempt-{self.ordinal}" if self.ordinal > 1 else "")


@dataclass(frozen=True, kw_only=True)
class RunningAttempt:
    """What the database says of an attempt that nobody has ended."""

    id: str
    number: int
    worker: str
    renewals: int
    is_expired: bool
    """By the database's clock."""
