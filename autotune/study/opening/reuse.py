"""Reuse of results: which results and predictions of earlier studies a new study need not repeat.

A result is reused if it was measured undisturbed on the same workload, device and versions, still
holds under the new study's cap, and is of a configuration that the new study may try; if several
studies have one, that of the newest. It is taken from the study that measured it, never from one
that reused it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autotune.analysis.confirmed_speed import (
    ConfirmedSpeed,
    SpeedNoise,
    confirmed_speeds,
    speed_noise,
)
from autotune.analysis.pick import NOISY_SPREAD
from autotune.errors import AutotuneError, Stopped, StorageUnreachable
from autotune.spec.cap import is_over_cap, need_and_cap
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import Confirmation, InitialPerplexity, initial_perplexity_of
from autotune.spec.prediction import Forecast
from autotune.spec.provenance import PerplexitySource, TrialReference
from autotune.spec.result import TrialRecord
from autotune.spec.script_files import have_same_files
from autotune.spec.search_space import LegalSpace
from autotune.spec.study import StudyDefinition
from autotune.storage.store import StudyStore
from autotune.study.request import SearchRequest


@dataclass(frozen=True, kw_only=True)
class EarlierStudy:
    """A stored study with its trials and predictions."""

    definition: StudyDefinition
    records: tuple[TrialRecord, ...]
    forecasts: Mapping[str, Forecast]
    """Forecasts by the configuration's fingerprint."""
    confirmations: Sequence[Confirmation] = ()
    """What was measured after its trials."""


@dataclass(frozen=True, kw_only=True)
class ReusedResults:
    """What a new study reuses."""

    records: tuple[TrialRecord, ...] = ()
    """Numbered as trials of the new study."""
    forecasts: tuple[Forecast, ...] = ()
    confirmations: tuple[InitialPerplexity, ...] = ()
    """The perplexity before training, if it is known."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of records reused from each earlier study, newest first."""


def reuse(store: StudyStore, definition: StudyDefinition, request: SearchRequest) -> ReusedResults:
    """Returns what a new study can reuse from the studies in `store`, as `request` allows."""
    if request.fresh:
        return ReusedResults()
    return select(definition, comparable_studies(store, definition), request)


def comparable_studies(store: StudyStore, new: StudyDefinition) -> Iterator[EarlierStudy]:
    """Yield the comparable studies, newest first.

    A study that cannot be read, such as one of a later version of autotune, is skipped.
    """
    for name in reversed(store.names()):
        try:
            definition, _ = store.definition(name)
            if are_comparable(definition, new):
                yield EarlierStudy(
                    definition=definition,
                    records=tuple(store.trials(name)),
                    forecasts=store.forecasts(name),
                    confirmations=tuple(store.confirmations(name)),
                )
        except (StorageUnreachable, Stopped):
            raise
        except (AutotuneError, TypeError, ValueError, KeyError):
            continue


def are_comparable(earlier: StudyDefinition, new: StudyDefinition) -> bool:
    """Returns whether a trial of one study would measure the same in the other, except for the cap.

    Never for a script, whose training also depends on what only its trials show, and never where
    other processes, or other trials, used the device.
    """
    if new.workload.script is not None or earlier.device.others:
        return False
    before, now = earlier.device, new.device
    is_same = (
        earlier.workload.identity() == new.workload.identity()
        and before.type == now.type
        and before.name == now.name
        and dict(before.versions) == dict(now.versions)
        and (before.type == "cpu" or before.total_memory_bytes == now.total_memory_bytes)
    )
    return is_same and have_same_files(earlier.workload, new.workload)


def select(
    new: StudyDefinition, studies: Iterable[EarlierStudy], request: SearchRequest
) -> ReusedResults:
    """Returns what holds in `new` of comparable studies, which come newest first."""
    legal = new.legal_space()
    first_names = _first_names(new, legal)
    records: dict[str, TrialRecord] = {}
    forecasts: dict[str, Forecast] = {}
    counts: dict[str, int] = {}

    def may_be_tried(config: TrainingConfig) -> bool:
        return config.fingerprint in first_names or config in legal

    # Reused results have no snapshots, and were measured without another trial on the GPU.
    shares_gpu = new.device.type == "cuda" and request.trials_per_device > 1
    before_training: InitialPerplexity | None = None
    for study in studies:
        known = initial_perplexity_of(study.confirmations)
        if before_training is None and known is not None and known.perplexity is not None:
            before_training = known
        name = study.definition.name
        if not request.memory_snapshot and not shares_gpu:
            for record in _valid_records(study, new, request):
                if record.config.fingerprint not in records and may_be_tried(record.config):
                    records[record.config.fingerprint] = record
                    counts[name] = counts.get(name, 0) + 1
        if request.predict:
            for fingerprint, forecast in study.forecasts.items():
                if fingerprint not in forecasts and may_be_tried(forecast.config):
                    forecasts[fingerprint] = forecast
    fingerprints = {**first_names, **records}  # the first configurations of the study come first
    ordered = [records[fingerprint] for fingerprint in fingerprints if fingerprint in records]
    return ReusedResults(
        records=tuple(_numbered(ordered, names=first_names)),
        forecasts=tuple(forecasts.values()),
        confirmations=() if before_training is None else (before_training,),
        counts=counts,
    )


def _first_names(new: StudyDefinition, legal: LegalSpace) -> dict[str, str]:
    """Returns the names of a study's first configurations by fingerprint, the baseline first."""
    named = {config.fingerprint: name for name, config in legal.named.items()}
    baseline = new.baseline_config().fingerprint
    return {baseline: named.get(baseline, "baseline"), **named}


# -- which results are valid -----------------------------------------------------------------------


def _valid_records(
    study: EarlierStudy, new: StudyDefinition, request: SearchRequest
) -> Iterator[TrialRecord]:
    """Yield the results measured in `study` that are valid in `new`, with their outcome there.

    The source of a shared perplexity names the trial and its study.
    """
    study_name = study.definition.name
    by_number = {record.number: record for record in study.records}
    confirmed = confirmed_speeds(study.records, study.confirmations)
    noise = speed_noise(study.records, study.confirmations)
    for record in study.records:
        if record.reused_from or _is_disturbed(record, confirmed.get(record.config), noise):
            continue
        rated = rate_under_cap(record, earlier=study.definition, new=new)
        if rated is None:
            continue
        representative = by_number.get(_representative_number(record), record)
        if _has_wanted_perplexity(record, representative, request):
            yield replace(
                rated,
                reused_from=TrialReference(number=record.number, study=study_name),
                perplexity_source=_with_study(record.perplexity_source, representative, study_name),
            )


def _is_disturbed(record: TrialRecord, confirmed: ConfirmedSpeed | None, noise: SpeedNoise) -> bool:
    """Returns whether something else seems to have used the device while the speed was measured.

    The steps of such a trial vary, or it has another speed when it is measured again. One that was
    not is as noisy as what the study has measured several times.
    """
    if not record.tokens_per_second:
        return False
    difference = (record.tokens_per_second_spread or 0.0) / record.tokens_per_second
    if confirmed is not None:
        ratio = record.tokens_per_second / confirmed.tokens_per_second
        difference = max(difference, abs(ratio - 1.0))
    elif noise.was_measured:
        difference = max(difference, noise.alone)
    return difference > NOISY_SPREAD


def rate_under_cap(
    record: TrialRecord, *, earlier: StudyDefinition, new: StudyDefinition
) -> TrialRecord | None:
    """Returns a trial of `earlier` as it ends under the cap of `new`; None to measure it again."""
    is_lower = new.cap_bytes <= earlier.cap_bytes
    is_baseline = record.config == new.baseline_config()
    match record.outcome:
        case "parity_failed" | "diverged":
            return record
        case "out_of_memory":
            # Only the baseline is trained without the cap.
            had_no_cap = record.config == earlier.baseline_config()
            return record if is_lower and (had_no_cap or not is_baseline) else None
        case "ok" | "over_cap" if record.device_bytes is not None:
            return _measured(record, earlier=earlier, new=new)
        case _:
            return None


def _measured(
    record: TrialRecord, *, earlier: StudyDefinition, new: StudyDefinition
) -> TrialRecord | None:
    """As `rate_under_cap`, for a trial whose memory was measured."""
    assert record.device_bytes is not None
    if record.alloc_retries and new.cap_bytes != earlier.cap_bytes:
        # The allocator reached its limit and freed cached memory, at a cost in speed: with another
        # limit the result is another.
        return None
    if not is_over_cap(record.device_bytes, new.cap_bytes):
        return replace(record, outcome="ok", message="") if record.has_all_objectives else None
    if not record.has_all_objectives and record.config == new.baseline_config():
        return None  # the baseline is trained to its end if the device can hold it
    if new.device.type == "cuda" and not _cannot_fit(record, earlier=earlier, new=new):
        return None  # with the allocator limited to the cap, it may fit
    need = need_and_cap(record.device_bytes, new.cap_bytes)
    return replace(record, outcome="over_cap", message=f"needs {need}")


def _cannot_fit(record: TrialRecord, *, earlier: StudyDefinition, new: StudyDefinition) -> bool:
    """Returns whether the live tensors and the context alone exceed the new cap.

    Then not even an allocator limited to the cap could make it fit.
    """
    if record.outcome == "over_cap" and new.cap_bytes <= earlier.cap_bytes:
        return True
    live_bytes = (record.peak_memory_bytes or 0) + (record.context_bytes or 0)
    return is_over_cap(live_bytes, new.cap_bytes)


def _has_wanted_perplexity(
    record: TrialRecord, representative: TrialRecord, request: SearchRequest
) -> bool:
    """Returns whether the perplexity is of the wanted seeds, and not shared with full trainings.

    One of more seeds is more precise, but differs by them from those that this search measures: two
    trials of the same numerics would seem to learn differently.
    """
    if record.perplexity is None:
        return True
    if request.full_trainings and record.shares_perplexity:
        return False
    source = representative.perplexity_source
    seeds = 1 if source is None else source.seeds
    return seeds == request.trial_options.perplexity_seeds


# -- the source of a result ------------------------------------------------------------------------


def _representative_number(record: TrialRecord) -> int:
    """Returns the number of the trial, in the same study, that measured the record's perplexity."""
    source = record.perplexity_source
    if source is None or source.trial is None or source.trial.study is not None:
        return record.number
    return source.trial.number


def _with_study(
    source: PerplexitySource | None, representative: TrialRecord, study: str
) -> PerplexitySource | None:
    """Add to a shared perplexity's source the study of the trial that measured it."""
    if source is None or not source.is_shared:
        return source
    trial = representative.reused_from or TrialReference(number=representative.number, study=study)
    return replace(source, trial=trial)


def _numbered(records: Iterable[TrialRecord], *, names: Mapping[str, str]) -> Iterator[TrialRecord]:
    """Yield the records as trials of the new study, where they took no time.

    A perplexity shared with a trial that is reused, too, is shared with that trial's new number.
    """
    ordered = list(records)
    numbers = {record.reused_from: number for number, record in enumerate(ordered)}
    for number, record in enumerate(ordered):
        source = record.perplexity_source
        if source is not None and source.is_shared and source.trial in numbers:
            source = replace(source, trial=TrialReference(number=numbers[source.trial]))
        yield replace(
            record,
            number=number,
            name=names.get(record.config.fingerprint),
            seconds=None,
            seconds_by_part=None,
            perplexity_source=source,
        )
