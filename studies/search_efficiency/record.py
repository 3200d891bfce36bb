"""Measures every legal configuration of a table's `space.toml` and writes `table.jsonl.xz`.

    OMP_NUM_THREADS=1 taskset -c 0 python studies/search_efficiency/record.py
    ... record.py --table llama --repeats 0

Resumes where it was stopped. A line is one part of one trial with its seconds: its prediction, the
first steps of a plain training that others are compared with, or its training to the end. The order
is shuffled. A sample is trained four more times, to measure memory and speed only, scattered over
the run, so that the spread includes the drift of the machine.

    ... record.py --only precision=bf16-stochastic

measures the configurations with this value again and replaces their predictions and trainings,
each in its line.
"""

import argparse
import dataclasses
import json
import os
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.execution.flow import Flow, result_of
from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import Predict, Trace, Train
from autotune.execution.trial_options import TrialOptions
from autotune.spec.config import TrainingConfig
from autotune.spec.parity import NoTrace, ParityTrace
from autotune.spec.prediction import PredictionRequest
from autotune.spec.study import StudyDefinition
from autotune.spec.training_request import TrainingRequest
from autotune.study.opening.new_study import new_definition
from autotune.study.opening.requested_space import space_of
from autotune.study.opening.work_folder import work_folder
from autotune.study.request import SearchRequest
from autotune.study.running.parity_gate import ParityGate
from studies.compressed import append_row, read_rows, write_rows
from studies.search_efficiency.table import TABLES, TableFiles

SAMPLE = 24
"""Configurations that are measured more than once."""
TRIAL_OPTIONS = TrialOptions(trial_time_limit_seconds=600.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=Only.read, metavar="FIELD=VALUE", help="measure these again")
    parser.add_argument("--table", choices=TABLES, default="gpt")
    parser.add_argument("--repeats", type=int, default=4, help="of each one of the sample")
    arguments = parser.parse_args()
    files = TableFiles(arguments.table)
    request = SearchRequest(
        name="record",
        storage=files.storage,
        space=str(files.space),
        workload={"model": str(files.model)} if files.model.exists() else {},
        predict=False,
    )
    with work_folder(request.storage) as work, LocalExecutor(work) as executor:
        new = new_definition(
            request, space=space_of(request), executor=executor, work=work, listener=print
        )
        folder = work / "record"
        if folder.exists():
            new.discard()
        else:
            new.settle(folder)
        if not files.environment.exists():
            write_environment(new.definition, files.environment)
        before = read_rows(files.trainings)
        if arguments.only is not None:
            write_rows(files.trainings, without(before, arguments.only))
        recorder = Recorder(new.definition, executor=executor, folder=folder, to=files.trainings)
        recorder.run(repeats=arguments.repeats)
        write_rows(files.trainings, in_order_of(before, read_rows(files.trainings)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Only:
    """The configurations that have one value of one technique: what `--only` asks for."""

    field: str
    value: str

    @classmethod
    def read(cls, text: str) -> "Only":
        """Raises argparse's error where `text` names no field of the configuration and value."""
        field, _, value = text.partition("=")
        if not value or field not in TrainingConfig.__dataclass_fields__:
            fields = ", ".join(TrainingConfig.__dataclass_fields__)
            raise argparse.ArgumentTypeError(f"{text!r}. Give FIELD=VALUE, a field of {fields}.")
        return cls(field=field, value=value)

    def holds(self, row: dict[str, Any]) -> bool:
        return str(row["config"][self.field]) == self.value


def without(rows: list[dict[str, Any]], only: Only) -> list[dict[str, Any]]:
    """Returns the table without the predictions and trainings that are to be measured again.

    First steps stay: the parity gate finds them in the work folder and does not measure them again.
    """
    return [row for row in rows if row["part"] == "trace" or not only.holds(row)]


def in_order_of(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns `rows` in the lines that they had, new ones last.

    `speeds.py` draws its sample by this order.
    """
    places = {_key(row): place for place, row in enumerate(before)}
    return sorted(rows, key=lambda row: places.get(_key(row), len(places)))


def _key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["part"], TrainingConfig(**row["config"]).fingerprint, row.get("repeat", 0)


def write_environment(definition: StudyDefinition, file: Path) -> None:
    said = {
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": dataclasses.asdict(definition.device),
        "processors_used": len(os.sched_getaffinity(0)),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "workload": definition.workload.to_dict(),
        "unavailable": {field: dict(reasons) for field, reasons in definition.unavailable.items()},
    }
    file.write_text(json.dumps(said, indent=1) + "\n")


def schedule(definition: StudyDefinition, *, repeats: int) -> Iterator[tuple[TrainingConfig, int]]:
    """Yields (configuration, repeat); repeat 0 is the training to the end and comes first."""
    draw = random.Random(0)
    configs = [definition.baseline_config(), *definition.legal_space().configurations()]
    draw.shuffle(configs)
    order = {(config.fingerprint, 0): float(place) for place, config in enumerate(configs)}
    for config in draw.sample(configs, SAMPLE):
        for repeat in range(1, repeats + 1):
            order[config.fingerprint, repeat] = draw.uniform(
                order[config.fingerprint, 0], len(configs)
            )
    by_fingerprint = {config.fingerprint: config for config in configs}
    for fingerprint, repeat in sorted(order, key=order.__getitem__):
        yield by_fingerprint[fingerprint], repeat


class Recorder:
    def __init__(
        self, definition: StudyDefinition, *, executor: LocalExecutor, folder: Path, to: Path
    ) -> None:
        self._definition = definition
        self._executor = executor
        self._folder = folder
        self._to = to
        self._done = {_key(row) for row in read_rows(to)}
        self._gate = ParityGate(self._trace, folder=folder / "parity", on_trace=lambda config: None)

    def run(self, *, repeats: int) -> None:
        wanted = list(schedule(self._definition, repeats=repeats))
        for number, (config, repeat) in enumerate(wanted):
            if repeat == 0:
                self._predict(config)
            self._train(config, repeat=repeat)
            print(f"{number + 1}/{len(wanted)} {config.describe()}", flush=True)

    def _predict(self, config: TrainingConfig) -> None:
        if ("prediction", config.fingerprint, 0) in self._done:
            return
        began = time.perf_counter()
        request = PredictionRequest(
            workload=self._definition.workload, config=config, device=self._definition.device.type
        )
        prediction = self._executor.run(Predict(request=request))
        seconds = time.perf_counter() - began
        kept = dataclasses.replace(prediction, holders=(), notes=())
        self._keep("prediction", config, seconds=seconds, result=kept.to_dict())

    def _train(self, config: TrainingConfig, *, repeat: int) -> None:
        if ("training", config.fingerprint, repeat) in self._done:
            return
        verdict = result_of(self._gate.check(config))
        training = dataclasses.replace(
            self._training(config), reference=verdict.reference, shares_perplexity=repeat > 0
        )
        log_name, limits = f"{config.fingerprint}-{repeat}", TRIAL_OPTIONS.time_limits()
        finished = self._executor.run(Train(training=training), log_name=log_name, limits=limits)
        measurement = dataclasses.asdict(finished.measurement)
        self._keep("training", config, seconds=finished.seconds, repeat=repeat, result=measurement)

    def _trace(
        self, config: TrainingConfig, *, dropout: bool, **_: Any
    ) -> Flow[ParityTrace | NoTrace]:
        began = time.perf_counter()
        task = Trace(training=self._training(config), dropout=dropout)
        trace = yield from self._executor.perform(task, limits=TRIAL_OPTIONS.time_limits())
        is_recorded = ("trace", config.fingerprint, 0) in self._done
        if isinstance(trace, ParityTrace) and not is_recorded:
            self._keep("trace", config, seconds=time.perf_counter() - began, result=trace.to_dict())
        return trace

    def _training(self, config: TrainingConfig) -> TrainingRequest:
        return self._executor.training(
            self._definition, config, study_folder=self._folder, enforce_cap=False
        )

    def _keep(self, part: str, config: TrainingConfig, **facts: Any) -> None:
        append_row(self._to, {"part": part, "config": config.to_dict(), **facts})


if __name__ == "__main__":
    main()
