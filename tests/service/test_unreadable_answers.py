"""What a server answers is checked as what a database says: it may be of another version."""

import dataclasses
import json

import pytest

from autotune.client.events import lines_to_events
from autotune.client.searches import search_of
from autotune.client.study_json import record_of, result_of
from autotune.errors import InvalidInput
from autotune.spec.result import Pick, StudyResult, TrialRecord
from tests.building.studies import config, definition, measured

NOT_READ = "the server's answer is not one that this version of autotune can read"


@pytest.fixture
def answer():
    """The JSON of a study with one trial."""
    study = definition()
    trial = TrialRecord(**vars(measured()), number=0, config=config(0), feasible=True)
    result = StudyResult(
        study=study.name,
        storage="sqlite:///autotune.db",
        workload=study.workload,
        device=study.device,
        cap_bytes=study.cap_bytes,
        trials=(trial,),
        front=(0,),
        pick=Pick(number=0, criterion="the fastest"),
        baseline=0,
    )
    return json.loads(json.dumps(result.to_dict()))


def test_a_study_comes_back_as_it_was_sent(answer):
    assert result_of(answer).trial(0).tokens_per_second == 1000.0


@pytest.mark.parametrize(
    "changes",
    [
        {"study": "../../.ssh/x"},
        {"study": None},
        {"cap_bytes": 10**300},
        {"front": ["0"]},
        {"front": 3},
        {"pick": "0"},
        {"baseline": 1.5},
        {"trials": None},
        {"device": []},
        {"storage": 3},
        {"workload": {"model": "gpt"}},
    ],
)
def test_a_study_that_is_none_is_one_sentence(answer, changes):
    with pytest.raises(InvalidInput) as raised:
        result_of(answer | changes)
    assert raised.value.message.startswith((NOT_READ, "'../../.ssh/x' cannot", "None cannot"))


@pytest.mark.parametrize(
    "changes",
    [
        {"number": -1},
        {"number": 10**18},
        {"outcome": "splendid"},
        {"peak_memory_bytes": 10**300},
        {"perplexity": -1.0},
        {"tokens_per_second": "fast"},
        {"tokens_per_second_interval": [1.0]},
        {"tokens_per_second_interval": 3},
        {"name": ["a"]},
        {"seconds": 1e308},
        {"config": None},
    ],
)
def test_a_trial_that_is_none_is_one_sentence(answer, changes):
    with pytest.raises(InvalidInput, match=NOT_READ):
        record_of(answer["trials"][0] | changes)


SEARCH = {"id": 3, "state": "running", "study": "a", "trials": 4, "request": {}}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        SEARCH | {"id": "../3"},
        SEARCH | {"id": -3},
        SEARCH | {"state": "elsewhere"},
        SEARCH | {"study": ["a"]},
        SEARCH | {"request": 3},
        SEARCH | {"exit_code": "0"},
    ],
)
def test_a_search_that_is_none_is_one_sentence(answer):
    assert search_of(SEARCH, server="http://here").id == 3
    with pytest.raises(InvalidInput, match=NOT_READ):
        search_of(answer, server="http://here")


def test_the_fields_of_a_later_version_are_left_out():
    found = search_of(SEARCH | {"colour": "red"}, server="http://here")
    assert dataclasses.asdict(found)["answer"]["colour"] == "red"


def test_an_event_that_is_nested_too_deeply_is_one_sentence():
    with pytest.raises(InvalidInput, match="cannot read"):
        list(lines_to_events([f"data: {'[' * 10**5}", ""]))


def test_a_number_of_an_event_with_too_many_digits_is_not_taken():
    (event,) = lines_to_events([f"id: {'1' * 5000}", "data: {}", ""])
    assert event.id == 0
