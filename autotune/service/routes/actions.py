"""The log of actions: who submitted, cancelled, renamed or deleted what."""

from functools import partial
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Query

from autotune.service import schemas
from autotune.service.parameters import WITHOUT_NUL, Limit, Offset
from autotune.service.problems import documented
from autotune.service.state import Service

router = APIRouter(tags=["server"])


@router.get(
    "/actions",
    response_model=schemas.Actions,
    summary="Who did what, newest first",
    responses=documented(422),
)
async def list_actions(
    service: Service,
    who: Annotated[
        str | None,
        Query(max_length=100, pattern=WITHOUT_NUL, description="Only what this person did."),
    ] = None,
    limit: Limit = 100,
    offset: Offset = 0,
) -> schemas.Actions:
    read = partial(service.tokens.actions, who=who, limit=limit, offset=offset)
    found, total = await anyio.to_thread.run_sync(read)
    return schemas.Actions(actions=found, total=total)
