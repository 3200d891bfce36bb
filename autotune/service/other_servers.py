"""Reads from other servers of the database what is only in their folders: logs and profiles.

Such files stay where a search ran: a trace has many megabytes, a log grows all the time, and both
may be deleted at any time, which a database is no place for. So each server notes in the database
where others reach it, and what one lacks it asks the others for, as a reader.
"""

import asyncio
import ipaddress
import logging
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import anyio.to_thread
import httpx
from starlette.background import BackgroundTask
from starlette.responses import Response, StreamingResponse

from autotune.analysis.queue_order import DeviceGroup
from autotune.errors import StorageUnavailable, StorageUpgraded
from autotune.service.problems import Problem
from autotune.service.processes import machine_of, this_host
from autotune.service.settings import ServerSettings
from autotune.storage.servers import RunningServer, Servers
from autotune.storage.tokens import digest_of, new_token

_LOG = logging.getLogger("autotune.service")

_RENEW_SECONDS = 5.0
_ANSWER_SECONDS = httpx.Timeout(10.0, connect=2.0)
_AWAY_SECONDS = 10.0
"""A server that could not be reached is not asked again for so long: others wait for the answer."""
_PASSED_ON = (
    *("cache-control", "content-disposition", "content-length", "content-security-policy"),
    "content-type",
)


class OtherServers:
    """The servers of the database but this one, which gives its own signs of life meanwhile."""

    def __init__(
        self, servers: Servers, settings: ServerSettings, *, groups: tuple[DeviceGroup, ...] = ()
    ) -> None:
        self._servers = servers
        secret = new_token()
        self._own = RunningServer(
            digest=digest_of(secret),
            owner_digest=""
            if settings.token or settings.is_worker
            else digest_of(settings.owner_token),
            address=(settings.internal_address or settings.address).rstrip("/"),
            host=this_host(),
            groups=groups,
        )
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {secret}", "Accept-Encoding": "identity"},
            timeout=_ANSWER_SECONDS,
            mounts={"all://": None},  # no proxy of the environment leads to them
        )
        self._asked_again_at: dict[str, float] = {}
        self.error: StorageUpgraded | None = None
        """Why this server cannot go on."""

    # -- signs of life -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Lets the others know of this server. Raises StorageUnavailable."""
        self._servers.renew(self._own)

    async def run(self) -> None:
        """Gives signs of life until cancelled, or until a later autotune has the database."""
        while self.error is None:
            await asyncio.sleep(_RENEW_SECONDS)
            try:
                await anyio.to_thread.run_sync(self._servers.renew, self._own)
            except StorageUpgraded as error:
                self.error = error
            except StorageUnavailable as error:
                _LOG.warning("other servers do not hear of this one: %s", error.message)

    def end(self) -> None:
        """Takes this server off the list."""
        with suppress(StorageUnavailable):
            self._servers.remove(self._own)
        self._http.close()

    def withdraw_groups(self) -> None:
        """Lets the others know, by the next sign of life, that no search is taken here any more."""
        self._own = replace(self._own, groups=())

    def groups_here(self) -> set[str]:
        """Returns the groups of devices of this machine that others run searches on, too.

        Raises StorageUnavailable.
        """
        return {
            group.name
            for server in self._servers.running()
            if server.host == self._own.host and server.digest != self._own.digest
            for group in server.groups
        }

    # -- what they have ----------------------------------------------------------------------------

    def answers(self, path: str, **parameters: Any) -> list[httpx.Response]:
        """Returns the successful answers of the others to a GET. Raises StorageUnavailable."""
        found = [self._answer(server, path, parameters) for server in self._others()]
        return [answer for answer in found if answer is not None]

    def answers_of_machines(self, path: str) -> list[httpx.Response]:
        """Returns the same of one server of each machine but this one."""
        servers = {
            server.host: server for server in self._others() if server.host != self._own.host
        }
        found = [self._answer(server, path, {}) for server in servers.values()]
        return [answer for answer in found if answer is not None]

    def file(self, path: str) -> Response | None:
        """Returns the answer of the first that has a file, of any size; None where nobody has."""
        for server in self._others():
            answer = self._answer(server, path, {}, stream=True)
            if answer is not None:
                headers = {
                    name: answer.headers[name] for name in _PASSED_ON if name in answer.headers
                }
                return StreamingResponse(
                    answer.iter_raw(), headers=headers, background=BackgroundTask(answer.close)
                )
        return None

    def problem(self, missing: Problem, what: str, machines: Collection[str]) -> Problem:
        """Returns why `what`, which none that was asked has, cannot be had.

        `missing` where every server and each of `machines`, the hosts that may have it, was asked.
        """
        running = self._servers.running()
        asked = {machine_of(server.host) for server in running if not self._is_away(server)}
        away = {machine_of(server.host) for server in running if self._is_away(server)}
        away |= {machine_of(machine) for machine in machines} - asked
        if not away:
            return missing
        return Problem(
            503,
            f"{what} is not on this machine, and may be on {' or '.join(sorted(away))}, where no "
            "server is that this one reaches",
            hint="start a server of the database there, with an --internal-address that this one "
            "reaches",
        )

    def _others(self) -> Iterator[RunningServer]:
        for server in self._servers.running():
            if server.digest != self._own.digest and not self._is_away(server):
                yield server

    def _is_away(self, server: RunningServer) -> bool:
        """Whether a server cannot be reached: one at a loopback address is only on its machine."""
        if server.host != this_host() and _is_loopback(server.address):
            return True
        return self._asked_again_at.get(server.address, 0.0) > time.monotonic()

    def _answer(
        self, server: RunningServer, path: str, parameters: Any, *, stream: bool = False
    ) -> httpx.Response | None:
        try:
            request = self._http.build_request("GET", server.address + path, params=parameters)
            answer = self._http.send(request, stream=stream)
            if answer.status_code == 200:
                return answer
            answer.close()
            if answer.status_code == 404:  # it does not have it
                return None
            reason = f"status {answer.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error)
        _LOG.warning("the server at %s does not answer: %s", server.address, reason)
        self._asked_again_at[server.address] = time.monotonic() + _AWAY_SECONDS
        return None


def _is_loopback(address: str) -> bool:
    name = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
