"""What `autotune explain` does: find the configuration, explain its memory peak and print that."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from autotune.analysis.explanation import Explanation
from autotune.cli.database import open_store
from autotune.cli.tables import make_console
from autotune.errors import InvalidInput, suggestion
from autotune.execution.local import LocalExecutor
from autotune.spec.config import TrainingConfig, check_legal
from autotune.spec.result import JSON_SCHEMA, TrialRecord
from autotune.spec.search_space import SearchSpace, bind_space
from autotune.spec.workload import Workload
from autotune.study.explain.explain import explain_configuration
from autotune.study.predictions import Forecaster, workload_of


@dataclass(frozen=True, kw_only=True)
class Question:
    """The configuration to explain, and the trial and study it comes from, if any."""

    forecaster: Forecaster
    config: TrainingConfig
    study: str | None = None
    record: TrialRecord | None = None
    records: tuple[TrialRecord, ...] = ()
    unavailable: Mapping[str, Mapping[str, str]]

    def about(self) -> str:
        workload = self.forecaster.workload
        return f"{workload.describe()}, for {self.forecaster.device_type}"


def question_of_trial(
    executor: LocalExecutor, study: str, trial: int, *, storage: str, torch_version: str | None
) -> Question:
    """Load a trial to explain. Raises UnknownStudy, and InvalidInput for an unknown trial."""
    with open_store(storage) as store:
        definition, _ = store.definition(study)
        records = tuple(store.trials(study))
    record = next((record for record in records if record.number == trial), None)
    if record is None:
        known = f"its trials are 0 to {len(records) - 1}" if records else "it has none yet"
        raise InvalidInput(
            f"study {study!r} has no trial {trial}", hint=f"{known}; see autotune show {study}"
        )
    forecaster = Forecaster.of_device(
        definition.device,
        executor=executor,
        workload=definition.workload,
        torch_version=torch_version,
    )
    return Question(
        forecaster=forecaster,
        config=record.config,
        study=study,
        record=record,
        records=records,
        unavailable=definition.unavailable,
    )


def requested(
    device_type: str,
    settings: Mapping[str, Any],
    configuration: Mapping[str, Any],
    *,
    space: SearchSpace | None,
    name: str | None,
) -> tuple[Workload, TrainingConfig]:
    """Return the workload and configuration that the options describe. Raises InvalidInput."""
    workload = workload_of(device_type, settings, space=space)
    if space is not None:
        config = _named_configuration(space, name, workload=workload)
    else:
        config = TrainingConfig(**{"micro_batch_size": workload.global_batch, **configuration})
    check_legal(config, workload.legality_context)
    return workload, config


def _named_configuration(space: Any, name: str | None, *, workload: Workload) -> TrainingConfig:
    named = bind_space(space, workload.legality_context, unavailable={}).named
    if name is None or name not in named:
        raise InvalidInput(
            f"search space {space.name!r} has no legal configuration {name!r}",
            hint=suggestion(name, named, otherwise=f"it names {', '.join(named) or 'none'}"),
        )
    return named[name]


def explain_question(question: Question, *, quiet: bool) -> Explanation:
    columns = (TextColumn("predicting"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns,
        console=make_console(sys.stderr),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    ) as progress:
        task = progress.add_task("", total=None)
        return explain_configuration(
            question.forecaster,
            question.config,
            record=question.record,
            records=question.records,
            unavailable=question.unavailable,
            progress=lambda made, wanted: progress.update(task, completed=made, total=wanted),
        )


def print_explanation(question: Question, explanation: Explanation) -> None:
    console = make_console()

    def say(line: str, style: str = "") -> None:
        console.print(Text(line, style=style), soft_wrap=True)

    number = "" if question.record is None else f"#{question.record.number} "
    say(f"{number}{explanation.config.describe()}", "bold")
    say(question.about())
    for title, lines in (
        ("Where the peak is", [f"{line[:1].upper()}{line[1:]}" for line in explanation.peak]),
        ("In use", [remark.sentence for remark in explanation.in_use]),
        (
            "What would save memory",
            [alternative.sentence for alternative in explanation.alternatives],
        ),
        ("What would not", [remark.sentence for remark in explanation.no_help]),
    ):
        if lines:
            say("")
            say(title, "bold")
            for line in lines:
                say(f"  {line}")
    say("")
    say("All sizes are predicted, except where a line says measured.")
    for note in explanation.prediction.notes:
        say(f"Note: {note}.")


def explanation_to_dict(question: Question, explanation: Explanation) -> dict[str, Any]:
    return {
        "schema": JSON_SCHEMA,
        "study": question.study,
        "trial": None if question.record is None else question.record.number,
        "workload": question.forecaster.workload.to_dict(),
        **explanation.to_dict(),
    }
