"""What Prometheus reads of a server."""

import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse

from autotune import __version__
from autotune.errors import StorageUnavailable
from autotune.service.metrics import MEDIA_TYPE, HttpMetrics, Metric, exposition, lines_of
from autotune.service.problems import documented
from autotune.service.processes import machine_of
from autotune.service.routes.health import Check
from autotune.service.state import Service, ServiceState
from autotune.spec.full_disk import LEAST_FREE_BYTES
from autotune.spec.queued_search import SEARCH_STATES

router = APIRouter(tags=["server"])


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    summary="Counters and gauges for Prometheus",
    responses=documented(),
)
async def metrics(request: Request, service: Service, check: Check) -> PlainTextResponse:
    """What only the database knows is left out while `autotune_database_up` is 0."""
    http: HttpMetrics = request.app.state.http_metrics
    is_reached, free_bytes = await check(service)
    of_database: tuple[Metric, ...] = ()
    if is_reached:
        try:
            of_database = await _of_database(service)
        except StorageUnavailable:
            is_reached = False
    found = (
        Metric(
            name="autotune_info",
            help="The version of the server.",
            kind="gauge",
            values={(("version", __version__),): 1},
        ),
        Metric(
            name="autotune_leader",
            help="Whether this server leads.",
            kind="gauge",
            values={(): 1 if service.role() == "leader" else 0},
        ),
        Metric(
            name="autotune_database_up",
            help="Whether this server reaches its database.",
            kind="gauge",
            values={(): int(is_reached)},
        ),
        Metric(
            name="autotune_disk_free_bytes",
            help="Free bytes of the disk that searches of this server write to.",
            kind="gauge",
            values={(): free_bytes},
        ),
        Metric(
            name="autotune_disk_full",
            help="Whether so few are free that the server takes no search.",
            kind="gauge",
            values={(): int(free_bytes < LEAST_FREE_BYTES)},
        ),
        *of_database,
        Metric(
            name="autotune_events_total",
            help="Events of searches that this server knows of.",
            kind="counter",
            values={(): service.stream.position},
        ),
        Metric(
            name="autotune_streams",
            help="Clients that listen to events.",
            kind="gauge",
            values={(): service.stream.listeners},
        ),
    )
    parts = [lines_of(metric) for metric in found]
    return PlainTextResponse(exposition([*parts, http.lines()]), media_type=MEDIA_TYPE)


async def _of_database(service: ServiceState) -> tuple[Metric, ...]:
    """Returns what only the database knows. Raises StorageUnavailable."""
    searches = await anyio.to_thread.run_sync(service.searches.counts)
    groups = await anyio.to_thread.run_sync(service.searches.groups)
    running = await anyio.to_thread.run_sync(service.searches.running)
    busy = {(search.host, search.group) for search in running}
    outcomes = await service.reader.outcomes()
    return (
        Metric(
            name="autotune_searches",
            help="Searches of the queue by their state.",
            kind="gauge",
            values={(("state", state),): searches.get(state, 0) for state in SEARCH_STATES},
        ),
        Metric(
            name="autotune_group_busy",
            help="Whether a search runs on a group of devices, of every worker that is there.",
            kind="gauge",
            values={
                (
                    ("machine", machine_of(group.machine)),
                    ("group", group.name),
                    ("kind", group.kind),
                ): int((group.machine, group.name) in busy)
                for group in groups
            },
        ),
        Metric(
            name="autotune_trials_total",
            help="Trials with a result, of all studies in the database.",
            kind="counter",
            values={
                (("outcome", outcome),): number for outcome, number in sorted(outcomes.items())
            },
        ),
    )
