"""Places that can no longer be used: what they have on their device ends, and others go on."""

import threading
from contextlib import nullcontext

import pytest

from autotune.errors import InvalidInput
from autotune.spec.result import DeviceInfo
from autotune.study.events import PlaceLeft
from autotune.study.running.places import SeveralPlaces, ThreadedListener, TrialPlace
from tests.quick_study.quick_executor import CPU, QuickExecutor


class Executor(QuickExecutor):
    """An executor without slots, of which a test knows when it was shut down."""

    def __init__(self, folder):
        super().__init__(folder)
        self.has_ended = threading.Event()

    def slot(self, device, **_):
        return nullcontext()

    def shutdown(self):
        super().shutdown()
        self.has_ended.set()


@pytest.fixture
def search(tmp_path):
    """Two places, and the events of their search."""
    events = []
    listener = ThreadedListener(events.append)
    places = [
        TrialPlace(executor=Executor(tmp_path), device=CPU, name=name, queue=name)
        for name in ("first", "second")
    ]
    with SeveralPlaces(
        places, listener=listener, ending=threading.Event(), seconds_without_place=1.0
    ) as several:
        yield several, places, events


def take(several, wanted):
    while (place := several.take()) is not wanted:
        if place is not None:
            several.begin(place, lambda: None)
        several.wait(0.1)


def test_a_dropped_place_ends_what_it_has_on_its_device_at_once(search):
    several, (_, second), _ = search
    take(several, second)
    several.drop(second)
    assert second.executor.has_ended.wait(5)


def test_the_executor_of_the_first_place_stays_for_what_follows(search):
    several, (first, _), _ = search
    take(several, first)
    several.drop(first)
    assert not first.executor.has_ended.is_set()


def test_a_place_that_cannot_be_prepared_ends_what_it_has_on_its_device(search):
    several, (first, second), events = search

    def refuse() -> DeviceInfo:
        raise InvalidInput("it has another GPU", hint="")

    second.prepare = refuse
    take(several, first)
    several.begin(first, lambda: None)
    while not any(isinstance(event, PlaceLeft) for event in events):
        several.take()
        several.wait(0.1)
    assert second.executor.has_ended.wait(5)


def test_finalists_are_measured_on_a_place_that_is_ready(search):
    several, (first, second), _ = search
    first.prepare = lambda: CPU
    assert several.first is second
