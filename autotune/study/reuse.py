"""What a new study takes over from earlier ones of its database: results and predictions that it need not make again.

Taken over is what was measured on the same workload, device and versions and still holds under the
new study's cap, of the newest study that has it, for every configuration that the new study may
try. What a trial measured itself is taken from the study that measured it, never from one that took
it over.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autotune.errors import AutotuneError, StorageAway
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast
from autotune.spec.result import DIRECTIONS, TrialRecord
from autotune.spec.search_space import LegalSpace
from autotune.spec.study import StudyDefinition
from autotune.storage.store import StudyStore
from autotune.study.request import SearchRequest
from autotune.units import format_size

_SHARED = "shared with "


@dataclass(frozen=True, kw_only=True)
class EarlierStudy:
    definition: StudyDefinition
    records: tuple[TrialRecord, ...]
    forecasts: Mapping[str, Forecast]
    """By the configuration's fingerprint."""


@dataclass(frozen=True, kw_only=True)
class ReusedResults:
    records: tuple[TrialRecord, ...] = ()
    """Numbered as trials of the new study."""
    forecasts: tuple[Forecast, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """How many records each earlier study gave, newest first."""


def reuse(store: StudyStore, definition: StudyDefinition, request: SearchRequest) -> ReusedResults:
    """What the studies in `store` have for a new one, as far as `request` allows."""
    if request.fresh:
        return ReusedResults()
    return select(definition, comparable_studies(store, definition), request)


def comparable_studies(store: StudyStore, new: StudyDefinition) -> Iterator[EarlierStudy]:
    """Newest first. One that cannot be read, as of a later autotune, has nothing to give."""
    for name in reversed(store.names()):
        try:
            definition, _ = store.definition(name)
            if are_comparable(definition, new):
                yield EarlierStudy(
                    definition=definition,
                    records=tuple(store.trials(name)),
                    forecasts=store.forecasts(name),
                )
        except StorageAway:
            raise
        except (AutotuneError, TypeError, ValueError, KeyError):
            continue


def are_comparable(earlier: StudyDefinition, new: StudyDefinition) -> bool:
    """Whether a trial of one would measure the same in the other, but for the cap.

    Never of a script: what it reads beside its own file, nobody knows. Nor where something else
    used the device.
    """
    one, other = earlier.device, new.device
    same_memory = one.type == "cpu" or one.total_memory_bytes == other.total_memory_bytes
    return (
        new.workload.script is None
        and not one.others
        and earlier.workload.identity() == new.workload.identity()
        and (one.type, one.name, dict(one.versions))
        == (other.type, other.name, dict(other.versions))
        and same_memory
    )


def select(
    new: StudyDefinition, studies: Iterable[EarlierStudy], request: SearchRequest
) -> ReusedResults:
    """Of `studies`, newest first and all comparable with `new`, what holds in it."""
    legal = new.legal_space()
    first = _first_names(new, legal)
    records: dict[str, TrialRecord] = {}
    forecasts: dict[str, Forecast] = {}
    counts: dict[str, int] = {}

    def may_be_tried(config: TrainingConfig) -> bool:
        return config.fingerprint in first or config in legal

    for study in studies:
        for record in () if request.memory_snapshot else _that_hold(study, new, request):
            if record.config.fingerprint not in records and may_be_tried(record.config):
                records[record.config.fingerprint] = record
                counts[study.definition.name] = counts.get(study.definition.name, 0) + 1
        for fingerprint, forecast in study.forecasts.items() if request.predict else ():
            if fingerprint not in forecasts and may_be_tried(forecast.config):
                forecasts[fingerprint] = forecast
    ordered = [
        records[fingerprint] for fingerprint in {**first, **records} if fingerprint in records
    ]
    return ReusedResults(
        records=tuple(_numbered(ordered, names=first)),
        forecasts=tuple(forecasts.values()),
        counts=counts,
    )


def _first_names(new: StudyDefinition, legal: LegalSpace) -> dict[str, str]:
    """Names of the configurations that a study begins with, by fingerprint, the baseline first."""
    named = {config.fingerprint: name for name, config in legal.named.items()}
    baseline = new.baseline_config().fingerprint
    return {baseline: named.get(baseline, "baseline"), **named}


# -- what holds ------------------------------------------------------------------------------------


def _that_hold(
    study: EarlierStudy, new: StudyDefinition, request: SearchRequest
) -> Iterator[TrialRecord]:
    """The study's own results as `new` would judge them; where a perplexity is from is said by labels of trials."""
    by_number = {record.number: record for record in study.records}
    for record in study.records:
        judged = None if record.reused_from else judge(record, earlier=study.definition, new=new)
        if judged is None:
            continue
        trained = by_number.get(_trained_for(record), record)
        if _is_thorough(record, trained, request):
            yield replace(
                judged,
                reused_from=label(record.number, study.definition.name),
                perplexity_source=_labelled(
                    record.perplexity_source, trained, study.definition.name
                ),
            )


def judge(
    record: TrialRecord, *, earlier: StudyDefinition, new: StudyDefinition
) -> TrialRecord | None:
    """A trial of `earlier` under the cap of `new`; None where it has to be measured again."""
    is_lower = new.cap_bytes <= earlier.cap_bytes
    is_baseline = record.config == new.baseline_config()
    match record.outcome:
        case "parity_failed" | "diverged":
            return record
        case "out_of_memory":
            # The baseline alone is given all of the device.
            was_given_all = record.config == earlier.baseline_config()
            return record if is_lower and (was_given_all or not is_baseline) else None
        case "ok" | "over_cap" if record.device_bytes is not None:
            return _measured(record, earlier=earlier, new=new)
        case _:
            return None


def _measured(
    record: TrialRecord, *, earlier: StudyDefinition, new: StudyDefinition
) -> TrialRecord | None:
    """One whose memory was measured."""
    assert record.device_bytes is not None
    is_complete = all(getattr(record, objective) is not None for objective in DIRECTIONS)
    if record.alloc_retries and new.cap_bytes != earlier.cap_bytes:
        # it came to its limit and freed what it kept, at a cost in speed: another limit, another
        # result
        return None
    if record.device_bytes <= new.cap_bytes:
        return replace(record, outcome="ok", message="") if is_complete else None
    if not is_complete and record.config == new.baseline_config():
        return None  # which is trained to its end wherever the device can hold it
    if new.device.type == "cuda" and not _cannot_fit(record, earlier=earlier, new=new):
        return None  # given no more than the cap, it may do with that
    needs = f"needs {format_size(record.device_bytes)} of {format_size(new.cap_bytes)}"
    return replace(record, outcome="over_cap", message=needs)


def _cannot_fit(record: TrialRecord, *, earlier: StudyDefinition, new: StudyDefinition) -> bool:
    """Whether even an allocator that is given no more than the new cap could not hold what is alive at once."""
    was_over = record.outcome == "over_cap" and new.cap_bytes <= earlier.cap_bytes
    return was_over or (record.peak_memory_bytes or 0) + (record.context_bytes or 0) > new.cap_bytes


def _is_thorough(record: TrialRecord, trained: TrialRecord, request: SearchRequest) -> bool:
    """Whether its perplexity has as many trainings behind it as are asked for now, and its own where that is asked."""
    if record.perplexity is None:
        return True
    if request.full_trainings and (record.perplexity_source or "").startswith(_SHARED):
        return False
    seeds = re.search(r"mean of (\d+) seeds", trained.perplexity_source or "")
    return int(seeds[1] if seeds else 1) >= request.perplexity_seeds


# -- where it is from ------------------------------------------------------------------------------


def label(number: int, study: str) -> str:
    return f"trial {number} of study {study!r}"


def _trained_for(record: TrialRecord) -> int:
    """Number of the trial of its own study that was trained to the end for the record's perplexity."""
    shared = re.fullmatch(rf"{_SHARED}trial (\d+)", record.perplexity_source or "")
    return int(shared[1]) if shared else record.number


def _labelled(source: str | None, trained: TrialRecord, study: str) -> str | None:
    """With the study of the trial that a perplexity is shared with: the one that measured it."""
    if source is None or not source.startswith(_SHARED):
        return source
    return _SHARED + (trained.reused_from or label(trained.number, study))


def _numbered(records: Iterable[TrialRecord], *, names: Mapping[str, str]) -> Iterator[TrialRecord]:
    """As trials of the new study, which took no time; a perplexity of one that is taken over too is said to be its."""
    ordered = list(records)
    number_of = {record.reused_from: number for number, record in enumerate(ordered)}
    for number, record in enumerate(ordered):
        source = record.perplexity_source or ""
        other = number_of.get(source.removeprefix(_SHARED)) if source.startswith(_SHARED) else None
        yield replace(
            record,
            number=number,
            name=names.get(record.config.fingerprint),
            seconds=None,
            seconds_by_part=None,
            perplexity_source=record.perplexity_source
            if other is None
            else f"{_SHARED}trial {other}",
        )
