"""A real server of the pages, with hand-made studies and a search that seems to run.

Another server leads the queue, so that this one starts no process: what the search does is written
by the test, as its process would.
"""

import contextlib
import socket
import threading
import time
from dataclasses import replace

import uvicorn
from sqlalchemy import update

from autotune.analysis.queue_order import DeviceGroup
from autotune.service.application import create_app
from autotune.service.connections import protocol_of_connections
from autotune.service.quick import QUICK_MODULE
from autotune.service.settings import ServerSettings
from autotune.spec.queued_search import (
    SEARCH_LEASE_SECONDS,
    SEARCH_RENEWAL_SECONDS,
    SearchProcess,
)
from autotune.storage.searches import NewSearch, Searches
from autotune.storage.tables import SEARCHES
from tests.building.studies import MIB, config, definition, keep, measured, open_store

TOKEN = "a-token-of-the-tests"
HOSTILE = (
    "</title></script><script>document.title='owned'</script>"
    "<img src=x onerror=\"document.title='owned'\">'\"{{7*7}}${7*7}<svg onload=alert(1)>"
)
RUNNING = "growing"
"""The study of the search that seems to run."""


class PageServer:
    """The address of a server, and the search that a test lets go on."""

    def __init__(self, url, port, settings, quick_module):
        self.url = url
        self._quick_module = quick_module
        self._settings = settings
        self.address = f"http://127.0.0.1:{port}"
        self.search = None
        self.app = None
        self._port = port
        self.told = 0
        self._number = 0

    def start(self):
        settings = ServerSettings(
            storage=self.url, token=TOKEN, port=self._port, worker=False, **self._settings
        )
        self.app = create_app(settings, quick_module=self._quick_module)
        options = uvicorn.Config(
            self.app,
            host="127.0.0.1",
            port=self._port,
            http=protocol_of_connections(settings.longest_wait_seconds),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)

    def stop(self):
        """End the server; its streams break."""
        self._server.should_exit = True
        self._thread.join(10)

    def path(self, path):
        return f"{self.address}{path}"

    @property
    def signed_in(self):
        """The address that signs a browser in."""
        return f"{self.address}/?token={TOKEN}"

    def add_trial(self, **changes):
        """Let the next trial of the running search end, and return its number."""
        number, self._number = self._number, self._number + 1
        memory = changes.pop("memory", (40 - number) * MIB)
        speed = changes.pop("speed", 1000.0 - 10 * number)
        sizes = {"peak_memory_bytes": memory, "device_bytes": memory, "tokens_per_second": speed}
        with open_store(self.url) as store:
            keep(
                store,
                replace(config(0), micro_batch_size=8 * (number + 1)),
                measured(**sizes, **changes),
                study=RUNNING,
                name=f"trial {number}",
            )
            record = store.trials(RUNNING)[number]
        self.say("trial_ended", {"trial": record.to_dict()})
        return number

    def say(self, kind, data):
        """Write an event of the running search."""
        self.say_all([(kind, data)])

    def say_all(self, events):
        """Write (kind, data) of each event at once."""
        with open_store(self.url) as store:
            self._say_all(Searches(store.database), events)

    def _say_all(self, searches, events):
        searches.renew_run(
            self.search.id,
            self.search.run,
            progress={},
            study=RUNNING,
            has_results=True,
            events=events,
            after=self.told,
        )
        self.told += len(events)

    def submit(self, study, **request):
        """Put a search into the queue, where it stays."""
        with open_store(self.url) as store:
            new = NewSearch(request=request, submitted_by="somebody", is_of_admin=True, study=study)
            return Searches(store.database).submit(new)[0]

    def fail(self, search, reason):
        with open_store(self.url) as store, store.database.writing() as connection:
            connection.execute(
                update(SEARCHES)
                .where(SEARCHES.c.id == search.id)
                .values(state="failed", reason=reason, hint=reason, ended_at=1.0)
            )


@contextlib.contextmanager
def page_server(folder, *, records=(), quick_module=QUICK_MODULE, **settings):
    """Yield a server with a study that grows, one that is hostile, and one of `records`."""
    url = f"sqlite:///{folder}/autotune.db"
    with open_store(url) as store:
        store.create_study(definition(RUNNING), trials_wanted=50)
        store.create_study(definition("other"), trials_wanted=2)
        for number in range(2):
            keep(store, config(number), measured(), study="other")
        store.create_study(definition("hostile"), trials_wanted=3)
        keep(store, config(0), measured(), study="hostile", name=HOSTILE)
        crashed = measured(
            outcome="crashed", message=HOSTILE, tokens_per_second=None, perplexity=None
        )
        keep(store, config(1), crashed, study="hostile", name=HOSTILE)
        if records:
            store.create_study(definition("large"), trials_wanted=len(records), records=records)
        searches = Searches(store.database)
        new = NewSearch(
            request={"space": "quick"}, submitted_by="me", is_of_admin=True, study=RUNNING
        )
        searches.submit(new)
        running = searches.claim_next(DeviceGroup(machine="elsewhere"), version="0.1.0")
        process = SearchProcess(host="elsewhere", pid=1, started_at=1.0)
        running = searches.begin_run(running.id, running.run, process, version="1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = PageServer(url, port, settings, quick_module)
    served.search = running
    served.start()
    try:
        with _signs_of_life(url):
            yield served
    finally:
        served.stop()


@contextlib.contextmanager
def _signs_of_life(url):
    """Renews the lease of the search, as its process would."""
    has_ended = threading.Event()

    def renew():
        with open_store(url) as store:
            while not has_ended.wait(SEARCH_RENEWAL_SECONDS):
                with store.database.writing() as connection:
                    lease_until = time.time() + SEARCH_LEASE_SECONDS
                    connection.execute(update(SEARCHES).values(lease_until=lease_until))

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        yield
    finally:
        has_ended.set()
        renewing.join()
