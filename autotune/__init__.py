"""Find the fastest way to train a model within a memory cap, by short real trainings.

import autotune

result = autotune.search(max_mem="8GiB")
print(result.pick.reason)
print(result.trial(result.pick.number).config)
"""

from autotune.analysis.pick import Preferences
from autotune.analysis.tolerance import Tolerance
from autotune.api import dry_run, optuna_study, predict, search, show
from autotune.errors import AutotuneError
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Prediction
from autotune.spec.result import StudyResult, TrialRecord
from autotune.spec.workload import Workload
from autotune.training.script.interface import apply, current_config, load_config, report

__version__ = "0.1.0"

__all__ = [
    "AutotuneError",
    "Prediction",
    "Preferences",
    "StudyResult",
    "Tolerance",
    "TrainingConfig",
    "TrialRecord",
    "Workload",
    "apply",
    "current_config",
    "dry_run",
    "load_config",
    "optuna_study",
    "predict",
    "report",
    "search",
    "show",
]
