"""`autotune predict`: predict peak memory and what holds it, without running the model."""

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from autotune import api
from autotune.analysis.pick import chosen_trial
from autotune.cli.lines import print_line
from autotune.cli.options import ShownQuietly
from autotune.errors import InvalidInput
from autotune.execution.local import LocalExecutor
from autotune.reporting.output_file import check_writable
from autotune.spec.config import configuration_of
from autotune.spec.data_sheets import requested_device
from autotune.spec.prediction import Extrapolation
from autotune.spec.setting import EVERYDAY, RESULTS, FilePath, Size, TrialNumber, setting
from autotune.spec.workload import Workload
from autotune.study.prediction.predicted_training import PredictedSpace
from autotune.system import standard_streams


@dataclass(frozen=True, kw_only=True)
class PredictCommand(PredictedSpace, ShownQuietly):
    """A trial, a configuration or the configurations of a space, and how the answer is shown."""

    study: str | None = setting(
        None, "Predict a trial of this study, for its device.", group=EVERYDAY, metavar="STUDY"
    )
    trial: TrialNumber | None = setting(None, "Number of the trial, with --study.", group=EVERYDAY)
    max_mem: Size | None = setting(
        None, "Memory cap to compare the prediction with: 8GiB.", group=EVERYDAY
    )
    space: str | None = setting(
        None,
        "Predict the named configurations of a search space, or all where it names none, those of "
        "least memory first.",
        group=EVERYDAY,
        metavar="NAME|FILE",
    )
    with_unnamed: bool = setting(
        False,
        "Predict every legal configuration of the search space.",
        group=EVERYDAY,
        flag="--all",
    )
    whole_depth: bool = setting(
        False,
        "Predict all layers. A deep model of --space or --from, or one compiled as a whole, is "
        "otherwise extrapolated from two shallow depths and checked at a third.",
        group=RESULTS,
    )
    plot: FilePath | None = setting(
        None, "Also draw the memory over one step, as an HTML page.", group=RESULTS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.study is None) != (self.trial is None):
            raise InvalidInput("--study and --trial belong together", hint="give both, or neither")
        if self.study is not None and (given := self.described("space")):
            raise InvalidInput(
                f"{', '.join(given)}: --study and --trial set workload, device and configuration",
                hint="leave these options out, or --study and --trial",
            )
        if self.space is not None and self.configuration:
            raise InvalidInput(
                f"--space predicts all configurations, {', '.join(self.configuration)} selects one",
                hint="leave one of them out",
            )
        if self.with_unnamed and self.space is None:
            raise InvalidInput("--all needs a search space", hint="add --space quick")
        if self.plot is None:
            return
        if self.space is not None:
            raise InvalidInput(
                "--plot draws one configuration",
                hint="describe it by its techniques instead of --space",
            )
        if self.plot.suffix.lower() not in (".html", ".htm"):
            raise InvalidInput(
                f"Invalid file for --plot: {str(self.plot)!r}", hint="end the file's name in .html"
            )
        check_writable(self.plot, option="--plot")


def predict(request: PredictCommand) -> None:
    """Predict peak memory on fake tensors. Needs no device, no data and no memory."""
    # These import numpy, 0.2 s that the help of this command does without.
    from autotune.cli import predictions  # noqa: PLC0415
    from autotune.cli.predicting import predicting  # noqa: PLC0415
    from autotune.study.opening.requested_space import on_all_devices  # noqa: PLC0415
    from autotune.study.prediction.compared import ComparedPrediction  # noqa: PLC0415
    from autotune.study.prediction.predicted_device import (  # noqa: PLC0415
        predicted_device_of,
        probed,
    )
    from autotune.study.prediction.predictions import (  # noqa: PLC0415
        Forecaster,
        forecaster_of,
        workload_with,
    )
    from autotune.study.prediction.space_answer import predict_space  # noqa: PLC0415

    loaded = request.search_space
    extrapolates: Extrapolation = "compiled"
    if request.whole_depth:
        extrapolates = "nothing"
    elif loaded is not None or request.from_file is not None:
        extrapolates = "any"

    def requested_workload(device_type: str) -> Workload:
        return workload_with(device_type, request.workload, request.configuration, space=loaded)

    if request.study is None:
        device = requested_device(request.device, request.compute_capability)
        workloads = on_all_devices(device, requested_workload)
        if loaded is None and not request.quiet:
            predictions.say_least(workloads, request.configuration, request.max_mem)
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        executor = stack.enter_context(LocalExecutor(Path(folder), only_predicts=True))
        if request.study is None:
            predicted = predicted_device_of(
                request.device,
                compute_capability=request.compute_capability,
                executor=executor,
                storage=request.storage,
            )
            described_workload = requested_workload(predicted.type)
            if loaded is not None and not request.with_unnamed:
                predicted = probed(
                    predicted, executor=executor, space=loaded, workload=described_workload
                )
            forecaster = Forecaster.for_device(
                predicted,
                executor=executor,
                workload=described_workload,
                torch_version=request.torch_version,
                extrapolates=extrapolates,
            )
        if loaded is not None:
            with predicting(quiet=request.quiet) as tell:
                answers = predict_space(
                    forecaster,
                    loaded,
                    cap_bytes=request.max_mem,
                    with_unnamed=request.with_unnamed,
                    tell=tell,
                )
            if request.as_json:
                print(json.dumps(answers.to_dict(), indent=2))
            else:
                predictions.print_space(answers, loaded)
            if answers.nothing_fits:
                raise typer.Exit(1)
            return
        record = None
        measured_on = None
        if request.study is not None:
            result = api.show(request.study, storage=request.storage)
            record = chosen_trial(result, request.trial)
            measured_on = result.device
            forecaster = forecaster_of(
                result,
                executor=executor,
                compute_capability=request.compute_capability,
                torch_version=request.torch_version,
            )
            forecaster = replace(forecaster, extrapolates=extrapolates)
            config = record.config
        else:
            config = configuration_of(request.configuration, forecaster.workload.legality_context)
        with predicting(quiet=request.quiet):
            prediction = forecaster.predict(config, with_timeline=request.plot is not None)
        answer = ComparedPrediction(
            forecaster=forecaster,
            config=config,
            prediction=prediction,
            cap_bytes=request.max_mem,
            record=record,
            measured_on=measured_on,
        )
        if not request.as_json:
            with standard_streams.answer():
                predictions.print_answer(answer)
        if request.from_file is not None:

            def say(what: str) -> None:
                if not request.quiet:
                    print_line(f"{what} ...", to_stderr=True, flush=True)

            answer = answer.with_change(progress=say)
    with standard_streams.answer():
        if request.as_json:
            print(json.dumps(answer.to_dict(), indent=2))
        elif line := answer.change_line():
            print_line(line)
    if request.plot is not None:
        predictions.write_page(answer, request.plot)
    if answer.is_too_large:
        raise typer.Exit(1)
