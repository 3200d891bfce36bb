"""`autotune explain`: where the peak of a configuration is and why, and what would make it lower."""

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options
from autotune.cli.option_groups import options_given, with_configuration, with_model_size
from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig, check_legal
from autotune.spec.result import JSON_SCHEMA, TrialRecord

if TYPE_CHECKING:
    from autotune.analysis.explanation import Explanation
    from autotune.execution.local import LocalExecutor
    from autotune.spec.search_space import SearchSpace
    from autotune.spec.workload import Workload
    from autotune.study.predictions import Forecaster


@with_model_size
@with_configuration
def explain(
    *,
    study: Annotated[
        str | None, typer.Argument(metavar="STUDY", help="Name of a study ...")
    ] = None,
    trial: Annotated[
        int | None, typer.Argument(metavar="TRIAL", help="... and the number of its trial.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda",
            help="Kind of device; need not be there. [default: a GPU if there is one]",
        ),
    ] = None,
    space: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="Workload of this search space; of its configurations ..."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="ROW", help="... the one of this name.")
    ] = None,
    scale: options.SpaceScaleOption = None,
    workload: Mapping[str, Any],
    configuration: Mapping[str, Any],
    compute_capability: options.ComputeCapabilityOption = None,
    torch_version: options.TorchVersionOption = None,
    storage: options.StorageOption = options.STORAGE,
    as_json: options.JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Say where the peak of a trial is and why, what each technique would save there, and what cannot help.

    Without a study: of the configuration that the options name.
    """
    from tempfile import TemporaryDirectory

    from autotune.execution.local import LocalExecutor
    from autotune.spec.prediction import check_release
    from autotune.study.predictions import (
        Forecaster,
        device_meant,
        on_some_device,
        predicted_device_of,
    )
    from autotune.study.request import check_device

    given = options_given(
        workload,
        configuration,
        device=device,
        compute_capability=compute_capability,
        space=space,
        name=name,
        scale=scale,
    )
    _check_together(
        study=study, trial=trial, space=space, name=name, given=given, configuration=configuration
    )
    options.check_scale(scale, space=space)
    check_device(device)
    meant = device_meant(device, compute_capability)
    check_release(torch_version)
    loaded = None if space is None else options.scaled_space(space, scale)

    def asked(device_type: str) -> tuple["Workload", TrainingConfig]:
        return _asked(device_type, workload, configuration, space=loaded, name=name)

    if study is None:
        on_some_device(meant, asked)
    with ExitStack() as stack:
        # A question leaves nothing behind, and may be asked from a folder that cannot be written
        # to.
        executor = stack.enter_context(
            LocalExecutor(Path(stack.enter_context(TemporaryDirectory())))
        )
        if study is not None and trial is not None:
            question = question_of_trial(
                executor, study, trial, storage=storage, torch_version=torch_version
            )
        else:
            device_type, capability = predicted_device_of(
                device, compute_capability=compute_capability, executor=executor
            )
            at, config = asked(device_type)
            forecaster = Forecaster(
                executor=executor,
                workload=at,
                device_type=device_type,
                compute_capability=capability,
                torch_version=torch_version,
            )
            question = Question(forecaster=forecaster, config=config, unavailable={})
        answer = _answered(question, quiet=quiet)
    if as_json:
        print(json.dumps(_to_dict(question, answer), indent=2, allow_nan=False))
    else:
        print_explanation(question, answer)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be explained."""

    forecaster: "Forecaster"
    config: TrainingConfig
    study: str | None = None
    record: TrialRecord | None = None
    records: tuple[TrialRecord, ...] = ()
    unavailable: Mapping[str, Mapping[str, str]]

    def about(self) -> str:
        workload = self.forecaster.workload
        return f"{workload.describe()}, for {self.forecaster.device_type}"


def question_of_trial(
    executor: "LocalExecutor", study: str, trial: int, *, storage: str, torch_version: str | None
) -> Question:
    from autotune.storage.store import StudyStore
    from autotune.study.predictions import Forecaster

    store = StudyStore(storage)
    try:
        definition, _ = store.definition(study)
        records = tuple(store.trials(study))
    finally:
        store.close()
    record = next((record for record in records if record.number == trial), None)
    if record is None:
        there = f"its trials are 0 to {len(records) - 1}" if records else "it has none yet"
        raise InvalidInput(
            f"study {study!r} has no trial {trial}", hint=f"{there}; see autotune show {study}"
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


def _asked(
    device_type: str,
    settings: Mapping[str, Any],
    configuration: Mapping[str, Any],
    *,
    space: "SearchSpace | None",
    name: str | None,
) -> tuple["Workload", TrainingConfig]:
    """What the options say. Raises InvalidInput."""
    from autotune.study.predictions import workload_of

    workload = workload_of(device_type, settings, space=space)
    if space is not None:
        config = _row(space, name, workload=workload)
    else:
        config = TrainingConfig(**{"micro_batch_size": workload.global_batch, **configuration})
    check_legal(config, workload.circumstances)
    return workload, config


def _row(space: Any, name: str | None, *, workload: "Workload") -> TrainingConfig:
    from autotune.spec.search_space import bind_space

    rows = bind_space(space, workload.circumstances, unavailable={}).named
    if name is None or name not in rows:
        there = f"it names {', '.join(rows)}" if rows else "it names none"
        raise InvalidInput(
            f"search space {space.name!r} has no legal configuration {name!r}", hint=there
        )
    return rows[name]


def _check_together(
    *,
    study: str | None,
    trial: int | None,
    space: str | None,
    name: str | None,
    given: list[str],
    configuration: Mapping[str, Any],
) -> None:
    if study is not None and trial is None:
        raise InvalidInput(
            f"which trial of study {study!r} is not said",
            hint=f"give its number, see autotune show {study}",
        )
    if study is not None and given:
        raise InvalidInput(
            f"a trial has its own workload, device and configuration, not {', '.join(given)}",
            hint="leave these options out, or the study and the trial",
        )
    if (space is None) != (name is None):
        raise InvalidInput("--space and --name belong together", hint="give both, or neither")
    if space is not None and configuration:
        raise InvalidInput(
            f"--name and {', '.join(configuration)} both say what to explain",
            hint="leave one of them out",
        )


def _answered(question: Question, *, quiet: bool) -> "Explanation":
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from autotune.cli.tables import make_console
    from autotune.study.explain.explain import explain_configuration

    columns = (TextColumn("predicting"), MofNCompleteColumn(), TimeElapsedColumn())
    silent = quiet or not sys.stderr.isatty()
    with Progress(
        *columns, console=make_console(sys.stderr), transient=True, disable=silent
    ) as shown:
        task = shown.add_task("", total=None)
        return explain_configuration(
            question.forecaster,
            question.config,
            record=question.record,
            records=question.records,
            unavailable=question.unavailable,
            progress=lambda made, wanted: shown.update(task, completed=made, total=wanted),
        )


def print_explanation(question: Question, answer: "Explanation") -> None:
    from rich.text import Text

    from autotune.cli.tables import make_console

    console = make_console()

    def say(line: str, style: str = "") -> None:
        console.print(Text(line, style=style), soft_wrap=True)

    number = "" if question.record is None else f"#{question.record.number} "
    say(f"{number}{answer.config.describe()}", "bold")
    say(question.about())
    for title, lines in (
        ("Where the peak is", answer.peak),
        ("In use", [remark.sentence for remark in answer.in_use]),
        ("What would save memory", [alternative.sentence for alternative in answer.alternatives]),
        ("What would not", [remark.sentence for remark in answer.no_help]),
    ):
        if lines:
            say("")
            say(title, "bold")
            for line in lines:
                say(f"  {line[:1].upper() + line[1:] if title == 'Where the peak is' else line}")
    say("")
    say("All sizes are predicted, apart from those said to be measured.")
    for note in answer.prediction.notes:
        say(f"Note: {note}.")


def _to_dict(question: Question, answer: "Explanation") -> dict[str, Any]:
    return {
        "schema": JSON_SCHEMA,
        "study": question.study,
        "trial": None if question.record is None else question.record.number,
        "workload": question.forecaster.workload.to_dict(),
        **answer.to_dict(),
    }
