"""Finds who calls, without asking the database for every request.

Tokens are compared in constant time.
"""

import asyncio
import hmac
import time
from collections.abc import Mapping
from contextlib import suppress

import anyio.to_thread

from autotune.errors import StorageUnavailable
from autotune.service.processes import machine_of
from autotune.service.state import Caller
from autotune.storage.servers import Servers
from autotune.storage.tokens import OWNER, TokenRole, Tokens, digest_of

_FRESH_SECONDS = 2.0
"""A token that was revoked is valid for at most this long after the database can be read."""
_SECONDS_BETWEEN_READS = 0.25
"""Wrong tokens make the server read the database at most this often."""


class Callers:
    """Who has which token; `owner_token` is that of the server's start.

    A worker knows `servers_only`, and no person.
    """

    def __init__(self, owner_token: str, *, servers_only: bool = False) -> None:
        self._owner_digest = digest_of(owner_token)
        self._servers_only = servers_only
        self._callers: Mapping[str, Caller] = {}
        self._roles: Mapping[str, TokenRole] = {}
        self._read_at = -float("inf")
        self._reading = asyncio.Lock()

    async def caller_of(self, token: str, tokens: Tokens, servers: Servers) -> Caller | None:
        """Returns who has this token; None for a wrong one.

        While the database is away, whoever had one when it was last read still has it; for any
        other token it raises StorageUnavailable.
        """
        digest = digest_of(token)
        if hmac.compare_digest(digest, self._owner_digest):
            return Caller(name=OWNER, role="admin")
        asked_at = time.monotonic()
        if self._read_at < asked_at - _FRESH_SECONDS:
            with suppress(StorageUnavailable):
                await self._read_after(asked_at - _FRESH_SECONDS, tokens, servers)
        found = self._named(digest)
        if found is None:
            # It may have been added since the database was read.
            await self._read_after(asked_at, tokens, servers)
            found = self._named(digest)
        return found

    async def person(self, name: str, tokens: Tokens, servers: Servers) -> Caller:
        """Returns somebody whom a proxy has let in: a member, unless a token of the name says more.

        Raises StorageUnavailable.
        """
        await self._read_after(time.monotonic() - _FRESH_SECONDS, tokens, servers)
        return Caller(name=name, role=self._roles.get(name, "member"))

    def _named(self, digest: str) -> Caller | None:
        """Compares with every token, so that the time tells nothing about any of them."""
        found = None
        for other, caller in self._callers.items():
            if hmac.compare_digest(digest, other):
                found = caller
        return found

    async def _read_after(self, moment: float, tokens: Tokens, servers: Servers) -> None:
        """Reads the database, unless that was done after `moment` of the monotonic clock.

        Waits until the last reading is long enough ago; all who wait share one reading.
        """
        async with self._reading:
            if self._read_at >= moment:
                return
            await asyncio.sleep(self._read_at + _SECONDS_BETWEEN_READS - time.monotonic())
            began = time.monotonic()
            found, self._roles = await anyio.to_thread.run_sync(_read, tokens, servers)
            self._callers = {
                digest: caller
                for digest, caller in found.items()
                if caller.is_server or not self._servers_only
            }
            self._read_at = began


def _read(tokens: Tokens, servers: Servers) -> tuple[Mapping[str, Caller], Mapping[str, TokenRole]]:
    """Returns who has which token, by its digest, and the role of each name."""
    callers = {
        digest: Caller(name=token.name, role=token.role) for digest, token in tokens.valid().items()
    }
    for server in servers.running():
        name = f"server {machine_of(server.host)}"  # no token has such a name
        callers[server.digest] = Caller(name=name, role="reader", is_server=True)
        callers[server.owner_digest] = Caller(name=OWNER, role="admin")
    callers.pop("", None)
    return callers, tokens.roles()
