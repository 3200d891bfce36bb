"""Filters and sorts the trials of a study."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.errors import InvalidInput, suggestion
from autotune.reporting.columns import COLUMNS
from autotune.reporting.outcomes import OUTCOME_LABELS, outcome_label
from autotune.reporting.trial_text import trial_label
from autotune.spec.config import FIELD_ORDER
from autotune.spec.result import TrialRecord

_COLUMNS = {column.key: column for column in COLUMNS}
SORTED_BY = (*_COLUMNS, "peak_reserved_bytes", "compile_seconds", *FIELD_ORDER)
"""What trials can be sorted by; `-` before it means from the largest."""


@dataclass(frozen=True, kw_only=True)
class TrialQuery:
    """Which trials are wanted, in which order. Raises InvalidInput."""

    find: str = ""
    """Words that all have to be in what is known of the trial; `#12` is trial 12."""
    outcomes: tuple[str, ...] = ()
    """Any of these; empty: all."""
    running: bool | None = None
    feasible: bool | None = None
    front: bool | None = None
    techniques: tuple[str, ...] = ()
    """Such as `precision:fp32`. Several of one technique mean any of them."""
    sort: str = "number"

    def __post_init__(self) -> None:
        for outcome in self.outcomes:
            if outcome not in OUTCOME_LABELS:
                raise InvalidInput(
                    f"{outcome!r} is no outcome of a trial",
                    hint=suggestion(
                        outcome, OUTCOME_LABELS, otherwise=f"use {', '.join(OUTCOME_LABELS)}"
                    ),
                )
        if self.sort.removeprefix("-") not in SORTED_BY:
            raise InvalidInput(
                f"trials cannot be sorted by {self.sort!r}",
                hint=suggestion(
                    self.sort.removeprefix("-"),
                    SORTED_BY,
                    otherwise=f"use one of {', '.join(SORTED_BY)}, for the largest first with a -",
                ),
            )
        for technique in self.techniques:
            name, separator, _ = technique.partition(":")
            if not separator or name not in FIELD_ORDER:
                raise InvalidInput(
                    f"{technique!r} is no choice of a technique",
                    hint="write for example precision:bf16-mixed, with one of "
                    f"{', '.join(FIELD_ORDER)}",
                )

    def found(self, trials: Sequence[TrialRecord], front: Collection[int]) -> Sequence[TrialRecord]:
        """Returns the trials, in order."""
        choices = self._choices()
        words = self.find.lower().split()
        front = frozenset(front)
        found = [
            record
            for record in trials
            if self._is_wanted(record, front, choices) and _has_words(record, words)
        ]
        return _sorted(found, self.sort)

    def _choices(self) -> Mapping[str, Collection[str]]:
        choices: dict[str, set[str]] = {}
        for technique in self.techniques:
            name, _, value = technique.partition(":")
            choices.setdefault(name, set()).add(value)
        return choices

    def _is_wanted(
        self,
        record: TrialRecord,
        front: Collection[int],
        choices: Mapping[str, Collection[str]],
    ) -> bool:
        if self.outcomes and record.outcome not in self.outcomes:
            return False
        if self.running is not None and record.is_running != self.running:
            return False
        if self.feasible is not None and record.feasible != self.feasible:
            return False
        if self.front is not None and (record.number in front) != self.front:
            return False
        return all(str(getattr(record.config, name)) in values for name, values in choices.items())


def _has_words(record: TrialRecord, words: Sequence[str]) -> bool:
    if not words:
        return True
    text = f"{trial_label(record)} {outcome_label(record)} {record.message}".lower()
    return all(word == f"#{record.number}" or word in text for word in words)


def _sorted(records: Sequence[TrialRecord], sort: str) -> Sequence[TrialRecord]:
    """Sorts by one field, then by number; what was not measured is last in both directions."""
    field = sort.removeprefix("-")
    known = [record for record in records if _value(record, field) is not None]
    unknown = [record for record in records if _value(record, field) is None]
    known.sort(key=lambda record: _value(record, field), reverse=sort.startswith("-"))
    return [*known, *unknown]


def _value(record: TrialRecord, field: str) -> Any:
    """Returns what a trial is sorted by; None for what was not measured or is not a number."""
    if field in FIELD_ORDER:
        return getattr(record.config, field)
    return _COLUMNS[field].value(record) if field in _COLUMNS else getattr(record, field)
