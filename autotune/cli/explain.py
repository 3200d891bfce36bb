"""`autotune explain`: say where a configuration's memory peak is and what would lower it."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from autotune import api
from autotune.analysis.pick import chosen_trial
from autotune.cli import completion, options
from autotune.cli.option_groups import options_given, with_configuration, with_model_size
from autotune.errors import InvalidInput
from autotune.execution.local import LocalExecutor
from autotune.spec.config import TrainingConfig
from autotune.spec.option import EVERYDAY
from autotune.spec.prediction import check_release
from autotune.spec.workload import Workload


@with_model_size
@with_configuration
def explain(
    *,
    study: Annotated[
        str | None,
        typer.Argument(
            metavar="STUDY",
            autocompletion=completion.studies,
            help="Name of a study; see autotune studies.",
        ),
    ] = None,
    trial: Annotated[
        int | None,
        typer.Argument(
            metavar="TRIAL",
            help="Number of a trial of the study. [default: the study's pick]",
        ),
    ] = None,
    device: options.DeviceTypeOption = None,
    space: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=EVERYDAY,
            metavar="NAME|FILE",
            autocompletion=completion.spaces,
            help="Explain a configuration of this search space, with --name.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=EVERYDAY,
            metavar="ROW",
            help="Name of the configuration, with --space.",
        ),
    ] = None,
    scale: options.SpaceScaleOption = None,
    workload: Mapping[str, Any],
    configuration: Mapping[str, Any],
    compute_capability: options.ComputeCapabilityOption = None,
    torch_version: options.TorchVersionOption = None,
    storage: options.StorageOption = options.STORAGE,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Explain a trial's memory peak: where it is, why, and what each technique would save there.

    Without a study, explains the configuration that the options describe.
    """
    # These import numpy, 0.2 s that the help of this command does without.
    from autotune.cli import explanations  # noqa: PLC0415
    from autotune.study.explain.question import (  # noqa: PLC0415
        Question,
        question_of_trial,
    )
    from autotune.study.predicted_device import (  # noqa: PLC0415
        predicted_device_of,
        requested_device,
    )
    from autotune.study.predictions import Forecaster  # noqa: PLC0415
    from autotune.study.requested_space import on_some_device  # noqa: PLC0415

    given = options_given(
        workload,
        configuration,
        device=device,
        compute_capability=compute_capability,
        space=space,
        name=name,
        scale=scale,
    )
    _check_together(study=study, space=space, name=name, given=given, configuration=configuration)
    options.check_scale(scale, space=space)
    target_device = requested_device(device, compute_capability)
    check_release(torch_version)
    loaded = None if space is None else options.scaled_space(space, scale)

    def requested(device_type: str) -> tuple[Workload, TrainingConfig]:
        return explanations.requested(device_type, workload, configuration, space=loaded, name=name)

    if study is None:
        on_some_device(target_device, requested)
    with ExitStack() as stack:
        # A temporary folder: this command leaves no files behind, and also works in a folder that
        # cannot be written to.
        folder = stack.enter_context(TemporaryDirectory())
        executor = stack.enter_context(LocalExecutor(Path(folder)))
        if study is not None:
            number = chosen_trial(api.show(study, storage=storage), trial).number
            question = question_of_trial(
                executor, study, number, storage=storage, torch_version=torch_version
            )
            explanations.say_beginning(quiet=quiet)
        else:
            explanations.say_beginning(quiet=quiet)
            predicted = predicted_device_of(
                device, compute_capability=compute_capability, executor=executor, storage=storage
            )
            resolved_workload, config = requested(predicted.type)
            forecaster = Forecaster.for_device(
                predicted,
                executor=executor,
                workload=resolved_workload,
                torch_version=torch_version,
            )
            question = Question(forecaster=forecaster, config=config, unavailable={})
        explanation = explanations.explain_question(question, quiet=quiet)
    if as_json:
        print(
            json.dumps(
                explanations.explanation_to_dict(question, explanation), indent=2, allow_nan=False
            )
        )
    else:
        explanations.print_explanation(question, explanation)


def _check_together(
    *,
    study: str | None,
    space: str | None,
    name: str | None,
    given: list[str],
    configuration: Mapping[str, Any],
) -> None:
    if study is None and not given:
        raise InvalidInput(
            "there is nothing to explain: no study and no configuration is given",
            hint="autotune explain STUDY explains its pick (autotune studies lists the "
            "studies); options such as --precision bf16-mixed describe a configuration",
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
