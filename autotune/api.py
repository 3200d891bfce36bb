"""The Python interface: the same as the command line, with plain dataclasses as results. Does not load torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from autotune.config import TrainingConfig
from autotune.definition import DEFAULT_STORAGE, Sampler
from autotune.model_choice import with_model_config
from autotune.prediction import Prediction
from autotune.quantities import parse_duration, parse_size
from autotune.recommendation.pick import DEFAULT_PREFERENCES, Preferences
from autotune.result import StudyResult

if TYPE_CHECKING:
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
    sampler: Sampler | None = None,
    seed: int | None = None,
    storage: str = DEFAULT_STORAGE,
    predict: bool = True,
    full_trainings: bool = False,
    perplexity_seeds: int = 1,
    fresh: bool = False,
    preferences: Preferences = DEFAULT_PREFERENCES,
    listener: "Listener | None" = None,
    should_stop: Callable[[], bool] | None = None,
    **workload: Any,
) -> StudyResult:
    """Begins a study, or continues the one of that name, and returns its records, front and pick.

    `space` is the name of a search space or a TOML file, `scale` one of the sizes that it has. Sizes and durations are
    numbers of bytes and seconds or texts such as "8GiB" and "30m". `workload` takes the fields of `Workload`:
    `layers=12, width=768, dataset="my.txt"`. What is left out is decided by the search space or the device. Works in
    a plain script, without a main guard. A new study takes over what earlier ones in `storage` measured of the same
    workload on the same device and versions, in addition to its `trials`; with `fresh` it measures that again.

    Raises AutotuneError for what cannot be done as asked. KeyboardInterrupt ends the running trial and keeps all
    results; the same call goes on from there.
    """
    from autotune.study import SearchRequest
    from autotune.study import search as run

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
        predict=predict,
        full_trainings=full_trainings,
        perplexity_seeds=perplexity_seeds,
        fresh=fresh,
        workload=with_model_config(workload),
        preferences=preferences,
    )
    return run(request, listener=listener or (lambda _: None), should_stop=should_stop or (lambda: False))


def predict(
    *,
    device: str | None = None,
    configuration: Mapping[str, Any] | None = None,
    torch_version: str | None = None,
    with_timeline: bool = False,
    **workload: Any,
) -> Prediction:
    """Peak memory of one configuration on fake tensors, without a device, a text or the model's memory.

    `configuration` takes the fields of `TrainingConfig`: {"checkpointing": "block", "compile": "block"}; `workload`
    those of `Workload`. `device` is "cpu" or "cuda", which need not be there. Raises InvalidInput of every kind, and
    PredictionImpossible for a model that cannot run on fake tensors.
    """
    from autotune.executors.local import LocalExecutor
    from autotune.study.forecast import Forecaster, device_type_of, workload_of

    with TemporaryDirectory() as folder, LocalExecutor(Path(folder)) as executor:
        device_type = device_type_of(device, executor=executor)
        settled = workload_of(device_type, with_model_config(workload))
        forecaster = Forecaster(
            executor=executor, workload=settled, device_type=device_type, torch_version=torch_version
        )
        config = TrainingConfig(**{"micro_batch_size": settled.global_batch, **(configuration or {})})
        return forecaster.predict(config, with_timeline=with_timeline)


def show(
    study: str,
    *,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> StudyResult:
    """What is known of a study, with its front and pick. Raises UnknownStudy."""
    from autotune.storage import StudyStore
    from autotune.study import result_of

    store = StudyStore(storage)
    try:
        return result_of(store, study, preferences)
    finally:
        store.close()


def view(
    study: str,
    *,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> "StudyView":
    """What `show` gives, with the study's definition and predictions: what figures and reports are made of."""
    from autotune.storage import StudyStore
    from autotune.study import view_of

    store = StudyStore(storage)
    try:
        return view_of(store, study, preferences)
    finally:
        store.close()
