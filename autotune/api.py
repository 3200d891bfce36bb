"""The Python interface: the functions of the command line, with dataclasses as results.

Importing it takes a fraction of a second and does not import torch, because training scripts do
`import autotune`: each function imports the search or the database when it is called.
"""

# ruff: noqa: PLC0415

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences
from autotune.spec.config import TrainingConfig
from autotune.spec.model_choice import with_model_config
from autotune.spec.prediction import Prediction
from autotune.spec.result import StudyResult
from autotune.spec.study import DEFAULT_STORAGE, Sampler
from autotune.study.request import SEARCH_OPTIONS, request_of

if TYPE_CHECKING:
    import optuna

    from autotune.reporting.study_view import StudyView
    from autotune.study.dry_run import Plan
    from autotune.study.events import Listener

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def _takes_parameters_of(
    function: Callable[Parameters, object],
) -> Callable[[Callable[..., Returned]], Callable[Parameters, Returned]]:
    """Give a function the signature of another one, for type checkers, editors and `help`."""

    def with_signature(decorated: Callable[..., Returned]) -> Callable[Parameters, Returned]:
        signature = inspect.signature(function)
        returned = inspect.signature(decorated).return_annotation
        decorated.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return decorated

    return with_signature


def _ignore(_event: object) -> None:
    """Listen to nothing."""


def _never() -> bool:
    return False


def search(
    *,
    max_mem: str | int | None = None,
    space: str | None = None,
    scale: str | None = None,
    name: str | None = None,
    device: str | None = None,
    trials: int | None = None,
    time_budget: str | float | None = None,
    until_converged: bool = False,
    trial_time_limit: str | float = 600.0,
    compile_time_limit: str | float | None = None,
    step_time_limit: str | float | None = None,
    sampler: Sampler | None = None,
    seed: int | None = None,
    predict: bool = True,
    full_trainings: bool = False,
    perplexity_seeds: int = 1,
    fresh: bool = False,
    workers: int = 1,
    trials_per_device: int = 1,
    database_wait: str | float = 300.0,
    memory_snapshot: bool = False,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
    listener: "Listener | None" = None,
    should_stop: Callable[[], bool] | None = None,
    **workload: Any,
) -> StudyResult:
    """Run a study, or resume the one of that name, and return its records, front and pick.

    Every setting of `autotune search` is a parameter; `dry_run` takes the same ones and says what a
    search would do. `space` is the name of a search space or the path of a TOML file, `scale` one
    of its scales. Sizes and durations are numbers of bytes and seconds, or strings such as "8GiB"
    and "30m". `workload` takes the fields of `Workload`: `layers=12, width=768, dataset="my.txt"`;
    the search space or the device decides the others. Works in a plain script, without a main
    guard.

    A new study reuses what earlier studies in `storage` measured for the same workload, device and
    versions, in addition to its `trials`; with `fresh` it measures everything again.

    A trial is stopped after `trial_time_limit`, or if a step takes longer than `step_time_limit`
    (by default a fifth of it); a step that compiles code may take `compile_time_limit` (by default
    half of it). With `memory_snapshot`, torch's allocation history of each trial is stored in the
    study's folder (CUDA only).

    With `workers`, that many processes share the study, each on its own GPU if the machine has
    several. The same call from another process joins the study, also from another machine if
    `storage` is in PostgreSQL. `database_wait` is how long to wait for an unreachable database.

    Raises AutotuneError for a request that cannot be carried out. KeyboardInterrupt stops the
    running trial; all results are stored, and the same call resumes the study.
    """
    settings = dict(locals())  # a test compares the parameters with the fields of the request
    from autotune.study.search import search as run

    request = request_of(settings, workload=with_model_config(workload), preferences=preferences)
    return run(
        request,
        listener=listener or _ignore,
        should_stop=should_stop or _never,
    )


@_takes_parameters_of(search)
def dry_run(
    *,
    preferences: Preferences = DEFAULT_PREFERENCES,
    listener: "Listener | None" = None,
    should_stop: Callable[[], bool] | None = None,
    **settings: Any,
) -> "Plan":
    """Return what a search with these settings would do and how long it would take.

    Takes the parameters of `search`. Creates no study: it checks the request, prepares the files of
    the workload, and times a few short trainings. Raises AutotuneError for a request that cannot be
    carried out.
    """
    from autotune.study.dry_run import plan

    known = {option.keyword for option in SEARCH_OPTIONS.values()}
    workload = {name: value for name, value in settings.items() if name not in known}
    request = request_of(settings, workload=with_model_config(workload), preferences=preferences)
    return plan(
        request,
        listener=listener or _ignore,
        should_stop=should_stop or _never,
    )


def predict(
    *,
    device: str | None = None,
    configuration: Mapping[str, Any] | None = None,
    compute_capability: str | None = None,
    torch_version: str | None = None,
    with_timeline: bool = False,
    **workload: Any,
) -> Prediction:
    """Predict the peak memory of one configuration, in bytes, by a training step on fake tensors.

    This needs no GPU, no text and none of the memory of the model. `configuration` takes the fields
    of `TrainingConfig`, such as {"checkpointing": "block", "compile": "block"}; `workload` takes
    those of `Workload`. `device` is "cpu" or "cuda", also on a machine without a GPU;
    `compute_capability`, such as "9.0", selects another GPU than that of this machine. Raises
    InvalidInput for invalid settings, and PredictionImpossible for a model that cannot run on fake
    tensors.
    """
    from autotune.execution.local import LocalExecutor
    from autotune.study.predictions import Forecaster, predicted_device_of, workload_of

    with TemporaryDirectory() as folder, LocalExecutor(Path(folder)) as executor:
        device_type, capability = predicted_device_of(
            device, compute_capability=compute_capability, executor=executor
        )
        complete_workload = workload_of(device_type, with_model_config(workload))
        forecaster = Forecaster(
            executor=executor,
            workload=complete_workload,
            device_type=device_type,
            compute_capability=capability,
            torch_version=torch_version,
        )
        choices = {"micro_batch_size": complete_workload.global_batch, **(configuration or {})}
        config = TrainingConfig(**choices)
        return forecaster.predict(config, with_timeline=with_timeline)


def show(
    study: str,
    *,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> StudyResult:
    """Return the records of a study with its front and pick. Raises UnknownStudy."""
    from autotune.storage.store import StudyStore
    from autotune.study.search import result_of

    store = StudyStore(storage)
    try:
        return result_of(store, study, preferences)
    finally:
        store.close()


def optuna_study(study: str, *, storage: str = DEFAULT_STORAGE) -> "optuna.Study":
    """Return the results as an in-memory Optuna study, for Optuna's plots and dashboard.

    Each trial has the constraints `device_memory` and `training`, feasible at or below zero, and
    the user attributes `autotune_number` and `outcome`. An objective that was not measured has the
    worst value seen until then. `optuna.copy_study` copies the study to an Optuna database. Raises
    UnknownStudy.
    """
    from autotune.storage.store import StudyStore
    from autotune.study.sampler.optuna_samplers import optuna_study_of

    store = StudyStore(storage)
    try:
        return optuna_study_of(store.definition(study)[0], store.trials(study))
    finally:
        store.close()


def view(
    study: str,
    *,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> "StudyView":
    """Return the result with the definition and the predictions, as figures and reports need them.

    Raises UnknownStudy.
    """
    from autotune.storage.store import StudyStore
    from autotune.study.search import view_of

    store = StudyStore(storage)
    try:
        return view_of(store, study, preferences)
    finally:
        store.close()
