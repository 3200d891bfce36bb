"""A server for tests of the queue: its searches are stand-ins."""

import time
from contextlib import contextmanager

from starlette.testclient import TestClient

from autotune.service.application import create_app
from autotune.service.settings import ServerSettings
from tests.building.service import BEARER, ORIGIN, TOKEN

STAND_IN = "tests.building.search_stand_in"
PATIENCE_SECONDS = 60.0


@contextmanager
def running_service(storage, *, search_module=STAND_IN, **settings):
    """Yield a client of a server that runs in this process; it has the token."""
    app = create_app(
        ServerSettings(storage=storage, token=TOKEN, **settings), search_module=search_module
    )
    with TestClient(app, base_url=ORIGIN, headers=BEARER) as client:
        yield client


def wait_until(is_so):
    """Wait until something is so, for as long as a busy machine may need."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "nothing happens any more"
        time.sleep(0.02)


def wait_for_end(client, number):
    """Returns the search once it has ended."""
    ended = []

    def has_ended():
        search = client.get(f"/api/v1/searches/{number}").json()
        if search["state"] not in ("queued", "running"):
            ended.append(search)
        return bool(ended)

    wait_until(has_ended)
    return ended[0]
