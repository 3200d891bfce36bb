"""`autotune predict`: predict peak memory and what holds it, without running the model."""

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options
from autotune.cli.option_groups import options_given, with_configuration, with_model_size
from autotune.cli.output import check_writable, write_file
from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig, check_legal
from autotune.units import parse_size

if TYPE_CHECKING:
    from autotune.cli.predictions import Answer
    from autotune.execution.local import LocalExecutor
    from autotune.spec.prediction import Forecast
    from autotune.spec.result import StudyResult, TrialRecord
    from autotune.spec.search_space import LegalSpace, SearchSpace
    from autotune.spec.workload import Workload
    from autotune.study.predictions import Forecaster


@with_model_size
@with_configuration
def predict(
    *,
    max_mem: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory cap to compare the prediction with: 8GiB."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda",
            help="Type of device; it need not exist. [default: a GPU if there is one]",
        ),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(metavar="STUDY", help="Predict a trial of this study, for its device."),
    ] = None,
    trial: Annotated[int | None, typer.Option(help="Number of the trial, with --study.")] = None,
    space: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Predict every legal configuration of a search space, sorted by memory.",
        ),
    ] = None,
    scale: options.SpaceScaleOption = None,
    reference: Annotated[
        bool,
        typer.Option("--reference", help="Compare with the published table of the search space."),
    ] = False,
    workload: Mapping[str, Any],
    configuration: Mapping[str, Any],
    compute_capability: options.ComputeCapabilityOption = None,
    torch_version: options.TorchVersionOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw the memory over one step, as an HTML page."),
    ] = None,
    storage: options.StorageOption = options.STORAGE,
    as_json: options.JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Predict peak memory on fake tensors. Needs no device, no data and no memory."""
    from tempfile import TemporaryDirectory

    from autotune.analysis.published_comparison import reference_of
    from autotune.execution.local import LocalExecutor
    from autotune.spec.prediction import check_release
    from autotune.study.predictions import (
        Forecaster,
        device_meant,
        on_some_device,
        predicted_device_of,
    )
    from autotune.study.request import check_device

    cap_bytes = None if max_mem is None else parse_size(max_mem)
    check_device(device)
    check_release(torch_version)
    target_device = device_meant(device, compute_capability)
    given = options_given(workload, configuration, device=device, space=space)
    _check_together(
        study=study, trial=trial, space=space, plot=plot, given=given, configuration=configuration
    )
    options.check_scale(scale, space=space)
    if plot is not None:
        _check_page(plot)
    if reference and max_mem is not None:
        raise InvalidInput(
            "--reference compares with no cap", hint="leave --max-mem or --reference out"
        )
    if reference and space is None:
        raise InvalidInput(
            "--reference needs a search space with a published table",
            hint="add --space peak_memory",
        )
    loaded = None if space is None else options.scaled_space(space, scale)

    def requested_workload(device_type: str) -> "Workload":
        return _requested_workload(device_type, workload, configuration, space=loaded)

    if reference and loaded is not None:
        reference_of(loaded, what="what is predicted")
    if study is None:
        on_some_device(target_device, requested_workload)
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        executor = stack.enter_context(LocalExecutor(Path(folder)))
        if study is None:
            device_type, capability = predicted_device_of(
                device, compute_capability=compute_capability, executor=executor
            )
            forecaster = Forecaster(
                executor=executor,
                workload=requested_workload(device_type),
                device_type=device_type,
                compute_capability=capability,
                torch_version=torch_version,
            )
        if loaded is not None:
            if (
                reference
                and torch_version is None
                and forecaster.device_type == "cuda"
                and loaded.reference
            ):
                forecaster = replace(forecaster, torch_version=loaded.reference.torch)
            if reference:
                _predict_reference(forecaster, loaded, as_json=as_json, quiet=quiet)
            else:
                _predict_space(
                    forecaster, loaded, cap_bytes=cap_bytes, as_json=as_json, quiet=quiet
                )
            return
        record = None
        measured_on = None
        if study is not None and trial is not None:
            result, record = _stored(study, trial, storage=storage)
            measured_on = result.device
            forecaster = forecaster_of(
                result,
                executor=executor,
                compute_capability=compute_capability,
                torch_version=torch_version,
            )
            config = record.config
        else:
            config = TrainingConfig(
                **{"micro_batch_size": forecaster.workload.global_batch, **configuration}
            )
        prediction = forecaster.predict(config, with_timeline=plot is not None)
    from autotune.cli.predictions import Answer, print_answer

    answer = Answer(
        forecaster=forecaster,
        config=config,
        prediction=prediction,
        cap_bytes=cap_bytes,
        record=record,
        measured_on=measured_on,
    )
    if as_json:
        print(json.dumps(answer.to_dict(), indent=2))
    else:
        print_answer(answer)
    if plot is not None:
        _write_page(answer, plot)
    if answer.is_too_large:
        raise typer.Exit(1)


def _predict_space(
    forecaster: "Forecaster",
    space: "SearchSpace",
    *,
    cap_bytes: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    from autotune.cli.predictions import space_table, space_to_dict
    from autotune.cli.tables import make_console

    legal = _legal(forecaster, space)
    names = {config.fingerprint: name for name, config in legal.named.items()}
    configs = {c.fingerprint: c for c in [*legal.named.values(), *legal.configurations()]}
    forecasts = _with_progress(forecaster, list(configs.values()), quiet=quiet)
    forecasts.sort(
        key=lambda forecast: forecast.prediction.peak_memory_bytes if forecast.prediction else 2**63
    )
    if as_json:
        print(
            json.dumps(space_to_dict(forecaster, forecasts, names, cap_bytes=cap_bytes), indent=2)
        )
    else:
        make_console().print(space_table(forecasts, names, cap_bytes=cap_bytes))


def _predict_reference(
    forecaster: "Forecaster", space: "SearchSpace", *, as_json: bool, quiet: bool
) -> None:
    from autotune.analysis.published_comparison import reference_of
    from autotune.cli.published import of_forecasts, print_reference

    rows = reference_of(space, what="what is predicted").rows
    named = {
        name: config for name, config in _legal(forecaster, space).named.items() if name in rows
    }
    configs = {config.fingerprint: config for config in named.values()}
    forecasts = _with_progress(forecaster, list(configs.values()), quiet=quiet)
    about = f"{forecaster.workload.describe()}, for {forecaster.device_type}"
    if forecaster.torch_version is not None:
        about += f" as with torch {forecaster.torch_version}"
    answer = of_forecasts(space, forecaster.workload, forecasts, named, about=about)
    print_reference(answer, form="json" if as_json else "table")


def _legal(forecaster: "Forecaster", space: "SearchSpace") -> "LegalSpace":
    from autotune.spec.search_space import bind_space

    return bind_space(space, forecaster.workload.circumstances, unavailable={})


def _with_progress(
    forecaster: "Forecaster", configs: list[TrainingConfig], *, quiet: bool
) -> "list[Forecast]":
    from rich.progress import Progress

    from autotune.cli.tables import make_console

    with Progress(console=make_console(sys.stderr), transient=True, disable=quiet) as progress:
        task = progress.add_task("predicting", total=len(configs))
        return forecaster.forecast_all(configs, on_each=lambda _: progress.advance(task))


def _requested_workload(
    device_type: str,
    settings: Mapping[str, Any],
    configuration: Mapping[str, Any],
    *,
    space: "SearchSpace | None",
) -> "Workload":
    """Return the workload that the options describe.

    Raises InvalidInput, also where the configuration of the options is not legal for it.
    """
    from autotune.study.predictions import workload_of

    workload = workload_of(device_type, settings, space=space)
    if space is None:
        config = TrainingConfig(**{"micro_batch_size": workload.global_batch, **configuration})
        check_legal(config, workload.circumstances)
    return workload


def _stored(study: str, trial: int, *, storage: str) -> "tuple[StudyResult, TrialRecord]":
    """Return a study and one of its trials.

    Raises UnknownStudy, and InvalidInput for an unknown trial.
    """
    import autotune

    result = autotune.show(study, storage=storage)
    record = next((record for record in result.trials if record.number == trial), None)
    if record is None:
        raise InvalidInput(
            f"study {study!r} has no trial {trial}",
            hint=f"it has {len(result.trials)}, see autotune show {study}",
        )
    return result, record


def forecaster_of(
    result: "StudyResult",
    *,
    executor: "LocalExecutor",
    compute_capability: str | None,
    torch_version: str | None,
) -> "Forecaster":
    """Return a forecaster for the study's device, or for a GPU of another compute capability.

    Raises InvalidInput if a compute capability is given and the study ran on a CPU: its workload
    has the defaults of a CPU.
    """
    from autotune.study.predictions import Forecaster

    device = result.device
    if compute_capability is not None:
        if device.type == "cpu":
            raise InvalidInput(
                f"compute capability {compute_capability} is for a GPU, "
                f"but study {result.study!r} ran on cpu",
                hint="leave --compute-capability out, or describe the model by its options "
                "instead of --study",
            )
        device = replace(device, compute_capability=compute_capability)
    return Forecaster.of_device(
        device, executor=executor, workload=result.workload, torch_version=torch_version
    )


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


def _write_page(answer: "Answer", file: Path) -> None:
    from autotune.reporting.figures import memory_timeline

    figure = memory_timeline.compute(
        answer.prediction,
        title=answer.config.describe(),
        about=answer.about(),
        answer=f"{answer.verdict()}.",
        cap_bytes=answer.cap_bytes,
    )
    write_file(file, memory_timeline.page(figure), option="--plot")
    print(file, file=sys.stderr)
