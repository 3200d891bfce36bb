"""The Python interface: the same as the command line, with plain dataclasses as results. Does not load torch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autotune.definition import DEFAULT_STORAGE, Sampler
from autotune.quantities import parse_duration, parse_size
from autotune.recommendation.pick import DEFAULT_PREFERENCES, Preferences
from autotune.result import StudyResult
from autotune.workload import with_model_config

if TYPE_CHECKING:
    from autotune.study.events import Listener


def search(
    *,
    max_mem: str | int | None = None,
    name: str | None = None,
    space: str | None = None,
    device: str | None = None,
    trials: int | None = None,
    time_budget: str | float | None = None,
    trial_time_limit: str | float = 600.0,
    sampler: Sampler | None = None,
    seed: int | None = None,
    storage: str = DEFAULT_STORAGE,
    predict: bool = True,
    preferences: Preferences = DEFAULT_PREFERENCES,
    listener: "Listener | None" = None,
    should_stop: Callable[[], bool] | None = None,
    **workload: Any,
) -> StudyResult:
    """Begins a study, or continues the one of that name, and returns its records, front and pick.

    Sizes and durations are numbers of bytes and seconds or texts such as "8GiB" and "30m". `workload` takes the
    fields of `Workload`: `layers=12, width=768, dataset="my.txt"`. What is left out is decided by the search space
    or the device. Works in a plain script, without a main guard.

    Raises AutotuneError for what cannot be done as asked. KeyboardInterrupt ends the running trial and keeps all
    results; the same call goes on from there.
    """
    from autotune.study import SearchRequest
    from autotune.study import search as run

    request = SearchRequest(
        name=name,
        storage=storage,
        space=space,
        device=device,
        cap_bytes=parse_size(max_mem) if isinstance(max_mem, str) else max_mem,
        sampler=sampler,
        seed=seed,
        trials=trials,
        time_budget_seconds=None if time_budget is None else parse_duration(str(time_budget)),
        trial_time_limit_seconds=parse_duration(str(trial_time_limit)),
        predict=predict,
        workload=with_model_config(workload),
        preferences=preferences,
    )
    return run(request, listener=listener or (lambda _: None), should_stop=should_stop or (lambda: False))


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
