"""Kills and stops servers and searches of the service at random moments, then counts the results.

    python studies/service/kills.py --kills 100 --storage sqlite > studies/service/kills.sqlite.json

Two servers use one database: one leads, the other stands by. A client submits searches of quick
trials to whichever answers, repeats what was not answered with the same Idempotency-Key, and
follows the events across all restarts. What is killed is started again; a leader that is stopped
(SIGSTOP) wakes up after the other has taken the lead. The databases of the studies are checked all
the time (`studies/reliability/watch.py`). Prints a JSON object whose `violations` must be empty.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from autotune.service.processes import find_process
from autotune.spec.queued_search import QueuedSearch
from autotune.storage.searches import Searches
from autotune.storage.store import StudyStore
from studies.reliability.kills import about_this_machine
from studies.reliability.watch import Watch, snapshot, violations_at_the_end
from tests.building.postgres import PostgresServer
from tests.quick_study.checks import MARK, processes

ROOT = Path(__file__).resolve().parents[2]
SPACE = ROOT / "tests" / "quick_study" / "space.toml"
TOKEN = uuid.uuid4().hex
WEIGHTS = {
    "leader": 6.0,
    "standby": 2.0,
    "both servers": 1.0,
    "search": 4.0,
    "young search": 2.0,
    "stopped leader": 0.5,
    "stopped search": 0.5,
}
TRIALS = 60
SECONDS_OF_TRIAL = 0.05
YOUNG_SECONDS = 3.0
SECONDS_STOPPED = 12.0
"""Longer than a leader may be silent."""
SECONDS_OF_STOPPED_SEARCH = 30.0
"""Longer than the lease of a search."""
SECONDS_TO_COMPLETE = 300.0


@dataclass(kw_only=True)
class Server:
    port: int
    storage: str
    folder: Path
    popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {
            **os.environ,
            "AUTOTUNE_TOKEN": TOKEN,
            "STAND_IN_SECONDS": str(SECONDS_OF_TRIAL),
            "PYTHONPATH": str(ROOT),
        }
        log = (self.folder / f"server-{self.port}.log").open("ab")
        self.popen = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "studies/service/quick_server.py"),
                str(self.port),
                self.storage,
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=self.folder,
            env=environment,
        )
        log.close()

    @property
    def is_running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def get(self, path: str) -> Any:
        answer = httpx.get(f"http://127.0.0.1:{self.port}{path}", headers=HEADERS, timeout=3.0)
        answer.raise_for_status()
        return answer.json()


HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@dataclass(kw_only=True)
class Run:
    storage: str
    folder: Path
    servers: list[Server]
    chance: random.Random
    queue: Searches
    kills: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    submitted: dict[str, int] = field(default_factory=dict)
    """{Idempotency-Key: number of the search}"""
    unanswered: int = 0
    watches: dict[str, Watch] = field(default_factory=dict)
    stopped: list[tuple[float, int]] = field(default_factory=list)
    """When to continue which process."""
    takeover_seconds: list[float] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    events: list[int] = field(default_factory=list)
    reconnections: int = 0

    # -- the client --------------------------------------------------------------------------------

    def submit(self) -> None:
        """Submit a search until a server has answered, with one key."""
        key = uuid.uuid4().hex
        body = {
            "space": "quick-trials",
            "space_content": SPACE.read_text(),
            "sampler": "random",
            "trials": TRIALS,
            "fresh": True,
            "predict": False,
            "confirm": False,
            "max_mem": "80MiB",
        }
        while not self.ended.is_set():
            server = self.chance.choice(self.servers)
            try:
                answer = httpx.post(
                    f"http://127.0.0.1:{server.port}/api/v1/searches",
                    json=body,
                    headers={**HEADERS, "Idempotency-Key": key},
                    timeout=5.0,
                )
            except httpx.HTTPError:
                self.unanswered += 1
                time.sleep(0.2)
                continue
            if answer.status_code in (200, 202):
                self.submitted[key] = answer.json()["id"]
                return
            if answer.status_code != 503:
                self.violations.append(f"a submission was answered {answer.text[:200]}")
                return
            time.sleep(0.2)

    def follow(self) -> None:
        """Follow the events of whichever server answers, from the first to the last."""
        last = 0
        while not self.ended.is_set():
            server = self.chance.choice(self.servers)
            url = f"http://127.0.0.1:{server.port}/api/v1/events"
            with suppress(httpx.HTTPError):
                headers = {**HEADERS, "Last-Event-ID": str(last)}
                timeout = httpx.Timeout(3.0, read=20.0)
                with httpx.stream("GET", url, headers=headers, timeout=timeout) as answer:
                    answer.raise_for_status()
                    self.reconnections += 1
                    kind, number = "", 0
                    for line in answer.iter_lines():
                        if self.ended.is_set():
                            return
                        name, _, value = line.partition(": ")
                        if name == "event":
                            kind = value
                        elif name == "id":
                            number = int(value)
                        elif not line and kind == "reset":
                            self.violations.append(f"a reset after event {last}")
                            kind = ""
                        elif not line and kind:
                            self.events.append(number)
                            last, kind = number, ""
            time.sleep(0.2)

    # -- kills -------------------------------------------------------------------------------------

    def keep_going(self) -> None:
        """Start what was killed again, wake what was stopped, and keep the queue filled."""
        now = time.monotonic()
        for entry in list(self.stopped):
            if now >= entry[0]:
                self.stopped.remove(entry)
                with suppress(ProcessLookupError):
                    os.kill(entry[1], signal.SIGCONT)
        for server in self.servers:
            if not server.is_running:
                server.start()
        counts = self.queue.counts()
        if counts.get("queued", 0) < 1:
            self.submit()
        for search in self.running():
            state = snapshot(self.storage, search.study)
            if state is not None:
                self.watches.setdefault(search.study, Watch()).look(state)

    def running(self) -> list[QueuedSearch]:
        return self.queue.find(states=("running",))[0]

    def leader(self) -> Server | None:
        with suppress(ValueError, TypeError):
            pid = json.loads(self.queue.lead().holder)["pid"]
            for server in self.servers:
                if server.is_running and server.popen and server.popen.pid == pid:
                    return server
        return None

    def kill(self, kind: str) -> bool:
        leader = self.leader()
        if kind in ("leader", "standby", "both servers", "stopped leader"):
            if leader is None or leader.popen is None:
                return False
            others = [server for server in self.servers if server is not leader]
            if kind == "stopped leader":
                if self.stopped:
                    return False
                os.kill(leader.popen.pid, signal.SIGSTOP)
                self.stopped.append((time.monotonic() + SECONDS_STOPPED, leader.popen.pid))
            else:
                victims = {"leader": [leader], "standby": others, "both servers": self.servers}
                for victim in victims[kind]:
                    if victim.popen is not None:
                        victim.popen.kill()
                        victim.popen.wait()
                if kind == "leader" and not self.stopped:
                    self.time_takeover()
        else:
            search = next(iter(self.running()), None)
            process = None if search is None else search.process
            found = None if process is None else find_process(process)
            if search is None or found is None or process is None:
                return False
            is_young = time.time() - process.started_at < YOUNG_SECONDS
            if is_young != (kind == "young search"):
                return False
            if kind == "stopped search":
                if self.stopped:
                    return False
                os.kill(process.pid, signal.SIGSTOP)
                self.stopped.append((time.monotonic() + SECONDS_OF_STOPPED_SEARCH, process.pid))
            else:
                os.killpg(process.pid, signal.SIGKILL)
        self.kills[kind] += 1
        return True

    def time_takeover(self) -> None:
        """Wait until the standby leads, and note how long that took."""
        began = time.monotonic()
        while time.monotonic() - began < 30.0:
            if self.leader() is not None:
                self.takeover_seconds.append(round(time.monotonic() - began, 2))
                return
            time.sleep(0.05)
        self.violations.append("nobody has taken the lead for 30 s")

    # -- the end -----------------------------------------------------------------------------------

    def complete(self) -> None:
        """Let everything that was submitted end in peace, and check what is there."""
        end = time.monotonic() + SECONDS_TO_COMPLETE
        while True:
            self.keep_servers()
            if not any(self.queue.counts().get(state) for state in ("queued", "running")):
                break
            if time.monotonic() > end:
                self.violations.append(f"searches do not end: {self.queue.counts()}")
                break
            time.sleep(0.2)
        time.sleep(3.0)
        for key, number in self.submitted.items():
            search = self.queue.get(number)
            if search.state != "finished":
                self.violations.append(
                    f"search {number} ({key}) is {search.state}: {search.reason}"
                )
                continue
            self.violations += [
                f"study {search.study}: {found}"
                for found in violations_at_the_end(self.storage, search.study, trials_wanted=TRIALS)
            ]
        _, total = self.queue.find(limit=1000)
        if total != len(self.submitted):
            self.violations.append(f"{len(self.submitted)} submissions, {total} searches")
        for watch in self.watches.values():
            self.violations += watch.violations
        last = self.queue.last_event()
        if self.events != list(range(1, last + 1)):
            missing = sorted(set(range(1, last + 1)) - set(self.events))
            doubled = [number for number, count in Counter(self.events).items() if count > 1]
            self.violations.append(f"events missing {missing[:5]}, doubled {doubled[:5]}")

    def keep_servers(self) -> None:
        for entry in self.stopped:
            with suppress(ProcessLookupError):
                os.kill(entry[1], signal.SIGCONT)
        self.stopped.clear()
        for server in self.servers:
            if not server.is_running:
                server.start()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def carry_out(run: Run, *, kills: int, seconds_between: float, mark: str) -> dict[str, Any]:
    began = time.monotonic()
    following = threading.Thread(target=run.follow, daemon=True)
    for server in run.servers:
        server.start()
    time.sleep(3.0)
    following.start()
    kinds = list(WEIGHTS)
    while sum(run.kills.values()) < kills:
        until = time.monotonic() + run.chance.expovariate(1 / seconds_between)
        while time.monotonic() < until:
            run.keep_going()
            time.sleep(0.1)
        (kind,) = run.chance.choices(kinds, weights=[WEIGHTS[kind] for kind in kinds])
        for _ in range(100):
            if run.kill(kind):
                print(f"{sum(run.kills.values())} {kind}", file=sys.stderr, flush=True)
                break
            run.keep_going()
            time.sleep(0.05)
    run.complete()
    run.ended.set()
    for server in run.servers:
        if server.popen is not None:
            server.popen.terminate()
            server.popen.wait(timeout=60)
    time.sleep(1.0)
    left = processes(mark)
    searches, _ = run.queue.find(limit=1000)
    return {
        **about_this_machine(),
        "command": " ".join(["python", "studies/service/kills.py", *sys.argv[1:]]),
        "kills": sum(run.kills.values()),
        "kills_by_kind": dict(run.kills),
        "searches": len(searches),
        "starts_of_searches": sum(search.run for search in searches),
        "trials": TRIALS * len(searches),
        "submissions_repeated": run.unanswered,
        "events": len(run.events),
        "streams_opened": run.reconnections,
        "takeover_seconds": run.takeover_seconds,
        "seconds": round(time.monotonic() - began, 1),
        "violations": [*run.violations, *(f"left running: {one}" for one in left)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--storage", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--seconds-between", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    mark = uuid.uuid4().hex
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["AUTOTUNE_LOCK_FOLDER"] = str(folder / "locks")
        (folder / "locks").mkdir()
        storage = f"sqlite:///{folder}/studies/autotune.db"
        if arguments.storage == "postgresql":
            server = stack.enter_context(PostgresServer(durable=True))
            storage = server.create_database("service")
        os.environ[MARK] = mark  # what is started from here on must not be left behind
        os.chdir(folder)
        store = StudyStore(storage, create=True)
        stack.callback(store.close)
        run = Run(
            storage=storage,
            folder=folder,
            servers=[Server(port=free_port(), storage=storage, folder=folder) for _ in range(2)],
            chance=random.Random(arguments.seed),
            queue=Searches(store.database),
        )
        stack.callback(run.ended.set)
        found = carry_out(
            run, kills=arguments.kills, seconds_between=arguments.seconds_between, mark=mark
        )
    print(json.dumps(found, indent=2))
    return 1 if found["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
