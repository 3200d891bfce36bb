"""Configurations that are excluded from the front: counts, reasons and the first of each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from autotune.reporting.outcomes import OUTCOME_LABELS
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_text import trial_label
from autotune.spec.config import RULES
from autotune.spec.result import Outcome, TrialRecord
from autotune.spec.search_space import Condition, LegalSpace
from autotune.spec.study import StudyDefinition
from autotune.units import format_size

LINES_SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class Group:
    """Configurations that are excluded for one reason."""

    title: str
    count: int
    why: str
    lines: tuple[str, ...]
    """At most `LINES_SHOWN`."""

    @property
    def hidden(self) -> int:
        """Number of configurations without a line."""
        return self.count - len(self.lines)


def excluded(view: StudyView) -> tuple[Group, ...]:
    """Returns the groups of excluded configurations that are not empty."""
    groups = [*_never_suggested(view.definition), *_not_run(view), *_failed(view.result.trials)]
    return tuple(group for group in groups if group.count)


def combinations(definition: StudyDefinition) -> tuple[int, int]:
    """Returns the number of combinations of the space's values, and how many of them are legal."""
    legal = definition.legal_space()
    if not legal.values:
        return 0, 0
    return math.prod(len(values) for values in legal.values.values()), legal.count()


# -- before a trial --------------------------------------------------------------------------------


def _never_suggested(definition: StudyDefinition) -> Iterator[Group]:
    legal = definition.legal_space()
    yield _group(
        "Does not work here",
        legal.excluded,
        why="The search space contains these values, but a test showed that they do not work on "
        "this device or with this model.",
    )
    total, allowed = combinations(definition)
    lines = [*_rule_violations(legal), *map(_condition, legal.conditions)]
    if allowed < total:
        why = (
            "Values that cannot be combined were never suggested: "
            f"{allowed:,} of {total:,} combinations of the values are left."
        )
        yield _group("Cannot be combined", lines, why=why)


def _rule_violations(legal: LegalSpace) -> Iterator[str]:
    """Yield one line for each rule that some combination of the space's values breaks."""
    for rule in RULES:
        chosen = [
            dict(zip(rule.fields, values, strict=True))
            for values in product(*(legal.values.get(field, ()) for field in rule.fields))
        ]
        broken = [choice for choice in chosen if rule.broken(choice, legal.at)]
        if not broken:
            continue
        line = rule.sentence(broken[0], legal.at)
        others = len(broken) - 1
        if others == 1:
            line += " (and 1 more combination like it)"
        elif others:
            line += f" (and {others} more combinations like it)"
        yield line


def _condition(condition: Condition) -> str:
    when = _field_values(condition.when)
    then = _field_values(condition.then)
    return f"the search space says: where {when}, {then}"


def _field_values(fields: Mapping[str, Sequence[Any]]) -> str:
    return " and ".join(
        f"{field} is {' or '.join(map(str, values))}" for field, values in fields.items()
    )


# -- instead of a trial ----------------------------------------------------------------------------


def _not_run(view: StudyView) -> Iterator[Group]:
    cap = format_size(view.result.cap_bytes)
    yield _with_outcome(
        view.result.trials,
        "predicted_over_cap",
        why="Not trained: even the lower bound of the predicted memory is more than the cap of "
        f"{cap}.",
        detail_of=lambda record: (
            f"predicted {format_size(record.predicted_peak_memory_bytes or 0)}"
        ),
    )
    yield _group(
        "Same program as a trial",
        list(_same_program(view)),
        why="Not run: torch.compile makes the same program of them as of a trial, whose memory and "
        "speed are measured already.",
    )


def _same_program(view: StudyView) -> Iterator[str]:
    tried = {record.config.fingerprint: record for record in view.result.trials}
    programs = {
        forecast.plan: tried[fingerprint]
        for fingerprint, forecast in view.forecasts.items()
        if fingerprint in tried and forecast.plan is not None
    }
    for fingerprint, forecast in view.forecasts.items():
        if fingerprint not in tried and forecast.plan in programs:
            yield f"{forecast.config.describe()}: program of #{programs[forecast.plan].number}"


# -- trials that are not candidates ----------------------------------------------------------------

_WHY: tuple[tuple[Outcome, str], ...] = (
    (
        "dominated",
        "Stopped after a few timed steps: another trial with the same numerics needs no more "
        "memory and is clearly faster.",
    ),
    ("over_cap", "Trained, and needed more memory than the cap."),
    ("out_of_memory", "Ended by the allocator, whose limit is the cap."),
    (
        "parity_failed",
        "Not the same training: the first steps differ from those of a plain training of the same "
        "precision and optimizer by more than rounding, or that one fails by itself, so that there "
        "is nothing to compare with.",
    ),
    ("diverged", "The loss became infinite or NaN."),
    ("timeout", "Took longer than the time limit of a trial."),
    ("crashed", "The process of the trial ended with an error. Other trials were not affected."),
    (
        "interrupted",
        "Has no result, because the search was stopped. Continuing the search runs it again.",
    ),
)


def _failed(records: Sequence[TrialRecord]) -> Iterator[Group]:
    for outcome, why in _WHY:
        yield _with_outcome(records, outcome, why=why, detail_of=_failure_detail)
    unchecked = [
        record
        for record in records
        if record.outcome == "ok" and record.parity in ("not compared", "same at two blocks")
    ]
    yield _group(
        "Counted without a comparison of the whole model",
        [
            f"#{record.number} {trial_label(record)}: {record.parity_message}"
            for record in unchecked
        ],
        why="These are candidates, but there was no room for the plain training of the whole model "
        "to compare their first steps with.",
    )


def _failure_detail(record: TrialRecord) -> str:
    if record.outcome == "over_cap" and record.device_bytes:
        return format_size(record.device_bytes)
    if record.outcome == "parity_failed" and record.parity_message:
        return record.parity_message
    return record.message


def _with_outcome(
    records: Sequence[TrialRecord],
    outcome: Outcome,
    *,
    why: str,
    detail_of: Callable[[TrialRecord], str],
) -> Group:
    title = OUTCOME_LABELS[outcome]
    ended = [record for record in records if record.outcome == outcome and not record.is_running]
    lines = []
    for record in ended[:LINES_SHOWN]:
        line = f"#{record.number} {trial_label(record)}"
        detail = detail_of(record)
        lines.append(f"{line}: {detail}" if detail else line)
    return _group(title[0].upper() + title[1:], lines, why=why, count=len(ended))


def _group(title: str, lines: Sequence[str], *, why: str, count: int | None = None) -> Group:
    """Returns a group; `count` is that of all configurations if `lines` has only the first."""
    return Group(
        title=title,
        count=len(lines) if count is None else count,
        why=why,
        lines=tuple(lines[:LINES_SHOWN]),
    )
