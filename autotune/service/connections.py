"""Bounds what a connection may hold, so that clients cannot use all that a server may have.

uvicorn waits without end for the headers of a request and for a client to take in what it is sent,
and keeps headers however many there are. Whoever has no token yet could fill the memory so.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

LARGEST_HEAD_BYTES = 32 * 1024
"""Of a request's first line and headers; programs and browsers send a tenth of it."""
MOST_HEADERS = 100
MOST_PIPELINED = 16
"""How many requests of a connection may wait for the answer to the one before."""
MOST_STRANGERS = 500
"""How many connections may be open at once whose last request had no valid token."""

_LOOKS = 2
"""How often within its limit a connection is looked at."""
_PIECE_BYTES = 4096
"""What is parsed at a time. The size of a head is known to so many bytes."""
_TOO_LARGE = b"the headers of the request are too large"
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_TOO_LARGE), _TOO_LARGE)
)


def protocol_of_connections(longest_wait_seconds: float) -> type[asyncio.Protocol]:
    """Returns uvicorn's protocol, which closes a connection after waiting so long for its client.

    A client is waited for while there are no complete headers of a request, and while it takes in
    nothing of what was sent to it. Headers that are too large or too many are answered with 431,
    and where too many strangers are connected, the one that came first is cut off.
    """

    class Protocol(HttpToolsProtocol):
        _look: asyncio.TimerHandle | None = None
        _unfinished_bytes = 0
        """Received since the last piece of a body, or the end of a request or its headers."""
        _is_in_head = True
        _is_refused = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._unchanged = 0
            self._seen = self._state()
            self._look_later()
            self._cycles: list[RequestResponseCycle] = []
            connected[self] = None
            self._make_room()

        def connection_lost(self, exc: Exception | None) -> None:
            connected.pop(self, None)
            if self._look is not None:
                self._look.cancel()
            super().connection_lost(exc)

        # -- how large what is not a body may be --------------------------------------------------

        def data_received(self, data: bytes) -> None:
            for begin in range(0, len(data), _PIECE_BYTES):
                if self._is_refused or self.transport.is_closing():
                    return
                piece = data[begin : begin + _PIECE_BYTES]
                self._unfinished_bytes += len(piece)
                super().data_received(piece)
                if self._unfinished_bytes > LARGEST_HEAD_BYTES:
                    self._refuse()

        def on_message_begin(self) -> None:
            self._is_in_head, self._unfinished_bytes = True, 0
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            # What follows a body is not a header. One more than the limit shows that there are too
            # many.
            if self._is_in_head and len(self.headers) <= MOST_HEADERS:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._is_in_head, self._unfinished_bytes = False, 0
            if len(self.headers) > MOST_HEADERS or len(self.pipeline) >= MOST_PIPELINED:
                self._refuse()
            if not self._is_refused:
                super().on_headers_complete()
                waiting = [cycle for cycle in self._cycles if not cycle.response_complete]
                self._cycles = [*waiting, self.cycle]

        def on_body(self, body: bytes) -> None:
            self._unfinished_bytes = 0
            if not self._is_refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._unfinished_bytes = 0
            if not self._is_refused:
                super().on_message_complete()

        def _refuse(self) -> None:
            """Reads nothing more, and closes the connection once what was asked is answered."""
            if self._is_refused:
                return
            self._is_refused = True
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_REFUSAL)
                self.transport.close()
            else:
                self.cycle.keep_alive = False

        def _cut_off(self) -> None:
            for cycle in self._cycles:
                cycle.disconnected = True  # the connection cannot be written to any more
            self.transport.abort()

        # -- how many may be connected -----------------------------------------------------------

        def _make_room(self) -> None:
            """Cuts off the stranger who came first where there are too many.

            Programs and browsers send their request at once, so that it is not one of them.
            """
            strangers = [each for each in connected if each._is_stranger()]
            if len(strangers) > MOST_STRANGERS:
                strangers[0]._cut_off()

        def _is_stranger(self) -> bool:
            """Whether its last request, if there is one, has not got past the check of tokens."""
            return self.cycle is None or "caller" not in self.cycle.scope["state"]

        # -- how long it is waited for -----------------------------------------------------------

        def _look_later(self) -> None:
            pause_seconds = longest_wait_seconds / _LOOKS
            self._look = asyncio.get_running_loop().call_later(pause_seconds, self._look_at)

        def _look_at(self) -> None:
            seen, self._seen = self._seen, self._state()
            is_waiting = self._seen is not None and self._seen == seen
            self._unchanged = self._unchanged + 1 if is_waiting else 0
            if self._unchanged >= _LOOKS:
                self._cut_off()
            else:
                self._look_later()

        def _state(self) -> tuple[object, int] | None:
            """Returns what changes as soon as the client does something; None if it need not."""
            unsent_bytes = self.transport.get_write_buffer_size()
            has_request = self.cycle is not None and not self.cycle.response_complete
            if has_request and unsent_bytes == 0:
                return None
            return self.cycle, unsent_bytes

    connected: dict[Protocol, None] = {}
    """In the order in which they came."""
    return Protocol
