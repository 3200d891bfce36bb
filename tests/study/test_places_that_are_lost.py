"""Places that can no longer be used: what they have on their device ends, and others go on."""

import threading
from contextlib import ExitStack

import pytest

from autotune.errors import InvalidInput, TrialLost
from autotune.execution.flow import result_of
from autotune.spec.result import DeviceInfo
from autotune.study.events import PlaceLeft
from autotune.study.running.places import Places, PlaceUnusable, ThreadedListener, TrialPlace
from tests.building.flows import as_flow
from tests.quick_study.quick_executor import CPU, QuickExecutor


class Executor(QuickExecutor):
    """An executor without slots, of which a test knows when it was shut down."""

    def __init__(self, folder):
        super().__init__(folder)
        self.has_ended = threading.Event()
        self.take_slot = as_flow(lambda device, **_: ExitStack())

    def shutdown(self):
        super().shutdown()
        self.has_ended.set()


LOST = TrialLost("the GPU has fallen off the bus")


@pytest.fixture
def search(tmp_path):
    """Two places, and the events of their search."""
    events = []
    places = [
        TrialPlace(executor=Executor(tmp_path), device=CPU, name=name, queue=name)
        for name in ("first", "second")
    ]
    with Places(
        places, listener=ThreadedListener(events.append), seconds_without_place=1.0
    ) as several:
        yield several, places, events


def test_a_lost_place_ends_what_it_has_on_its_device_at_once(search):
    several, (_, second), events = search
    several.lose(second, LOST)
    assert second.executor.has_ended.wait(5)
    assert events == [PlaceLeft(device="second", reason=LOST.message)]


def test_the_executor_of_the_first_place_stays_for_what_follows(search):
    several, (first, _), _ = search
    several.lose(first, LOST)
    assert not first.executor.has_ended.is_set()


def test_a_place_that_cannot_be_prepared_is_unusable(search):
    several, (_, second), _ = search

    def refuse() -> DeviceInfo:
        raise InvalidInput("it has another GPU", hint="")

    second.prepare = refuse
    with pytest.raises(PlaceUnusable) as unusable:
        result_of(several.slot(second))
    assert isinstance(unusable.value.reason, InvalidInput)


def test_finalists_are_measured_on_a_place_that_is_ready(search):
    several, (first, second), _ = search
    first.prepare = lambda: CPU
    assert several.first is second
