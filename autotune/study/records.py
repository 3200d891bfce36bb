"""What is stored of a study, read as a result: its records, front, pick and baseline."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.analysis.confirmed import confirmed_records, variant_records
from autotune.analysis.expected_step import ExpectedStep
from autotune.analysis.front import pareto_front
from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences, choose
from autotune.analysis.roofline import with_utilization
from autotune.reporting.study_view import StudyView
from autotune.spec.confirmation import InitialPerplexity, initial_perplexity_of
from autotune.spec.result import StudyResult, TrialRecord
from autotune.spec.study import StudyDefinition
from autotune.storage.identity import work_folder_path
from autotune.storage.store import StudyStore
from autotune.study.workers.coordinator import WORKERS
from autotune.study.workers.liveness import is_dead


def result_of(
    store: StudyStore, study: str, preferences: Preferences = DEFAULT_PREFERENCES
) -> StudyResult:
    """Returns a study's trials with its Pareto front, pick and baseline. Raises UnknownStudy."""
    return chosen_result(records_of(store, study), preferences)


@dataclass(frozen=True, kw_only=True)
class StudyRecords:
    """What is known of a study whatever its user prefers: no front and no pick."""

    definition: StudyDefinition
    storage: str
    """The database's URL without its password."""
    folder: Path
    trials: tuple[TrialRecord, ...]
    """With the speeds of confirmed trials replaced."""
    variants: tuple[TrialRecord, ...]
    baseline: TrialRecord | None
    initial_perplexity: InitialPerplexity | None = None
    """Of pretrained weights, before any training."""
    expected: ExpectedStep | None = None
    """What is expected of the baseline, where it is predicted and not measured."""


def records_of(
    store: StudyStore, study: str, stored: Sequence[TrialRecord] | None = None
) -> StudyRecords:
    """Returns the records of a study. Raises UnknownStudy.

    `stored` are its trials as the store has them, for a caller that has read them.
    """
    definition, _ = store.definition(study)
    confirmations = store.confirmations(study)
    running = _running(store, study)
    trials = [
        dataclasses.replace(record, is_running=True)
        if record.number in running and not record.is_finished
        else record
        for record in (store.trials(study) if stored is None else stored)
    ]
    everything = with_utilization(
        confirmed_records([*trials, *variant_records(confirmations)], confirmations),
        definition.device,
    )
    records = everything[: len(trials)]
    baseline, expected = _baseline_of(definition, records), None
    if baseline is None:
        for forecast in store.forecasts(study, of=definition.baseline_config()).values():
            expected = ExpectedStep.of(definition, forecast.prediction)
    return StudyRecords(
        definition=definition,
        storage=store.url,
        folder=work_folder_path(store.database) / definition.name,
        trials=tuple(records),
        variants=tuple(everything[len(trials) :]),
        baseline=baseline,
        expected=expected,
        initial_perplexity=initial_perplexity_of(confirmations),
    )


def chosen_result(records: StudyRecords, preferences: Preferences) -> StudyResult:
    """Returns the result of a study with the front and the pick that a user prefers."""
    definition, baseline = records.definition, records.baseline
    before_training, remark = records.initial_perplexity, ""
    if before_training is not None:
        precision = before_training.config.precision
        if before_training.failure:
            remark = before_training.failure
        elif precision != definition.baseline_config().precision:
            remark = f"in {precision}"
    initial_perplexity = None if before_training is None else before_training.perplexity
    front = pareto_front(records.trials, tolerance=preferences.tolerance)
    return StudyResult(
        study=definition.name,
        storage=records.storage,
        folder=records.folder,
        workload=definition.workload,
        device=definition.device,
        cap_bytes=definition.cap_bytes,
        trials=records.trials,
        front=front,
        pick=choose(
            records.trials,
            front,
            baseline=baseline,
            preferences=preferences,
            workload=definition.workload,
            initial_perplexity=initial_perplexity,
            expected=records.expected,
        ),
        baseline=None if baseline is None else baseline.number,
        initial_perplexity=initial_perplexity,
        initial_perplexity_remark=remark,
        variants=records.variants,
    )


def _running(store: StudyStore, study: str) -> set[int]:
    """Returns the numbers of the trials that a living process works on."""
    attempts = store.attempts.running(study)
    if not attempts:
        return set()
    workers = work_folder_path(store.database) / study / WORKERS
    return {
        attempt.number
        for attempt in attempts
        if not attempt.is_expired and not is_dead(workers, attempt.worker)
    }


def view_of(
    store: StudyStore, study: str, preferences: Preferences = DEFAULT_PREFERENCES
) -> StudyView:
    """Returns the result with the study's definition and predictions, for figures and reports.

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


def _baseline_of(definition: StudyDefinition, records: Iterable[TrialRecord]) -> TrialRecord | None:
    """Returns the baseline's record; None while it has no result to compare others with."""
    baseline = definition.baseline_config()
    for record in records:
        is_comparable = record.outcome == "ok" or record.is_over_cap
        if is_comparable and record.config == baseline:
            return record
    return None
