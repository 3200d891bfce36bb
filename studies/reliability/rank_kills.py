"""Ends trainings of two processes at random moments: `python studies/reliability/rank_kills.py`.

    python studies/reliability/rank_kills.py --attacks 100 > studies/reliability/rank_kills.json

Each attack meets a trial, the first steps of a parity check, or two trainings in turn as in a
confirmation: one of the ranks is killed or stopped, raises an error or asks for more memory than
there is, or the process of the trial or the trial server is killed. Prints a JSON object whose
`violations` must be empty: nothing is left running, no file is left behind, the device is free
again, the answer names the rank that failed first and comes within seconds.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import textwrap
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autotune.errors import AutotuneError
from autotune.execution.in_turn import TrainingInTurn
from autotune.execution.local import LocalExecutor
from autotune.execution.prepared_folder import PREPARED
from autotune.execution.server.process_tree import descendants, started_under
from autotune.execution.tasks import ListDevices, Prepare, Trace, Train
from autotune.execution.trial_options import TrialOptions
from autotune.spec.config import Sharding, TrainingConfig
from autotune.spec.parity import NoTrace
from autotune.spec.result import DeviceInfo
from autotune.spec.search_space import SearchSpace
from autotune.spec.study import StudyDefinition
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload

RANKS = 2
STEP_SECONDS = 5.0
"""The limit that ends a training of which a rank is stopped."""
SECONDS_TO_END = 15.0
"""From an attack, or from the limit, to the answer, on a machine that does other work, too."""
LONGEST_PAUSE = 4.0
"""Between the start of the ranks and the attack; the shortest training is not over by then."""

Kind = Literal[
    "kill rank 0",
    "kill rank 1",
    "stop rank 0",
    "stop rank 1",
    "rank 1 raises",
    "rank 1 asks for too much memory",
    "kill the trial",
    "kill the server",
]
KINDS: Sequence[Kind] = (
    "kill rank 0",
    "kill rank 1",
    "stop rank 0",
    "stop rank 1",
    "rank 1 raises",
    "rank 1 asks for too much memory",
    "kill the trial",
    "kill the server",
)
Work = Literal["train", "trace", "in turn"]
WORK: Sequence[Work] = ("train", "trace", "in turn")
SHARDINGS: Sequence[Sharding] = ("ddp", "zero1", "zero2", "zero3")

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
            time.sleep(0.01)
            if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
                attack = TRIGGER.read_text() if TRIGGER.exists() else ""
                if attack == "rank 1 raises":
                    raise ValueError("this rank has had enough")
                if attack == "rank 1 asks for too much memory":
                    torch.empty(2**50)
            hidden = self.embedding(tokens)
            for block in self.blocks:
                hidden = hidden + block(hidden)
            return self.head(hidden)
"""


@dataclass(kw_only=True)
class Storm:
    """The executor of a search and what it is to run, and what was seen."""

    executor: LocalExecutor
    folder: Path
    definition: StudyDefinition
    mark: str
    chance: random.Random
    met: Counter[str] = field(default_factory=Counter)
    """How many attacks of each kind met something that ran."""
    missed: int = 0
    """Attacks that came after the end."""
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)
    """Seconds from an attack to the answer, by kind of attack."""
    messages: dict[str, str] = field(default_factory=dict)
    """An example for each kind."""
    violations: list[str] = field(default_factory=list)

    @property
    def trigger(self) -> Path:
        return self.folder / "trigger"

    def attack(self, kind: Kind, work: Work) -> None:
        """Begin the work, attack it at a random moment, and check what comes of it."""
        self.trigger.unlink(missing_ok=True)
        with (
            self.executor.slot(self.definition.device, on_wait=lambda holder: None),
            ThreadPoolExecutor(1) as pool,
        ):
            answer = pool.submit(self._begin, work)
            ranks = self._wait_for_ranks(answer)
            pause = self.chance.uniform(0.0, LONGEST_PAUSE)
            end = time.monotonic() + pause
            while time.monotonic() < end and not answer.done():
                time.sleep(0.005)
            began = time.monotonic()
            has_met = bool(ranks) and not answer.done() and self._strike(kind, ranks)
            said = answer.result()
            seconds = time.monotonic() - began
            # Some trainings begin after the attack, as those of a run in turn do.
            self.trigger.unlink(missing_ok=True)
        if not has_met or said.startswith("ok"):
            self.missed += 1
        else:
            self._judge(kind, work, said, seconds=seconds)
        self._look_for_what_is_left(f"{kind}, {work}")

    def _judge(self, kind: Kind, work: Work, said: str, *, seconds: float) -> None:
        self.met[kind] += 1
        self.outcomes[f"{kind}: {said.partition(':')[0]}"] += 1
        self.slowest[kind] = round(max(seconds, self.slowest.get(kind, 0.0)), 1)
        self.messages.setdefault(kind, said)
        allowed = SECONDS_TO_END
        if kind.startswith("stop"):
            allowed += STEP_SECONDS if work != "in turn" else 2 * STEP_SECONDS
        if seconds > allowed:
            self.violations.append(f"{kind}, {work}: the answer took {seconds:.1f} s: {said}")
        rank = next((word for word in ("rank 0", "rank 1") if word in kind), "")
        if rank and f"{rank}" not in said:
            self.violations.append(f"{kind}, {work}: the answer is {said}")

    def _begin(self, work: Work) -> str:
        """Returns "ok", or what came of it with its message."""
        config = TrainingConfig(sharding=self.chance.choice(SHARDINGS), micro_batch_size=2)
        options = TrialOptions(
            trial_time_limit_seconds=120.0,
            compile_time_limit_seconds=60.0,
            step_time_limit_seconds=STEP_SECONDS,
        )
        try:
            if work == "train":
                task = Train(training=self._training(config, enforce_cap=True))
                measured = self.executor.run(task, limits=options.time_limits()).measurement
                return f"{measured.outcome}: {measured.message}"
            if work == "trace":
                training = self._training(config, enforce_cap=False)
                steps = Trace(training=training, dropout=True)
                trace = self.executor.run(steps, limits=options.time_limits())
                return f"no trace: {trace}" if isinstance(trace, NoTrace) else "ok"
            timed = self.executor.time_in_turn(
                self.definition,
                [TrainingInTurn(config=config), TrainingInTurn(config=config)],
                study_folder=self.folder,
                log_name="in-turn",
                trial_options=options,
                rounds=4,
                seed=0,
            )
            failed = [one for one in timed.results if one.outcome != "ok"]
            return f"{failed[0].outcome}: {failed[0].message}" if failed else "ok"
        except AutotuneError as error:
            return f"{type(error).__name__}: {error.message}"

    def _training(self, config: TrainingConfig, *, enforce_cap: bool) -> TrainingRequest:
        return self.executor.training(
            self.definition, config, study_folder=self.folder, enforce_cap=enforce_cap
        )

    def _wait_for_ranks(self, answer: "Future[str]") -> list[int]:
        while not answer.done():
            if ranks := self._ranks():
                return ranks
            time.sleep(0.002)
        return []

    def _trials(self) -> list[int]:
        server = self.executor.server_pid
        return [pid for pid in descendants(server) if _parent(pid) == server]

    def _ranks(self) -> list[int]:
        """Returns the processes of the ranks of one trial, in order, once all have begun."""
        for trial in self._trials():
            ranks = sorted(pid for pid in descendants(trial) if _parent(pid) == trial)
            if len(ranks) >= RANKS:
                return ranks[:RANKS]
        return []

    def _strike(self, kind: Kind, ranks: Sequence[int]) -> bool:
        ranks = self._ranks() or ranks
        try:
            if kind.startswith(("kill rank", "stop rank")):
                number = signal.SIGKILL if kind.startswith("kill") else signal.SIGSTOP
                os.kill(ranks[int(kind[-1])], number)
            elif kind == "kill the trial":
                trials = self._trials()
                if not trials:
                    return False
                os.kill(self.chance.choice(trials), signal.SIGKILL)
            elif kind == "kill the server":
                os.kill(self.executor.server_pid, signal.SIGKILL)
            else:
                self.trigger.write_text(kind)
        except ProcessLookupError:
            return False
        return True

    def _look_for_what_is_left(self, after: str) -> None:
        left: list[Any] = []
        end = time.monotonic() + 10.0
        while True:
            left = [
                pid
                for pid in started_under(self.mark)
                if pid not in (os.getpid(), self.executor.server_pid)
            ]
            if not left or time.monotonic() > end:
                break
            time.sleep(0.05)
        left += [str(file) for file in Path(tempfile.gettempdir()).glob("*ranks*")]
        left += [str(file) for file in (self.folder / "tmp").iterdir()]
        if left:
            self.violations.append(f"{after}: {left} left")


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[1])


@contextmanager
def storm(folder: Path, *, seed: int) -> Iterator[Storm]:
    """Prepare everything in the folder, in which temporary files are, too."""
    (folder / "tmp").mkdir()
    (folder / "net.py").write_text(
        textwrap.dedent(MODEL).replace("TRIGGER_FILE", str(folder / "trigger"))
    )
    settings: dict[str, Any] = {
        "model": f"{folder / 'net.py'}:Net",
        "sequence_length": 16,
        "global_batch": 8,
        "steps": 60,
        "evaluation_sequences": 64,
        "devices_per_trial": RANKS,
    }
    mark = uuid.uuid4().hex
    os.environ.update({"RANKS_MARK": mark, "TMPDIR": str(folder / "tmp")})
    tempfile.tempdir = None
    try:
        with LocalExecutor(folder) as executor:
            device = executor.run(ListDevices())[-1]
            workload = make_workload("cpu", settings)
            executor.run(Prepare(workload=workload, folder=folder / PREPARED))
            definition = _definition(device, workload)
            yield Storm(
                executor=executor,
                folder=folder,
                definition=definition,
                mark=mark,
                chance=random.Random(seed),
            )
    finally:
        del os.environ["RANKS_MARK"], os.environ["TMPDIR"]
        tempfile.tempdir = None


def _definition(device: DeviceInfo, workload: Any) -> StudyDefinition:
    return StudyDefinition(
        name="ranks",
        workload=workload,
        space=SearchSpace(name="none", techniques={}),
        device=device,
        unavailable={},
        cap_bytes=2**40,
        seed=0,
        sampler="grid",
    )


def carry_out(
    run: Storm, *, attacks: int, on_attack: Callable[[int], None] = lambda number: None
) -> dict[str, Any]:
    began = time.monotonic()
    number = 0
    while sum(run.met.values()) < attacks:
        kind = KINDS[number % len(KINDS)]
        work = run.chance.choices(WORK, weights=(3, 2, 1))[0]
        run.attack(kind, work)
        number += 1
        on_attack(number)
    outcome = run._begin("train")
    if not outcome.startswith("ok"):
        run.violations.append(f"afterwards a trial ends with {outcome}")
    return {
        "attacks": sum(run.met.values()),
        "attacks_by_kind": dict(run.met),
        "too_late": run.missed,
        "outcomes": dict(sorted(run.outcomes.items())),
        "most_seconds_to_the_answer": run.slowest,
        "messages": run.messages,
        "seconds": round(time.monotonic() - began, 1),
        "violations": run.violations,
    }


def main() -> int:
    from studies.reliability.kills import about_this_machine

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attacks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    def show(number: int) -> None:
        print(number, dict(run.met), run.violations[-1:], file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder, storm(Path(folder), seed=arguments.seed) as run:
        found = carry_out(run, attacks=arguments.attacks, on_attack=show)
    print(json.dumps({**about_this_machine(), "seed": arguments.seed, **found}, indent=2))
    return 1 if found["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
