"""Limits of a person and estimates of the queue, without a database."""

from dataclasses import replace

import pytest

from autotune.analysis.queue_order import (
    DeviceGroup,
    DeviceHours,
    Queue,
    QueueRules,
    Running,
    Use,
    Waiting,
    places,
)
from autotune.errors import InvalidInput, InvalidSize

NOW = 1e9
HOUR = 3600.0
DAY = 24 * HOUR
TWO = (DeviceGroup(name="left"), DeviceGroup(name="right"))
LIMIT = QueueRules(most_hours=DeviceHours.parse("2/1d"))


def waiting(number, person="ada", *, seconds=HOUR, group="", is_begun=False, not_before=0.0):
    return Waiting(
        id=number,
        person=person,
        priority=0,
        group=group,
        is_begun=is_begun,
        not_before=not_before,
        seconds=seconds,
    )


def running(number, person="ada", *, seconds=HOUR, group="default"):
    return Running(id=number, person=person, group=group, seconds=seconds)


def used(began, ended=None, *, person="ada", devices=1):
    """Returns a use from `began` to `ended` hours before now; without an end it goes on."""
    end = {} if ended is None else {"ended_at": NOW - ended * HOUR}
    return Use(search=1, person=person, devices=devices, began_at=NOW - began * HOUR, **end)


def begins(queue):
    """Returns after how many hours each search begins, in the order in which they do."""
    after = {number: place.begins_in_seconds for number, place in places(queue).items()}
    return {number: None if each is None else each / HOUR for number, each in after.items()}


def test_a_search_begins_when_those_before_it_have_ended():
    queue = Queue(QueueRules(), now=NOW, waiting=[waiting(2), waiting(3)], running=[running(1)])
    assert begins(queue) == {2: 1.0, 3: 2.0}


def test_nothing_is_said_of_when_a_search_begins_after_one_without_a_budget():
    queue = Queue(QueueRules(), now=NOW, waiting=[waiting(1, seconds=None), waiting(2)])
    assert begins(queue) == {1: 0.0, 2: None}


def test_a_search_of_another_group_is_not_waited_for():
    rules = QueueRules(groups=TWO)
    queue = Queue(
        rules,
        now=NOW,
        waiting=[waiting(3, group="left"), waiting(4, group="right")],
        running=[running(1, group="left", seconds=2 * HOUR), running(2, group="right")],
    )
    told = places(queue)
    assert [(number, place.waits_for) for number, place in told.items()] == [
        (4, "the group right"),
        (3, "the group left"),
    ]


def test_who_has_used_the_hours_waits_and_others_go_before():
    queue = Queue(LIMIT, now=NOW, waiting=[waiting(2), waiting(3, "bob")], uses=[used(3.0, 0.0)])
    assert queue.next_for(DeviceGroup()).person == "bob"


def test_hours_are_free_once_the_window_has_left_enough_behind():
    """Of three hours that ended five hours ago one must be older than a day."""
    queue = Queue(LIMIT, now=NOW, waiting=[waiting(2)], uses=[used(8.0, 5.0)])
    reason = "device hours of ada, who has used 3.0 of 2/1d: the next in 17 h 00 m"
    assert queue.reason_to_wait(waiting(2)) == reason
    assert begins(queue)[2] == pytest.approx(17.0, abs=1.1 / HOUR)


def test_every_device_of_a_group_counts():
    queue = Queue(LIMIT, now=NOW, waiting=[waiting(2)], uses=[used(1.5, 0.5, devices=2)])
    assert queue.next_for(DeviceGroup()) is None


def test_what_is_older_than_the_window_does_not_count():
    queue = Queue(LIMIT, now=NOW, waiting=[waiting(2)], uses=[used(30.0, 23.0)])
    assert queue.next_for(DeviceGroup()).id == 2


def test_a_running_search_counts_up_to_now():
    queue = Queue(
        QueueRules(groups=TWO, most_hours=LIMIT.most_hours),
        now=NOW,
        waiting=[waiting(2)],
        running=[running(1, group="left", seconds=None)],
        uses=[used(2.5)],
    )
    assert queue.next_for(TWO[1]) is None
    assert queue.reason_to_wait(waiting(2)).endswith("used 2.5 of 2/1d: the next after what runs")


def test_a_thousand_searches_are_placed():
    queue = Queue(
        LIMIT, now=NOW, waiting=[waiting(number, f"p{number % 20}") for number in range(1000)]
    )
    assert len(places(queue)) == 1000


@pytest.mark.parametrize("text", ["", "40", "0/7d", "-1/7d", "nan/7d", "1e9/7d", "x/7d", "40/"])
def test_a_limit_needs_hours_and_a_time(text):
    with pytest.raises((InvalidInput, InvalidSize)):
        DeviceHours.parse(text)


def test_trials_that_share_a_gpu_need_one():
    search = replace(waiting(1), devices=1, slots=2)
    assert search.fits(DeviceGroup(type="cuda", slots=1))
    assert not search.fits(DeviceGroup(type="cpu", slots=1))


def test_a_search_of_several_gpus_waits_for_a_worker_with_them():
    search = replace(waiting(1), devices=4, slots=4)
    queue = Queue(
        QueueRules(groups=(DeviceGroup(type="cuda", kind="NVIDIA H200"),)),
        now=NOW,
        waiting=[search],
    )
    assert queue.next_for(queue.rules.groups[0]) is None
    assert queue.reason_to_wait(search) == "a worker with 4 devices, and none is there"


@pytest.mark.parametrize(
    ("model", "kind", "fits"),
    [
        ("NVIDIA H200", "NVIDIA H200", True),
        ("NVIDIA H200 NVL", "NVIDIA H200", False),
        ("NVIDIA H200", "NVIDIA H200 NVL", False),
        ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H200", True),
        ("AMD EPYC, 8 threads", "AMD EPYC", True),
    ],
)
def test_a_study_goes_on_with_devices_of_the_whole_name_of_its_model(model, kind, fits):
    assert replace(waiting(1), model=model).fits(DeviceGroup(type="cuda", kind=kind)) == fits


@pytest.mark.parametrize(
    ("kind", "name", "fits"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("nvidia h100", "NVIDIA H100 80GB HBM3", True),
        ("A10", "NVIDIA A100-SXM4-80GB", False),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("A100-SXM4", "NVIDIA A100-SXM4-80GB", True),
        ("Xeon", "Intel(R) Xeon(R) Platinum 8480C", True),
        ("cuda", "NVIDIA A10", True),
        ("cpu", "NVIDIA A10", False),
        ("NVIDIA H100", "NVIDIA A10", False),
    ],
)
def test_a_kind_is_whole_words_of_a_name(kind, name, fits):
    assert replace(waiting(1), kind=kind).fits(DeviceGroup(type="cuda", kind=name)) == fits
