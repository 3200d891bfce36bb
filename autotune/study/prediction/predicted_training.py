"""The training that a prediction is asked for: of a study, or as settings describe it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig
from autotune.spec.data_sheets import DATA_SHEETS, requested_device
from autotune.spec.prediction import check_release
from autotune.spec.search_space import SearchSpace
from autotune.spec.setting import (
    EVERYDAY,
    THE_DEVICE,
    FilePaths,
    Settings,
    TrialNumber,
    all_options_of,
    part,
    same_setting,
    setting,
)
from autotune.spec.space_file import load_space
from autotune.spec.workload import SIZE_SETTINGS, Workload
from autotune.study.request import SearchRequest


@dataclass(frozen=True, kw_only=True)
class PredictedTraining(Settings):
    """What is trained, with which configuration and on which device: given, or of a study.

    Raises InvalidInput for settings that are invalid on any device.
    """

    is_predicted: ClassVar = True
    """Whether nothing is trained: DeepSpeed's engine does not run on fake tensors."""

    study: str | None = setting(
        None,
        "Name of a study; see autotune studies.",
        metavar="STUDY",
        is_argument=True,
        over_http=True,
    )
    trial: TrialNumber | None = setting(
        None,
        "Number of a trial of the study. [default: the study's pick]",
        group=EVERYDAY,
        metavar="NUMBER",
        over_http=True,
    )
    device: str | None = setting(
        None,
        "Device to predict for; it need not exist. A GPU by its data sheet: h100, l4, rtx-4090. "
        "[default: a GPU if there is one]",
        group=EVERYDAY,
        metavar="cpu|cuda|GPU",
        choices=("cpu", "cuda", *DATA_SHEETS),
        over_http=True,
    )
    from_file: FilePaths | None = same_setting(SearchRequest, "from_file")
    workload: Mapping[str, Any] = part(Workload, only=SIZE_SETTINGS, default_factory=dict)
    configuration: Mapping[str, Any] = part(TrainingConfig, default_factory=dict)
    compute_capability: str | None = setting(
        None,
        "Predict for a GPU of this compute capability: 9.0 for an H100. "
        "[default: that of the local GPU, else 8.0]",
        group=THE_DEVICE,
        metavar="X.Y",
        over_http=True,
    )
    torch_version: str | None = setting(
        None,
        "Predict CUDA memory for this torch version. [default: the installed one]",
        group=THE_DEVICE,
        flag="--torch",
        metavar="RELEASE",
        over_http=True,
    )
    storage: str = same_setting(SearchRequest, "storage")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_release(self.torch_version)
        requested_device(self.device, self.compute_capability)

    def described(self, *others: str) -> list[str]:
        """Returns the flags of the settings that say what a study would say, and of `others`."""
        given = [name for name in ("device", *others) if getattr(self, name) is not None]
        kind: type = type(self)
        options = all_options_of(kind)
        names = [*self.workload, *self.configuration, *given]
        return [options[name].flag if name in options else name for name in names]


@dataclass(frozen=True, kw_only=True)
class PredictedSpace(PredictedTraining):
    """The same, or configurations of a search space."""

    space: str | None = setting(
        None, "A search space.", group=EVERYDAY, metavar="NAME|FILE", over_http=True
    )
    scale: str | None = same_setting(SearchRequest, "scale")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None and self.space is None:
            raise InvalidInput(
                f"--scale {self.scale} needs a search space", hint="add --space peak_memory"
            )

    @cached_property
    def search_space(self) -> SearchSpace | None:
        """The search space, at its scale. Raises InvalidSpace and InvalidInput."""
        return None if self.space is None else load_space(self.space).at_scale(self.scale)
