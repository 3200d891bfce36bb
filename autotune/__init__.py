"""autotune: the fastest way to train your model inside the GPU memory you have, found by measuring.

import autotune

result = autotune.search(max_mem="8GiB")
print(result.pick.reason)
print(result.trial(result.pick.number).config)
"""

from autotune.api import optuna_study, predict, search, show
from autotune.config import TrainingConfig
from autotune.errors import AutotuneError
from autotune.prediction import Prediction
from autotune.recommendation.front import Tolerance
from autotune.recommendation.pick import Preferences
from autotune.result import StudyResult, TrialRecord
from autotune.script import apply, current_config, load_config, report
from autotune.workload import Workload

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
    "load_config",
    "optuna_study",
    "predict",
    "report",
    "search",
    "show",
]
