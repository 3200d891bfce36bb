"""What a trial of the report shows when it is opened, small enough for ten thousand trials.

Repeated texts are stored once.
"""

from collections.abc import Sequence
from typing import Any

from autotune.reporting.outcomes import OUTCOME_LABELS
from autotune.reporting.trial_facts import Facts, measured_facts, rank_peaks
from autotune.spec.config import FIELD_ORDER
from autotune.spec.result import StudyResult, TrialRecord


def trial_details(result: StudyResult) -> dict[str, Any]:
    """Returns the configurations and the facts of all trials, JSON-ready.

    A column is an object with the distinct `values` and, in `of`, the index of each trial's value;
    a trial about which a fact says nothing has an empty text.
    """
    records = result.trials
    facts = [dict(_facts(result, record)) for record in records]
    names = dict.fromkeys(name for known in facts for name in known)
    return {
        "config": {
            field: _indexed([getattr(record.config, field) for record in records])
            for field in FIELD_ORDER
        },
        "facts": {name: _indexed([known.get(name, "") for known in facts]) for name in names},
        "ranks": {
            record.number: [
                {"rank": peak.rank, "text": peak.text, "share": peak.share}
                for peak in rank_peaks(record)
            ]
            for record in records
            if record.peak_memory_bytes_by_rank
        },
        "outcomes": dict(OUTCOME_LABELS),
    }


def _facts(result: StudyResult, record: TrialRecord) -> Facts:
    message = (("message", record.message),) if record.message else ()
    return (*measured_facts(result, record), *message)


def _indexed(column: Sequence[Any]) -> dict[str, Any]:
    values = list(dict.fromkeys(column))
    index_of = {value: index for index, value in enumerate(values)}
    return {"values": values, "of": [index_of[value] for value in column]}
