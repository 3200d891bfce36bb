"""Closes connections on which nothing moves, so that clients cannot use all that a server may have.

uvicorn waits without end for the headers of a request, and for a client to take in what it is sent.
"""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_LOOKS = 2
"""How often within its limit a connection is looked at."""


def protocol_of_connections(longest_wait_seconds: float) -> type[asyncio.Protocol]:
    """Returns uvicorn's protocol, which closes a connection after waiting so long for its client.

    A client is waited for while there are no complete headers of a request, and while it takes in
    nothing of what was sent to it.
    """

    # The class that uvicorn chooses is known only at run time.
    class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _look: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._unchanged = 0
            self._seen = self._state()
            self._look_later()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._look is not None:
                self._look.cancel()
            super().connection_lost(exc)

        def _look_later(self) -> None:
            pause_seconds = longest_wait_seconds / _LOOKS
            self._look = asyncio.get_running_loop().call_later(pause_seconds, self._look_at)

        def _look_at(self) -> None:
            seen, self._seen = self._seen, self._state()
            is_waiting = self._seen is not None and self._seen == seen
            self._unchanged = self._unchanged + 1 if is_waiting else 0
            if self._unchanged >= _LOOKS:
                self.transport.abort()
            else:
                self._look_later()

        def _state(self) -> tuple[object, int] | None:
            """Returns what changes as soon as the client does something; None if it need not."""
            unsent_bytes = self.transport.get_write_buffer_size()
            has_request = self.cycle is not None and not self.cycle.response_complete
            if has_request and unsent_bytes == 0:
                return None
            return self.cycle, unsent_bytes

    return cast(type[asyncio.Protocol], Protocol)
