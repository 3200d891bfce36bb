"""Runs the search of `autotune search`: progress, signals, the summary, the command to continue."""

import json
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import typer
from rich.console import Console

from autotune.analysis.loose_cap import loose_cap_sentence
from autotune.analysis.pick import Preferences
from autotune.cli.lines import print_line
from autotune.cli.live import make_display
from autotune.cli.options import ShownInFull
from autotune.cli.tables import as_text, make_console, print_result, print_trials
from autotune.client.address import SERVER_VARIABLE
from autotune.errors import Stopped, StorageUnreachable, TrialLost
from autotune.reporting.outcomes import outcome_counts
from autotune.reporting.report.commands import preference_arguments
from autotune.spec.result import StudyResult
from autotune.spec.search_space import SearchSpace
from autotune.spec.setting import options_of
from autotune.spec.study import DEFAULT_STORAGE, MOST_TRIALS_IN_TIME
from autotune.storage.error_translation import redacted_url
from autotune.study.confirmation.request import ConfirmationRequest
from autotune.study.events import Notice
from autotune.study.profiling import profile_at_end
from autotune.study.request import SearchRequest
from autotune.study.search import search
from autotune.system.standard_streams import answer
from autotune.units import format_duration


def run_with_display(
    request: SearchRequest,
    *,
    shown: ShownInFull,
    space: SearchSpace | None = None,
    confirmation: ConfirmationRequest | None = None,
) -> None:
    """Run the search, or only the confirmation, show its progress and print its result.

    `space` is as in `search`.
    """
    display = make_display(
        quiet=shown.quiet,
        preferences=request.preferences,
        until_converged=request.until_converged,
    )
    with _stop_on_signals() as signals:
        try:
            with display:
                result = search(
                    request,
                    space=space,
                    listener=display,
                    should_stop=lambda: bool(signals),
                    confirmation=confirmation,
                )
                profile_at_end(
                    result,
                    request,
                    should_stop=lambda: bool(signals),
                    note=lambda sentence: display(Notice(message=sentence)),
                )
        except Stopped:
            if display.progress.opened is not None:
                study = display.progress.opened.study
                command = continue_command(study, request)
                if confirmation is not None:
                    command = shlex.join(["autotune", "confirm", study])
                stopped = "Stopped; every finished trial is stored. Continue with:"
                print_line(stopped, to_stderr=True)
                print_line(f"  {command}", to_stderr=True)
            else:
                print_line("Stopped before the study began.", to_stderr=True)
            raise typer.Exit(128 + signals[0]) from None
        except (StorageUnreachable, TrialLost) as error:
            command = "the same command"
            if display.progress.opened is not None:
                command = continue_command(display.progress.opened.study, request)
            hint = error.hint or "measured results are stored"
            raise type(error)(error.message, hint=f"{hint}; continue with: {command}") from None
    # The commands that read a study would ask the server of the environment.
    is_found = request.storage == DEFAULT_STORAGE and not os.environ.get(SERVER_VARIABLE)
    location = StudyLocation(
        name=result.storage,
        arguments=() if is_found else ("--storage", result.storage),
        continue_command=lambda trials: continue_command(result.study, request, trials=trials),
    )
    print_ended(result, location, wanted=display.progress.wanted, shown=shown)


@contextmanager
def _stop_on_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in the yielded list; the second ends the process at once.

    The processes that it started end with it. SIGHUP comes several times from a terminal that
    closes, so that only the first one counts; under `nohup` it does not count at all.
    """
    received: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if received and number != signal.SIGHUP:
            os._exit(128 + number)
        received.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            if received and number == signal.SIGHUP:
                handler = signal.SIG_IGN  # what is left to say is said, or dropped
            signal.signal(number, handler)


def continue_command(study: str, request: SearchRequest, *, trials: int | None = None) -> str:
    """Returns the command that continues a study, with every option that the study does not store.

    Defaults are left out, and a password in the storage URL is replaced by a placeholder.
    """
    values = {name: getattr(request, name) for name in options_of(SearchRequest)}
    values |= {"name": study, "trials": trials, "storage": redacted_url(request.storage)}
    return search_command(values, request.preferences)


def search_command(
    values: Mapping[str, Any], preferences: Preferences, *, server: Sequence[str] = ()
) -> str:
    """Returns a command that continues a study, with those of the settings that it does not store.

    `server` are the arguments that name the server of the study, if it has one.
    """
    arguments = ["autotune", "search", *server]
    for name, option in options_of(SearchRequest).items():
        if option.is_repeated:
            arguments += option.arguments(values.get(name, option.default))
    return shlex.join([*arguments, *preference_arguments(preferences)])


@dataclass(frozen=True, kw_only=True)
class StudyLocation:
    """Where the study of a summary is, for the commands that read and continue it."""

    name: str
    """The URL of a database, or of the page of a server."""
    arguments: tuple[str, ...]
    """What names it on a command line; empty for the default database."""
    continue_command: Callable[[int], str]
    """Returns the command that continues the study to that number of trials."""


def print_ended(
    result: StudyResult, location: StudyLocation, *, wanted: int, shown: ShownInFull
) -> None:
    """Print the result of a search, and exit with 1 where nothing is feasible."""
    show = ["autotune", "show", result.study, *location.arguments]
    if shown.as_json:
        show.append("--json")
    with answer(hint=f"every result is stored; make room and print them: {shlex.join(show)}"):
        if shown.as_json:
            print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
        else:
            print_summary(
                result, make_console(), place=location, wanted=wanted, verbose=shown.verbose
            )
    if not result.front:
        raise typer.Exit(1)


def print_summary(
    result: StudyResult, console: Console, *, place: StudyLocation, wanted: int, verbose: bool
) -> None:
    seconds = sum(record.seconds or 0.0 for record in result.trials)
    counts = outcome_counts(result.trials)
    console.print(
        as_text(
            f"Study {result.study}: {counts}, {format_duration(seconds)} of trials", style="bold"
        )
    )
    console.print()
    if verbose:
        print_trials(console, result, result.trials, title="All trials", with_before_training=True)
        console.print()
    print_result(result, console)
    baseline = None if result.baseline is None else result.trial(result.baseline)
    sentence = loose_cap_sentence(baseline, cap_bytes=result.cap_bytes, records=result.trials)
    if sentence:
        console.print()
        console.print(as_text(f"Note: {sentence}."))
    study_arguments = shlex.join([result.study, *place.arguments])
    reused = sum(record.reused_from is not None for record in result.trials)
    is_unfinished = len(result.trials) < wanted < MOST_TRIALS_IN_TIME
    trials_to_continue = wanted if is_unfinished else 2 * len(result.trials)
    commands = [
        (f"autotune show {study_arguments}", "every trial"),
        (f"autotune report {study_arguments}", "the whole study as one HTML page"),
    ]
    own_file = result.workload.own_file
    if result.pick and own_file is not None:
        into = shlex.quote(own_file)
        commands.append(
            (f"autotune export {study_arguments} --into {into}", "the pick, in a copy of your file")
        )
    elif result.pick:
        commands.append(
            (f"autotune export {study_arguments} --to pytorch", "the pick, for your trainer")
        )
    commands.append((place.continue_command(trials_to_continue - reused), "continue"))
    console.print()
    console.print(as_text(f"Results  {place.name}"))
    for command, purpose in commands:
        console.print(as_text(f"  {command}  # {purpose}"), soft_wrap=True)
