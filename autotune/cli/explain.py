"""`autotune explain`: say where a configuration's memory peak is and what would lower it."""

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
        str | None, typer.Argument(metavar="STUDY", help="Name of a study; see autotune studies.")
    ] = None,
    trial: Annotated[
        int | None, typer.Argument(metavar="TRIAL", help="Number of a trial of the study.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda",
            help="Type of device; it need not exist. [default: a GPU if there is one]",
        ),
    ] = None,
    space: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="Explain a configuration of this search space, with --name."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="ROW", help="Name of the configuration, with --space.")
    ] = None,
    scale: options.SpaceScaleOption = None,
    workload: Mapping[str, Any],
    configuration: Mapping[str, Any],
    compute_capability: options.ComputeCapabilityOption = None,
    torch_version: options.TorchVersionOption = None,
    storage: options.StorageOption = options.STORAGE,
    as_json: options.JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Explain a trial's memory peak: where it is, why, and what each technique would save there.

    Without a study, explains the configuration that the options describe.
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
    target_device = device_meant(device, compute_capability)
    check_release(torch_version)
    loaded = None if space is None else options.scaled_space(space, scale)

    def requested(device_type: str) -> tuple["Workload", TrainingConfig]:
        return _requested(device_type, workload, configuration, space=loaded, name=name)

    if study is None:
        on_some_device(target_device, requested)
    with ExitStack() as stack:
        # A temporary folder: this command leaves no files behind, and also works in a folder that
        # cannot be written to.
        folder = stack.enter_context(TemporaryDirectory())
        executor = stack.enter_context(LocalExecutor(Path(folder)))
        if study is not None and trial is not None:
            question = question_of_trial(
                executor, study, trial, storage=storage, torch_version=torch_version
            )
        else:
            device_type, capability = predicted_device_of(
                device, compute_capability=compute_capability, executor=executor
            )
            resolved_workload, config = requested(device_type)
            forecaster = Forecaster(
                executor=executor,
                workload=resolved_workload,
                device_type=device_type,
                compute_capability=capability,
                torch_version=torch_version,
            )
            question = Question(forecaster=forecaster, config=config, unavailable={})
        explanation = _explain(question, quiet=quiet)
    if as_json:
        print(json.dumps(_to_dict(question, explanation), indent=2, allow_nan=False))
    else:
        print_explanation(question, explanation)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The configuration to explain, and the trial and study it comes from, if any."""

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
    """Load a trial to explain. Raises UnknownStudy, and InvalidInput for an unknown trial."""
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


def _requested(
    device_type: str,
    settings: Mapping[str, Any],
    configuration: Mapping[str, Any],
    *,
    space: "SearchSpace | None",
    name: str | None,
) -> tuple["Workload", TrainingConfig]:
    """Return the workload and configuration that the options describe. Raises InvalidInput."""
    from autotune.study.predictions import workload_of

    workload = workload_of(device_type, settings, space=space)
    if space is not None:
        config = _named_configuration(space, name, workload=workload)
    else:
        config = TrainingConfig(**{"micro_batch_size": workload.global_batch, **configuration})
    check_legal(config, workload.circumstances)
    return workload, config


def _named_configuration(space: Any, name: str | None, *, workload: "Workload") -> TrainingConfig:
    from autotune.spec.search_space import bind_space

    named = bind_space(space, workload.circumstances, unavailable={}).named
    if name is None or name not in named:
        raise InvalidInput(
            f"search space {space.name!r} has no legal configuration {name!r}",
            hint=f"it names {', '.join(named) or 'none'}",
        )
    return named[name]


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
            f"no trial of study {study!r} is given",
            hint=f"give its number, see autotune show {study}",
        )
    if study is not None and given:
        raise InvalidInput(
            f"{', '.join(given)}: the trial sets workload, device and configuration",
            hint="leave these options out, or the study and the trial",
        )
    if (space is None) != (name is None):
        raise InvalidInput("--space and --name belong together", hint="give both, or neither")
    if space is not None and configuration:
        raise InvalidInput(
            f"--name and {', '.join(configuration)} both set the configuration",
            hint="leave one of them out",
        )


def _explain(question: Question, *, quiet: bool) -> "Explanation":
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from autotune.cli.tables import make_console
    from autotune.study.explain.explain import explain_configuration

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


def print_explanation(question: Question, explanation: "Explanation") -> None:
    from rich.text import Text

    from autotune.cli.tables import make_console

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


def _to_dict(question: Question, explanation: "Explanation") -> dict[str, Any]:
    return {
        "schema": JSON_SCHEMA,
        "study": question.study,
        "trial": None if question.record is None else question.record.number,
        "workload": question.forecaster.workload.to_dict(),
        **explanation.to_dict(),
    }
