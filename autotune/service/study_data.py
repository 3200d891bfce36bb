"""What a server holds of a study in memory: its records, and each one as JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autotune.analysis.pick import Preferences
from autotune.reporting.study_view import StudyView
from autotune.service.answers import json_bytes
from autotune.spec.prediction import Forecast
from autotune.spec.result import StudyResult, TrialRecord
from autotune.storage.store import StudyStore, StudyVersion
from autotune.study.records import StudyRecords, chosen_result, records_of

_BYTES_OF_RECORD = 4_000
"""About what a record, its configuration and its JSON take in memory."""
_BYTES_OF_FORECAST = 2_000


@dataclass(frozen=True, kw_only=True)
class StudyData:
    """A study at one version, whatever its reader prefers."""

    version: StudyVersion
    records: StudyRecords
    forecasts: Mapping[str, Forecast]
    begun_at: str
    last_result_at: str
    revision_read: int
    """The revision that `stored` is of; the study may have changed since its version was read."""
    stored: Mapping[int, TrialRecord]
    """The trials by their number as the database has them."""
    lines: Sequence[bytes]
    """The JSON object of each trial, by its place in the records."""

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory."""
        trials = len(self.records.trials) * _BYTES_OF_RECORD
        return trials + len(self.forecasts) * _BYTES_OF_FORECAST

    @cached_property
    def places(self) -> Mapping[int, int]:
        """The place of each trial in the records by its number."""
        return {record.number: place for place, record in enumerate(self.records.trials)}

    def view(self, preferences: Preferences) -> StudyView:
        """Returns the study with the front and the pick that a reader prefers."""
        return StudyView(
            definition=self.records.definition,
            result=chosen_result(self.records, preferences),
            forecasts=self.forecasts,
            begun_at=self.begun_at,
            last_result_at=self.last_result_at,
        )

    def result_json(self, result: StudyResult) -> bytes:
        """Returns the JSON object of `autotune show --json`, without computing the trials again."""
        members = dataclasses.replace(result, trials=()).to_dict()
        parts = []
        for name, value in members.items():
            text = json_bytes(value)
            if name == "trials":
                text = b"[" + b",".join(self.lines) + b"]"
            parts.append(json_bytes(name) + b":" + text)
        return b"{" + b",".join(parts) + b"}"

    def trials_json(self, numbers: Sequence[int], **others: Any) -> bytes:
        """Returns a JSON object with these trials and other members."""
        trials = b",".join(self.lines[self.places[number]] for number in numbers)
        rest = json_bytes(others)[1:]
        return b'{"trials":[' + trials + b"]" + (b"," if others else b"") + rest


def read_study(
    store: StudyStore,
    study: str,
    version: StudyVersion,
    earlier: StudyData | None,
    *,
    address: str,
) -> StudyData:
    """Reads a study. Of one that was read `earlier`, only the trials that have changed are read.

    `address` is where its readers find it, the server's: the database is not theirs. Raises
    UnknownStudy.
    """
    stored: dict[int, TrialRecord] = {}
    forecasts: Mapping[str, Forecast] = {}
    since = -1
    if earlier is not None and _is_same_study(earlier.version, version):
        stored.update(earlier.stored)
        forecasts, since = earlier.forecasts, earlier.revision_read
    if since < 0 or version.forecasts != len(forecasts):
        forecasts = store.forecasts(study)
    if since < 0:
        # Trials that are in the database from the beginning have no revision of their own.
        since = version.revision
        stored.update({record.number: record for record in store.trials(study)})
    changes = store.changes(study, since=since)
    stored.update({record.number: record for record in changes.records})
    trials = [_with_prediction(stored[number], forecasts) for number in sorted(stored)]
    begun_at, last_result_at = store.dates(study)
    records = dataclasses.replace(records_of(store, study, trials), storage=address)
    if earlier is not None and earlier.records.definition == records.definition:
        # What was computed of it stays, such as the number of its legal combinations.
        records = dataclasses.replace(records, definition=earlier.records.definition)
    return StudyData(
        version=version,
        records=records,
        forecasts=forecasts,
        begun_at=begun_at,
        last_result_at=last_result_at,
        revision_read=changes.revision,
        stored=stored,
        lines=_lines(records.trials, earlier),
    )


def _lines(trials: Sequence[TrialRecord], earlier: StudyData | None) -> list[bytes]:
    """Returns the JSON object of each trial, taking those of unchanged records from `earlier`."""
    known: Mapping[int, tuple[TrialRecord, bytes]] = {}
    if earlier is not None:
        pairs = zip(earlier.records.trials, earlier.lines, strict=True)
        known = {record.number: (record, line) for record, line in pairs}
    lines = []
    for record in trials:
        same, line = known.get(record.number, (None, b""))
        lines.append(line if same == record else json_bytes(record.to_dict()))
    return lines


def _is_same_study(earlier: StudyVersion, version: StudyVersion) -> bool:
    """Whether a version is a later one of the same study.

    SQLite gives the id of a deleted study to the next one, and its clock has whole seconds: a new
    study is known by having fewer changes as well.
    """
    is_same = (earlier.study_id, earlier.begun) == (version.study_id, version.begun)
    return is_same and earlier.revision <= version.revision


def _with_prediction(record: TrialRecord, forecasts: Mapping[str, Forecast]) -> TrialRecord:
    """Adds a prediction that was stored after the trial was read."""
    if record.predicted_peak_memory_bytes is not None:
        return record
    forecast = forecasts.get(record.config.fingerprint)
    if forecast is None or forecast.prediction is None:
        return record
    return dataclasses.replace(
        record, predicted_peak_memory_bytes=forecast.prediction.peak_memory_bytes
    )
