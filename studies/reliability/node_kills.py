"""Kills nodes under trials whose ranks run on two of them.

    python studies/reliability/node_kills.py --node-kills 50 > studies/reliability/node_kills.json

A search runs on a Ray cluster of three nodes that is simulated on this machine; each trial has a
rank on two of them. At a random moment of a trial one of its nodes is killed, which comes back a
few seconds later; or, less often, one of its ranks is killed or stopped, or asks for more memory
than there is, or the worker of a node is killed. Prints a JSON object whose `violations` must be
empty: one attack loses at most one attempt, its cause names the node, or the rank with its node,
none of the ranks is left on any node, another trial begins, and in the end no worker, no placement
group and, once a worker has started on each node, no file are left.
"""

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from studies.reliability.watch import Snapshot, broken, snapshot
from tests.building.keeper import children
from tests.building.ray_cluster import Node, RayCluster

STUDY = "nodes"
MORE_TRIALS = 100_000
"""More than there are configurations: the search goes on while nodes are killed."""
NODES = 3
LONGEST_PAUSE = 5.0
"""Between the start of a trial's ranks and the attack; the shortest trial is not over by then."""
STEP_SECONDS = 8.0
"""The limit that ends a training of which a rank is stopped."""
SECONDS_TO_ANSWER = 90.0
"""From an attack to the end of its attempt."""
SECONDS_TO_GO_ON = 400.0
"""From an attack to the next trial: a node has to come back, or another one takes its place."""
SECONDS_TO_END = 60.0
SECONDS_UNTIL_REPLACED = (1.0, 8.0)

Kind = Literal[
    "kill the first node",
    "kill the last node",
    "kill a rank",
    "stop a rank",
    "rank 1 asks for too much memory",
    "kill a worker",
]
OTHER_KINDS: Sequence[Kind] = (
    "kill a rank",
    "stop a rank",
    "rank 1 asks for too much memory",
    "kill a worker",
)

MODEL = """
    import time
    from pathlib import Path

    import torch
    from torch import nn

    TRIGGER = Path("TRIGGER_FILE")


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(257, 24)
            self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
            self.head = nn.Linear(24, 257)

        def forward(self, tokens):
            time.sleep(0.02)
            if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
                if TRIGGER.exists():
                    torch.empty(2**50)
            hidden = self.embedding(tokens)
            for block in self.blocks:
                hidden = hidden + block(hidden)
            return self.head(hidden)
"""
SPACE = """
    description = "Many configurations of two ranks."
    [techniques]
    sharding = ["ddp", "zero1", "zero2", "zero3"]
    micro_batch_size = [1, 2, 4]
    optimizer = ["adamw", "sgd"]
    gradient_reduction = ["fp32", "bf16"]
    checkpointing = ["none", "block"]
    loss = ["full", "chunked"]
"""


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A rank of the running trial."""

    pid: int
    node: Node
    worker: int
    """The process of the node's worker."""


@dataclass(kw_only=True)
class Storm:
    """A search whose trials are attacked, and what was seen."""

    cluster: RayCluster
    folder: Path
    chance: random.Random
    driver: subprocess.Popen[bytes] | None = None
    met: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    """Attacks that came after the end of their trial."""
    lost: Counter[str] = field(default_factory=Counter)
    """Attempts that were lost, by the kind of attack."""
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)
    """Seconds from an attack to the end of its attempt, by kind of attack."""
    causes: dict[str, list[str]] = field(default_factory=dict)
    """A few for each kind."""
    violations: list[str] = field(default_factory=list)
    exits: Counter[str] = field(default_factory=Counter)
    """How searches ended before their end; each was continued."""

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder}/studies.db"

    @property
    def trigger(self) -> Path:
        return self.folder / "trigger"

    # -- the search --------------------------------------------------------------------------------

    def start(self, *, trials: int) -> None:
        """Begin the search, or go on with it, until it has so many trials."""
        words = ["--name", STUDY, "--storage", self.url, "--ray", self.cluster.address]
        words += ["--trials", str(trials), "--no-confirm"]
        if snapshot(self.url, STUDY) is None:
            words += ["--devices-per-trial", "2", "--nodes-per-trial", "2", "--device", "cpu"]
            words += ["--model", "net.py:Net", "--space", "space.toml", "--max-mem", "1GiB"]
            words += ["--seq-len", "16", "--global-batch", "8", "--steps", "60"]
            words += ["--eval-sequences", "16", "--sampler", "random", "--no-predict"]
        words += ["--step-time-limit", str(STEP_SECONDS), "--trial-time-limit", "120"]
        with (self.folder / "driver.txt").open("ab") as said:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "autotune", "search", *words],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd=self.folder,
                env={**self.cluster.environment, "AUTOTUNE_LOCK_FOLDER": str(self.folder)},
            )

    def look(self) -> Snapshot:
        found = snapshot(self.url, STUDY)
        assert found is not None, (self.folder / "driver.txt").read_text()[-3000:]
        return found

    def ranks(self) -> list[RankProcess]:
        """Returns both ranks of the running trial, once both have begun."""
        below = children()
        found = []
        for node in self.cluster.nodes:
            for worker in node.workers():
                for server in below.get(worker, ()):
                    for trial in below.get(server, ()):
                        found += [
                            RankProcess(pid=pid, node=node, worker=worker)
                            for pid in below.get(trial, ())
                        ]
        return found if len(found) == 2 and found[0].node is not found[1].node else []

    def wait_for_ranks(self) -> list[RankProcess]:
        end = time.monotonic() + SECONDS_TO_GO_ON
        while not (found := self.ranks()) and time.monotonic() < end:
            if self._has_ended():  # as where the head did not answer for 30 s on a loaded machine
                assert self.driver is not None
                self.exits[str(self.driver.returncode)] += 1
                self.start(trials=MORE_TRIALS)
            time.sleep(0.2)
        return found

    def _has_ended(self) -> bool:
        return self.driver is not None and self.driver.poll() is not None

    def _wait(self, is_so: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > end:
                return False
            time.sleep(0.2)
        return True

    # -- attacks -----------------------------------------------------------------------------------

    def attack(self, kind: Kind) -> None:
        """Wait for a trial, attack it at a random moment, and check what comes of it."""
        began = time.monotonic()
        ranks = self.wait_for_ranks()
        if not ranks:
            self.violations.append(
                f"before {kind}: no trial began for {time.monotonic() - began:.0f} s"
            )
            return
        time.sleep(self.chance.uniform(0.0, LONGEST_PAUSE))
        before = self.look()
        running = [one for one in before.attempts if one["state"] == "running"]
        ranks = self.ranks()
        if not ranks or len(running) != 1:
            self.missed += 1
            return
        began = time.monotonic()
        names = self._strike(kind, ranks)
        if not names:
            self.missed += 1
            return
        [attempt] = running
        ended: dict[str, Any] = {}

        def has_ended() -> bool:
            found = {one["id"]: one for one in self.look().attempts}
            ended.update(found[attempt["id"]])
            return bool(ended["state"] != "running")

        has_answered = self._wait(has_ended, SECONDS_TO_ANSWER)
        seconds = time.monotonic() - began
        self.trigger.unlink(missing_ok=True)
        if not has_answered:
            self.violations.append(f"{kind}: the attempt did not end for {seconds:.0f} s")
        self._judge(kind, ended, before, names=names, seconds=seconds)
        gone = self._wait(
            lambda: not any(map(_lives, (rank.pid for rank in ranks))), SECONDS_TO_END
        )
        if not gone:
            self.violations.append(f"{kind}: ranks are left")
        self._replace_nodes()

    def _strike(self, kind: Kind, ranks: Sequence[RankProcess]) -> Sequence[str]:
        """Attack; return what the cause must name one of."""
        ordered = self._in_order(ranks)
        victim = self.chance.choice(ordered)
        index = ordered.index(victim)
        try:
            match kind:
                case "kill the first node" | "kill the last node":
                    victim = ordered[0 if kind == "kill the first node" else 1]
                    self.cluster.kill_node(victim.node)
                    return ("the node of", "the process of")
                case "kill a rank":
                    os.kill(victim.pid, signal.SIGKILL)
                case "stop a rank":
                    os.kill(victim.pid, signal.SIGSTOP)
                case "kill a worker":
                    os.kill(victim.worker, signal.SIGKILL)
                    return ("the process of",)
                case "rank 1 asks for too much memory":
                    self.trigger.touch()
                    index = 1
        except ProcessLookupError:
            return ()
        return (f"rank {index} on ",)

    def _in_order(self, ranks: Sequence[RankProcess]) -> list[RankProcess]:
        """Returns rank 0 first: the worker of its node begins the others."""
        return sorted(ranks, key=lambda rank: "OfFirst" not in _title(rank.worker))

    def _judge(
        self,
        kind: Kind,
        ended: Mapping[str, Any],
        before: Snapshot,
        *,
        names: Sequence[str],
        seconds: float,
    ) -> None:
        now = self.look()
        lost = now.states["lost"] - before.states["lost"]
        if lost > 1:
            self.violations.append(f"{kind}: {lost} attempts were lost")
        cause = ended.get("cause") or ""
        if ended.get("state") == "finished":
            trial = next(one for one in now.trials if one["id"] == ended["trial_id"])
            outcome = trial["measurement"]["outcome"]
            cause = f"{outcome}: {trial['measurement']['message']}"
            if outcome == "ok":  # it had ended just when it was attacked
                self.missed += 1
                self.met[f"{kind}, at its end"] += 1
                return
        self.met[kind] += 1
        self.lost[kind] += lost
        self.outcomes[f"{kind}: {ended.get('state')}, {cause.partition(':')[0][:40]}"] += 1
        self.slowest[kind] = round(max(seconds, self.slowest.get(kind, 0.0)), 1)
        known = self.causes.setdefault(kind, [])
        if cause not in known and len(known) < 4:
            known.append(cause)
        if not any(name in cause for name in names):
            self.violations.append(f"{kind}: the cause is {cause!r}")
        is_memory = kind == "rank 1 asks for too much memory"
        if lost == is_memory:
            self.violations.append(f"{kind}: {lost} attempts were lost, state {ended.get('state')}")

    def _replace_nodes(self) -> None:
        names = {f"node{number}" for number in range(NODES)}
        missing = names - {node.folder.name for node in self.cluster.nodes}
        for name in missing:
            time.sleep(self.chance.uniform(*SECONDS_UNTIL_REPLACED))
            self.cluster.add_node(name)

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Stop the search, have it go on in peace for a few trials, and look for what is left."""
        assert self.driver is not None
        self.driver.send_signal(signal.SIGTERM)
        self._wait_for_end(SECONDS_TO_END, expected=143)
        self._look_for_what_is_left("after SIGTERM")
        done = len(self.look().trials)
        self.start(trials=done + NODES)
        self._wait_for_end(SECONDS_TO_GO_ON, expected=0)
        self._look_for_what_is_left("at the end")
        now = self.look()
        if now.states["running"] or now.finished != len(now.trials):
            self.violations.append(f"{now.finished} of {len(now.trials)} trials have a result")
        # What a search loses with its only pair of nodes is forgiven, however often.
        by_trial = Counter(one["trial_id"] for one in now.attempts if one["state"] == "lost")
        if by_trial and max(by_trial.values()) > 4:
            self.violations.append(f"a trial has lost {max(by_trial.values())} attempts")
        if message := broken(self.url):
            self.violations.append(f"the database is damaged: {message}")

    def _wait_for_end(self, seconds: float, *, expected: int) -> None:
        assert self.driver is not None
        if not self._wait(self._has_ended, seconds):
            self.violations.append(f"the search did not end for {seconds:g} s")
            self.driver.kill()
        exit_code = self.driver.wait()
        if exit_code != expected:
            said = (self.folder / "driver.txt").read_text()[-500:]
            self.violations.append(f"the search ended with {exit_code}, not {expected}: {said}")

    def _look_for_what_is_left(self, when: str) -> None:
        def left() -> list[str]:
            found = [f"worker {pid}" for pid in self.cluster.workers()]
            for node in self.cluster.nodes:
                found += [str(path) for path in (node.cache / "autotune" / "nodes").glob("*")]
            return found

        self._wait(lambda: not self.cluster.workers(), SECONDS_TO_END)
        for node in self.cluster.nodes:  # a node that was killed keeps its files until then
            _begin_a_worker_on(node)
        self.violations += [f"{when}: {one} is left" for one in left()]
        groups = self._placement_groups()
        if groups:
            self.violations.append(f"{when}: placement groups are left: {groups}")

    def _placement_groups(self) -> list[str]:
        """Returns the states of the groups that Ray knows and that are not removed."""
        code = (
            "import json, ray; from ray.util import placement_group_table as table; "
            f"ray.init(address='{self.cluster.address}', log_to_driver=False); "
            "print(json.dumps([one['state'] for one in table().values()]))"
        )
        said = subprocess.run(
            [sys.executable, "-c", code],
            env=self.cluster.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        states = json.loads(said.stdout.splitlines()[-1])
        return [state for state in states if state != "REMOVED"]


def _begin_a_worker_on(node: Node) -> None:
    """Do with the files of a node what the next worker does that starts there, and end it."""
    code = "from autotune.execution.cluster.node_folder import NodeFolder as F; F('next').close()"
    environment = {**os.environ, "XDG_CACHE_HOME": str(node.cache)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] != b"Z"


def carry_out(
    run: Storm,
    *,
    node_kills: int,
    others: int,
    minutes: float = math.inf,
    on_attack: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Kill so many nodes, attack so often otherwise, or for so long; return what came of it."""
    began = time.monotonic()
    run.start(trials=MORE_TRIALS)
    wanted: dict[Kind, int] = {
        "kill the first node": node_kills // 2,
        "kill the last node": node_kills - node_kills // 2,
        **dict.fromkeys(OTHER_KINDS, 0),
    }
    for number in range(others):
        wanted[OTHER_KINDS[number % len(OTHER_KINDS)]] += 1
    while left := [kind for kind, count in wanted.items() if run.met[kind] < count]:
        run.attack(run.chance.choices(left, [wanted[kind] - run.met[kind] for kind in left])[0])
        on_attack()
        if len(run.violations) > 20 or time.monotonic() - began > 60 * minutes:
            break
    seconds = time.monotonic() - began
    run.finish()
    last = run.look()
    return {
        "attacks": sum(run.met.values()),
        "attacks_by_kind": dict(run.met),
        "too_late": run.missed,
        "searches_continued": dict(run.exits),
        "attempts_lost": dict(run.lost),
        "outcomes": dict(sorted(run.outcomes.items())),
        "most_seconds_to_the_answer": run.slowest,
        "causes": run.causes,
        "trials": len(last.trials),
        "attempts": len(last.attempts),
        "attempts_by_state": dict(last.states),
        "seconds_of_attacks": round(seconds, 1),
        "violations": run.violations,
    }


def storm(folder: Path, cluster: RayCluster, *, seed: int) -> Storm:
    """Prepare the search's files in a folder."""
    model = textwrap.dedent(MODEL).replace("TRIGGER_FILE", str(folder / "trigger"))
    (folder / "net.py").write_text(model)
    (folder / "space.toml").write_text(textwrap.dedent(SPACE))
    return Storm(cluster=cluster, folder=folder, chance=random.Random(seed))


def main() -> int:
    from studies.reliability.kills import about_this_machine

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--node-kills", type=int, default=50)
    parser.add_argument("--others", type=int, default=16, help="attacks of other kinds")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RayCluster(nodes=NODES, cpus=2) as cluster:
        run = storm(Path(folder), cluster, seed=arguments.seed)

        def show() -> None:
            print(dict(run.met), run.missed, run.violations[-1:], file=sys.stderr, flush=True)

        found = carry_out(
            run,
            node_kills=arguments.node_kills,
            others=arguments.others,
            minutes=arguments.minutes,
            on_attack=show,
        )
    print(json.dumps({**about_this_machine(), "seed": arguments.seed, **found}, indent=2))
    return 1 if found["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
