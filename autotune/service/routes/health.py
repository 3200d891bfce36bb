"""Whether the server and its database answer; the one route that needs no token."""

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
from autotune.service.state import ServerRole, Service
from autotune.storage.database import Database

router = APIRouter(tags=["server"])

_FRESH_SECONDS = 1.0


class Health(BaseModel):
    """Whether the server can work."""

    status: Literal["ok", "unavailable"]
    version: str
    role: ServerRole
    database: Literal["ok", "unreachable"] = Field(
        description="Whether the server reaches its database."
    )


class DatabaseCheck:
    """Asks the database at most once a second, however many ask without a token."""

    def __init__(self) -> None:
        self._asked_at = -float("inf")
        self._is_reached = False
        self._asking = asyncio.Lock()

    async def reaches(self, database: Database) -> bool:
        async with self._asking:
            if time.monotonic() - self._asked_at >= _FRESH_SECONDS:
                self._is_reached = await anyio.to_thread.run_sync(_is_reached, database)
                self._asked_at = time.monotonic()
            return self._is_reached


def _is_reached(database: Database) -> bool:
    try:
        with database.reading() as connection:
            connection.execute(sqlalchemy.text("SELECT 1"))
    except StorageUnavailable:
        return False
    return True


def _check_of(request: Request) -> DatabaseCheck:
    check: DatabaseCheck = request.app.state.database_check
    return check


@router.get(
    "/health",
    response_model=Health,
    summary="Whether the server and its database answer",
    responses={
        **documented(),
        503: {"model": Health, "description": "The database cannot be reached at the moment."},
    },
)
async def health(
    service: Service, check: Annotated[DatabaseCheck, Depends(_check_of)]
) -> JSONResponse:
    """Answers 503 where the database cannot be reached. Needs no token."""
    is_reached = await check.reaches(service.store.database)
    content = Health(
        status="ok" if is_reached else "unavailable",
        version=__version__,
        role=service.role(),
        database="ok" if is_reached else "unreachable",
    )
    headers = {} if is_reached else {"Retry-After": "2"}
    return JSONResponse(content.model_dump(), 200 if is_reached else 503, headers=headers)
