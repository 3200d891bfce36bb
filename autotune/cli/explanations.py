"""What `autotune explain` does: find the configuration, explain its memory peak and print that."""

from collections.abc import Mapping
from typing import Any

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
