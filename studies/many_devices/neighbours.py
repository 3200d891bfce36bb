"""Measures what a trial on one CPU slot does to the speed of a trial on the slot beside it.

    OMP_NUM_THREADS=1 python studies/many_devices/neighbours.py  # adds rounds to neighbours.json.xz
    python studies/many_devices/neighbours.py --summary

Each slot has a CPU of its own and an executor of its own, as the places of a search have. One
configuration is trained again and again on the first slot. In each round, in random order, it is
trained alone twice (the second is the control), next to a training that steps, and next to
trainings that compile and end, one after the other, without a cache of compiled code. Speeds are
compared within a round. What the neighbour was doing is asked every tenth of a second.
"""

import argparse
import dataclasses
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.execution.cpu_shares import cpu_shares
from autotune.execution.local import LocalExecutor
from autotune.execution.prepared_folder import PREPARED
from autotune.execution.tasks import Train
from autotune.execution.trial_options import TrialOptions
from autotune.spec.config import TrainingConfig
from autotune.spec.study import StudyDefinition
from autotune.study.opening.new_study import new_definition
from autotune.study.opening.requested_space import space_of
from autotune.study.request import SearchRequest
from studies.compressed import read_json, write_json

RESULTS = Path(__file__).with_name("neighbours.json.xz")
SUBJECTS: dict[str, dict[str, Any]] = {
    "fp32": {"optimizer_fusion": "foreach", "micro_batch_size": 4},
    "bf16, compiled": {"precision": "bf16-mixed", "compile": "block", "micro_batch_size": 4},
}
"""What differs from the baseline."""
CONDITIONS = ("alone", "alone again", "beside a training", "beside a compilation")
NEIGHBOUR_STEPS = 100_000
"""More than it takes before it is ended."""
RESAMPLES = 10_000
TRIAL_OPTIONS = TrialOptions(trial_time_limit_seconds=600.0)


class Neighbour:
    """Keeps the second slot busy, in a thread of its own, while it is used as a context manager."""

    def __init__(self, executor: LocalExecutor, definition: StudyDefinition, folder: Path) -> None:
        self._executor = executor
        self._definition = definition
        self._folder = folder
        self._ending = threading.Event()
        self._future: Any = None
        self.trials = 0

    @property
    def phase(self) -> str:
        """What it is doing: start, compile, step, evaluation, or empty between two trials."""
        return "" if self._future is None else self._executor.doing(self._future).phase

    @contextmanager
    def at_work(self, condition: str) -> Iterator[None]:
        """Yield once it steps, or compiles for the first time; end it afterwards."""
        if not condition.startswith("beside"):
            yield
            return
        compiles = condition == "beside a compilation"
        self._ending.clear()
        thread = threading.Thread(target=self._compile_often if compiles else self._train_long)
        thread.start()
        try:
            while self.phase != ("compile" if compiles else "step"):
                time.sleep(0.05)
            yield
        finally:
            self._ending.set()
            with suppress(AutotuneError):
                self._executor.cancel(self._future)
            thread.join()

    def _train_long(self) -> None:
        config = subject_config(self._definition, "fp32")
        workload = dataclasses.replace(self._definition.workload, steps=NEIGHBOUR_STEPS)
        definition = dataclasses.replace(self._definition, workload=workload)
        self._run(definition, config, self._folder)

    def _compile_often(self) -> None:
        config = dataclasses.replace(subject_config(self._definition, "fp32"), compile="model")
        while not self._ending.is_set():
            self.trials += 1
            folder = self._folder.with_name(f"compiled-{self.trials}")
            folder.mkdir()
            (folder / PREPARED).symlink_to(self._folder / PREPARED)
            self._run(self._definition, config, folder)
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, definition: StudyDefinition, config: TrainingConfig, folder: Path) -> None:
        training = self._executor.training(
            definition, config, study_folder=folder, enforce_cap=False
        )
        self._future = self._executor.call(
            Train(training=training), log_name="neighbour", limits=TRIAL_OPTIONS.time_limits()
        )
        outcome = self._future.result().measurement.outcome
        assert outcome == "ok" or self._ending.is_set(), outcome


def subject_config(definition: StudyDefinition, name: str) -> TrainingConfig:
    return dataclasses.replace(definition.baseline_config(), **SUBJECTS[name])


def measure(
    executor: LocalExecutor,
    definition: StudyDefinition,
    config: TrainingConfig,
    neighbour: Neighbour,
    *,
    folder: Path,
    condition: str,
) -> dict[str, Any]:
    """Train `config` once; return its speed, and how often the neighbour was in which phase."""
    phases: Counter[str] = Counter()
    with neighbour.at_work(condition):
        began = time.monotonic()
        training = executor.training(definition, config, study_folder=folder, enforce_cap=False)
        future = executor.call(
            Train(training=training), log_name="subject", limits=TRIAL_OPTIONS.time_limits()
        )
        while not future.done():
            if executor.doing(future).phase == "step":
                phases[neighbour.phase if condition.startswith("beside") else "none"] += 1
            time.sleep(0.1)
        seconds = time.monotonic() - began
    measurement = future.result().measurement
    assert measurement.outcome == "ok", measurement.message
    return {
        "tokens_per_second": measurement.tokens_per_second,
        "spread": measurement.tokens_per_second_spread,
        "peak_memory_bytes": measurement.peak_memory_bytes,
        "seconds": round(seconds, 2),
        "neighbour_phases": dict(phases),
    }


def record(
    *, rounds: int, steps: int, limit_seconds: float, subjects: Sequence[str] = tuple(SUBJECTS)
) -> None:
    """Add rounds to the file; a round that the time cuts short is kept as far as it got."""
    deadline = time.monotonic() + limit_seconds
    with (
        tempfile.TemporaryDirectory() as work,
        LocalExecutor(Path(work)) as executor,
        LocalExecutor(Path(work) / "beside") as beside,
    ):
        executor.cpus, beside.cpus = cpu_shares(2)
        assert executor.cpus != beside.cpus, "needs two CPUs"
        request = SearchRequest(
            name="neighbours",
            storage=f"sqlite:///{work}/studies.db",
            space="quick",
            workload={"steps": steps},
        )
        new = new_definition(
            request,
            space=space_of(request),
            executor=executor,
            work=Path(work),
            listener=lambda event: None,
        )
        folder = Path(work) / "study"
        new.settle(folder)
        definition = new.definition
        neighbour = Neighbour(beside, definition, folder)
        trials = read_json(RESULTS)["trials"] if RESULTS.exists() else []
        first = 1 + max((row["round"] for row in trials), default=-1)
        draw = random.Random(first)
        for name in subjects:  # its compiled code is then there, and the files are in memory
            config = subject_config(definition, name)
            measure(executor, definition, config, neighbour, folder=folder, condition="alone")
        for number in range(first, first + rounds):
            for name in subjects:
                config = subject_config(definition, name)
                order = draw.sample(CONDITIONS, len(CONDITIONS))
                for condition in order:
                    if time.monotonic() > deadline:
                        break
                    row = {"round": number, "subject": name, "condition": condition}
                    row |= measure(
                        executor, definition, config, neighbour, folder=folder, condition=condition
                    )
                    trials.append(row)
                    print(json.dumps(row), flush=True)
        found = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.machine(),
            "device": definition.device.name,
            "cpus": [executor.cpus, beside.cpus],
            "cpus_of_machine": os.cpu_count(),
            "versions": {**definition.device.versions, "torch": version("torch")},
            "workload": definition.workload.to_dict(),
            "subjects": {name: subject_config(definition, name).describe() for name in SUBJECTS},
            "trials": trials,
        }
        write_json(RESULTS, found)


def ratios(
    trials: Sequence[dict[str, Any]], subject: str, condition: str, *, to: Sequence[str]
) -> list[float]:
    """Returns the speed under `condition` relative to the geometric mean of those under `to`.

    One for each round that has all of them.
    """
    speeds = {
        (row["round"], row["condition"]): row["tokens_per_second"]
        for row in trials
        if row["subject"] == subject
    }
    found = []
    for number in sorted({number for number, _ in speeds}):
        if all((number, one) in speeds for one in (condition, *to)):
            alone = statistics.geometric_mean(speeds[number, one] for one in to)
            found.append(speeds[number, condition] / alone)
    return found


def interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval (percentiles) of the median."""
    draw = random.Random(seed)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1]


def summarize() -> None:
    trials = read_json(RESULTS)["trials"]
    alone, again, *beside = CONDITIONS
    print("| configuration | relative to | condition | rounds | median | 95 % interval | all |")
    print("|---|---|---|---|---|---|---|")
    for subject in SUBJECTS:
        for to in ([alone], [alone, again]):
            for condition in [again, *beside] if to == [alone] else beside:
                values = sorted(ratios(trials, subject, condition, to=to))
                low, high = interval(values)
                everything = " ".join(f"{value:.2f}" for value in values)
                print(
                    f"| {subject} | {' and '.join(to)} | {condition} | {len(values)} | "
                    f"{statistics.median(values):.3f} | {low:.3f} to {high:.3f} | {everything} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--summary", action="store_true", help="print a table of what is recorded")
    parser.add_argument("--only", choices=SUBJECTS, help="one configuration")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40, help="of each training")
    parser.add_argument("--seconds", type=float, default=960.0, help="at most, for all of it")
    arguments = parser.parse_args()
    if not arguments.summary:
        record(
            rounds=arguments.rounds,
            steps=arguments.steps,
            limit_seconds=arguments.seconds,
            subjects=[arguments.only] if arguments.only else tuple(SUBJECTS),
        )
    summarize()


if __name__ == "__main__":
    main()
