"""Whether the server, its database and its disk are well; the one route that needs no token."""

import asyncio
import time
from typing import Annotated, Literal

import anyio.to_thread
import sqlalchemy
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse

from autotune import __version__
from autotune.errors import StorageUnavailable
from autotune.service.problems import documented
from autotune.service.state import ServerRole, Service, ServiceState
from autotune.spec.full_disk import LEAST_FREE_BYTES

router = APIRouter(tags=["server"])

_FRESH_SECONDS = 1.0


class Health(BaseModel):
    """Whether the server can work."""

    status: Literal["ok", "degraded", "unavailable"] = Field(
        description="`degraded`: it answers, and takes no search, as its disk is full."
    )
    version: str
    role: ServerRole
    database: Literal["ok", "unreachable"] = Field(
        description="Whether the server reaches its database."
    )
    disk: Literal["ok", "full"] = Field(
        description="Whether the disk that searches of this server write to has room."
    )


class HealthCheck:
    """Looks at the database and the disk at most once a second, however many ask."""

    def __init__(self) -> None:
        self._asked_at = -float("inf")
        self._found = False, 0
        self._asking = asyncio.Lock()

    async def __call__(self, service: ServiceState) -> tuple[bool, int]:
        """Returns whether the database answers, and how many bytes of the disk are free."""
        async with self._asking:
            if time.monotonic() - self._asked_at >= _FRESH_SECONDS:
                self._found = await anyio.to_thread.run_sync(_look, service)
                self._asked_at = time.monotonic()
            return self._found


def _look(service: ServiceState) -> tuple[bool, int]:
    free_bytes = service.free_disk_bytes()
    try:
        with service.store.database.reading() as connection:
            connection.execute(sqlalchemy.text("SELECT 1"))
    except StorageUnavailable:
        return False, free_bytes
    return True, free_bytes


def _check_of(request: Request) -> HealthCheck:
    check: HealthCheck = request.app.state.health_check
    return check


Check = Annotated[HealthCheck, Depends(_check_of)]


@router.get(
    "/health",
    response_model=Health,
    summary="Whether the server, its database and its disk are well",
    responses={
        **documented(),
        503: {"model": Health, "description": "The database cannot be reached at the moment."},
    },
)
async def health(service: Service, check: Check) -> JSONResponse:
    """Answers 503 where the database cannot be reached. Needs no token."""
    is_reached, free_bytes = await check(service)
    is_full = free_bytes < LEAST_FREE_BYTES
    content = Health(
        status="unavailable" if not is_reached else "degraded" if is_full else "ok",
        version=__version__,
        role=service.role(),
        database="ok" if is_reached else "unreachable",
        disk="full" if is_full else "ok",
    )
    headers = {} if is_reached else {"Retry-After": "2"}
    return JSONResponse(content.model_dump(), 200 if is_reached else 503, headers=headers)
