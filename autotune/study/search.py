"""Entry of a search: open or resume a study, run the main loop on its devices, read the result.

`records.py` reads a study, and `dry_run.py` reports what a study would do. The main loop is
`loop.py`, and one trial of it `trial_runner.py`. Importing this imports Optuna, half a second.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

from autotune.analysis.pick import chosen_trial
from autotune.errors import InvalidInput, Stopped, TrialLost
from autotune.execution.device_slots import container_isolation_note
from autotune.execution.flow import Flow
from autotune.execution.local import LocalExecutor
from autotune.reporting.outcomes import OUTCOME_LABELS
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import ignored_quantization
from autotune.spec.prediction import Forecast
from autotune.spec.result import DeviceInfo, StudyResult
from autotune.spec.search_space import SearchSpace
from autotune.storage.retry import RetryPolicy
from autotune.storage.store import StudyStore
from autotune.study.confirmation.request import ConfirmationRequest, seconds_of_trials
from autotune.study.confirmation.session import ConfirmationSession
from autotune.study.event_text import opening_lines
from autotune.study.events import Listener, Notice, StudyOpened
from autotune.study.opening.new_study import new_definition, with_peaks
from autotune.study.opening.open_study import (
    OpenedStudy,
    open_study,
    opened_store,
    opening_lock,
    stored_study,
)
from autotune.study.opening.requested_space import of_each_trial, space_of
from autotune.study.opening.resume import check_same_study
from autotune.study.opening.work_folder import work_folder
from autotune.study.prediction.prediction_cache import PredictionCache
from autotune.study.records import result_of
from autotune.study.request import SearchRequest, check_sampler
from autotune.study.running.devices_of_search import Devices, devices_of, forecast_by
from autotune.study.running.loop import StudySession
from autotune.study.running.places import ThreadedListener
from autotune.study.running.running_study import RunningStudy
from autotune.study.running.time_budget import TimeBudget
from autotune.study.workers.coordinator import Coordinator
from autotune.study.workers.retry import search_retry
from autotune.system.failpoints import failpoint
from autotune.system.standard_streams import reopen_closed_streams
from autotune.units import format_size

T = TypeVar("T")


def search(
    request: SearchRequest,
    *,
    listener: Listener = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
    make_executor: Callable[..., LocalExecutor] = LocalExecutor,
    space: SearchSpace | None = None,
    confirmation: ConfirmationRequest | None = None,
    was_reached: bool = False,
) -> StudyResult:
    """Start, resume or join the study of `request`, and return its result once it is done.

    `space` is what `space_of(request)` has returned, where that was called already. With
    `confirmation` it runs no trial, and measures again what that says. `was_reached` says that this
    process has used the database before: one that cannot be reached is then away for a while. Where
    the search uses several devices, `should_stop` is called in other threads, too; `listener` never
    is.

    Raises AutotuneError for a request that is invalid or cannot be carried out, and Stopped once
    `should_stop` returns True. Everything measured until then is stored, and the same call resumes
    from there.
    """
    began = time.monotonic()

    def check_stop() -> None:
        if should_stop():
            raise Stopped("the search was stopped", hint="run the same command again to continue")

    reopen_closed_streams()
    listener = ThreadedListener(listener)
    retry = search_retry(
        limit_seconds=request.database_wait, listener=listener, check_stop=check_stop
    )
    stored = stored_study(request, retry, was_reached=was_reached)
    if confirmation is not None:
        _check_confirmation(request, confirmation, retry)
    if stored is not None:
        check_same_study(request, stored)
        check_sampler(stored.sampler, until_converged=request.until_converged)
    if stored is not None:
        space = None
    elif space is None:
        space = space_of(request)
    with (
        work_folder(request.storage, retry) as work,
        devices_of(
            request,
            work,
            make_executor=make_executor,
            should_stop=should_stop,
            listener=listener,
        ) as devices,
    ):
        request = devices.choose(
            request,
            devices_per_trial=of_each_trial("devices_per_trial", request, space, stored=stored),
            nodes_per_trial=of_each_trial("nodes_per_trial", request, space, stored=stored),
            stored=stored,
            is_confirmation=confirmation is not None,
        )
        new = None
        if space is not None:
            new = _unless_lost(
                devices,
                partial(new_definition, request, space=space, work=work, listener=listener),
            )
            new = _unless_lost(devices, partial(with_peaks, new, request, listener=listener))
            failpoint("files prepared")
        name = request.name or "" if new is None else new.definition.name
        try:
            # The database is opened only now, so that a rejected request does not create one.
            with opened_store(request.storage, retry) as store:
                with opening_lock(work / f".{name}.opening", check_stop):
                    opened = _unless_lost(
                        devices, partial(open_study, store, name, new, request, work=work)
                    )
                if opened.perplexity_seeds is not None:
                    request = dataclasses.replace(request, perplexity_seeds=opened.perplexity_seeds)
                default_budget = None
                if stored is None:
                    device_type = opened.definition.device.type
                    default_budget = request.default_time_budget_seconds(device_type)
                if default_budget is not None:
                    request = dataclasses.replace(request, time_budget=default_budget)
                _run(
                    opened,
                    request,
                    store,
                    devices,
                    work / name,
                    listener,
                    should_stop,
                    confirmation=confirmation,
                    default_time_budget_seconds=default_budget,
                    began=began,
                )
                return result_of(store, name, request.preferences)
        finally:
            if new is not None:
                new.discard()


def _unless_lost(devices: Devices, prepare: Callable[..., T]) -> T:
    """Returns what `prepare` returns, called again with another executor where its is lost."""
    while True:
        try:
            return prepare(executor=devices.executor)
        except TrialLost:
            if not devices.replace_first():
                raise


def _run(
    opened: OpenedStudy,
    request: SearchRequest,
    store: StudyStore,
    devices: Devices,
    folder: Path,
    listener: ThreadedListener,
    should_stop: Callable[[], bool],
    *,
    confirmation: ConfirmationRequest | None,
    default_time_budget_seconds: float | None,
    began: float,
) -> None:
    definition, executor = opened.definition, devices.executor
    predicts = request.predict and definition.workload.script is None
    forecast = forecast_by(executor, definition.device, definition)
    budget = TimeBudget.of(request, began=began, seconds_waited=executor.seconds_waited)

    def check_stop() -> None:
        if should_stop():
            raise Stopped("the search was stopped", hint="run the same command again to continue")

    with (
        Coordinator(definition, store=store, folder=folder, listener=listener) as shared,
        devices.places(definition, predicts=predicts) as places,
    ):
        for sentence in _device_warnings(definition.device, request):
            listener(Notice(message=sentence))
        if ignored := ignored_quantization(definition.workload.model_config):
            listener(Notice(message=ignored))
        listener(
            StudyOpened(
                study=definition.name,
                lines=tuple(
                    opening_lines(
                        definition,
                        is_new=opened.reused is not None,
                        excluded=definition.legal_space().excluded,
                        places=devices.uuids,
                        reused={} if opened.reused is None else opened.reused.counts,
                        default_time_budget_seconds=default_time_budget_seconds,
                        seconds_for_trials=budget.seconds_for_trials,
                    )
                ),
                trials_wanted=opened.trials_wanted,
                records=tuple(sorted(shared.records.values(), key=lambda record: record.number)),
                is_new=opened.reused is not None,
                cap_bytes=definition.cap_bytes,
                device=definition.device.name,
                is_cuda=definition.device.type == "cuda",
                baseline=definition.baseline_config(),
                default_time_budget_seconds=default_time_budget_seconds,
                seconds_for_trials=budget.seconds_for_trials,
                seconds_left=budget.seconds_left,
                confirm_share=request.confirm_share if request.confirm else None,
                seconds_of_trials=seconds_of_trials(shared.trial_times()),
                places=devices.uuids,
            )
        )

        if budget.setup_note:
            listener(Notice(message=budget.setup_note))

        def predict_at_first(config: TrainingConfig) -> Flow[Forecast]:
            predict_there = places.first.predict or forecast
            return predict_there(config)

        prediction_cache = PredictionCache(
            definition, store=store, predict=predict_at_first if predicts else None
        )
        study = RunningStudy(
            definition=definition,
            shared=shared,
            prediction_cache=prediction_cache,
            folder=folder,
            listener=listener,
            trial_options=request.trial_options,
        )
        session = StudySession(
            study,
            executor=executor,
            should_stop=devices.should_stop,
            until_converged=request.until_converged,
            repeats_baseline=request.confirm,
            places=places,
        )
        if confirmation is None:
            session.run(trials_wanted=opened.trials_wanted, deadline=budget.trials_until)
        if request.confirm:
            place = places.first
            places.keep_only(place)
            ConfirmationSession(
                dataclasses.replace(
                    study, definition=dataclasses.replace(definition, device=place.device)
                ),
                executor=place.executor,
                trials_on_device=place.trials_on_device,
                trial_runner=session.trial_runner,
                check_stop=check_stop,
                preferences=request.preferences,
            ).run(
                confirmation or ConfirmationRequest(share=request.confirm_share), ends=budget.ends
            )


def _check_confirmation(
    request: SearchRequest, confirmation: ConfirmationRequest, retry: RetryPolicy
) -> None:
    """Raise UnknownStudy, and InvalidInput for a trial that has no speed to confirm."""
    with closing(StudyStore(request.storage, retry=retry)) as store:
        result = result_of(store, request.name or "", request.preferences)
    if confirmation.trial is None:
        if result.pick is None:
            raise InvalidInput(
                f"study {result.study!r} has no feasible trial to confirm",
                hint=f"see autotune show {result.study}",
            )
        return
    record = chosen_trial(result, confirmation.trial)
    if not record.feasible:
        raise InvalidInput(
            f"trial {record.number} of study {result.study!r} has no speed to confirm: "
            f"{OUTCOME_LABELS[record.outcome]}",
            hint=f"see autotune show {result.study}",
        )


def _device_warnings(device: DeviceInfo, request: SearchRequest) -> Iterator[str]:
    """Sentences on how this machine changes the meaning of measurements on a GPU."""
    if request.trials_per_device > 1 and device.context_bytes is not None:
        yield (
            f"{request.trials_per_device} trials at a time share {device.device}: their speeds are "
            "those of sharing it, and each counts "
            f"{format_size(device.context_bytes)} for its CUDA context, as of a new one, without "
            "the kernels that it loads; leave --trials-per-device out to measure both"
        )
    if request.ray is None and (sentence := container_isolation_note(device)):
        yield sentence
