"""Events reach everybody who listens, in their order, each once."""

import asyncio
from contextlib import asynccontextmanager, closing

import pytest

from autotune.analysis.queue_order import DeviceGroup
from autotune.service import stream as stream_module
from autotune.service.stream import EventStream
from autotune.storage.searches import NewSearch, Searches
from autotune.storage.store import StudyStore


@pytest.fixture
def database(store_url):
    with closing(StudyStore(store_url, create=True)) as store:
        yield store.database


class Writer:
    """A search of another connection, as of another process, that adds events."""

    def __init__(self, queue):
        self.queue = queue
        self.epoch = queue.take_lead("a server", version="1")
        queue.submit(NewSearch(request={}, submitted_by="ada", study="s"))
        self.told = 0
        self.search = queue.claim_next(DeviceGroup(), version="1")

    def __call__(self, count):
        events = [("notice", {"message": str(index)}) for index in range(count)]
        self.queue.renew_run(
            self.search.id,
            self.search.run,
            progress={},
            study="s",
            has_results=False,
            events=events,
            after=self.told,
        )
        self.told += count


@pytest.fixture
def writer(store_url, database):
    with closing(StudyStore(store_url)) as other:
        yield Writer(Searches(other.database))


def everything(_event):
    return True


@asynccontextmanager
async def running(database):
    events = EventStream(database, Searches(database))
    await events.begin()
    task = asyncio.create_task(events.run())
    try:
        yield events
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def numbers(events, *, after, count, wants=everything):
    found = []
    async for batch in events.listen(after=after, wants=wants):
        found += [None if event is None else event.number for event in batch]
        if len(found) >= count:
            return found
    return found


def run(main):
    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_listener_gets_every_event_in_order(database, writer):
    async def main():
        async with running(database) as events:
            listening = asyncio.create_task(numbers(events, after=2, count=30))
            for _ in range(3):
                await asyncio.to_thread(writer, 10)
            assert await listening == list(range(3, 33))

    run(main)


def test_a_listener_who_comes_back_gets_what_was_missed_and_then_what_is_new(database, writer):
    async def main():
        writer(50)
        async with running(database) as events:
            listening = asyncio.create_task(numbers(events, after=20, count=42))
            await asyncio.to_thread(writer, 10)
            assert await listening == list(range(21, 63))

    run(main)


def test_missed_events_that_are_still_in_memory_are_the_same(database, writer):
    async def main():
        async with running(database) as events:
            await asyncio.to_thread(writer, 40)
            while events.position < 42:
                await asyncio.sleep(0.01)
            assert await numbers(events, after=10, count=32) == list(range(11, 43))

    run(main)


def test_who_comes_back_after_events_were_removed_is_told_to_read_everything(database, writer):
    async def main():
        writer(50)
        writer.queue.prune_events(writer.epoch, most=10)
        async with running(database) as events:
            found = await numbers(events, after=5, count=11)
            assert found == [None, *range(43, 53)]

    run(main)


def test_a_number_that_does_not_exist_yet_is_answered_with_reset(database, writer):
    async def main():
        async with running(database) as events:
            assert await numbers(events, after=10_000, count=1) == [None]

    run(main)


def test_who_comes_back_to_a_server_that_has_just_started_is_told_nothing_twice(database, writer):
    async def main():
        writer(10)
        events = EventStream(database, Searches(database))
        await events.begin()  # it looks for events only later
        listening = asyncio.create_task(numbers(events, after=12, count=3))
        await asyncio.sleep(0.05)
        task = asyncio.create_task(events.run())
        await asyncio.to_thread(writer, 3)
        assert await listening == [13, 14, 15]
        task.cancel()

    run(main)


def test_a_listener_gets_only_what_it_wants(database, writer):
    async def main():
        async with running(database) as events:
            listening = asyncio.create_task(
                numbers(events, after=2, count=4, wants=lambda event: event.number % 2 == 0)
            )
            await asyncio.to_thread(writer, 9)
            assert await listening == [4, 6, 8, 10]

    run(main)


def test_a_listener_who_is_too_slow_is_sent_away_and_loses_nothing(database, writer, monkeypatch):
    monkeypatch.setattr(stream_module, "_LONGEST_QUEUE", 5)

    async def main():
        async with running(database) as events:
            listening = events.listen(after=2, wants=everything)
            await asyncio.to_thread(writer, 1)
            seen = [event.number for event in await anext(listening)]
            await asyncio.to_thread(writer, 20)
            while events.position < 23:
                await asyncio.sleep(0.01)
            seen += [event.number async for batch in listening for event in batch]
            assert events.listeners == 0
            assert seen == [3]
            assert await numbers(events, after=seen[-1], count=20) == list(range(4, 24))

    run(main)


def test_two_hundred_listeners_get_the_same(database, writer):
    async def main():
        async with running(database) as events:
            listening = [
                asyncio.create_task(numbers(events, after=2, count=100)) for _ in range(200)
            ]
            await asyncio.sleep(0.05)
            for _ in range(10):
                await asyncio.to_thread(writer, 10)
            for found in await asyncio.gather(*listening):
                assert found == list(range(3, 103))

    run(main)


@pytest.mark.slow
def test_an_idle_stream_leaves_no_transaction_open(database, writer):
    async def main():
        async with running(database) as events:
            await asyncio.to_thread(writer, 1)
            while events.position < 3:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            if database.file is not None:
                with database.engine.connect() as connection:
                    row = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
                assert row[0] == 0, "a reader keeps the log of the database from being emptied"

    run(main)
