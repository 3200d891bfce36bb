"""What was tried and left out, and why: counted, and in words."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from autotune.reporting.outcomes import OUTCOME_WORDS
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_text import described
from autotune.spec.config import RULES
from autotune.spec.result import Outcome, TrialRecord
from autotune.spec.search_space import Condition, LegalSpace
from autotune.spec.study import StudyDefinition
from autotune.units import format_size

LINES_SHOWN = 40
MOST_COMBINATIONS_COUNTED = 300_000
"""Counting the legal ones among more would take longer than the page is worth."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Configurations that are not in the front for one reason."""

    title: str
    count: int
    why: str
    lines: tuple[str, ...]
    """At most `LINES_SHOWN`."""

    @property
    def unsaid(self) -> int:
        return self.count - len(self.lines)


def excluded(view: StudyView) -> tuple[Group, ...]:
    groups = [*_never_asked(view.definition), *_not_run(view), *_failed(view.result.trials)]
    return tuple(group for group in groups if group.count)


def combinations(legal: LegalSpace) -> tuple[int, int | None]:
    """How many combinations the space's values have, and how many are legal; None where nobody counted."""
    total = math.prod(len(values) for values in legal.values.values()) if legal.values else 0
    return total, None if total > MOST_COMBINATIONS_COUNTED else legal.count()


# -- before a trial --------------------------------------------------------------------------------


def _never_asked(definition: StudyDefinition) -> Iterator[Group]:
    legal = definition.legal_space()
    yield _group(
        "Does not work here",
        legal.excluded,
        why="Of what the search space asks for, this does not work on the device or with the model. Found by trying.",
    )
    total, allowed = combinations(legal)
    lines = [*_broken_rules(legal), *map(_condition, legal.conditions)]
    if total and (allowed is None or allowed < total):
        counted = (
            f"{allowed:,} of {total:,} combinations of the values are left"
            if allowed is not None
            else ""
        )
        why = f"Values that cannot be combined were never suggested{': ' if counted else ''}{counted}."
        yield _group("Cannot be combined", lines, why=why)


def _broken_rules(legal: LegalSpace) -> Iterator[str]:
    """One line for each rule that some combination of the space's values breaks."""
    for rule in RULES:
        chosen = [
            dict(zip(rule.fields, values, strict=True))
            for values in product(*(legal.values.get(field, ()) for field in rule.fields))
        ]
        if broken := [choice for choice in chosen if rule.broken(choice, legal.at)]:
            why = rule.sentence(broken[0], legal.at)
            others = len(broken) - 1
            yield why + (
                f" (and {others} more combination{'s' if others > 1 else ''} like it)"
                if others
                else ""
            )


def _condition(condition: Condition) -> str:
    sides = [
        " and ".join(
            f"{field} is {' or '.join(map(str, values))}" for field, values in fields.items()
        )
        for fields in (condition.when, condition.then)
    ]
    return f"the search space says: where {sides[0]}, {sides[1]}"


# -- in place of a trial ---------------------------------------------------------------------------


def _not_run(view: StudyView) -> Iterator[Group]:
    cap = format_size(view.result.cap_bytes)
    yield _with_outcome(
        view.result.trials,
        "predicted_over_cap",
        why=f"Not trained: even the least that the prediction leaves room for is more than the cap of {cap}.",
        words=lambda record: f"predicted {format_size(record.predicted_peak_memory_bytes or 0)}",
    )
    yield _group(
        "The same program as a trial",
        list(_same_program(view)),
        why="Not run again: torch.compile makes one program of them, whose memory and speed are measured already.",
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
            yield f"{forecast.config.describe()}: that of #{programs[forecast.plan].number}"


# -- a trial that is no candidate ------------------------------------------------------------------

_WHY: tuple[tuple[Outcome, str], ...] = (
    (
        "dominated",
        "Stopped after a few timed steps: a trial of the same numerics needs no more memory and is clearly faster.",
    ),
    ("over_cap", "Trained, and found to need more than the cap."),
    ("out_of_memory", "Ended by the allocator, which is given no more than the cap."),
    (
        "parity_failed",
        "Not the same training: the first losses or gradients differ from a plain training of the same precision and "
        "optimizer by more than rounding.",
    ),
    ("diverged", "The loss became infinite or no number."),
    ("timeout", "Took longer than a trial may."),
    ("crashed", "Its process ended with an error; no other trial was touched."),
    ("interrupted", "Has no result: the search was stopped. The same search runs it again."),
)


def _failed(records: Sequence[TrialRecord]) -> Iterator[Group]:
    for outcome, why in _WHY:
        yield _with_outcome(records, outcome, why=why, words=_what_happened)
    unchecked = [
        record for record in records if record.outcome == "ok" and record.parity == "not compared"
    ]
    yield _group(
        "Counted without a comparison",
        [f"#{record.number} {described(record)}: {record.parity_message}" for record in unchecked],
        why="These are candidates, but their first steps could not be held against a plain training.",
    )


def _what_happened(record: TrialRecord) -> str:
    if record.outcome == "over_cap":
        return f"{format_size(record.device_bytes)}" if record.device_bytes else record.message
    return (record.parity_message if record.outcome == "parity_failed" else None) or record.message


def _with_outcome(
    records: Sequence[TrialRecord],
    outcome: Outcome,
    *,
    why: str,
    words: Callable[[TrialRecord], str],
) -> Group:
    title, ended = (
        OUTCOME_WORDS[outcome],
        [record for record in records if record.outcome == outcome],
    )
    lines = [
        f"#{record.number} {described(record)}" + (f": {said}" if (said := words(record)) else "")
        for record in ended[:LINES_SHOWN]
    ]
    return _group(title[0].upper() + title[1:], lines, why=why, count=len(ended))


def _group(title: str, lines: Sequence[str], *, why: str, count: int | None = None) -> Group:
    """`count`: of all, where `lines` are the first only."""
    return Group(
        title=title,
        count=len(lines) if count is None else count,
        why=why,
        lines=tuple(lines[:LINES_SHOWN]),
    )
