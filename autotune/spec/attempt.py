"""An attempt is one run of a trial by a worker; exactly one attempt provides its result."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autotune.spec.limits import Count, Number, Seconds
from autotune.spec.result import Measurement
from autotune.spec.schema import Schema

AttemptState = Literal["running", "finished", "lost", "forgiven", "given_up", "given_back", "late"]
"""State of an attempt, as stored in the database. The states after `running`:

- finished: its result is the result of the trial
- lost: it failed because of the machine, not the configuration: killed from outside, device lost,
  trial server lost
- forgiven: it was lost, and a later search may retry the trial
- given_up: its lease expired, or its worker died
- given_back: the search was stopped and released it
- late: a result arrived after it was lost, given up or given back; the result was rejected and is
  stored with the attempt only
"""

LEASE_SECONDS = 60.0
"""A worker that has not renewed its lease for this long counts as dead, unless its process can be
checked directly."""
RENEWAL_SECONDS = 10.0
"""Interval at which a worker renews its lease."""
MAX_RETRIES = 3
"""Attempts after the first that a trial gets if every attempt was lost."""


def new_attempt_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt that this worker has claimed."""

    id: str
    study: str
    number: Number
    name: str | None
    ordinal: Number
    """1 for the first attempt of the trial."""

    @property
    def log_name(self) -> str:
        """Name of the log: each attempt writes a separate one."""
        if self.ordinal == 1:
            return f"trial-{self.number}"
        return f"trial-{self.number}-attempt-{self.ordinal}"


@dataclass(frozen=True, kw_only=True)
class FinishedTrial(Schema):
    """What a trial has measured, as the executor returns it and an attempt stores it."""

    measurement: Measurement
    seconds: Seconds
    """Wall-clock time of the trial."""
    script_files: Mapping[str, str] = field(default_factory=dict)
    """{path: SHA-256} of files that a script has first read after `autotune.apply`. They are stored
    with the study, not with the attempt."""


@dataclass(frozen=True, kw_only=True)
class RunningAttempt(Schema):
    """An attempt that has not ended, as stored in the database."""

    id: str
    number: Number
    worker: str
    renewals: Count
    is_expired: bool
    """Whether its lease has expired, by the clock of the database."""
