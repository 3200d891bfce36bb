"""Ten ways in which a trial can hang, each run as a trial: `python studies/reliability/hangs.py`.

Each is a user's training script that hangs in a different way, run by the executor of searches.
Prints a JSON line for each: the limit that should end it, when it ended, its outcome and message,
and how many of its processes are left. Takes about a minute; `--step-seconds 120` waits as long as
a search does by default.
"""

import argparse
import json
import os
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from autotune.execution.local import LocalExecutor
from autotune.execution.server.limits import TimeLimits
from autotune.execution.server.process_tree import started_under
from autotune.execution.tasks import ListDevices, Train
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.result import DeviceInfo
from autotune.spec.search_space import SearchSpace
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import make_workload

LONG_SECONDS = 600.0
"""A limit that is not the one to be met."""

SCRIPT = """
    import ctypes, itertools, os, signal, sys, threading, time
    import torch, autotune

    def hang():
        HANG

    WHEN_STARTING
    model = torch.nn.Linear(4, 4)
    model, optimizer = autotune.apply(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for step in range(12):
            if step == 3:
                IN_A_STEP
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            autotune.report(tokens=8, loss=loss)
    finally:
        AT_EXIT
"""

Place = Literal["WHEN_STARTING", "IN_A_STEP", "AT_EXIT"]


@dataclass(frozen=True, kw_only=True)
class Hang:
    kind: str
    limit: Literal["trial", "compile", "step"] = "step"
    """Which limit is to end it."""
    place: Place = "IN_A_STEP"
    code: str

    def script(self) -> str:
        text = textwrap.dedent(SCRIPT)
        for place in ("WHEN_STARTING", "IN_A_STEP", "AT_EXIT"):
            text = text.replace(place, "hang()" if place == self.place else "pass")
        return text.replace("HANG", textwrap.indent(textwrap.dedent(self.code), "    ").strip())


HANGS: Sequence[Hang] = (
    Hang(kind="sleeps in a step", code="time.sleep(3600)"),
    Hang(kind="holds the interpreter in a loop of C", code="sum(itertools.repeat(1))"),
    Hang(
        kind="ignores the signal to end",
        code="""
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(0.1)
        """,
    ),
    Hang(kind="stops itself", code="os.kill(os.getpid(), signal.SIGSTOP)"),
    Hang(
        kind="leaves a child behind in a session of its own",
        code="""
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:  # an orphan that holds the pipe of the result
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    while True:
                        time.sleep(0.1)
                os._exit(0)
            os.wait()
            time.sleep(3600)
        """,
    ),
    Hang(
        kind="deadlocks two threads",
        code="""
            first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
            def take(mine, other):
                with mine:
                    both.wait()
                    with other:
                        pass
            orders = ((first, second), (second, first))
            threads = [threading.Thread(target=take, args=order) for order in orders]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        """,
    ),
    Hang(kind="hangs at its exit", place="AT_EXIT", code="threading.Event().wait()"),
    Hang(
        kind="hangs while starting", limit="trial", place="WHEN_STARTING", code="time.sleep(3600)"
    ),
    Hang(
        kind="hangs while compiling",
        limit="compile",
        code="""
            def compiler(graph, inputs):
                time.sleep(3600)
            torch.compile(torch.nn.Linear(4, 4), backend=compiler)(torch.ones(2, 4))
        """,
    ),
    Hang(
        kind="writes without end to its log and to all its pipes",
        code="""
            while True:
                print("nothing to say", flush=True)
                for pipe in range(3, 32):
                    try:
                        os.write(pipe, b'{"phase": ')  # a line may have 16 MiB
                    except OSError:
                        pass
        """,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What came of one that hung."""

    kind: str
    limit: str
    limit_seconds: float
    seconds: float
    """From the request until it was ended."""
    outcome: str
    message: str
    processes_left: int


@dataclass(frozen=True, kw_only=True)
class Runner:
    """The executor of a search, whose processes can be told from all others of the machine."""

    executor: LocalExecutor
    folder: Path
    device: DeviceInfo
    mark: str

    def submit(self, hang: Hang, *, seconds: float) -> "Future[FinishedTrial]":
        """Runs it with one limit of `seconds` and the others long."""
        script = self.folder / f"{hang.kind.replace(' ', '-')}.py"
        script.write_text(hang.script())
        limits = self.limits(hang, seconds=seconds)
        training = self.executor.training(
            self.definition(script),
            TrainingConfig(micro_batch_size=4),
            study_folder=self.folder,
            enforce_cap=True,
        )
        return self.executor.call(Train(training=training), log_name=script.stem, limits=limits)

    @staticmethod
    def limits(hang: Hang, *, seconds: float) -> TimeLimits:
        others = {
            "trial_seconds": LONG_SECONDS,
            "compile_seconds": LONG_SECONDS,
            "step_seconds": LONG_SECONDS,
        }
        if hang.limit == "trial":
            others = dict.fromkeys(others, seconds)
        return TimeLimits(**{**others, f"{hang.limit}_seconds": seconds})

    def definition(self, script: Path) -> StudyDefinition:
        workload = make_workload("cpu", {"script": str(script), "global_batch": 4, "steps": 12})
        space = SearchSpace(name="none", techniques={})
        return StudyDefinition(
            name="hangs",
            workload=workload,
            space=space,
            device=self.device,
            unavailable={},
            cap_bytes=2**40,
            seed=0,
            sampler="grid",
        )

    def seen(self, hang: Hang, future: "Future[FinishedTrial]", *, limit_seconds: float) -> Seen:
        finished = future.result()
        return Seen(
            kind=hang.kind,
            limit=hang.limit,
            limit_seconds=limit_seconds,
            seconds=round(finished.seconds, 2),
            outcome=finished.measurement.outcome,
            message=finished.measurement.message,
            processes_left=len(self.processes()),
        )

    def processes(self) -> list[int]:
        """All that the executor's server has started, and those that they have."""
        return [pid for pid in started_under(self.mark) if pid != self.executor.server_pid]


@contextmanager
def runner(folder: Path) -> Iterator[Runner]:
    """With an environment that all its processes inherit."""
    mark = uuid.uuid4().hex
    os.environ["HANGS_MARK"] = mark
    with LocalExecutor(folder) as executor:
        device = executor.run(ListDevices())[
            -1
        ]  # the CPU; starts the server, which is no part of a trial's time
        del os.environ["HANGS_MARK"]
        yield Runner(executor=executor, folder=folder, device=device, mark=mark)


def main() -> None:
    from studies.reliability.kills import about_this_machine

    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--step-seconds", type=float, default=2.0, help="the limit that ends each [default: 2]"
    )
    limit_seconds = arguments.parse_args().step_seconds
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, runner(Path(folder)) as run:
        for hang in HANGS:
            future = run.submit(hang, seconds=limit_seconds)
            print(
                json.dumps(asdict(run.seen(hang, future, limit_seconds=limit_seconds))), flush=True
            )
    print(json.dumps({**about_this_machine(), "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
