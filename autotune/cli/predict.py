"""`autotune predict`: predict peak memory and what holds it, without running the model."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from autotune import standard_streams
from autotune.cli import completion, options
from autotune.cli.option_groups import options_given, with_configuration, with_predicted_model
from autotune.errors import InvalidInput
from autotune.execution.local import LocalExecutor
from autotune.reporting.output_file import check_writable
from autotune.spec.config import configuration_of
from autotune.spec.option import EVERYDAY, RESULTS
from autotune.spec.prediction import Extrapolation, check_release
from autotune.spec.workload import Workload
from autotune.units import parse_size


@with_predicted_model
@with_configuration
def predict(
    *,
    max_mem: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=EVERYDAY,
            metavar="SIZE",
            help="Memory cap to compare the prediction with: 8GiB.",
        ),
    ] = None,
    device: options.DeviceTypeOption = None,
    study: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=EVERYDAY,
            metavar="STUDY",
            autocompletion=completion.studies,
            help="Predict a trial of this study, for its device.",
        ),
    ] = None,
    trial: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=EVERYDAY,
            help="Number of the trial, with --study.",
        ),
    ] = None,
    space: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=EVERYDAY,
            metavar="NAME|FILE",
            autocompletion=completion.spaces,
            help="Predict the named configurations of a search space, or all where it names none, "
            "those of least memory first.",
        ),
    ] = None,
    with_unnamed: Annotated[
        bool,
        typer.Option(
            "--all",
            rich_help_panel=EVERYDAY,
            help="Predict every legal configuration of the search space.",
        ),
    ] = False,
    scale: options.SpaceScaleOption = None,
    workload: Mapping[str, Any],
    configuration: Mapping[str, Any],
    compute_capability: options.ComputeCapabilityOption = None,
    torch_version: options.TorchVersionOption = None,
    whole_depth: Annotated[
        bool,
        typer.Option(
            "--whole-depth",
            rich_help_panel=RESULTS,
            help="Predict all layers. A deep model of --space, or one compiled as a whole, is "
            "otherwise extrapolated from two shallow depths and checked at a third.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=RESULTS,
            metavar="FILE",
            help="Also draw the memory over one step, as an HTML page.",
        ),
    ] = None,
    storage: options.StorageOption = options.STORAGE,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Predict peak memory on fake tensors. Needs no device, no data and no memory."""
    # These import numpy, 0.2 s that the help of this command does without.
    from autotune.cli import predictions  # noqa: PLC0415
    from autotune.study.predicted_device import (  # noqa: PLC0415
        predicted_device_of,
        probed,
        requested_device,
    )
    from autotune.study.predictions import Forecaster, forecaster_of  # noqa: PLC0415
    from autotune.study.requested_space import on_some_device  # noqa: PLC0415

    cap_bytes = None if max_mem is None else parse_size(max_mem)
    check_release(torch_version)
    target_device = requested_device(device, compute_capability)
    given = options_given(workload, configuration, device=device, space=space)
    _check_together(
        study=study, trial=trial, space=space, plot=plot, given=given, configuration=configuration
    )
    options.check_scale(scale, space=space)
    if with_unnamed and space is None:
        raise InvalidInput("--all needs a search space", hint="add --space quick")
    if plot is not None:
        _check_page(plot)
    loaded = None if space is None else options.scaled_space(space, scale)

    extrapolates: Extrapolation = "compiled"
    if whole_depth:
        extrapolates = "nothing"
    elif space is not None:
        extrapolates = "any"

    def requested_workload(device_type: str) -> Workload:
        return predictions.requested_workload(device_type, workload, configuration, space=loaded)

    if study is None:
        on_some_device(target_device, requested_workload)
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        executor = stack.enter_context(LocalExecutor(Path(folder), only_predicts=True))
        if study is None:
            predicted = predicted_device_of(
                device, compute_capability=compute_capability, executor=executor, storage=storage
            )
            described_workload = requested_workload(predicted.type)
            if loaded is not None and not with_unnamed:
                predicted = probed(
                    predicted, executor=executor, space=loaded, workload=described_workload
                )
            forecaster = Forecaster.for_device(
                predicted,
                executor=executor,
                workload=described_workload,
                torch_version=torch_version,
                extrapolates=extrapolates,
            )
        if loaded is not None:
            answers = predictions.predict_space(
                forecaster,
                loaded,
                cap_bytes=cap_bytes,
                with_unnamed=with_unnamed,
                as_json=as_json,
                quiet=quiet,
            )
            if answers.nothing_fits:
                raise typer.Exit(1)
            return
        record = None
        measured_on = None
        if study is not None and trial is not None:
            result, record = predictions.stored_trial(study, trial, storage=storage)
            measured_on = result.device
            forecaster = forecaster_of(
                result,
                executor=executor,
                compute_capability=compute_capability,
                torch_version=torch_version,
            )
            forecaster = replace(forecaster, extrapolates=extrapolates)
            config = record.config
        else:
            config = configuration_of(configuration, forecaster.workload.legality_context)
        prediction = forecaster.predict(config, with_timeline=plot is not None)
    answer = predictions.Answer(
        forecaster=forecaster,
        config=config,
        prediction=prediction,
        cap_bytes=cap_bytes,
        record=record,
        measured_on=measured_on,
    )
    with standard_streams.answer():
        if as_json:
            print(json.dumps(answer.to_dict(), indent=2))
        else:
            predictions.print_answer(answer)
    if plot is not None:
        predictions.write_page(answer, plot)
    if answer.is_too_large:
        raise typer.Exit(1)


def _check_together(
    *,
    study: str | None,
    trial: int | None,
    space: str | None,
    plot: Path | None,
    given: list[str],
    configuration: Mapping[str, Any],
) -> None:
    if (study is None) != (trial is None):
        raise InvalidInput("--study and --trial belong together", hint="give both, or neither")
    if study is not None and given:
        raise InvalidInput(
            f"{', '.join(given)}: --study and --trial set workload, device and configuration",
            hint="leave these options out, or --study and --trial",
        )
    if space is not None and configuration:
        raise InvalidInput(
            f"--space predicts all configurations, {', '.join(configuration)} selects one",
            hint="leave one of them out",
        )
    if space is not None and plot is not None:
        raise InvalidInput(
            "--plot draws one configuration",
            hint="describe it by its techniques instead of --space",
        )


def _check_page(file: Path) -> None:
    if file.suffix.lower() not in (".html", ".htm"):
        raise InvalidInput(
            f"Invalid file for --plot: {str(file)!r}", hint="end the file's name in .html"
        )
    check_writable(file, option="--plot")
