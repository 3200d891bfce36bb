"""Two servers of one database, their searches, and people who submit them, all to be killed.

Each person submits one search after the other to one of the servers, by the client of autotune with
a token of their own, and watches it to its end; a killed client is started again by the same
command. A killed server is started again at its port; one leads, the other stands by, and a leader
that is stopped (SIGSTOP) goes on after the other has taken the lead. What has been submitted must
be there once, finish, and have the results that its trials must have.
"""

import json
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import psutil

from autotune.service.processes import find_process
from autotune.spec.queued_search import MOST_LOSSES, QueuedSearch
from autotune.storage.database import Database
from autotune.storage.identity import find_work_folder
from autotune.storage.searches import Searches
from autotune.storage.store import StudyStore
from autotune.storage.tokens import Tokens, new_token
from studies.reliability import nursery
from studies.reliability.kills import PEACE_SECONDS, Run, leads_a_group, of_age, send, storage_of
from studies.reliability.processes import family
from studies.reliability.watch import violations_at_the_end
from tests.quick_study import person, server

PEOPLE = ("ada", "bob", "cyn")
WEIGHTS = {
    "leader": 5.0,
    "standby": 2.0,
    "both servers": 1.0,
    "search": 4.0,
    "young search": 2.0,
    "trial server": 2.0,
    "trial": 2.0,
    "client": 4.0,
    "stopped leader": 0.3,
    "stopped search": 0.3,
}
YOUNG_SECONDS = 2.0
"""A search of less than this age takes over what the process before it has left."""
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_STOP = 60.0
MOST_SEARCHES = 1000


@dataclass(kw_only=True)
class ServiceRun(Run):
    """Servers by their ports, and what each person waits for."""

    storage: str
    ports: Sequence[int]
    tokens: dict[str, str]
    """By the name of the person; that of the owner is the servers'."""
    trials: int
    """Of each search."""
    seconds_of_trial: float
    servers: dict[int, int] = field(default_factory=dict)
    """Process id of each server by its port."""
    clients: dict[int, str] = field(default_factory=dict)
    """Process id of each client to its study."""
    studies: dict[str, str] = field(default_factory=dict)
    """Every study that was submitted, to the person."""
    is_over: bool = False
    """Whether nobody submits another search."""
    looked_at: float = 0.0

    def settings(self) -> dict[str, Any]:
        return {"storage": self.storage, "trials_of_a_search": self.trials}

    def keep_going(self) -> None:
        for pid, code in self.reap().items():
            self._has_ended(pid, code)
        for port in self.ports:
            if port not in self.servers:
                words = ["--port", str(port), "--storage", self.url, "--verbose"]
                self.servers[port] = self._start(server, words, who="owner")
        waiting = {self.studies[study] for study in self.clients.values()}
        for who in () if self.is_over else set(PEOPLE) - waiting:
            count = sum(submitter == who for submitter in self.studies.values())
            self._watch(who, f"{who}-{count + 1}")
        if time.monotonic() - self.looked_at > SECONDS_BETWEEN_LOOKS:
            for search in self._searches("running"):
                self.look(search.study)
            self.looked_at = time.monotonic()

    def _has_ended(self, pid: int, code: int) -> None:
        if pid in self.clients:
            study = self.clients.pop(pid)
            if code == -signal.SIGKILL:
                self._watch(self.studies[study], study)
            elif code:
                self.violations.append(f"the client of study {study} ended with {code}")
        else:
            self.servers = {port: server for port, server in self.servers.items() if server != pid}
            if code not in self._exits_of_servers():
                self.violations.append(f"a server ended with {code}")

    def _exits_of_servers(self) -> set[int]:
        exits = {-signal.SIGKILL, 128 + signal.SIGTERM}
        # A process that is stopped while it writes to SQLite keeps a server from beginning.
        has_stopped = any(kind.startswith("stopped") for kind in self.kills)
        return exits | {75} if has_stopped and self.storage == "sqlite" else exits

    def _watch(self, who: str, study: str) -> None:
        """Start the client of a person, who submits a study unless it was submitted before."""
        port = self.chance.choice(self.ports)
        words = [f"http://127.0.0.1:{port}", study, str(self.trials)]
        self.studies[study] = who
        self.clients[self._start(person, words, who=who)] = study

    def _start(self, program: ModuleType, words: Sequence[str], *, who: str) -> int:
        environment = {
            "AUTOTUNE_TOKEN": self.tokens[who],
            "STAND_IN_SECONDS": str(self.seconds_of_trial),
        }
        pid = nursery.start(
            program, words, folder=self.folder, chance=self.chance, environment=environment
        )
        self.started[pid] = time.monotonic()
        return pid

    def _searches(self, *states: str) -> list[QueuedSearch]:
        # Opened anew each time: no connection may be open where a process is forked.
        database = Database(self.url, create=True)
        try:
            return Searches(database).find(states=states, limit=MOST_SEARCHES)[0]
        finally:
            database.close()

    def _leader(self) -> int | None:
        database = Database(self.url, create=True)
        try:
            with suppress(ValueError, TypeError):
                pid: int = json.loads(Searches(database).lead().holder)["pid"]
                return pid if pid in self.servers.values() else None
        finally:
            database.close()
        return None

    # -- what is killed ----------------------------------------------------------------------------

    def strike(self, kind: str) -> bool:
        if kind != "both servers":
            return super().strike(kind)
        for pid in self.servers.values():
            send(pid, signal.SIGKILL)
        return True

    def victims(self, kind: str) -> Sequence[int]:
        if kind == "client":
            return list(self.clients)
        if kind in ("leader", "standby", "stopped leader"):
            leader = self._leader()
            if leader is None:
                return []
            return [pid for pid in self.servers.values() if (pid == leader) == (kind != "standby")]
        # One that was lost as often as it may be in a row would fail, as it has to.
        running = [each for each in self._searches("running") if each.losses < MOST_LOSSES]
        found = [find_process(each.process) for each in running if each.process is not None]
        ages = {each.pid: _age_of(each) for each in found if each is not None}
        if kind == "stopped search":
            return list(ages)
        if kind in ("search", "young search"):
            return of_age(ages, YOUNG_SECONDS, are_young=kind == "young search")
        below = family(self.folder, workers=ages)
        if kind == "trial server":
            return below.servers
        return [trial for trial in below.trials if leads_a_group(trial)]

    # -- the end -----------------------------------------------------------------------------------

    def complete(self) -> None:
        self.is_over = True
        end = time.monotonic() + PEACE_SECONDS
        while self.clients:
            self.go_on_for(0.1)
            if time.monotonic() > end:
                self.violations.append(f"clients of {sorted(self.clients.values())} do not end")
                break
        for study in self.studies:
            self.look(study)
        for pid in self.servers.values():
            send(pid, signal.SIGTERM)
        end = time.monotonic() + SECONDS_TO_STOP
        while self.servers and time.monotonic() < end:
            for pid, code in self.reap().items():
                self._has_ended(pid, code)
            time.sleep(0.05)
        self.violations += [f"server {pid} does not stop" for pid in self.servers.values()]

    def violations_at_the_end(self) -> list[str]:
        found = []
        searches = self._searches()
        found += [
            f"search {each.id} of {each.study} was submitted by nobody"
            for each in searches
            if each.study not in self.studies
        ]
        for study, who in self.studies.items():
            of_study = [each for each in searches if each.study == study]
            ends = [(each.state, each.submitted_by, each.reason) for each in of_study]
            if ends != [("finished", who, "")]:
                found.append(f"the searches of {study} are {ends}")
            found += [
                f"study {study}: {violation}"
                for violation in violations_at_the_end(self.url, study, trials_wanted=self.trials)
            ]
        left = [
            *(self.folder / "tmp").iterdir(),
            *find_work_folder(self.url).glob(".searches/*.files"),
        ]
        return found + [f"left over: {path.name}" for path in left]


def _age_of(process: psutil.Process) -> float:
    try:
        return time.time() - float(process.create_time())
    except psutil.Error:
        return 0.0


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def service_run(folder: Path, chance: Random) -> Iterator[ServiceRun]:
    storage = chance.choice(("sqlite", "postgresql"))
    with storage_of(storage, folder) as (url, database):
        StudyStore(url, create=True).close()
        of_people = Database(url, create=True)
        tokens = {who: Tokens(of_people).add(who) for who in PEOPLE}
        of_people.close()
        yield ServiceRun(
            url=url,
            folder=folder,
            chance=chance,
            weights=WEIGHTS if database is None else {**WEIGHTS, "database": 0.3},
            seconds_between=1.5,
            database=database,
            storage=storage,
            ports=(_free_port(), _free_port()),
            tokens={"owner": new_token(), **tokens},
            trials=chance.randint(15, 40),
            seconds_of_trial=0.05,
        )
