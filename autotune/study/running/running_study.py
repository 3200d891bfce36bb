"""What the parts of a running search have in common."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.execution.trial_options import TrialOptions
from autotune.spec.study import StudyDefinition
from autotune.study.events import Listener
from autotune.study.prediction.prediction_cache import PredictionCache
from autotune.study.workers.coordinator import Coordinator


@dataclass(frozen=True, kw_only=True)
class RunningStudy:
    """A study that this process works on: its trials, and what runs, predicts and tells of them."""

    definition: StudyDefinition
    shared: Coordinator
    prediction_cache: PredictionCache
    folder: Path
    """The study's own, in the work folder."""
    listener: Listener
    trial_options: TrialOptions
    clock: Callable[[], float] = time.monotonic
