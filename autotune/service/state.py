"""What the routes of one server share, and who calls them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio.to_thread
from fastapi import Depends, Request

from autotune.analysis.queue_order import DeviceGroup, Needs, kind_of
from autotune.errors import NotYours
from autotune.service.leader import Leader
from autotune.service.other_servers import OtherServers
from autotune.service.quick import QuickAnswers
from autotune.service.reading import StudyReader
from autotune.service.settings import ServerSettings, SubmissionRules
from autotune.service.stream import EventStream
from autotune.service.worker import Worker
from autotune.spec.model_size import free_disk_bytes
from autotune.spec.queued_search import SearchState
from autotune.storage.searches import Searches
from autotune.storage.servers import Servers
from autotune.storage.store import StudyStore
from autotune.storage.tokens import TokenRole, Tokens

ANY_DEVICES = Needs()
"""Those of a search that names none."""
ServerRole = Literal["leader", "standby", "worker"]


@dataclass(kw_only=True)
class ServiceState:
    """The open database of a server and what reads and writes it."""

    settings: ServerSettings
    store: StudyStore
    tokens: Tokens
    servers: Servers
    cookie: str
    """The name of the cookie with a browser's token, which all servers of the database share."""
    searches: Searches
    stream: EventStream
    worker: Worker
    leader: Leader | None
    """None: a worker alone, which never leads."""
    quick: QuickAnswers
    reader: StudyReader
    others: OtherServers
    work_folder: Path
    """Where the files of studies are, each in a folder of its name: logs, and what is prepared."""
    deleted_folder: Path
    """Where deleted studies are exported to."""

    def role(self) -> ServerRole:
        """Whether this server leads, or waits for the one that does to end."""
        if self.leader is None:
            return "worker"
        return "leader" if self.leader.is_leading else "standby"

    def rules(self, settings: Mapping[str, Any], *, model: str = "") -> SubmissionRules:
        """Returns what is accepted for a search with these settings.

        `model` is the device that its study was begun on. It may ask for as much as the largest
        group has that it is for, of GPUs before CPUs. One that asks for more GPUs than there are,
        or is for no group that is there, waits for a worker with them.
        """
        largest = self.largest_group(
            Needs(group=settings.get("group") or "", kind=kind_of(settings), model=model)
        )
        slots = largest.slots if largest is not None and largest.type == "cpu" else None
        return dataclasses.replace(
            self.settings.rules(),
            devices=None if largest is None else largest.devices,
            most_devices=self.settings.most_devices or slots,
            device_type="" if largest is None else largest.type,
            device_kind="" if largest is None else largest.kind,
        )

    def largest_group(self, needs: Needs = ANY_DEVICES) -> DeviceGroup | None:
        """Returns the largest group of all workers for such a search, of GPUs before CPUs."""
        known = (*self.worker.groups, *self.searches.groups())
        groups = [each for each in known if needs.is_for(each)]
        return max(groups, key=lambda each: (each.type != "cpu", each.slots), default=None)

    def dry_run_order(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the process of a dry run is told. Raises StorageUnavailable."""
        return {
            "settings": settings,
            "rules": asdict(self.rules(settings)),
        }

    def free_disk_bytes(self) -> int:
        """Returns the free bytes of the disk with the fewest, of those that searches write to."""
        return min(map(free_disk_bytes, (Path.cwd(), self.work_folder)))

    async def states_of_studies(self) -> Mapping[str, SearchState]:
        """Returns the state of the latest search of each study that has one."""
        return await anyio.to_thread.run_sync(self.searches.states_of_studies)


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Whoever has the token of a request."""

    name: str
    role: TokenRole
    is_server: bool = False
    """Whether it is another server of the database, for which this one asks no further ones."""

    @property
    def is_read_only(self) -> bool:
        return self.role == "reader"

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"

    def may_change(self, owner: str) -> bool:
        """Whether the caller may change what belongs to `owner`."""
        return self.is_admin or (self.name == owner and not self.is_read_only)

    def check_may_change(self, what: str, *, owner: str) -> None:
        """Raises NotYours for what belongs to somebody else."""
        if not self.may_change(owner):
            raise NotYours(f"{what} belongs to {owner}", hint=f"ask {owner}, or an admin")


def service_state(request: Request) -> ServiceState:
    state: ServiceState = request.app.state.service
    return state


def caller(request: Request) -> Caller:
    """The caller that the gate has let in."""
    found: Caller = request.state.caller
    return found


Service = Annotated[ServiceState, Depends(service_state)]
CallerOfRequest = Annotated[Caller, Depends(caller)]
