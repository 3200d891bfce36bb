"""A server of a temporary database in this process, and all of its routes."""

from contextlib import contextmanager

from starlette.testclient import TestClient

from autotune.service.application import create_app
from autotune.service.settings import ServerSettings
from tests.building.studies import MIB, measured, write_study

STAND_IN = "tests.building.search_stand_in"
"""What runs instead of a search that is submitted."""
TOKEN = "the-token-of-this-test-Zq9"
ORIGIN = "http://127.0.0.1:8321"
BEARER = {"Authorization": f"Bearer {TOKEN}"}

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"

TRIALS = (
    measured(peak_memory_bytes=60 * MIB, device_bytes=60 * MIB, tokens_per_second=900.0),
    measured(peak_memory_bytes=40 * MIB, device_bytes=40 * MIB, tokens_per_second=1000.0),
    measured(peak_memory_bytes=20 * MIB, device_bytes=20 * MIB, tokens_per_second=500.0),
    measured(
        outcome="crashed",
        message=HOSTILE,
        peak_memory_bytes=None,
        device_bytes=None,
        tokens_per_second=None,
        tokens_per_second_spread=None,
        perplexity=None,
    ),
    None,
)
"""A slow baseline, the pick, the smallest, a failure with a hostile message, and one stopped."""


def write_example(url, name="quick"):
    write_study(url, TRIALS, name=name)


PEER = "testclient"
"""What a connection is from, unless a test says so: no address."""


@contextmanager
def serving(storage, *, peer=PEER, **settings):
    """Yields a client of a server; it sends no token by itself and follows no redirect."""
    of_server = ServerSettings(storage=storage, **{"token": TOKEN, **settings})
    app = create_app(of_server, search_module=STAND_IN)
    connection = (peer, 50000)
    with TestClient(app, base_url=ORIGIN, follow_redirects=False, client=connection) as client:
        yield client


def cookie_of(client):
    """Returns the name of the cookie of a server in this process."""
    return client.app.state.service.cookie


def routes_of(app):
    """Returns (method, path) of every route, also of those that the OpenAPI document leaves out."""
    return sorted(set(_routes_of(app.routes)))


def _routes_of(routes, prefix=""):
    for route in routes:
        if hasattr(route, "original_router"):  # how FastAPI 0.165 holds an included router
            yield from _routes_of(
                route.original_router.routes, prefix + route.include_context.prefix
            )
        elif route.methods is not None:
            for method in route.methods:
                yield method, prefix + route.path
