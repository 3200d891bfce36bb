"""The events of a server, read from its event stream, which is opened again wherever it breaks.

The server numbers events; after a break the client names the last number that it has, so that none
is lost, and leaves out what it has seen, so that none is doubled.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.client.connection import Connection, reading_answer
from autotune.client.study_json import record_of
from autotune.errors import InvalidInput, ServerUnreachable, StorageUnreachable
from autotune.spec.reading import parse
from autotune.study.events import (
    Confirming,
    Event,
    ServerMessage,
    StudyOpened,
    TrialBegan,
    TrialEnded,
    TrialPhase,
)

_SILENCE_SECONDS = 45.0
"""The server sends something every 15 seconds."""
_LONGEST_NUMBER = 18
"""Digits of an event's number."""
_LARGEST_EVENT_BYTES = 2**24
"""The largest that a server sends, the list of trials at a reset, is a hundredth of it."""
_BETWEEN_STREAMS_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class ServerEvent:
    """Something that happened on the server."""

    id: int
    """Its number, which grows; 0 for one that the client made itself."""
    kind: str
    """search, opened, trial_began, step, trial_ended, front, confirming, notice, study or reset."""
    data: Mapping[str, Any]

    @property
    def search(self) -> int | None:
        """The number of the search that it is about."""
        number = self.data.get("id") if self.kind == "search" else None
        found = self.data.get("search", number)
        return found if isinstance(found, int) else None

    def of_search(self) -> Event | None:
        """Returns the event as the search itself has it; None for what only the server knows.

        A notice of a class that is not known here is what it says. Raises InvalidInput for an event
        that this version cannot read.
        """
        with reading_answer():
            match self.kind:
                case "opened":
                    places = dict.fromkeys(self.data.get("places") or (), ())
                    values = {**self.data, "places": places}
                    return parse(StudyOpened, values, ignore_unknown=True)
                case "trial_ended":
                    return TrialEnded(record=record_of(self.data["trial"]))
                case "notice" if known := _NOTICES.get(self.data.get("type", "")):
                    return parse(known, self.data["values"], ignore_unknown=True)
                case _ if known := _KINDS.get(self.kind):
                    return parse(known, self.data, ignore_unknown=True)
        return None


_KINDS: Mapping[str, type[Event]] = {
    "trial_began": TrialBegan,
    "step": TrialPhase,
    "confirming": Confirming,
    "notice": ServerMessage,
}
_NOTICES = {kind.__name__: kind for kind in Event.__subclasses__() if not kind.kind}


@dataclass(frozen=True, kw_only=True)
class Breath:
    """The stream is alive and has nothing to say."""


def lines_of(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a stream that arrives in pieces, without a last line that is cut off.

    Raises InvalidInput for an event without end.
    """
    rest, event_bytes = b"", 0
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r")
            event_bytes = event_bytes + len(text) if text else 0
            yield text.decode(errors="replace")
        if event_bytes + len(rest) > _LARGEST_EVENT_BYTES:
            raise InvalidInput(
                "the server sends an event that does not end",
                hint="check that the URL is that of an autotune server",
            )


def lines_to_events(lines: Iterable[str]) -> Iterator[ServerEvent | Breath]:
    """Yield the events in the lines of an event stream, and a Breath for each comment.

    An event without its empty line at the end is cut off, and is left out.
    """
    number, kind, data = 0, "message", []
    for line in lines:
        if line.startswith(":"):
            yield Breath()
        elif line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "id" and value.isdecimal() and len(value) <= _LONGEST_NUMBER:
                number = int(value)
            elif name == "event":
                kind = value
            elif name == "data":
                data.append(value)
        else:
            if data:
                yield ServerEvent(id=number, kind=kind, data=_data(data))
            kind, data = "message", []


def _data(lines: list[str]) -> Mapping[str, Any]:
    try:
        found = json.loads("\n".join(lines))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidInput(
            "the server sends events that this version of autotune cannot read",
            hint="install the version of the server: autotune --version, and /api/v1/health",
        )
    return found


def events_of(
    connection: Connection, *, parameters: Mapping[str, Any], after: int | None
) -> Iterator[ServerEvent | Breath]:
    """Yield events for ever, those after the number `after`; None: those from now on.

    Raises ServerUnreachable or StorageUnreachable where the server is away for longer than the
    connection waits.
    """
    while True:
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        try:
            with connection.stream(
                "/events", parameters=parameters, headers=headers, read_seconds=_SILENCE_SECONDS
            ) as response:
                for event in lines_to_events(lines_of(response.iter_bytes())):
                    if isinstance(event, Breath):
                        yield event
                    elif event.kind == "reset":
                        after = event.id or after
                        yield event
                    elif after is None or event.id > after:
                        after = event.id
                        yield event
        except (ServerUnreachable, StorageUnreachable) as error:
            connection.wait_after(error)
        else:
            time.sleep(_BETWEEN_STREAMS_SECONDS)
