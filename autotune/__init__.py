"""Find the fastest way to train a model within a memory cap, by short real trainings.

import autotune

result = autotune.search(max_mem="8GiB")
print(result.pick.reason)
result.export("pytorch")

`report`, `apply`, `current_config` and `load_config` are for training scripts.
"""

from autotune.analysis.pick import Preferences
from autotune.analysis.tolerance import Tolerance
from autotune.api import (
    dry_run,
    explain,
    export,
    fit,
    optuna_study,
    plot,
    predict,
    search,
    show,
    write_report,
)
from autotune.errors import AutotuneError
from autotune.result import Result
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
    "Result",
    "StudyResult",
    "Tolerance",
    "TrainingConfig",
    "TrialRecord",
    "Workload",
    "apply",
    "current_config",
    "dry_run",
    "explain",
    "export",
    "fit",
    "load_config",
    "optuna_study",
    "plot",
    "predict",
    "report",
    "search",
    "show",
    "write_report",
]


def __dir__() -> list[str]:
    """Return what is public, without the modules that Python binds here when they are imported."""
    return sorted([*__all__, "__version__", "__doc__", "__name__", "__file__", "__path__"])
