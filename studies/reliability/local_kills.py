"""Workers of one study on this machine, their trial servers and their trials, to be killed.

Every worker that ends is replaced by a new one, which recovers the work of the dead one and may be
killed meanwhile as well.
"""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from studies.reliability import nursery
from studies.reliability.kills import (
    PEACE_SECONDS,
    Run,
    leads_a_group,
    of_age,
    storage_of,
)
from studies.reliability.processes import family
from studies.reliability.watch import violations_at_the_end
from tests.quick_study import worker

STUDY = "kills"
WEIGHTS = {"worker": 5.0, "young worker": 3.0, "trial server": 3.0, "trial": 3.0}
SECONDS_BETWEEN_LOOKS = 1.0
YOUNG_SECONDS = 1.0
"""A worker of less than this age opens the study and takes over what dead ones left."""


@dataclass(kw_only=True)
class WorkersRun(Run):
    """Workers on one study, of which more trials are wanted while kills are left."""

    workers: int
    more_trials: int = 60
    """Are wanted whenever the study is nearly complete."""
    trials_wanted: int = 60
    looked_at: float = 0.0

    def words(self) -> list[str]:
        """Returns the arguments of a worker that begins now."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Returns the variables that a worker has besides those of this process."""
        raise NotImplementedError

    def reap(self) -> dict[int, int]:
        ended = super().reap()
        self.violations += [
            f"a worker ended with {code}"
            for code in ended.values()
            if code not in self.allowed_exits()
        ]
        return ended

    def allowed_exits(self) -> set[int]:
        """Returns how a worker may end: complete, killed, or to be continued, also by SIGTERM.

        That ends one that has only just begun as any other process.
        """
        exits = {0, -signal.SIGKILL, 75, 128 + signal.SIGTERM, -signal.SIGTERM}
        # One that begins while the database is away cannot know that it will be back.
        return exits | {2} if self.kills["database"] else exits

    def keep_going(self) -> None:
        self.reap()
        while len(self.started) < self.workers:
            self.start()
        if time.monotonic() - self.looked_at > SECONDS_BETWEEN_LOOKS:
            now = self.look(STUDY)
            self.looked_at = time.monotonic()
            if now is not None and now.finished > self.trials_wanted - self.more_trials // 2:
                self.trials_wanted += self.more_trials

    def start(self) -> None:
        words = ["--name", STUDY, "--storage", self.url, "--trials", str(self.trials_wanted)]
        pid = nursery.start(
            worker,
            [*words, "--events", *self.words()],
            folder=self.folder,
            chance=self.chance,
            environment=self.environment(),
        )
        self.started[pid] = time.monotonic()

    def complete(self) -> None:
        end = time.monotonic() + PEACE_SECONDS
        self.workers_end(end)
        for _ in range(self.workers):
            self.start()
        self.workers_end(end)
        self.look(STUDY)

    def workers_end(self, end: float) -> None:
        """Wait until all workers have ended."""
        while self.started:
            self.reap()
            if time.monotonic() > end:
                self.violations.append(f"workers {list(self.started)} do not end")
                return
            time.sleep(0.05)

    def violations_at_the_end(self) -> list[str]:
        return violations_at_the_end(self.url, STUDY, trials_wanted=self.trials_wanted)


@dataclass(kw_only=True)
class LocalRun(WorkersRun):
    """Workers that share a device with several places."""

    storage: str
    places: int
    beside: int
    """How many predictions run at a time beside a trial; 0: nothing is predicted."""

    def settings(self) -> dict[str, Any]:
        return {
            "storage": self.storage,
            "workers": self.workers,
            "places": self.places,
            "predictions_beside": self.beside,
        }

    def words(self) -> list[str]:
        words = ["--places", str(self.places)]
        if self.beside:
            words += ["--sampler", "ehvi", "--beside", str(self.beside)]
        return words

    def environment(self) -> dict[str, str]:
        return {"STAND_IN_SECONDS": "0.05"}

    def victims(self, kind: str) -> Sequence[int]:
        alive = family(self.folder)
        if kind == "trial":
            return [pid for pid in alive.trials if leads_a_group(pid)]
        if kind == "trial server":
            return alive.servers
        now = time.monotonic()
        ages = {pid: now - self.started.get(pid, now) for pid in alive.workers}
        return of_age(ages, YOUNG_SECONDS, are_young=kind == "young worker")


@contextmanager
def local_run(
    folder: Path, chance: Random, *, storage: Literal["sqlite", "postgresql"]
) -> Iterator[LocalRun]:
    with storage_of(storage, folder) as (url, database):
        weights = WEIGHTS if database is None else {**WEIGHTS, "database": 0.2}
        yield LocalRun(
            url=url,
            folder=folder,
            chance=chance,
            weights=weights,
            seconds_between=0.4,
            database=database,
            storage=storage,
            workers=chance.randint(2, 5),
            places=chance.randint(1, 3),
            beside=chance.choice((0, 0, 2)),
        )
