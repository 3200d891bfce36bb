"""What happens, as server-sent events."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import format_sse_event
from starlette.responses import StreamingResponse

from autotune.service.problems import documented
from autotune.service.state import Service
from autotune.service.stream import StreamedEvent

router = APIRouter(tags=["events"])

_RETRY_MILLISECONDS = 1000
_RESET = format_sse_event(event="reset", data_str="{}")
_SIGN_OF_LIFE = format_sse_event(comment="here")
_LARGEST_NUMBER = 2**62


@dataclass(frozen=True, kw_only=True)
class _Listened:
    """What one request listens to."""

    after: int
    """The number of the last event before."""
    events: AsyncIterator[Sequence[StreamedEvent | None]]
    is_still_let_in: Callable[[], Awaitable[bool]]
    """Whether its token is still valid."""


_DESCRIPTION = """\
`text/event-stream` of https://html.spec.whatwg.org/multipage/server-sent-events.html. The `data` of
each event is a JSON object with `search`, `study` and `at`, and:

- `search`: the state of a search has changed (`id`, `state`, `reason`, `priority`, ...)
- `opened`: its study is open (`trials_wanted`, `trials`, `device`, `lines` of text, `baseline`)
- `trial_began`: `number`, `config`, `label`, `name`, `device`
- `step`: `number`, `doing`, `steps` (how many have ended, of how many), at most one a second
- `trial_ended`: `trial`, the record of `autotune show --json`
- `front`: `front`, the numbers of its trials, and `pick`
- `confirming`: `doing`
- `notice`: `message`, also as pages show it, `on_page`; of a search `type` and `values`, its event
  in Python
- `study`: a study was renamed or deleted (`action`)
- `reset`: events before this one are no longer stored; read everything again

A stream that is opened with the number of the last event seen, in `Last-Event-ID` or
`last_event_id`, goes on after it: no event is lost, and none comes twice. A reader who is too slow
is disconnected, and goes on in that way.
"""


async def _listened(
    request: Request,
    service: Service,
    search: Annotated[
        int | None, Query(ge=1, le=2**31 - 1, description="Only events of this search.")
    ] = None,
    study: Annotated[
        str | None, Query(max_length=100, description="Only events of this study.")
    ] = None,
    last_event_id: Annotated[
        int | None,
        Query(ge=0, le=_LARGEST_NUMBER, description="Go on after this event."),
    ] = None,
    last_event_id_header: Annotated[
        str | None, Header(alias="Last-Event-ID", description="The same, as browsers send it.")
    ] = None,
) -> AsyncIterator[_Listened]:
    """Gives what a request listens to, and ends it with the request.

    FastAPI does not close the generator of a route whose client leaves.
    """
    after = service.stream.position if last_event_id is None else last_event_id
    if last_event_id_header is not None and last_event_id_header.isascii():
        digits = last_event_id_header.strip()
        if digits.isdigit() and len(digits) < 19:
            after = int(digits)

    def wants(event: StreamedEvent) -> bool:
        return search in (None, event.search) and study in (None, event.study)

    async with aclosing(service.stream.listen(after=after, wants=wants)) as listened:
        yield _Listened(after=after, events=listened, is_still_let_in=request.state.is_still_let_in)


class EventTextResponse(StreamingResponse):
    """A stream of events that are written already."""

    media_type = "text/event-stream"


@router.get(
    "/events",
    response_class=EventTextResponse,
    summary="What happens, as it happens",
    description=_DESCRIPTION,
    responses=documented(422),
)
async def events(listened: Annotated[_Listened, Depends(_listened)]) -> EventTextResponse:
    headers = {"X-Accel-Buffering": "no"}  # nginx passes it on at once
    return EventTextResponse(_text_of(listened), headers=headers)


async def _text_of(listened: _Listened) -> AsyncIterator[bytes]:
    """Yields the text of a stream, which ends where its token is not valid any more.

    Events are written once for all listeners. FastAPI would write each for each of them, which for
    200 listeners kept all other requests waiting for a fifth of a second.
    """
    # The number of the last event, for a client that is disconnected before the first.
    yield format_sse_event(comment="events", id=str(listened.after), retry=_RETRY_MILLISECONDS)
    async for batch in listened.events:
        if not await listened.is_still_let_in():
            return
        if batch:
            yield b"".join(_RESET if event is None else event.text for event in batch)
        else:
            yield _SIGN_OF_LIFE
