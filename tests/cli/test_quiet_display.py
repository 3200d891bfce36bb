"""A quiet search says whom it waits for, and nothing else."""

import io

import pytest
from rich.console import Console

from autotune.analysis.pick import Preferences
from autotune.cli.live import QuietDisplay
from autotune.study.events import (
    Notice,
    ServerMessage,
    StorageBack,
    WaitingForDevice,
    WaitingForOthers,
    WaitingForStorage,
)
from autotune.study.progress import Progress

WAITS = {
    "another process 4711 of ada": WaitingForDevice(
        device="cuda:0", holder="another process 4711 of ada"
    ),
    "trials #3, #5 of other searches": WaitingForOthers(numbers=(3, 5)),
    "The database is away": WaitingForStorage(message="the database is away", limit_seconds=60.0),
}


@pytest.fixture
def shown():
    """The text, and the display that writes it."""
    written = io.StringIO()
    progress = Progress(preferences=Preferences())
    return written, QuietDisplay(progress, Console(file=written, width=160))


@pytest.mark.parametrize("text", WAITS)
def test_what_is_waited_for_is_said_once(shown, text):
    written, display = shown
    for _ in range(2):
        display(WAITS[text])
    assert text in written.getvalue()
    if not isinstance(WAITS[text], WaitingForStorage):
        assert written.getvalue().count("\n") == 1


def test_the_end_of_a_wait_for_the_database_is_said(shown):
    written, display = shown
    display(StorageBack(seconds=3.0))
    assert "3.0 s" in written.getvalue()


def test_everything_else_is_silent(shown):
    written, display = shown
    display(Notice(message="a step of progress"))
    display(ServerMessage(message="a line"))
    assert written.getvalue() == ""
