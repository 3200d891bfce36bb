"""What people are told of the queue is what happens: the forecast beside the claims."""

from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, event

from autotune.analysis.queue_order import DeviceGroup
from autotune.spec.queued_search import SearchEnd
from autotune.storage.searches import NewSearch, Searches
from autotune.storage.servers import RunningServer, Servers
from autotune.storage.store import StudyStore
from autotune.storage.tables import SEARCHES, USES

GROUPS = tuple(
    DeviceGroup(machine="here", name=name, number=number)
    for name, number in {"left": 1, "right": 2}.items()
)
HERE = RunningServer(digest="d", owner_digest="", address="", host="here", groups=GROUPS)
LONGEST_SECONDS = 300
HOUR = 3600.0

NEW = st.builds(
    NewSearch,
    request=st.just({}),
    submitted_by=st.sampled_from(["ada", "bob", "cid"]),
    priority=st.integers(0, 1),
    group=st.sampled_from(["", *(group.name for group in GROUPS)]),
    budget_seconds=st.integers(1, 5).map(float),
)
# Half a second more than whole ones: nobody is at the limit at the moment of a claim.
HOURS = st.integers(1, 12).map(lambda seconds: f"{(seconds + 0.5) / HOUR:.9f}/8s")
LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "most_running_of_person": st.just(1),
        "most_device_hours_of_person": HOURS,
    },
)


class Clock:
    """The clock of the database."""

    seconds = 1e9

    def julian_day(self, _):
        return self.seconds / 86400.0 + 2440587.5


class Server:
    """Works a queue off as a server does, in seconds of a clock that it moves on."""

    def __init__(self, database, clock, limits):
        with database.writing() as connection:
            connection.execute(delete(SEARCHES))
            connection.execute(delete(USES))
        clock.seconds += 1e6
        self._begin = clock.seconds
        self._clock = clock
        self.queue = Searches(database)
        self.queue.take_lead("a server", version="1", limits=limits)
        self._servers = Servers(database)
        self._servers.renew(HERE)
        self._running = {}
        self.begun = []

    @property
    def second(self):
        return round(self._clock.seconds - self._begin)

    def round(self):
        """End what is over, and begin what may begin."""
        for search, began, left in list(self._running.values()):
            if self.second >= began + left:
                self.queue.end_run(search.id, search.run, SearchEnd(state="finished"))
                del self._running[search.id]
        for group in GROUPS:
            search = self.queue.claim_next(group, version="1")
            if search is not None:
                used = (search.progress or {}).get("used_seconds", 0)
                self._running[search.id] = search, self.second, search.budget_seconds - used
                self.begun.append((search.id, self.second))
                self._clock.seconds += 0.001  # no two begin at the same moment

    def wait(self):
        self._clock.seconds += 1.0
        self._servers.renew(HERE)

    def report(self):
        """Say of each search for how long it has run, as its process does."""
        for search, began, left in self._running.values():
            used = search.budget_seconds - left + self.second - began
            self.queue.renew_run(
                search.id,
                search.run,
                progress={"used_seconds": used},
                study=search.study,
                has_results=True,
            )

    def stop_searches(self):
        for search, _, _ in self._running.values():
            self.queue.end_run(search.id, search.run, SearchEnd(state="queued"))
        self._running.clear()


@pytest.fixture(scope="module")
def clock():
    return Clock()


@pytest.fixture(scope="module")
def database(clock, tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('queue')}/autotune.db"
    with closing(StudyStore(url, create=True)) as store:
        engine = store.database.engine

        @event.listens_for(engine, "connect")
        def _(connection, _record):
            connection.create_function("julianday", 1, clock.julian_day)

        engine.dispose()
        yield store.database


@settings(max_examples=15, deadline=None)
@given(
    new=st.lists(NEW, min_size=1, max_size=6),
    limits=LIMITS,
    rounds=st.integers(0, 4),
    is_stopped=st.booleans(),
)
def test_searches_begin_in_the_order_and_at_the_time_that_was_said(
    database, clock, new, limits, rounds, is_stopped
):
    server = Server(database, clock, limits)
    for each in new:
        server.queue.submit(each)
    for _ in range(rounds):
        server.wait()
        server.round()
    server.report()
    if is_stopped:
        server.stop_searches()
    said = server.queue.places()
    assert [each.id for each in server.queue.find(states=["queued"], order=said)[0]] == list(said)
    told = [(number, server.second + place.begins_in_seconds) for number, place in said.items()]
    before = len(server.begun)
    while len(server.begun) < before + len(said) and server.second < LONGEST_SECONDS:
        server.round()
        server.wait()
    assert server.begun[before:] == [(number, round(second)) for number, second in told]
