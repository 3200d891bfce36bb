"""The devices of servers and workers, how they are used, and who leads."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from autotune.service.devices import Device, devices_in_use
from autotune.service.problems import documented
from autotune.service.processes import machine_of
from autotune.service.state import CallerOfRequest, Service
from autotune.spec.queued_search import QueuedSearch

router = APIRouter(tags=["server"])


class Group(BaseModel):
    """A group of devices of a machine runs one search at a time."""

    name: str
    machine: str
    kind: str = Field(description="The vendor's name of its devices; empty: not known.")
    devices: str | None = Field(description="As of `--devices`; null: one device.")
    search: int | None = Field(description="The search that runs on it.")


class Devices(BaseModel):
    """The devices of every machine with a server or a worker, and the groups of all workers."""

    devices: list[Device]
    groups: list[Group]
    ray: str | None = Field(description="The Ray cluster that trials run on.")
    leader: str = Field(description="Version of the server that leads; empty: none.")


@router.get(
    "/devices", response_model=Devices, summary="Devices and their use", responses=documented(503)
)
def devices(service: Service, caller: CallerOfRequest) -> dict[str, Any]:
    """Devices that others use are shown as such: their use disturbs what is measured."""
    return devices_of_searches(service, caller, service.searches.running())


def devices_of_searches(
    service: Service, caller: CallerOfRequest, running: Sequence[QueuedSearch]
) -> dict[str, Any]:
    """Returns the answer of `devices` for the searches that run."""
    of_group = {(search.host, search.group): search.id for search in running}
    lead = service.searches.lead()
    found = [asdict(device) for device in devices_in_use(running)]
    if not caller.is_server:
        for answer in service.others.answers_of_machines("/api/v1/devices"):
            found += answer.json()["devices"]
    return {
        "devices": found,
        "groups": [
            {
                "name": group.name,
                "machine": machine_of(group.machine),
                "kind": group.kind,
                "devices": group.devices,
                "search": of_group.get((group.machine, group.name)),
            }
            for group in service.searches.groups()
        ],
        "ray": service.settings.ray,
        "leader": lead.version if lead.holder else "",
    }
