"""The contents of a report, computed from a study: plain values, no HTML."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences
from autotune.exporters import TARGETS
from autotune.reporting.columns import ON_PAGES, TrialTable, front_records, trial_table
from autotune.reporting.outcomes import outcome_counts
from autotune.reporting.report import commands
from autotune.reporting.report.answer import Headline, answer_of
from autotune.reporting.report.details import trial_details
from autotune.reporting.report.excluded import Group, excluded
from autotune.reporting.report.facts import study_facts, workload_facts
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_facts import Facts
from autotune.reporting.trial_text import place_and_cap
from autotune.spec.terms import Terms


@dataclass(frozen=True, kw_only=True)
class Command:
    """A shell command of the page and what it is for."""

    purpose: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that the page shows but its figures.

    What takes long for thousands of trials is computed when it is asked for.
    """

    study: str
    about: str
    """Workload and device in one line."""
    answer: Headline
    outcomes: str
    front: TrialTable
    rerun_template: str
    export_template: str
    targets: Mapping[str, str]
    """Targets of an export: {value of --to: title}."""
    workload: Facts
    settings: Facts
    commands: tuple[Command, ...]
    version: str
    view: StudyView
    """The data of the figures."""

    @property
    def terms(self) -> Terms:
        return self.view.result.terms

    @property
    def torch_version(self) -> str:
        return self.view.result.device.versions.get("torch", "?")

    @cached_property
    def excluded(self) -> tuple[Group, ...]:
        """The configurations that are excluded from the front, and why."""
        return excluded(self.view)

    @cached_property
    def trials(self) -> TrialTable:
        """The table of all trials."""
        result = self.view.result
        return trial_table(result, result.trials, optional=ON_PAGES)

    @cached_property
    def details(self) -> Mapping[str, Any]:
        """What a trial shows when it is opened, JSON-ready, see `details.py`."""
        return trial_details(self.view.result)


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
        about=f"{result.workload.describe(counted=result.terms.counted)}, "
        f"{result.workload.steps} steps, on {place_and_cap(result)}",
        answer=answer_of(view),
        outcomes=outcome_counts(result.trials),
        front=trial_table(result, front_records(result), with_before_training=True),
        rerun_template=commands.rerun_template(definition),
        export_template=commands.export_template(result.study, storage=result.storage),
        targets=targets,
        workload=workload_facts(result.workload),
        settings=study_facts(view, preferences),
        commands=_commands(view, preferences=preferences, storage=result.storage),
        version=version,
        view=view,
    )


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
