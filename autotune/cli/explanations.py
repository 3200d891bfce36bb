"""What `autotune explain` does: find the configuration, explain its memory peak and print that."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autotune.analysis.explanation import SIZES_NOTE, Explanation
from autotune.cli.lines import print_line
from autotune.cli.tables import as_text, indented, make_console
from autotune.errors import InvalidInput, suggestion
from autotune.reporting.trial_text import speed_text
from autotune.spec.config import TrainingConfig, check_legal, configuration_of
from autotune.spec.result import JSON_SCHEMA
from autotune.spec.search_space import SearchSpace, bind_space
from autotune.spec.workload import Workload, check_adapters
from autotune.study.explain.question import Question
from autotune.study.prediction.predictions import workload_of
from autotune.units import format_duration


def requested(
    device_type: str,
    settings: Mapping[str, Any],
    configuration: Mapping[str, Any],
    *,
    space: SearchSpace | None,
    name: str | None,
) -> tuple[Workload, TrainingConfig]:
    """Returns the workload and configuration that the options describe. Raises InvalidInput."""
    workload = workload_of(device_type, settings, space=space)
    if space is not None:
        config = _named_configuration(space, name, workload=workload)
    else:
        config = configuration_of(configuration, workload.legality_context)
    check_legal(config, workload.legality_context)
    check_adapters(workload, [config.adapter])
    return workload, config


def _named_configuration(space: Any, name: str | None, *, workload: Workload) -> TrainingConfig:
    named = bind_space(space, workload.legality_context, unavailable={}).named
    if name is None or name not in named:
        raise InvalidInput(
            f"search space {space.name!r} has no legal configuration {name!r}",
            hint=suggestion(name, named, otherwise=f"it names {', '.join(named) or 'none'}"),
        )
    return named[name]


def say_beginning(*, quiet: bool) -> None:
    """Say on stderr what takes the first seconds, once the request has been checked."""
    if not quiet:
        print_line("Starting torch ...", to_stderr=True, flush=True)


def explain_question(question: Question, *, quiet: bool) -> Explanation:
    """Returns the explanation; stderr shows its progress, in a file or pipe as lines."""
    if quiet or not sys.stderr.isatty():
        return question.explain(progress=_ignore if quiet else _Lines())
    columns = (TextColumn("predicting"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns,
        console=make_console(sys.stderr),
        transient=True,
    ) as progress:
        task = progress.add_task("", total=None)
        return question.explain(
            progress=lambda made, wanted: progress.update(task, completed=made, total=wanted),
        )


def _ignore(_made: int, _wanted: int) -> None:
    """Show no progress."""


class _Lines:
    """Prints a line where a set of predictions begins, with the time since the first one."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._wanted = 0

    def __call__(self, made: int, wanted: int) -> None:
        if wanted <= self._wanted:
            return
        line = "Predicting the configuration ..."
        if self._wanted:
            elapsed = format_duration(time.monotonic() - self._began)
            more = wanted - made
            configurations = "configuration" if more == 1 else "configurations"
            line = f"Predicting {more} more {configurations}, after {elapsed} ..."
        self._wanted = wanted
        print_line(line, to_stderr=True, flush=True)


def print_explanation(question: Question, explanation: Explanation) -> None:
    console = make_console()

    def say(line: str, style: str = "") -> None:
        """Print a line: folded between words on a terminal, whole in a pipe."""
        if line and console.is_terminal:
            text = line.lstrip()
            console.print(indented(text, len(line) - len(text), style=style))
        else:
            console.print(as_text(line, style=style), soft_wrap=True)

    number = "" if question.record is None else f"#{question.record.number} "
    say(f"{number}{explanation.config.describe()}", "bold")
    say(question.about())
    if speed := speed_text(explanation.prediction):
        say("")
        say("How fast, by prediction", "bold")
        say(f"  {speed[0].upper()}{speed[1:]}. Rates: {question.forecaster.rates_from}.")
    for title, lines in explanation.sections():
        say("")
        say(title, "bold")
        for line in lines:
            say(f"  {line}")
    say("")
    say(SIZES_NOTE)
    for note in explanation.prediction.notes:
        say(f"Note: {note}.")


def explanation_to_dict(question: Question, explanation: Explanation) -> dict[str, Any]:
    return {
        "schema": JSON_SCHEMA,
        "study": question.study,
        "trial": None if question.record is None else question.record.number,
        "workload": question.forecaster.workload.to_dict(),
        **explanation.to_dict(),
    }
