"""Kills and stops the parts of a Ray cluster at random moments, then counts the results.

    python studies/reliability/ray_kills.py --kills 200 --storage sqlite > ray_kills.json

The cluster is simulated on this machine (`tests/building/ray_cluster.py`): a head, and nodes with
processes, caches and device locks of their own. Whatever is killed is replaced: a driver by the
same command, a node by a new one with the same files, the head by a new cluster at the same
address; Ray ends a worker whose node or driver is killed. What is stopped (SIGSTOP) goes on after a
minute, by when the search has given it up. PostgreSQL is killed and comes back after five seconds.
The database is checked all the time (`watch.py`).
Prints a JSON object whose `violations` must be empty.

Most trials have no process (`tests/quick_study/quick_executor.py`); with `--processes` they run in
the real trial server, whose trainings alone are a stand-in, and it and its trials are killed, too.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from studies.reliability import nursery
from studies.reliability.kills import (
    STUDY,
    Run,
    about_this_machine,
)
from studies.reliability.processes import family
from studies.reliability.watch import violations_at_the_end
from tests.building.keeper import children, descendants
from tests.building.postgres import PostgresServer
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
    "database": 0.4,
}
WEIGHTS_OF_PROCESSES = {"trial server": 6.0, "trial": 6.0}
MORE_TRIALS = 400
"""A driver takes seconds to start, and is to be killed at work."""
YOUNG_SECONDS = 4.0
"""A driver of less than this age connects, looks at the nodes and waits for a worker."""
SECONDS_UNTIL_REPLACED = 4.0
SECONDS_STOPPED = 60.0
SECONDS_WITHOUT_DATABASE = 5.0
SECONDS_TO_COMPLETE = 300.0
SECONDS_TO_STOP = 30.0
SECONDS_TO_LEAVE_NODES = 20.0
PROGRESS_SECONDS = 240.0
"""By then a search that is killed and stopped has at least one result more."""


@dataclass(kw_only=True)
class RayRun(Run):
    """Drivers on one study, and the cluster that they use."""

    cluster: RayCluster
    mark: str
    seconds_of_trial: float
    with_processes: bool
    server: PostgresServer | None
    """Of the database, for it to be killed, too."""
    stopped: dict[int, float] = field(default_factory=dict)
    """Process id to when it goes on."""
    stopped_nodes: dict[Node, float] = field(default_factory=dict)
    missing: dict[str, float] = field(default_factory=dict)
    """Name of each killed node to when it is replaced."""
    starting: dict[Node, float] = field(default_factory=dict)
    workers_seen: dict[int, float] = field(default_factory=dict)
    progressed_at: float = field(default_factory=time.monotonic)
    finished: int = 0
    longest_without_result: float = 0.0
    seconds_to_stop: float = 0.0

    def keep_going(self) -> None:
        self._replace_nodes()
        self._continue_stopped(time.monotonic())
        super().keep_going()
        for pid in self.cluster.workers():
            self.workers_seen.setdefault(pid, time.monotonic())
        self._watch_progress()

    def _watch_progress(self) -> None:
        now = time.monotonic()
        if self.watch.last is not None and self.watch.last.finished > self.finished:
            self.finished = self.watch.last.finished
            self.progressed_at = now
        self.longest_without_result = max(self.longest_without_result, now - self.progressed_at)
        if now - self.progressed_at > PROGRESS_SECONDS:
            self.watch.violations.append(f"no result for {PROGRESS_SECONDS:g} s")
            self.progressed_at = now

    def _start(self) -> None:
        words = ["--name", STUDY, "--storage", self.url, "--trials", str(self.trials_wanted)]
        words += ["--ray", self.cluster.address, "--devices", "all", "--events"]
        if not self.with_processes:
            words += ["--quick", str(self.seconds_of_trial)]
        pid = nursery.start_forked(words, folder=self.folder, environment=self.cluster.environment)
        self.started[pid] = time.monotonic()

    # -- what is killed ----------------------------------------------------------------------------

    def kill(self, kind: str) -> bool:
        if kind == "head":
            return self._kill_head()
        if kind == "database":
            return self._kill_database()
        if kind in ("node", "stopped node"):
            return self._kill_node(kind)
        victim = self._victim_of(kind)
        if victim is None:
            return False
        number = signal.SIGSTOP if kind == "stopped worker" else signal.SIGKILL
        try:
            (os.killpg if kind == "trial" else os.kill)(victim, number)
        except ProcessLookupError:
            return False
        if kind == "stopped worker":
            self.stopped[victim] = time.monotonic() + SECONDS_STOPPED
        self._count(kind)
        return True

    def _count(self, kind: str) -> None:
        self.kills[kind] += 1
        print(f"{time.monotonic():.1f} {sum(self.kills.values())} {kind}", file=sys.stderr)

    def _victim_of(self, kind: str) -> int | None:
        now = time.monotonic()
        drivers = family(self.folder).workers
        workers = [pid for pid in self.cluster.workers() if pid not in self.stopped]
        servers = [pid for worker in workers for pid in _children(worker)]
        ages = {pid: now - self.workers_seen.get(pid, now) for pid in workers}
        who = {
            "driver": [pid for pid in drivers if now - self.started.get(pid, now) >= YOUNG_SECONDS],
            "young driver": [
                pid for pid in drivers if now - self.started.get(pid, now) < YOUNG_SECONDS
            ],
            "worker": [pid for pid in workers if ages[pid] >= 1.0],
            "young worker": [pid for pid in workers if ages[pid] < 1.0],
            "stopped worker": workers,
            "trial server": servers,
            "trial": [
                pid for server in servers for pid in _children(server) if os.getpgid(pid) == pid
            ],
        }[kind]
        return self.chance.choice(who) if who else None

    def _kill_node(self, kind: str) -> bool:
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
        self._count(kind)
        return True

    def _kill_head(self) -> bool:
        names = [node.folder.name for node in self.cluster.nodes]
        self.cluster.kill_head()
        self.stopped_nodes = {}
        self.cluster.start_head()
        for name in names:
            self.missing[name] = 0.0
        self._count("head")
        return True

    def _kill_database(self) -> bool:
        if self.server is None:
            return False
        self.server.stop(mode="immediate")
        time.sleep(SECONDS_WITHOUT_DATABASE)
        self.server.start()
        self._count("database")
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

    def _continue_stopped(self, now: float) -> None:
        for pid, when in list(self.stopped.items()):
            if now > when:
                del self.stopped[pid]
                _continue(pid)
        for node, when in list(self.stopped_nodes.items()):
            if now > when:
                del self.stopped_nodes[node]
                self.cluster.continue_node(node)
                # Ray has declared it dead, upon which its raylet ends.
                self.cluster.nodes.remove(node)
                self.cluster.end(node)
                self.missing[node.folder.name] = now + 1.0

    # -- the end -----------------------------------------------------------------------------------

    def complete(self) -> None:
        """Let drivers work in peace until the study has all its trials, and end."""
        self._continue_stopped(float("inf"))
        self._stop_drivers()
        end = time.monotonic() + SECONDS_TO_COMPLETE
        while (self.missing or self.starting) and time.monotonic() < end:
            self._replace_nodes()
            time.sleep(0.1)
        now = self.look()
        # A driver with a worker on each node removes what killed ones have left there.
        done = 0 if now is None else len(now.trials)
        self.trials_wanted = done + 20 * len(self.cluster.nodes)
        self._start()
        self._end_in_peace(end)
        self.look()

    def _stop_drivers(self) -> None:
        """End the drivers with SIGTERM, as Ctrl-C does, and see how long each takes."""
        for pid in self.started:
            os.kill(pid, signal.SIGTERM)
        began = time.monotonic()
        while self.started and time.monotonic() - began < SECONDS_TO_STOP:
            self._reap()
            time.sleep(0.02)
        self.seconds_to_stop = time.monotonic() - began
        if self.started:
            self.watch.violations.append(f"drivers {list(self.started)} do not stop")

    def _end_in_peace(self, end: float) -> None:
        while self.started:
            self._reap()
            if time.monotonic() > end:
                self.watch.violations.append(f"drivers {list(self.started)} do not end")
                return
            time.sleep(0.05)
            self._continue_stopped(time.monotonic())
        now = self.look()
        if now is not None and now.finished < self.trials_wanted:
            self._start()
            self._end_in_peace(end)

    def left_on_nodes(self) -> list[str]:
        """What is still there after a while of what the search had on the nodes."""
        end = time.monotonic() + SECONDS_TO_LEAVE_NODES
        while (found := self._on_nodes()) and time.monotonic() < end:
            time.sleep(0.2)
        return found

    def _on_nodes(self) -> list[str]:
        found = [f"worker {pid} is left" for pid in self.cluster.workers()]
        for node in self.cluster.nodes:
            left = (node.cache / "autotune" / "nodes").glob("*")
            found += [f"left on {node.folder.name}: {path.name}" for path in left]
        for said in processes(self.mark):
            if "stand_in" in said:
                found.append(f"process {said} is left")
        return found


def _children(pid: int) -> list[int]:
    return children().get(pid, [])


def _continue(pid: int) -> None:
    for one in (pid, *descendants(pid)):
        try:
            os.kill(one, signal.SIGCONT)
        except ProcessLookupError:
            pass


def carry_out(
    run: RayRun, *, kills: int, minutes: float, weights: dict[str, float], pause: float
) -> dict[str, Any]:
    """Kill so many, or for so long, complete the study, and return what came of it."""
    began = time.monotonic()
    while sum(run.kills.values()) < kills and time.monotonic() - began < 60 * minutes:
        until = time.monotonic() + run.chance.expovariate(1 / pause)
        while time.monotonic() < until:
            run.keep_going()
            time.sleep(0.02)
        [kind] = run.chance.choices(list(weights), weights=list(weights.values()))
        for _ in range(400):  # after a driver was killed there is no worker for a while
            if run.kill(kind):
                break
            run.keep_going()
            time.sleep(0.05)
    seconds = time.monotonic() - began
    run.complete()
    found = [*run.watch.violations, *run.left_on_nodes()]
    os.chdir(run.folder)
    found += violations_at_the_end(run.url, STUDY, trials_wanted=run.trials_wanted)
    last = run.watch.last
    return {
        "kills": sum(run.kills.values()),
        "kills_by_kind": dict(run.kills),
        "driver_exits": dict(run.exits),
        "trials": len(last.trials) if last else 0,
        "attempts": len(last.attempts) if last else 0,
        "attempts_by_state": dict(last.states) if last else {},
        "retries": last.retries if last else 0,
        "looks_at_the_database": run.watch.looks,
        "longest_seconds_without_a_result": round(run.longest_without_result, 1),
        "seconds_to_stop_the_drivers": round(run.seconds_to_stop, 1),
        "seconds_of_killing": round(seconds, 1),
        "seconds": round(time.monotonic() - began, 1),
        "violations": found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=600.0, help="kill no longer than that")
    parser.add_argument("--drivers", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--storage", default="sqlite", choices=["sqlite", "postgresql"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=[*WEIGHTS, *WEIGHTS_OF_PROCESSES])
    parser.add_argument("--seconds-between", type=float, default=3.0, help="on average")
    parser.add_argument("--trial-seconds", type=float, default=0.5, help="on average")
    parser.add_argument("--processes", action="store_true", help="with the real trial server")
    parser.add_argument("--log", type=Path, default=None, help="what the drivers say goes there")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # not without the drivers
    said = about_this_machine()
    said["versions"]["ray"] = version("ray")
    weights = {**WEIGHTS, **(WEIGHTS_OF_PROCESSES if arguments.processes else {})}
    weights = {kind: weights[kind] for kind in arguments.only or weights}
    if arguments.storage == "sqlite":
        weights.pop("database", None)
    mark = uuid.uuid4().hex
    environment = {MARK: mark, "STAND_IN_SECONDS": str(arguments.trial_seconds)}
    with (
        tempfile.TemporaryDirectory() as temporary,
        RayCluster(nodes=arguments.nodes, **environment) as cluster,
    ):
        folder = Path(temporary).resolve() / "run"
        folder.mkdir()
        with ExitStack() as stack:
            server = None
            url = f"sqlite:///{folder}/kills.db"
            if arguments.storage == "postgresql":
                server = stack.enter_context(PostgresServer(durable=True))
                url = server.create_database("kills")
            run = RayRun(
                url=url,
                folder=folder,
                workers=arguments.drivers,
                places=1,
                beside=0,
                chance=random.Random(arguments.seed),
                more_trials=MORE_TRIALS,
                trials_wanted=MORE_TRIALS,
                cluster=cluster,
                server=server,
                mark=mark,
                seconds_of_trial=arguments.trial_seconds,
                with_processes=arguments.processes,
            )
            said |= {"storage": arguments.storage, "drivers": arguments.drivers}
            said |= {"nodes": arguments.nodes, "seed": arguments.seed}
            try:
                said |= carry_out(
                    run,
                    kills=arguments.kills,
                    minutes=arguments.minutes,
                    weights=weights,
                    pause=arguments.seconds_between,
                )
            finally:
                for pid in run.started:
                    os.kill(pid, signal.SIGKILL)
                if arguments.log is not None:
                    arguments.log.write_bytes((folder / "workers.log").read_bytes())
        os.chdir("/")
    print(json.dumps(said, indent=2))
    return 1 if said["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
