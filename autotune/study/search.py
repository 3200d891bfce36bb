"""The study: ask, run, keep, tell.

`search` runs one, `result_of` reads one; `dry_run.py` says what one would do.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from autotune.analysis.front import pareto_front
from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences, choose
from autotune.errors import Stopped
from autotune.execution.device_slots import why_containers_are_not_seen
from autotune.execution.local import LocalExecutor
from autotune.failpoints import failpoint
from autotune.reporting.study_view import StudyView
from autotune.spec.result import DeviceInfo, StudyResult, TrialRecord
from autotune.spec.study import StudyDefinition
from autotune.storage.store import StudyStore
from autotune.study.events import Listener, Notice, StudyOpened
from autotune.study.open_study import OpenedStudy, alone, open_study, opened_store, stored_study
from autotune.study.prediction_cache import PredictionCache
from autotune.study.predictions import Forecaster
from autotune.study.request import SearchRequest, check_sampler, new_definition, space_of
from autotune.study.resume import check_same_study
from autotune.study.trial_runner import TrialOptions
from autotune.study.work_folder import work_folder
from autotune.study.workers.coordinator import Coordinator
from autotune.study.workers.processes import Workers
from autotune.study.workers.retry import DatabaseRetry
from autotune.units import format_size

__all__ = ["SearchRequest", "result_of", "search", "view_of"]


def search(
    request: SearchRequest,
    *,
    listener: Listener = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
    make_executor: Callable[..., LocalExecutor] = LocalExecutor,
) -> StudyResult:
    """Begins the study, continues it or joins it, and returns what is known when it is done.

    Raises AutotuneError for what cannot be done as asked, and Stopped when `should_stop` says so;
    what was measured until then is kept, and the same call goes on from there.
    """

    def check_stop() -> None:
        if should_stop():
            raise Stopped("the search was stopped", hint="the same command goes on from here")

    retry = DatabaseRetry(
        limit_seconds=request.database_wait_seconds, listener=listener, check_stop=check_stop
    )
    stored = retry(lambda: stored_study(request))
    if stored is not None:
        check_same_study(request, stored)
        check_sampler(stored.sampler, until_converged=request.until_converged)
    space = space_of(request) if stored is None else None
    with (
        work_folder(request.storage) as work,
        make_executor(
            work, should_stop=should_stop, note=lambda sentence: listener(Notice(message=sentence))
        ) as executor,
    ):
        new = None
        if space is not None:
            new = new_definition(
                request, space=space, executor=executor, work=work, listener=listener
            )
            failpoint("files prepared")
        name = request.name or "" if new is None else new.definition.name
        try:
            with opened_store(
                request.storage, retry
            ) as store:  # not before: what is refused leaves no database
                with alone(work / f".{name}.opening", check_stop):
                    opened = open_study(
                        store, name, new, request, executor=executor, work=work, retry=retry
                    )
                with Workers(
                    request,
                    name=name,
                    devices=_devices_of_workers(request, opened.definition, executor),
                    log_folder=work / name / "logs",
                    listener=listener,
                    check_stop=check_stop,
                ):
                    _run(
                        opened,
                        request,
                        store,
                        executor,
                        work / name,
                        listener,
                        should_stop,
                        retry,
                    )
                return retry(lambda: result_of(store, name, request.preferences))
        finally:
            if new is not None:
                new.discard()


def _run(
    opened: OpenedStudy,
    request: SearchRequest,
    store: StudyStore,
    executor: LocalExecutor,
    folder: Path,
    listener: Listener,
    should_stop: Callable[[], bool],
    retry: DatabaseRetry,
) -> None:
    from autotune.study.loop import StudySession

    definition = opened.definition
    is_predictable = request.predict and definition.workload.script is None
    forecaster = Forecaster.of_device(
        definition.device, executor=executor, workload=definition.workload
    )
    predict = forecaster.forecast if is_predictable else None
    budget = request.time_budget_seconds
    deadline = None if budget is None else time.monotonic() + budget
    slots = executor.slots_on(definition.device, places=request.trials_per_device)
    with Coordinator(
        definition, store=store, folder=folder, listener=listener, retry=retry
    ) as shared:
        for sentence in _of_this_machine(definition.device, request):
            listener(Notice(message=sentence))
        listener(
            StudyOpened(
                definition=definition,
                legal=definition.legal_space(),
                trials_wanted=opened.trials_wanted,
                records=tuple(sorted(shared.records.values(), key=lambda record: record.number)),
                is_new=opened.reused is not None,
                reused={} if opened.reused is None else opened.reused.counts,
            )
        )
        session = StudySession(
            definition,
            shared=shared,
            executor=executor,
            slots=slots,
            prediction_cache=PredictionCache(definition, store=store, predict=predict, retry=retry),
            study_folder=folder,
            listener=listener,
            should_stop=should_stop,
            trial_options=TrialOptions(
                time_limit_seconds=request.trial_time_limit_seconds,
                compile_time_limit_seconds=request.compile_time_limit_seconds,
                step_time_limit_seconds=request.step_time_limit_seconds,
                full_trainings=request.full_trainings,
                seeds=request.perplexity_seeds,
                keep_snapshots=request.memory_snapshot,
            ),
            until_converged=request.until_converged,
        )
        session.run(trials_wanted=opened.trials_wanted, deadline=deadline)


def _of_this_machine(device: DeviceInfo, request: SearchRequest) -> Iterator[str]:
    """What of the machine makes a search on a GPU mean something else than it seems to."""
    if request.trials_per_device > 1 and device.context_bytes is not None:
        yield (
            f"{request.trials_per_device} trials at a time share {device.device}: their speeds are those of sharing "
            f"it, and each counts {format_size(device.context_bytes)} for its CUDA context, as of a new one, without "
            "the kernels that it loads; leave --trials-per-device out to measure both"
        )
    if sentence := why_containers_are_not_seen(device):
        yield sentence


def result_of(
    store: StudyStore, study: str, preferences: Preferences = DEFAULT_PREFERENCES
) -> StudyResult:
    """Everything known of a study, with its front and pick. Raises UnknownStudy."""
    definition, _ = store.definition(study)
    records = store.trials(study)
    baseline = _baseline_of(definition, records)
    front = pareto_front(records, tolerance=preferences.tolerance)
    return StudyResult(
        study=study,
        storage=store.url,
        workload=definition.workload,
        device=definition.device,
        cap_bytes=definition.cap_bytes,
        trials=tuple(records),
        front=front,
        pick=choose(records, front, baseline=baseline, preferences=preferences),
        baseline=None if baseline is None else baseline.number,
    )


def view_of(
    store: StudyStore, study: str, preferences: Preferences = DEFAULT_PREFERENCES
) -> StudyView:
    """The same with the study's definition and predictions, for figures and reports.

    Raises UnknownStudy.
    """
    definition, _ = store.definition(study)
    begun_at, last_result_at = store.dates(study)
    return StudyView(
        definition=definition,
        result=result_of(store, study, preferences),
        forecasts=store.forecasts(study),
        begun_at=begun_at,
        last_result_at=last_result_at,
    )


def _devices_of_workers(
    request: SearchRequest, definition: StudyDefinition, executor: LocalExecutor
) -> list[DeviceInfo]:
    """The study's device, and where none was asked for by name the others of its kind."""
    device = definition.device
    if request.workers == 1 or request.device not in (None, device.type) or device.type == "cpu":
        return [device]
    alike = [
        other
        for other in executor.devices()
        if other.name == device.name and other.device != device.device
    ]
    return [device, *alike]


def _baseline_of(definition: StudyDefinition, records: Iterable[TrialRecord]) -> TrialRecord | None:
    baseline = definition.baseline_config()
    known = ("ok", "over_cap", "predicted_over_cap")
    return next((r for r in records if r.config == baseline and r.outcome in known), None)
