"""The contents of a report, computed from a study: plain values, no HTML."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences
from autotune.exporters import TARGETS
from autotune.reporting.outcomes import outcome_counts, outcome_label
from autotune.reporting.report import commands
from autotune.reporting.report.answer import Headline, answer_of
from autotune.reporting.report.excluded import Group, excluded
from autotune.reporting.report.facts import Facts, study_facts, workload_facts
from autotune.reporting.report.trials import trial_table
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_text import (
    BeforeTraining,
    before_training,
    confirmed_mark,
    format_perplexity,
    format_speed,
    perplexity_notes,
    perplexity_warning,
    place_and_cap,
)
from autotune.spec.result import TrialRecord
from autotune.units import format_size


@dataclass(frozen=True, kw_only=True)
class FrontRow:
    """A row of the short table: a trial of the front, or the baseline."""

    number: int
    name: str
    words: str
    memory: str
    device: str
    speed: str
    perplexity: str
    marks: tuple[str, ...]
    notes: tuple[str, ...]
    """How often it was confirmed, and the earlier trial that the result is reused from."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A shell command of the page and what it is for."""

    purpose: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that the page shows."""

    study: str
    about: str
    """Workload and device in one line."""
    answer: Headline
    outcomes: str
    front: tuple[FrontRow, ...]
    before_training: BeforeTraining | None
    """The first row of the front's table, with pretrained weights."""
    is_cuda: bool
    perplexity_notes: tuple[str, ...]
    """What explains the marks at perplexities."""
    trials: Mapping[str, Any]
    """JSON-ready columns, see `trials.py`."""
    rerun_template: str
    export_template: str
    targets: Mapping[str, str]
    """Targets of an export: {value of --to: title}."""
    excluded: tuple[Group, ...]
    workload: Facts
    settings: Facts
    commands: tuple[Command, ...]
    version: str
    view: StudyView
    """The data of the figures."""


def compute(
    view: StudyView,
    *,
    version: str,
    preferences: Preferences = DEFAULT_PREFERENCES,
    targets: Mapping[str, str] | None = None,
) -> Report:
    """Compute the contents of a report.

    `version` is that of autotune, `preferences` are those the view was made with, and `targets`
    are the targets of an export, by default all.
    """
    result, definition = view.result, view.definition
    if targets is None:
        targets = {name: target.title for name, target in TARGETS.items()}
    return Report(
        study=result.study,
        about=f"{result.workload.describe()}, {result.workload.steps} steps, "
        f"on {place_and_cap(result)}",
        answer=answer_of(view),
        outcomes=outcome_counts(result.trials),
        front=front_rows(view),
        before_training=before_training(result),
        is_cuda=result.device.type == "cuda",
        perplexity_notes=tuple(perplexity_notes(result.trials)),
        trials=trial_table(view),
        rerun_template=commands.rerun_template(definition),
        export_template=commands.export_template(result.study, storage=result.storage),
        targets=targets,
        excluded=excluded(view),
        workload=workload_facts(result.workload),
        settings=study_facts(view, preferences),
        commands=_commands(view, preferences=preferences, storage=result.storage),
        version=version,
        view=view,
    )


def front_rows(view: StudyView) -> tuple[FrontRow, ...]:
    """Returns the front, sorted by memory, and the baseline if it is not on the front."""
    by_number = {record.number: record for record in view.result.trials}
    records = [by_number[number] for number in view.result.front]
    if view.baseline is not None and view.baseline not in records:
        records.append(view.baseline)
    return tuple(_front_row(view, record) for record in records)


def _front_row(view: StudyView, record: TrialRecord) -> FrontRow:
    marks = []
    if view.pick is not None and view.pick.number == record.number:
        marks.append("pick")
    if record.number in view.result.front:
        marks.append("front")
    if record.number == view.result.baseline:
        marks.append("baseline")
    if record.outcome != "ok":
        marks.append(outcome_label(record))
    if warning := perplexity_warning(view.result, record):
        marks.append(warning)
    notes = [confirmed_mark(record)]
    if record.reused_from:
        notes.append(f"from {record.reused_from}")
    memory = _size(record.peak_memory_bytes)
    if record.peak_memory_bytes is None and record.predicted_peak_memory_bytes:
        memory = f"{format_size(record.predicted_peak_memory_bytes)} predicted"
    return FrontRow(
        number=record.number,
        name=record.name or "",
        words=record.config.describe(),
        memory=memory,
        device=_size(record.device_bytes),
        speed=format_speed(record.tokens_per_second, record.tokens_per_second_spread) or "–",
        perplexity=format_perplexity(record) or "–",
        marks=tuple(marks),
        notes=tuple(filter(None, notes)),
    )


def _size(size_bytes: int | None) -> str:
    return "–" if size_bytes is None else format_size(size_bytes)


def _commands(view: StudyView, *, preferences: Preferences, storage: str) -> tuple[Command, ...]:
    study = view.result.study
    reading = commands.reading_command
    search = commands.search_command(view.definition, trials=len(view.result.trials))
    return (
        Command(purpose="Repeat the search as a new study", text=search),
        Command(
            purpose="Write this page again",
            text=reading("report", study, storage=storage, preferences=preferences),
        ),
        Command(
            purpose="All numbers as JSON",
            text=reading("show", study, storage=storage, suffix=" --json"),
        ),
        Command(
            purpose="All trials as CSV, for a spreadsheet",
            text=reading("show", study, storage=storage, suffix=" --csv"),
        ),
    )
