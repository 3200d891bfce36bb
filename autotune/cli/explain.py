"""`autotune explain`: say where a configuration's memory peak is and what would lower it."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from autotune import api
from autotune.analysis.pick import chosen_trial
from autotune.cli.options import ShownQuietly
from autotune.errors import InvalidInput
from autotune.execution.local import LocalExecutor
from autotune.spec.config import TrainingConfig
from autotune.spec.data_sheets import requested_device
from autotune.spec.setting import EVERYDAY, TrialNumber, setting
from autotune.spec.workload import Workload
from autotune.study.prediction.predicted_training import PredictedSpace


@dataclass(frozen=True, kw_only=True)
class ExplainCommand(PredictedSpace, ShownQuietly):
    """A trial or a configuration to explain, and how the answer is shown."""

    trial: TrialNumber | None = setting(
        None,
        "Number of a trial of the study. [default: the study's pick]",
        metavar="TRIAL",
        is_argument=True,
    )
    space: str | None = setting(
        None,
        "Explain a configuration of this search space, with --name.",
        group=EVERYDAY,
        metavar="NAME|FILE",
    )
    name: str | None = setting(
        None, "Name of the configuration, with --space.", group=EVERYDAY, metavar="ROW"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.described("space", "compute_capability", "name", "scale")
        if self.study is None and not given:
            raise InvalidInput(
                "there is nothing to explain: no study and no configuration is given",
                hint="autotune explain STUDY explains its pick (autotune studies lists the "
                "studies); options such as --precision bf16-mixed describe a configuration",
            )
        if self.study is not None and given:
            raise InvalidInput(
                f"{', '.join(given)}: the trial sets workload, device and configuration",
                hint="leave these options out, or the study and the trial",
            )
        if (self.space is None) != (self.name is None):
            raise InvalidInput("--space and --name belong together", hint="give both, or neither")
        if self.space is not None and self.configuration:
            raise InvalidInput(
                f"--name and {', '.join(self.configuration)} both set the configuration",
                hint="leave one of them out",
            )


def explain(request: ExplainCommand) -> None:
    """Explain a trial's memory peak: where it is, why, and what each technique would save there.

    Without a study, explains the configuration that the options describe.
    """
    # These import numpy, 0.2 s that the help of this command does without.
    from autotune.cli import explanations  # noqa: PLC0415
    from autotune.cli.predicting import predicting  # noqa: PLC0415
    from autotune.study.explain.question import (  # noqa: PLC0415
        Question,
        question_of_trial,
    )
    from autotune.study.opening.requested_space import on_some_device  # noqa: PLC0415
    from autotune.study.prediction.predicted_device import (  # noqa: PLC0415
        predicted_device_of,
    )
    from autotune.study.prediction.predictions import Forecaster  # noqa: PLC0415

    def requested(device_type: str) -> tuple[Workload, TrainingConfig]:
        return explanations.requested(
            device_type,
            request.workload,
            request.configuration,
            space=request.search_space,
            name=request.name,
        )

    if request.study is None:
        device = requested_device(request.device, request.compute_capability)
        on_some_device(device, requested)
    with ExitStack() as stack:
        # A temporary folder: this command leaves no files behind, and also works in a folder that
        # cannot be written to.
        folder = stack.enter_context(TemporaryDirectory())
        executor = stack.enter_context(LocalExecutor(Path(folder)))
        if request.study is not None:
            shown = api.show(request.study, storage=request.storage)
            number = chosen_trial(shown, request.trial).number
            question = question_of_trial(
                executor,
                request.study,
                number,
                storage=request.storage,
                torch_version=request.torch_version,
            )
            explanations.say_beginning(quiet=request.quiet)
        else:
            explanations.say_beginning(quiet=request.quiet)
            predicted = predicted_device_of(
                request.device,
                compute_capability=request.compute_capability,
                executor=executor,
                storage=request.storage,
            )
            resolved_workload, config = requested(predicted.type)
            forecaster = Forecaster.for_device(
                predicted,
                executor=executor,
                workload=resolved_workload,
                torch_version=request.torch_version,
            )
            question = Question(forecaster=forecaster, config=config, unavailable={})
        with predicting(quiet=request.quiet) as tell:
            explanation = question.explain(progress=tell)
    if request.as_json:
        print(
            json.dumps(
                explanations.explanation_to_dict(question, explanation), indent=2, allow_nan=False
            )
        )
    else:
        explanations.print_explanation(question, explanation)
