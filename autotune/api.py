"""The Python interface: the same as the command line, with plain dataclasses as results.

Does not load torch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences
from autotune.spec.config import TrainingConfig
from autotune.spec.model_choice import with_model_config
from autotune.spec.prediction import Prediction
from autotune.spec.result import StudyResult
from autotune.spec.study import DEFAULT_STORAGE, Sampler
from autotune.units import parse_duration, parse_size

if TYPE_CHECKING:
    import optuna

    from autotune.reporting.study_view import StudyView
    from autotune.study.events import Listener


def search(
    *,
    max_mem: str | int | None = None,
    name: str | None = None,
    space: str | None = None,
    scale: str | None = None,
    device: str | None = None,
    trials: int | None = None,
    time_budget: str | float | None = None,
    until_converged: bool = False,
    trial_time_limit: str | float = 600.0,
    compile_time_limit: str | float | None = None,
    step_time_limit: str | float | None = None,
    sampler: Sampler | None = None,
    seed: int | None = None,
    storage: str = DEFAULT_STORAGE,
    predict: bool = True,
    full_trainings: bool = False,
    perplexity_seeds: int = 1,
    fresh: bool = False,
    workers: int = 1,
    trials_per_device: int = 1,
    database_wait: str | float = 300.0,
    preferences: Preferences = DEFAULT_PREFERENCES,
    listener: "Listener | None" = None,
    should_stop: Callable[[], bool] | None = None,
    **workload: Any,
) -> StudyResult:
    """Begins a study, or continues the one of that name, and returns its records, front and pick.

    `space` is the name of a search space or a TOML file, `scale` one of the sizes that it has.
    Sizes and durations are numbers of bytes and seconds or texts such as "8GiB" and "30m".
    `workload` takes the fields of `Workload`: `layers=12, width=768, dataset="my.txt"`. What is
    left out is decided by the search space or the device. Works in a plain script, without a main
    guard. A new study takes over what earlier ones in `storage` measured of the same workload on
    the same device and versions, in addition to its `trials`; with `fresh` it measures that again.

    A trial is ended after `trial_time_limit`, or when no step ended within `step_time_limit` (a
    fifth of it), one in which code is compiled within `compile_time_limit` (half of it).

    Raises AutotuneError for what cannot be done as asked. KeyboardInterrupt ends the running trial
    and keeps all results; the same call goes on from there. With `workers` that many processes
    share the study, on a machine with several GPUs each on its own; the same call from another
    process, also on another machine with `storage` in PostgreSQL, joins it too. A database that is
    away is waited for, `database_wait`.
    """
    from autotune.study.search import SearchRequest
    from autotune.study.search import search as run

    request = SearchRequest(
        name=name,
        storage=storage,
        space=space,
        scale=scale,
        device=device,
        cap_bytes=parse_size(max_mem) if isinstance(max_mem, str) else max_mem,
        sampler=sampler,
        seed=seed,
        trials=trials,
        time_budget_seconds=None if time_budget is None else parse_duration(str(time_budget)),
        until_converged=until_converged,
        trial_time_limit_seconds=parse_duration(str(trial_time_limit)),
        compile_time_limit_seconds=None
        if compile_time_limit is None
        else parse_duration(str(compile_time_limit)),
        step_time_limit_seconds=None
        if step_time_limit is None
        else parse_duration(str(step_time_limit)),
        predict=predict,
        full_trainings=full_trainings,
        perplexity_seeds=perplexity_seeds,
        fresh=fresh,
        workers=workers,
        trials_per_device=trials_per_device,
        database_wait_seconds=parse_duration(str(database_wait)),
        workload=with_model_config(workload),
        preferences=preferences,
    )
    return run(
        request, listener=listener or (lambda _: None), should_stop=should_stop or (lambda: False)
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
    """Peak memory of one configuration on fake tensors, without a device, a text or the model's memory.

    `configuration` takes the fields of `TrainingConfig`: {"checkpointing": "block", "compile":
    "block"}; `workload` those of `Workload`. `device` is "cpu" or "cuda", which need not be there;
    `compute_capability`, such as "9.0", says which GPU is meant where it is not the one here.
    Raises InvalidInput of every kind, and PredictionImpossible for a model that cannot run on fake
    tensors.
    """
    from autotune.execution.local import LocalExecutor
    from autotune.study.predictions import Forecaster, predicted_device_of, workload_of

    with TemporaryDirectory() as folder, LocalExecutor(Path(folder)) as executor:
        device_type, capability = predicted_device_of(
            device, compute_capability=compute_capability, executor=executor
        )
        settled = workload_of(device_type, with_model_config(workload))
        forecaster = Forecaster(
            executor=executor,
            workload=settled,
            device_type=device_type,
            compute_capability=capability,
            torch_version=torch_version,
        )
        config = TrainingConfig(
            **{"micro_batch_size": settled.global_batch, **(configuration or {})}
        )
        return forecaster.predict(config, with_timeline=with_timeline)


def show(
    study: str,
    *,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> StudyResult:
    """What is known of a study, with its front and pick. Raises UnknownStudy."""
    from autotune.storage.store import StudyStore
    from autotune.study.search import result_of

    store = StudyStore(storage)
    try:
        return result_of(store, study, preferences)
    finally:
        store.close()


def optuna_study(study: str, *, storage: str = DEFAULT_STORAGE) -> "optuna.Study":
    """The study's results as a study of Optuna's in memory, for its own figures, importances and dashboard.

    Each trial has the constraints `device_memory` and `training`, feasible at or below zero, and
    the user attributes `autotune_number` and `outcome`; where something was not measured its value
    is the worst seen until then. `optuna.copy_study` puts it into a database of Optuna's. Raises
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
    """What `show` gives, with the study's definition and predictions: what figures and reports are made of."""
    from autotune.storage.store import StudyStore
    from autotune.study.search import view_of

    store = StudyStore(storage)
    try:
        return view_of(store, study, preferences)
    finally:
        store.close()
