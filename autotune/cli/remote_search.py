"""Follows a search of a server as if it ran here: the same display, summary and exit codes."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from autotune.analysis.pick import Preferences
from autotune.cli.lines import print_line
from autotune.cli.live import PlainDisplay, make_display
from autotune.cli.options import ShownInFull
from autotune.cli.search_run import StudyLocation, print_ended, search_command
from autotune.cli.server import command_on_server
from autotune.client.client import Client, RemoteResult
from autotune.client.events import ServerEvent
from autotune.client.searches import RemoteSearch
from autotune.errors import AutotuneError, InvalidInput, Stopped, UnknownStudy
from autotune.spec.checked import checked_setting
from autotune.spec.result import TrialRecord
from autotune.spec.setting import options_of
from autotune.study.events import Event, ServerMessage, StudyOpened, TrialEnded, WaitingForServer
from autotune.study.request import SearchRequest

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
    """Shows the events of a server in a display that was made for those of a search here.

    A display is told only of trials that the study did not have when it was opened.
    """

    def __init__(self, client: Client, search: RemoteSearch, display: PlainDisplay) -> None:
        self._client = client
        self._search = search
        self._display = display
        self._known: set[int] | None = None
        """Numbers of the trials that the display has; None before the study is opened."""
        self._state = ""

    def __call__(self, received: ServerEvent) -> None:
        """Show an event. Raises InvalidInput for one that this version cannot read."""
        match received.of_search():
            case None:
                self._note(received)
            case StudyOpened() as opened:
                self._open(opened)
            case event if event.kind:
                self._show(event, received.data.get("number"))
            case notice:
                self._display(notice)

    def _note(self, received: ServerEvent) -> None:
        """Take in what only the server knows."""
        if received.kind == "search":
            self._note_state(received.data.get("state", ""))
        elif received.kind == "reset" and self._known is not None:  # events of trials are gone
            for record in self._finished():
                self._show(TrialEnded(record=record), record.number)

    def _note_state(self, state: str) -> None:
        if state == "queued" and self._state != "queued":
            now = self._client.search(self._search.id)
            if now.state == "queued":
                place = "" if now.position is None else f", at place {now.position}"
                waiting = f": it {now.waiting}" if now.waiting else ""
                waits = f"Search {now.id} waits in the queue{place}{waiting} ..."
                self._display(WaitingForServer(message=waits))
        elif state == "running" and self._state != "running":
            self._display(
                ServerMessage(message=f"Search {self._search.id} runs on {self._client.url}.")
            )
        self._state = state

    def _open(self, opened: StudyOpened) -> set[int]:
        """Tell the display of the study, and return the numbers of the trials that it has."""
        if self._known is not None:  # by an earlier process of the search
            self._display(ServerMessage(message="\n".join(opened.lines)))
            return self._known
        records = self._finished()
        self._known = {record.number for record in records}
        wanted = opened.trials_wanted or len(records)
        self._display(replace(opened, records=records, trials_wanted=wanted))
        return self._known

    def _finished(self) -> tuple[TrialRecord, ...]:
        """Returns the trials of the study that have a result; none where it was deleted."""
        self._search = self._client.search(self._search.id)
        try:
            trials = self._client.show(self._search.study).trials
        except UnknownStudy:
            return ()
        return tuple(record for record in trials if record.is_finished)

    def _show(self, event: Event, number: Any) -> None:
        """Show what a trial does, or its result, unless the display has that."""
        known = self._known
        if known is None:
            wanted = self._search.trials_wanted or 0
            known = self._open(StudyOpened(study=self._search.study, trials_wanted=wanted))
        if isinstance(event, TrialEnded):
            number = event.record.number
        if number in known:
            return
        if isinstance(event, TrialEnded):
            known.add(event.record.number)
        self._display(event)


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

    def show_waiting(why: str) -> None:
        display(WaitingForServer(message=_waiting_for(why)))

    with display, client.patient(show_waiting) as patient:
        followed = _Followed(patient, search, display)
        for event in patient.watch(search.id, on_wait=show_waiting):
            followed(event)
        return patient.search(search.id)


def say_waiting(why: str) -> None:
    """Print that the server is away, where no display is open."""
    print_line(_waiting_for(why), to_stderr=True)


def _waiting_for(why: str) -> str:
    return f"{why[0].upper()}{why[1:]}; waiting for it, the search goes on."


def print_result_of_server(
    client: Client, search: RemoteSearch, *, preferences: Preferences, shown: ShownInFull
) -> None:
    """Print the result of a search that has ended, as a search here does, and exit as it would."""
    raise_unless_finished(search, client)
    result = client.show(search.study, preferences=preferences)
    location = StudyLocation(
        name=f"{client.url}/studies/{result.study}",
        arguments=("--server", client.url),
        continue_command=lambda trials: _continue_command(client, search, trials, result),
    )
    print_ended(result, location, wanted=search.trials_wanted or len(result.trials), shown=shown)


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


def _continue_command(
    client: Client, search: RemoteSearch, trials: int, result: RemoteResult
) -> str:
    """Returns the command that continues the study on the server, with what it does not store."""
    given = {**search.request, "name": result.study, "trials": trials}
    values = {
        name: checked_setting(SearchRequest, name, given[name])
        for name, option in options_of(SearchRequest).items()
        if option.is_repeated and given.get(name) is not None
    }
    return search_command(values, result.preferences, server=("--server", client.url))


def print_left(client: Client, search: RemoteSearch) -> None:
    """Say that a search goes on although nobody watches it here."""
    again = command_on_server(["watch", str(search.id)], client)
    cancel = command_on_server(["cancel", str(search.id)], client)
    goes_on = f"Search {search.id} goes on without this display. Watch it again with:"
    for line in (goes_on, f"  {again}", "Cancel it with:", f"  {cancel}"):
        print_line(line, to_stderr=True)
