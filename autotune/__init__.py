"""Find the fastest way to train a model within a memory cap, by short real trainings.

import autotune

result = autotune.search(max_mem="8GiB")
print(result.pick.reason)
result.export("pytorch")

`report`, `apply`, `current_config` and `load_config` are for training scripts, `TrainerCallback`
for those with transformers' Trainer and `LightningCallback` for those with Lightning's. `Client`
talks to a server that `autotune serve` has started.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autotune.analysis.pick import Preferences
from autotune.analysis.tolerance import Tolerance
from autotune.api import (
    checkpoint,
    compare,
    confirm,
    dry_run,
    explain,
    export,
    export_into,
    fit,
    fit_to,
    optuna_study,
    plot,
    predict,
    profile,
    search,
    show,
    studies,
    will_it_fit,
    write_optuna_study,
    write_report,
)
from autotune.errors import AutotuneError
from autotune.result import Result
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Prediction
from autotune.spec.result import StudyResult, TrialRecord
from autotune.spec.workload import Workload
from autotune.training.script.interface import apply, current_config, load_config, report

if TYPE_CHECKING:
    from autotune.client.client import Client as Client
    from autotune.training.script.hugging_face import TrainerCallback as TrainerCallback
    from autotune.training.script.lightning import LightningCallback as LightningCallback

__version__ = "0.2.1"

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
    "checkpoint",
    "compare",
    "confirm",
    "current_config",
    "dry_run",
    "explain",
    "export",
    "export_into",
    "fit",
    "fit_to",
    "load_config",
    "optuna_study",
    "plot",
    "predict",
    "profile",
    "report",
    "search",
    "show",
    "studies",
    "will_it_fit",
    "write_optuna_study",
    "write_report",
]


_CALLBACKS = {
    "TrainerCallback": "autotune.training.script.hugging_face",
    "LightningCallback": "autotune.training.script.lightning",
}
"""Modules that import the library of their trainer, which takes seconds or is not installed.

So they are imported when they are used, and `from autotune import *` leaves them out.
"""
_LATE = {**_CALLBACKS, "Client": "autotune.client.client"}
"""With what imports httpx, 0.2 s that training scripts do without."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_LATE[name])
    except ModuleNotFoundError as error:  # what looks at all attributes expects an AttributeError
        raise AttributeError(f"autotune.{name} needs {error.name}: install it") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    """Returns what is public, without the modules that Python binds here when they are imported."""
    attributes = ("__version__", "__doc__", "__name__", "__file__", "__path__")
    return sorted([*__all__, *_LATE, *attributes])
