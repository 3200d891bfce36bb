"""Follows a search of a server as if it ran here: the same display, summary and exit codes."""

import json
import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

import typer

from autotune.analysis.pick import Preferences
from autotune.cli.lines import print_line
from autotune.cli.live import Display, make_display
from autotune.cli.options import ShownInFull
from autotune.cli.search_run import StudyLocation, print_summary
from autotune.cli.server import command_on_server
from autotune.cli.tables import make_console
from autotune.client.client import Client
from autotune.client.connection import reading_answer
from autotune.client.events import ServerEvent
from autotune.client.remote_result import RemoteResult
from autotune.client.searches import RemoteSearch
from autotune.client.study_json import record_of, result_of
from autotune.errors import AutotuneError, InvalidInput, Stopped, UnknownStudy
from autotune.reporting.report.commands import preference_arguments
from autotune.spec.checked import checked_setting
from autotune.spec.config import TrainingConfig
from autotune.spec.reading import check
from autotune.spec.search_space import LegalSpace, SearchSpace
from autotune.spec.setting import options_of
from autotune.spec.study import DEFAULT_SAMPLER, StudyDefinition
from autotune.standard_streams import answer
from autotune.study.events import Confirming, StudyOpened, TrialBegan, TrialEnded, TrialPhase
from autotune.study.request import SearchRequest

_Event: TypeAlias = TrialBegan | TrialPhase | Confirming | TrialEnded
_CLASS_OF: dict[int, type[AutotuneError]] = {2: InvalidInput, 75: Stopped}


class Interrupted(BaseException):
    """SIGINT or SIGTERM has come."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def interrupts() -> Iterator[None]:
    """Raise Interrupted at the first SIGINT or SIGTERM; the second ends the process at once."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Followed:
    """Shows the events of a server in a display that was made for those of a search here."""

    def __init__(self, client: Client, search: RemoteSearch, display: Display) -> None:
        self._client = client
        self._search = search
        self._display = display
        self._shown: set[int] | None = None
        """Numbers of the trials that the display has; None before the study is opened."""
        self._state = ""

    def __call__(self, event: ServerEvent) -> None:
        """Show an event. Raises InvalidInput for one that this version cannot read."""
        data = event.data
        match event.kind:
            case "search":
                self._note_state(data)
            case "opened":
                lines = data.get("lines")
                for line in lines if isinstance(lines, list) else ():
                    self._display.say(str(line))
                self._open(trials_wanted=data.get("trials_wanted"), places=data.get("places") or ())
            case "reset":
                self._open_again()
            case "notice":
                for line in str(data.get("message", "")).splitlines():
                    self._display.say(line)
            case "trial_began" | "step" | "confirming" | "trial_ended" if self._is_open():
                shown = _event_of(event.kind, data)
                if isinstance(shown, TrialEnded):
                    self._end_trial(shown)
                elif self._shown is not None and data.get("number") not in self._shown:
                    self._display(shown)

    def _note_state(self, data: Any) -> None:
        state = data.get("state", "")
        if state == "queued" and self._state != "queued":
            now = self._client.search(self._search.id)
            if now.state == "queued":
                place = "" if now.position is None else f", at place {now.position}"
                self._display.say_waiting(f"Search {now.id} waits in the queue{place} ...")
        elif state == "running" and self._state != "running":
            self._display.say(f"Search {self._search.id} runs on {self._client.url}.")
        self._state = state

    def _is_open(self) -> bool:
        if self._shown is None:
            self._open(trials_wanted=self._search.trials_wanted, places=())
        return self._shown is not None

    def _open(self, *, trials_wanted: int | None, places: Any) -> None:
        """Tell the display of the study, once it has been begun."""
        if self._shown is not None:
            return
        with reading_answer():
            if not isinstance(trials_wanted, int | None):
                raise TypeError(f"trials_wanted is {trials_wanted!r}")
            names = {str(place): () for place in places}
        try:
            values = self._client.study_json(self._study())
        except UnknownStudy:
            return
        result = result_of(values)
        finished = tuple(record for record in result.trials if record.is_finished)
        definition = StudyDefinition(
            name=result.study,
            workload=result.workload,
            # The JSON of a study does not have its space. The display needs only the baseline.
            space=SearchSpace(name="", techniques={}),
            device=result.device,
            unavailable={},
            cap_bytes=result.cap_bytes,
            seed=result.workload.seed,
            sampler=DEFAULT_SAMPLER,
        )
        self._shown = {record.number for record in finished}
        self._display.note(
            StudyOpened(
                definition=definition,
                legal=LegalSpace(
                    values={},
                    conditions=(),
                    at=result.workload.legality_context,
                    named={},
                    excluded=(),
                ),
                trials_wanted=trials_wanted or len(finished),
                records=finished,
                is_new=False,
                places=names,
            )
        )

    def _study(self) -> str:
        if not self._search.study:
            self._search = self._client.search(self._search.id)
        return self._search.study

    def _open_again(self) -> None:
        """Take in what the study has by now: events of trials are gone."""
        if not self._is_open():
            return
        for record in self._client.show(self._study()).trials:
            if record.is_finished:
                self._end_trial(TrialEnded(record=record))

    def _end_trial(self, ended: TrialEnded) -> None:
        """Show the result of a trial, unless the display has it."""
        if self._shown is not None and ended.record.number not in self._shown:
            self._shown.add(ended.record.number)
            self._display(ended)


def _event_of(kind: str, data: Mapping[str, Any]) -> _Event:
    """Returns an event of a trial as a search here has it. Raises InvalidInput."""
    with reading_answer():
        event: _Event
        if kind == "trial_began":
            event = TrialBegan(
                number=data["number"],
                config=TrainingConfig(**data["config"]),
                name=data.get("name"),
                device=data.get("device") or "",
            )
        elif kind == "step":
            steps = data.get("steps")
            event = TrialPhase(
                doing=data["doing"],
                steps=None if steps is None else (steps[0], steps[1]),
                device=data.get("device") or "",
            )
        elif kind == "confirming":
            event = Confirming(doing=data["doing"], device=data.get("device") or "")
        else:
            event = TrialEnded(record=record_of(data["trial"]))
        check(event)
        return event


def follow(
    client: Client,
    search: RemoteSearch,
    *,
    quiet: bool,
    preferences: Preferences,
    until_converged: bool = False,
) -> RemoteSearch:
    """Show what a search does until it has ended, and return it as it ended."""
    display = make_display(quiet=quiet, preferences=preferences, until_converged=until_converged)
    followed = _Followed(client, search, display)
    with display:
        for event in client.watch(search.id, on_wait=lambda why: _say_waiting(display, why)):
            followed(event)
    return client.search(search.id)


def _say_waiting(display: Display, why: str) -> None:
    display.say_waiting(f"{why[0].upper()}{why[1:]}; waiting for it, the search goes on.")


def print_ended(
    client: Client,
    search: RemoteSearch,
    *,
    preferences: Preferences,
    shown: ShownInFull,
) -> None:
    """Print the result of a search that has ended, as a search here does, and exit as it would."""
    raise_unless_finished(search, client)
    show = command_on_server(["show", search.study, *(["--json"] if shown.as_json else [])], client)
    with answer(hint=f"every result is stored; make room and print them: {show}"):
        if shown.as_json:
            values = client.study_json(search.study, preferences=preferences)
            print(json.dumps(values, indent=2, allow_nan=False))
            has_front = bool(result_of(values).front)
        else:
            result = client.show(search.study, preferences=preferences)
            has_front = bool(result.front)
            _print_result(result, search, client, verbose=shown.verbose)
    if not has_front:
        raise typer.Exit(1)


def raise_unless_finished(search: RemoteSearch, client: Client) -> None:
    """Raise the error with which a search has failed or was cancelled."""
    if search.state == "failed":
        error = _CLASS_OF.get(search.exit_code or 0, AutotuneError)
        raise error(search.reason or "the search failed", hint=search.hint)
    if search.state != "cancelled":
        return
    by = f": {search.reason}" if search.reason else ""
    go_on = command_to_continue(search, client)
    if go_on is None:
        raise Stopped(
            f"search {search.id} was cancelled{by}, before its study began",
            hint=f"submit it again with the same command; its settings are on {search.url}",
        )
    raise Stopped(
        f"search {search.id} was cancelled{by}; every finished trial is stored",
        hint=f"continue with: {go_on}",
    )


def command_to_continue(search: RemoteSearch, client: Client) -> str | None:
    """Returns the command that continues the study of a cancelled search; None without a study.

    Under the name of a study that never began the command would begin another, with the defaults.
    """
    if not search.study:
        return None
    try:
        client.study_json(search.study)
    except UnknownStudy:
        return None
    return command_on_server(["search", "--name", search.study], client)


def _print_result(
    result: RemoteResult, search: RemoteSearch, client: Client, *, verbose: bool
) -> None:
    print_summary(
        result,
        make_console(),
        place=StudyLocation(
            name=f"{client.url}/studies/{result.study}",
            arguments=("--server", client.url),
            continue_command=lambda trials: _continue_command(client, search, trials, result),
        ),
        wanted=search.trials_wanted or len(result.trials),
        verbose=verbose,
    )


def _continue_command(
    client: Client, search: RemoteSearch, trials: int, result: RemoteResult
) -> str:
    """Returns the command that continues the study on the server, with what it does not store."""
    given = {**search.request, "name": result.study, "trials": trials}
    arguments = ["autotune", "search", "--server", client.url]
    for name, option in options_of(SearchRequest).items():
        if option.is_repeated and given.get(name) is not None:
            arguments += option.arguments(checked_setting(SearchRequest, name, given[name]))
    return shlex.join([*arguments, *preference_arguments(result.preferences)])


def print_left(client: Client, search: RemoteSearch) -> None:
    """Say that a search goes on although nobody watches it here."""
    again = command_on_server(["watch", str(search.id)], client)
    cancel = command_on_server(["cancel", str(search.id)], client)
    goes_on = f"Search {search.id} goes on without this display. Watch it again with:"
    for line in (goes_on, f"  {again}", "Cancel it with:", f"  {cancel}"):
        print_line(line, to_stderr=True)
