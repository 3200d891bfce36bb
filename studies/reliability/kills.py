"""Kills what works on studies at random moments, and counts what is wrong of the results.

`Run` is what the ways of `campaign.py` share: it kills and stops processes, starts again what has
ended, and looks at the studies all the time (`watch.py`). Each way says who its processes are.
"""

import os
import platform
import random
import signal
import sqlite3
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from studies.reliability.processes import processes_of, wait_until_gone
from studies.reliability.watch import Snapshot, Watch, snapshot
from tests.building.keeper import descendants
from tests.building.postgres import PostgresServer

SECONDS_TO_FIND = 20.0
"""How long there may be nobody of a kind to be killed: then somebody else is."""
SECONDS_STOPPED = 60.0
"""By when the others have given up who is stopped."""
SECONDS_WITHOUT_DATABASE = 5.0
PEACE_SECONDS = 900.0
"""The longest that everything takes to come to its end once nobody is killed any more."""


@dataclass(kw_only=True)
class Run:
    """Processes at work on the studies of one database, and who of them was killed."""

    url: str
    folder: Path
    """The working directory of all that this process starts, and of what that starts."""
    chance: random.Random
    weights: Mapping[str, float]
    """Who is killed or stopped, and how often in relation to each other."""
    seconds_between: float
    """Between two kills, on average."""
    database: PostgresServer | None = None
    """Which is killed, too."""
    started: dict[int, float] = field(default_factory=dict)
    """Process id of each child of this process to when it began."""
    stopped: dict[int, float] = field(default_factory=dict)
    """Process id of each that is stopped to when it goes on."""
    kills: Counter[str] = field(default_factory=Counter)
    exits: Counter[str] = field(default_factory=Counter)
    watches: dict[str, Watch] = field(default_factory=lambda: defaultdict(Watch))
    """By the name of the study."""
    violations: list[str] = field(default_factory=list)

    # -- what each way says ------------------------------------------------------------------------

    def keep_going(self) -> None:
        """Start again what has ended, and look at the studies from time to time."""
        raise NotImplementedError

    def victims(self, kind: str) -> Sequence[int]:
        """Returns the processes of a kind that live now."""
        raise NotImplementedError

    def complete(self) -> None:
        """Let everybody work in peace until all studies are complete, and end."""
        raise NotImplementedError

    def violations_at_the_end(self) -> list[str]:
        """Returns what is wrong with the studies, after the last process has ended."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Returns how this run differs from others of its way."""
        return {}

    # -- what all share ----------------------------------------------------------------------------

    def carry_out(self, *, kills: int, seconds: float) -> dict[str, Any]:
        """Kill so many, or for so long, let the rest come to its end, and return what was seen."""
        began = time.monotonic()
        with chdir(self.folder):
            try:
                while sum(self.kills.values()) < kills and time.monotonic() - began < seconds:
                    self.go_on_for(self.chance.expovariate(1 / self.seconds_between))
                    self._strike_somebody()
                seconds_of_killing = time.monotonic() - began
                self.continue_stopped(now=float("inf"))
                self.complete()
                self.violations += [
                    *(f"process {pid} is left" for pid in wait_until_gone(self.folder)),
                    *self.violations_at_the_end(),
                ]
            finally:
                self._end_all()
        watches = self.watches.values()
        last = [watch.last for watch in watches if watch.last is not None]
        states = sum((each.states for each in last), Counter())
        found = [
            f"study {study}: {violation}"
            for study, watch in self.watches.items()
            for violation in watch.violations
        ]
        return {
            **self.settings(),
            "kills": sum(self.kills.values()),
            "kills_by_kind": dict(self.kills),
            "exits": dict(self.exits),
            "studies": len(last),
            "trials": sum(len(each.trials) for each in last),
            "attempts": states.total(),
            "attempts_by_state": dict(states),
            "looks_at_the_database": sum(watch.looks for watch in watches),
            "seconds_of_killing": round(seconds_of_killing, 1),
            "seconds": round(time.monotonic() - began, 1),
            "violations": [*self.violations, *found],
        }

    def go_on_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            self.continue_stopped(now=time.monotonic())
            self.keep_going()
            if time.monotonic() > until:
                return
            time.sleep(0.01)

    def _strike_somebody(self) -> None:
        [kind] = self.chance.choices(list(self.weights), weights=list(self.weights.values()))
        until = time.monotonic() + SECONDS_TO_FIND
        while not self.strike(kind):
            if time.monotonic() > until:
                return
            self.go_on_for(0.005)
        self.kills[kind] += 1
        print(f"{sum(self.kills.values())} {kind}", file=sys.stderr, flush=True)

    def strike(self, kind: str) -> bool:
        """Kill or stop one of a kind; return False where there is none just now."""
        if kind == "database":
            return self._stop_database()
        victims = [pid for pid in self.victims(kind) if pid not in self.stopped]
        if not victims:
            return False
        victim = self.chance.choice(victims)
        stops = kind.startswith("stopped")
        try:
            if kind == "trial":
                os.killpg(victim, signal.SIGKILL)
            else:
                os.kill(victim, signal.SIGSTOP if stops else signal.SIGKILL)
        except ProcessLookupError:
            return False
        if stops:
            self.stopped[victim] = time.monotonic() + SECONDS_STOPPED
        return True

    def _stop_database(self) -> bool:
        if self.database is None:
            return False
        self.database.stop(mode="immediate")
        time.sleep(SECONDS_WITHOUT_DATABASE)
        self.database.start()
        return True

    def continue_stopped(self, *, now: float) -> None:
        for pid, when in list(self.stopped.items()):
            if now > when:
                del self.stopped[pid]
                for each in (pid, *descendants(pid)):
                    send(each, signal.SIGCONT)

    def look(self, study: str) -> Snapshot | None:
        now = snapshot(self.url, study)
        if now is not None:
            self.watches[study].look(now)
        return now

    def reap(self) -> dict[int, int]:
        """Returns the exit code of each child that has ended since the last time."""
        ended = {}
        for pid in list(self.started):
            waited, status = os.waitpid(pid, os.WNOHANG)
            if waited:
                del self.started[pid]
                ended[pid] = os.waitstatus_to_exitcode(status)
                self.exits[str(ended[pid])] += 1
        return ended

    def _end_all(self) -> None:
        """Kill what is left, as after an error."""
        for pid in {*self.started, *processes_of(self.folder)}:
            send(pid, signal.SIGKILL)


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def of_age(ages: Mapping[int, float], seconds: float, *, are_young: bool) -> list[int]:
    """Returns the processes that are older than so many seconds, or not."""
    return [pid for pid, age in ages.items() if (age < seconds) == are_young]


def leads_a_group(pid: int) -> bool:
    """Whether a trial can be killed with all it has started; before, its server would go, too."""
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


@contextmanager
def storage_of(kind: str, folder: Path) -> Iterator[tuple[str, PostgresServer | None]]:
    """Yield the URL of an empty database; PostgreSQL is a new server that syncs every commit."""
    if kind == "sqlite":
        yield f"sqlite:///{folder}/kills.db", None
    else:
        with PostgresServer(durable=True) as server:
            yield server.create_database("kills"), server


def about_this_machine() -> dict[str, Any]:
    arguments = " ".join(sys.argv[1:])
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python studies/reliability/{Path(sys.argv[0]).name} {arguments}".strip(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            **{name: version(name) for name in ("optuna", "sqlalchemy", "torch")},
        },
    }
