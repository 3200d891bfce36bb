"""Puts the server together: the gate, the routes, the pages, and what they share while it runs."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response

from autotune import __version__
from autotune.reporting.figures import FigureOptions
from autotune.reporting.study_view import StudyView
from autotune.service.answers import AsciiResponse
from autotune.service.devices import groups_of
from autotune.service.gate import Gate
from autotune.service.leader import Leader
from autotune.service.metrics import HttpMetrics
from autotune.service.openapi import document_of
from autotune.service.other_servers import OtherServers
from autotune.service.pages import routes as pages
from autotune.service.problems import add_handlers
from autotune.service.quick import QUICK_MODULE, QuickAnswers
from autotune.service.reading import StudyReader
from autotune.service.retention import Retention
from autotune.service.routes import (
    actions,
    devices,
    events,
    health,
    measures,
    profiles,
    quick,
    searches,
    studies,
    study_changes,
    will_it_fit,
)
from autotune.service.settings import ServerSettings
from autotune.service.state import ServiceState
from autotune.service.stream import EventStream
from autotune.service.worker import SEARCH_MODULE, Worker
from autotune.storage.database import Database
from autotune.storage.hidden_url import HiddenUrl
from autotune.storage.identity import work_folder_path
from autotune.storage.searches import Searches
from autotune.storage.servers import Servers
from autotune.storage.store import StudyStore
from autotune.storage.tokens import Tokens
from autotune.study.opening.staging import sweep

API = "/api/v1"

ROUTERS: tuple[APIRouter, ...] = (
    health.router,
    searches.router,
    studies.router,
    profiles.router,
    study_changes.router,
    quick.router,
    will_it_fit.router,
    devices.router,
    events.router,
    actions.router,
)
"""What answers under /api/v1, a line for each subject."""

PAGE_ROUTERS: tuple[APIRouter, ...] = (pages.router,)
"""What answers with HTML."""

SEARCH_LOGS = ".searches"
"""Folder of logs in the work folder, by a name that no study has."""
_BUSY_TIMEOUT_SECONDS = 5.0
"""How long a request waits for the lock of an SQLite database."""


def create_app(
    settings: ServerSettings,
    *,
    search_module: str = SEARCH_MODULE,
    quick_module: str = QUICK_MODULE,
) -> FastAPI:
    """Returns the app of a server. Its database is opened when the app starts.

    `search_module` is what the process of a search runs, and `quick_module` that of an answer.
    """
    http_metrics = HttpMetrics()
    app = FastAPI(
        title="autotune",
        version=__version__,
        lifespan=_lifespan,
        default_response_class=AsciiResponse,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=[Middleware(Gate, settings=settings, metrics=http_metrics)],
    )
    app.state.settings = settings
    app.state.search_module = search_module
    app.state.quick_module = quick_module
    app.state.http_metrics = http_metrics
    app.state.health_check = health.HealthCheck()
    app.state.hidden_url = HiddenUrl(settings.storage)
    add_handlers(app)
    for router in ROUTERS:
        app.include_router(router, prefix=API)
    app.include_router(measures.router)
    for router in PAGE_ROUTERS:
        app.include_router(router, include_in_schema=False)
    _add_document(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    settings: ServerSettings = app.state.settings
    store = StudyStore(settings.storage, create=True, busy_timeout_seconds=_BUSY_TIMEOUT_SECONDS)
    with closing(store):
        queue = Searches(store.database)
        tokens = Tokens(store.database)
        work = work_folder_path(store.database)
        retention = Retention(
            folder=work, keep_days=settings.keep_days, quota_bytes=settings.quota_bytes
        )
        stream = EventStream(
            store.database,
            queue,
            when_study_changes=partial(study_changes.follow_change, work, store, queue),
        )
        servers = Servers(store.database)
        groups = groups_of(settings) if settings.worker else ()
        others = OtherServers(servers, settings, groups=groups)
        worker = Worker(
            queue,
            others,
            settings,
            groups=groups,
            log_folder=work / SEARCH_LOGS,
            retention=retention,
            module=app.state.search_module,
        )
        leader = None
        if not settings.is_worker:
            leader = Leader(queue, settings, webhooks_of_people=tokens.webhooks)
        quick_answers = QuickAnswers(work, module=app.state.quick_module)
        app.state.service = ServiceState(
            settings=settings,
            store=store,
            tokens=tokens,
            servers=servers,
            cookie=_cookie_of(store.database),
            searches=queue,
            stream=stream,
            worker=worker,
            leader=leader,
            quick=quick_answers,
            reader=StudyReader(
                store,
                address=settings.address,
                timeline_of=partial(_timeline_of, quick_answers, settings),
            ),
            others=others,
            work_folder=work,
            # What is below `work` can be made again, and may go at any time.
            deleted_folder=work.parent.parent / "deleted" / work.name,
        )
        with suppress(OSError):  # of a disk that others can read alone
            await anyio.to_thread.run_sync(sweep, work)
        await stream.begin()
        await anyio.to_thread.run_sync(others.begin)
        threads = [worker] if leader is None else [worker, leader]
        running = [asyncio.create_task(stream.run()), asyncio.create_task(others.run())]
        try:
            for rounds in threads:
                await anyio.to_thread.run_sync(rounds.__enter__)
            yield
        finally:
            for rounds in threads:
                await anyio.to_thread.run_sync(rounds.__exit__)
            for task in running:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await anyio.to_thread.run_sync(others.end)


def _cookie_of(database: Database) -> str:
    """Returns a name that is of the database: a host has cookies of all its ports and servers.

    Raises StorageUnavailable.
    """
    digest = hashlib.sha256((database.identity or "").encode())
    return f"autotune_token_{digest.hexdigest()[:12]}"


async def _timeline_of(
    answers: QuickAnswers, settings: ServerSettings, view: StudyView, options: FigureOptions
) -> str:
    """Has a process predict a trial's memory over one step, as it imports torch."""
    # plotly takes 0.1 s to import, which the start of the server does without.
    from autotune.reporting.figures.memory_timeline import trial_shown  # noqa: PLC0415

    order = {
        "study": view.result.study,
        "trial": trial_shown(view, options.trial).number,
        "rules": asdict(settings.rules()),
        "version": [view.begun_at, view.last_result_at, len(view.result.trials)],
    }
    return json.dumps(await answers.ask("timeline", order))


def _add_document(app: FastAPI) -> None:
    written: dict[str, Any] = {}

    @app.get(f"{API}/openapi.json", include_in_schema=False)
    async def document() -> Response:
        if not written:
            written.update(document_of(app))
        return JSONResponse(written)
