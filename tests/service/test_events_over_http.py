"""Events of a search come out of a server's stream as the search has told them."""

import json

import pytest

from autotune.client.events import ServerEvent
from autotune.errors import InvalidInput
from autotune.spec.result import TrialRecord
from autotune.study.events import (
    AttemptLost,
    BudgetSpent,
    Confirming,
    Converged,
    Notice,
    PlaceJoined,
    PlaceLeft,
    PoisonTrial,
    Preparing,
    ResultRejected,
    SameProgram,
    ServerMessage,
    SpaceExhausted,
    StorageBack,
    StudyOpened,
    TrialBegan,
    TrialEnded,
    TrialPhase,
    WaitingForDevice,
    WaitingForOthers,
    WaitingForStorage,
    stream_form,
)
from tests.building.studies import config, measured

EVENTS = (
    Preparing(what="reading the text"),
    Notice(message="the machine is shared"),
    StudyOpened(
        study="made",
        lines=("Study made", "Devices: cuda:0"),
        trials_wanted=4,
        is_new=True,
        cap_bytes=2**30,
        device="NVIDIA H200",
        baseline=config(1),
        places={"cuda:0": ()},
    ),
    TrialBegan(number=3, config=config(1), name="named", device="cuda:0"),
    TrialBegan(number=3, config=config(1), name=None),
    TrialEnded(record=TrialRecord(**vars(measured()), number=3, config=config(1), feasible=True)),
    TrialPhase(doing="training", steps=(3, 40), used_bytes=2**20, device="cuda:0"),
    TrialPhase(doing="starting"),
    PlaceJoined(device="cuda:1"),
    PlaceLeft(device="cuda:1", reason="its node is gone"),
    Confirming(doing="#3 in turn with #0: the pick"),
    SameProgram(config=config(1), number=2),
    SpaceExhausted(trials=3),
    Converged(trials=3, relative_improvement=0.001),
    BudgetSpent(trials=3, trials_wanted=4),
    AttemptLost(number=3, cause="the device is lost", attempts_left=2),
    PoisonTrial(number=3, deaths=2),
    ResultRejected(number=3),
    WaitingForStorage(message="the database is away", limit_seconds=60.0),
    StorageBack(seconds=3.0),
    WaitingForDevice(device="cuda:0", holder="process 17", place="cuda:0"),
    WaitingForOthers(numbers=(3, 5)),
)


def received(kind, data):
    """The event that a client reads, with what the server adds to each."""
    added = {"search": 7, "study": "made", "at": "2026-03-04T05:06:07+00:00"}
    return ServerEvent(id=1, kind=kind, data=json.loads(json.dumps({**added, **data})))


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_comes_back_as_it_was(event):
    assert received(*stream_form(event, list(event.sentences()))).of_search() == event


@pytest.mark.parametrize("event", [each for each in EVENTS if not each.kind], ids=repr)
def test_what_has_no_kind_of_its_own_says_itself_to_readers_of_notices(event):
    kind, data = stream_form(event, ["one line", "another"])
    assert (kind, data["message"]) == ("notice", "one line\nanother")


@pytest.mark.parametrize(
    "data",
    [
        {"message": "Converged.\nIt is over."},
        {"message": "Converged.\nIt is over.", "type": "Later", "values": {"number": 3}},
    ],
    ids=["an earlier version", "a later version"],
)
def test_a_notice_of_another_version_is_what_it_says(data):
    event = received("notice", data).of_search()
    assert isinstance(event, ServerMessage)
    assert list(event.sentences()) == ["Converged.", "It is over."]


def test_a_study_that_an_earlier_version_opens_has_its_lines_and_places():
    event = received("opened", {"trials_wanted": 4, "places": ["a"], "lines": ["Study made"]})
    assert event.of_search() == StudyOpened(
        study="made", trials_wanted=4, places={"a": ()}, lines=("Study made",)
    )


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("opened", {"trials_wanted": "many"}),
        ("opened", {"trials_wanted": 4, "places": 3}),
        ("trial_began", {"number": 3, "name": None, "config": {"precision": 3}}),
        ("trial_began", {"name": None, "config": {}}),
        ("step", {"doing": "training", "steps": [1]}),
        ("trial_ended", {}),
        ("trial_ended", {"trial": {"number": 3}}),
        ("confirming", {"doing": 3}),
        ("notice", {"message": 3}),
        ("notice", {"message": "", "type": ["Notice"]}),
        ("notice", {"message": "", "type": "Notice", "values": 3}),
        ("notice", {"message": "", "type": "Notice"}),
    ],
)
def test_an_event_that_cannot_be_read_is_one_sentence(kind, data):
    with pytest.raises(InvalidInput):
        received(kind, data).of_search()


@pytest.mark.parametrize("kind", ["search", "front", "study", "reset", "later"])
def test_what_only_the_server_knows_is_no_event_of_a_search(kind):
    assert received(kind, {}).of_search() is None
