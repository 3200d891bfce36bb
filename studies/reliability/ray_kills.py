"""Drivers of one study and the Ray cluster that they use, of which every part is killed or stopped.

The cluster is simulated on this machine (`tests/building/ray_cluster.py`): a head, and nodes with
processes, caches and device locks of their own. Whatever is killed is replaced: a driver by the
same command, a node by a new one with the same files, the head by a new cluster at the same
address; Ray ends a worker whose node or driver is killed. What is stopped (SIGSTOP) goes on after a
minute, by when the search has given it up. PostgreSQL is killed and comes back after five seconds.

Most trials have no process (`tests/quick_study/quick_executor.py`); in one run of four they run in
the real trial server, whose trainings alone are a stand-in, and it and its trials are killed, too.
"""

import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from studies.reliability.kills import (
    PEACE_SECONDS,
    SECONDS_STOPPED,
    leads_a_group,
    of_age,
    send,
    storage_of,
)
from studies.reliability.local_kills import STUDY, WorkersRun
from studies.reliability.processes import family
from tests.building.keeper import children
from tests.building.ray_cluster import Node, RayCluster
from tests.quick_study.checks import MARK, processes

WEIGHTS = {
    "worker": 14.0,
    "young worker": 5.0,
    "node": 1.5,
    "driver": 1.5,
    "young driver": 0.5,
    "stopped worker": 0.4,
    "stopped node": 0.2,
    "head": 0.1,
}
WEIGHTS_OF_PROCESSES = {"trial server": 6.0, "trial": 6.0}
YOUNG_DRIVER_SECONDS = 4.0
"""A driver of less than this age connects, looks at the nodes and waits for a worker."""
YOUNG_WORKER_SECONDS = 1.0
SECONDS_OF_TRIAL = 0.5
SECONDS_UNTIL_REPLACED = 4.0
SECONDS_TO_STOP = 30.0
SECONDS_TO_LEAVE_NODES = 20.0
PROGRESS_SECONDS = 600.0
"""By then a search that is killed and stopped has at least one result more."""


@dataclass(kw_only=True)
class RayRun(WorkersRun):
    """Drivers on one study, and the cluster that they use."""

    storage: str
    cluster: RayCluster
    mark: str
    with_processes: bool
    stopped_nodes: dict[Node, float] = field(default_factory=dict)
    """Each node that is stopped to when it goes on."""
    missing: dict[str, float] = field(default_factory=dict)
    """Name of each killed node to when it is replaced."""
    starting: dict[Node, float] = field(default_factory=dict)
    workers_seen: dict[int, float] = field(default_factory=dict)
    progressed_at: float = field(default_factory=time.monotonic)
    finished: int = 0
    longest_without_result: float = 0.0
    seconds_to_stop: float = 0.0

    def settings(self) -> dict[str, Any]:
        return {
            "storage": self.storage,
            "drivers": self.workers,
            "with_processes": self.with_processes,
            "longest_seconds_without_a_result": round(self.longest_without_result, 1),
            "seconds_to_stop_the_drivers": round(self.seconds_to_stop, 1),
        }

    def words(self) -> list[str]:
        words = ["--ray", self.cluster.address, "--devices", "all"]
        return words if self.with_processes else [*words, "--quick", str(SECONDS_OF_TRIAL)]

    def environment(self) -> dict[str, str]:
        return self.cluster.environment

    def keep_going(self) -> None:
        self._replace_nodes()
        self._continue_nodes(now=time.monotonic())
        super().keep_going()
        for pid in self.cluster.workers():
            self.workers_seen.setdefault(pid, time.monotonic())
        self._watch_progress()

    def allowed_exits(self) -> set[int]:
        # One that begins on a cluster whose head has just come back finds no node.
        return super().allowed_exits() | ({2} if self.kills["head"] else set())

    def _watch_progress(self) -> None:
        now, last = time.monotonic(), self.watches[STUDY].last
        if last is not None and last.finished > self.finished:
            self.finished = last.finished
            self.progressed_at = now
        self.longest_without_result = max(self.longest_without_result, now - self.progressed_at)
        if now - self.progressed_at > PROGRESS_SECONDS:
            self.violations.append(f"no result for {PROGRESS_SECONDS:g} s")
            self.progressed_at = now

    # -- what is killed ----------------------------------------------------------------------------

    def strike(self, kind: str) -> bool:
        if kind == "head":
            return self._kill_head()
        if kind in ("node", "stopped node"):
            return self._strike_node(kind)
        return super().strike(kind)

    def victims(self, kind: str) -> Sequence[int]:
        now = time.monotonic()
        if kind in ("driver", "young driver"):
            ages = {pid: now - self.started.get(pid, now) for pid in family(self.folder).workers}
            return of_age(ages, YOUNG_DRIVER_SECONDS, are_young=kind == "young driver")
        # What a killed worker of a stopped node has started would stay stopped for ever.
        running = [node for node in self.cluster.nodes if node not in self.stopped_nodes]
        workers = [pid for node in running for pid in node.workers()]
        if kind == "stopped worker":
            return workers
        if kind in ("worker", "young worker"):
            ages = {pid: now - self.workers_seen.get(pid, now) for pid in workers}
            return of_age(ages, YOUNG_WORKER_SECONDS, are_young=kind == "young worker")
        of_each = children()
        servers = [server for worker in workers for server in of_each.get(worker, ())]
        if kind == "trial server":
            return servers
        trials = [trial for server in servers for trial in of_each.get(server, ())]
        return [trial for trial in trials if leads_a_group(trial)]

    def _strike_node(self, kind: str) -> bool:
        nodes = [node for node in self.cluster.nodes if node not in self.stopped_nodes]
        if len(nodes) < 2:  # one is left to work on
            return False
        node = self.chance.choice(nodes)
        if kind == "node":
            self.cluster.kill_node(node)
            self.missing[node.folder.name] = time.monotonic() + SECONDS_UNTIL_REPLACED
        else:
            self.cluster.stop_node(node)
            self.stopped_nodes[node] = time.monotonic() + SECONDS_STOPPED
        return True

    def _kill_head(self) -> bool:
        names = [node.folder.name for node in self.cluster.nodes]
        self.cluster.kill_head()
        self.stopped_nodes = {}
        self.cluster.start_head()
        for name in names:
            self.missing[name] = 0.0
        return True

    def _replace_nodes(self) -> None:
        now = time.monotonic()
        for name, when in list(self.missing.items()):
            if now > when:
                del self.missing[name]
                self.starting[self.cluster.add_node(name, waits=False)] = now
        for node, began in list(self.starting.items()):
            if self.cluster.has_joined(node):
                del self.starting[node]
                self.cluster.nodes.append(node)
            elif now - began > 60.0:  # as where the head was killed meanwhile
                del self.starting[node]
                self.cluster.end(node)
                self.missing[node.folder.name] = now

    def _continue_nodes(self, *, now: float) -> None:
        for node, when in list(self.stopped_nodes.items()):
            if now > when:
                del self.stopped_nodes[node]
                self.cluster.continue_node(node)
                # Ray has declared it dead, upon which its raylet ends.
                self.cluster.nodes.remove(node)
                self.cluster.end(node)
                self.missing[node.folder.name] = time.monotonic() + 1.0

    # -- the end -----------------------------------------------------------------------------------

    def complete(self) -> None:
        self._continue_nodes(now=float("inf"))
        self._stop_drivers()
        end = time.monotonic() + PEACE_SECONDS
        while (self.missing or self.starting) and time.monotonic() < end:
            self._replace_nodes()
            time.sleep(0.1)
        now = self.look(STUDY)
        # A driver with a worker on each node removes what killed ones have left there.
        self.trials_wanted = (len(now.trials) if now else 0) + 20 * len(self.cluster.nodes)
        while True:
            self.start()
            self.workers_end(end)
            now = self.look(STUDY)
            if now is None or now.finished >= self.trials_wanted or time.monotonic() > end:
                break
        self.violations += self._left_on_nodes()

    def _stop_drivers(self) -> None:
        """End the drivers with SIGTERM, as Ctrl-C does, and see how long each takes."""
        for pid in self.started:
            send(pid, signal.SIGTERM)
        began = time.monotonic()
        self.workers_end(began + SECONDS_TO_STOP)
        self.seconds_to_stop = time.monotonic() - began

    def _left_on_nodes(self) -> list[str]:
        """Returns what is still there after a while of what the search had on the nodes."""
        end = time.monotonic() + SECONDS_TO_LEAVE_NODES
        while (found := self._on_nodes()) and time.monotonic() < end:
            time.sleep(0.2)
        return found

    def _on_nodes(self) -> list[str]:
        found = [f"worker {pid} is left" for pid in self.cluster.workers()]
        for node in self.cluster.nodes:
            left = (node.cache / "autotune" / "nodes").glob("*")
            found += [f"left on {node.folder.name}: {path.name}" for path in left]
        trials = [each for each in processes(self.mark) if "stand_in" in each]
        return found + [f"process {each} is left" for each in trials]


@contextmanager
def ray_run(folder: Path, chance: Random) -> Iterator[RayRun]:
    mark = uuid.uuid4().hex
    storage = chance.choice(("sqlite", "postgresql"))
    with_processes = chance.random() < 0.25
    weights = {**WEIGHTS, **(WEIGHTS_OF_PROCESSES if with_processes else {})}
    if storage == "postgresql":
        weights["database"] = 0.4
    environment = {MARK: mark, "STAND_IN_SECONDS": str(SECONDS_OF_TRIAL)}
    with (
        RayCluster(nodes=chance.randint(2, 3), **environment) as cluster,
        storage_of(storage, folder) as (url, database),
    ):
        yield RayRun(
            url=url,
            folder=folder,
            chance=chance,
            weights=weights,
            seconds_between=1.5,
            database=database,
            workers=chance.randint(1, 2),
            more_trials=400,  # a driver takes seconds to start, and is to be killed at work
            trials_wanted=400,
            storage=storage,
            cluster=cluster,
            mark=mark,
            with_processes=with_processes,
        )
