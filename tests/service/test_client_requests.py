"""What a client sends for a search, and how it reads events and studies; no server is needed."""

import json
import math
import tomllib
from dataclasses import replace

import pytest

import autotune
from autotune.client.events import Breath, ServerEvent, lines_to_events
from autotune.client.searches import search_of, submission
from autotune.client.study_json import record_of, result_of
from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig
from autotune.spec.result import Pick
from tests.building.results import (
    mean_of,
    out_of_memory,
    record,
    shared_with,
    study_result,
    trial,
)

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}
SPACE = """
extends = "quick"
[workload]
steps = 12
"""


# -- submissions -----------------------------------------------------------------------------------


def test_only_what_differs_from_the_defaults_is_sent():
    settings = {"trials": 4, "predict": True, "fresh": False, "database_wait": "5m", "layers": None}
    assert submission(settings) == {"trials": 4}


def test_preferences_are_sent_by_the_names_of_the_interface():
    preferences = autotune.Preferences(
        prefer="smallest", tolerance=autotune.Tolerance(speed=0.1, perplexity=0.01)
    )
    assert submission({}, preferences=preferences) == {
        "prefer": "smallest",
        "tolerance": {"speed": 0.1, "perplexity": 0.01},
    }


def test_every_value_can_be_written_as_json():
    body = submission({"time_budget": math.inf, "script_arguments": ("a", "b"), "max_mem": 2**30})
    assert json.loads(json.dumps(body, allow_nan=False)) == {
        "time_budget": "none",
        "script_arguments": ["a", "b"],
        "max_mem": 2**30,
    }


def test_a_search_space_in_a_file_is_sent_with_all_that_it_extends(tmp_path):
    (tmp_path / "mine.toml").write_text(SPACE)
    body = submission({"space": str(tmp_path / "mine.toml")})
    content = tomllib.loads(body["space_content"])
    assert (body["space"], content["workload"]["steps"]) == ("mine", 12)
    assert "extends" not in content
    assert content["techniques"]


def test_a_named_search_space_is_sent_by_its_name():
    assert submission({"space": "quick"}) == {"space": "quick"}


def test_the_config_of_a_model_is_sent_as_its_content(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    body = submission({"model": str(tmp_path / "config.json")})
    assert body["model_config"]["num_hidden_layers"] == 2
    assert str(tmp_path) not in json.dumps(body)


def test_the_config_that_a_space_names_is_sent_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = json.dumps(str(tmp_path / "config.json"))
    (tmp_path / "mine.toml").write_text(f"{SPACE}model = {model}\n")
    body = submission({"space": str(tmp_path / "mine.toml")})
    assert body["model_config"]["hidden_size"] == 64
    assert "config.json" not in body["space_content"]


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "mine.py:build"},
        {"script": "train.py", "script_arguments": ["x"]},
        {"dataset": "texts/"},
        {"model": "owner/name"},
    ],
    ids=str,
)
def test_other_files_are_named_as_they_are_for_the_server_to_decide(settings):
    assert submission(settings) == settings


@pytest.mark.parametrize(
    "settings", [{"storage": "sqlite:///a.db"}, {"listener": print}, {"should_stop": bool}], ids=str
)
def test_what_only_a_search_here_can_have_is_rejected(settings):
    with pytest.raises(InvalidInput) as error:
        submission(settings)
    assert error.value.hint


def test_a_search_whose_study_is_a_path_is_rejected():
    answer = {"id": 3, "state": "running", "study": "../../x"}
    with pytest.raises(InvalidInput, match=r"'\.\./\.\./x'"):
        search_of(answer, server="http://host")


def test_a_search_of_a_later_version_is_read_with_what_is_known():
    answer = {"id": 3, "state": "running", "study": None, "later": 1, "position": None}
    search = search_of(answer, server="http://host")
    assert (search.id, search.study, search.url) == (3, "", "http://host/searches/3")
    assert search.answer["later"] == 1


# -- events ----------------------------------------------------------------------------------------


def test_events_are_read_as_the_standard_says():
    text = ': comment\n\nid: 7\nevent: step\ndata: {"search":\ndata: 3}\n\nid: 8\ndata:{}\n\n'
    assert list(lines_to_events(text.splitlines())) == [
        Breath(),
        ServerEvent(id=7, kind="step", data={"search": 3}),
        ServerEvent(id=8, kind="message", data={}),
    ]


def test_an_event_that_is_cut_off_is_left_out():
    lines = ["id: 7", "event: step", "data: {}", "", "id: 8", "event: step", "data: {}"]
    assert [event.id for event in lines_to_events(lines)] == [7]


def test_an_event_that_is_no_json_object_is_an_error():
    with pytest.raises(InvalidInput, match="events that this version of autotune cannot read"):
        list(lines_to_events(["data: nonsense", ""]))


# -- studies ---------------------------------------------------------------------------------------

RECORDS = (
    record(0, tokens_per_second_spread=3.5, bytes_by_kind={"parameters": 5}, seconds=2.0),
    record(1, perplexity_source=shared_with(0), reused_from=trial(4, "an 'older' one")),
    record(2, perplexity_source=mean_of(3), tokens_per_second_interval=(9.0, 11.5)),
    record(4, perplexity_source=replace(shared_with(0), over_random_weights=True)),
    out_of_memory(3, requested_bytes=77, config=TrainingConfig(checkpointing="block")),
)


def through_json(value):
    return json.loads(json.dumps(value, allow_nan=False))


def test_a_result_is_the_same_after_its_json_was_read():
    pick = Pick(number=0, criterion="the fastest")
    result = study_result(RECORDS, front=(0, 1), pick=pick, initial_perplexity=12.5)
    assert result_of(through_json(result.to_dict())) == result


def test_a_field_that_a_later_version_adds_is_left_out():
    values = {**through_json(RECORDS[0].to_dict()), "later": [1, 2]}
    values["config"]["later"] = 3
    assert record_of(values) == RECORDS[0]


@pytest.mark.parametrize("values", [None, [], {}, {"trials": 3}, {"study": "a", "pick": 0}])
def test_other_json_is_an_error_in_a_sentence(values):
    with pytest.raises(InvalidInput, match="not one that this version of autotune can read"):
        result_of(values)
