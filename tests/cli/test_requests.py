"""Contracts over the requests of all commands: what is declared once holds everywhere."""

import dataclasses
import json

import pytest
import typer.main

from autotune.analysis.pick import Preferences
from autotune.cli import app
from autotune.errors import InvalidInput, NotAllowed
from autotune.service.pages import form
from autotune.service.request_body import (
    body_of,
    check_names,
    open_beside_parts,
    open_settings,
)
from autotune.spec.checked import checked_beside, schema_of
from autotune.spec.config import TrainingConfig
from autotune.spec.setting import all_options_of
from autotune.spec.workload import Workload
from autotune.study.fit.request import FitRequest
from autotune.study.prediction.predicted_training import PredictedTraining
from autotune.study.request import SearchRequest
from autotune.study.submission import Submission


def commands_of(command, name=""):
    """Returns every command and subcommand that can be run, by its name."""
    command = command.load() if hasattr(command, "load") else command
    inner = getattr(command, "commands", {})
    found = {name: command} if name else {}
    for word, each in inner.items():
        found |= commands_of(each, f"{name} {word}".strip())
    return found


COMMANDS = commands_of(typer.main.get_command(app))
KINDS = {name: command.callback.kind for name, command in COMMANDS.items()}
EVERY_KIND = pytest.mark.parametrize(
    "kind", [*dict.fromkeys(KINDS.values())], ids=lambda kind: kind.__name__
)
MADE_BY_HAND = {"of_command", "script_arguments", "help"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_an_option_for_each_setting_and_no_other(name):
    parameters = {parameter.name for parameter in COMMANDS[name].params} - MADE_BY_HAND
    settings = {each.parameter for each in all_options_of(KINDS[name]).values() if each.is_typed}
    assert parameters == settings


def test_a_switch_of_the_workload_that_is_on_by_default_has_a_flag_that_turns_it_off():
    on = {field.name for field in dataclasses.fields(Workload) if field.default is True}
    assert "callback" in on
    for kind in (SearchRequest, Submission):
        for name in on & set(all_options_of(kind)):
            option = all_options_of(kind)[name]
            assert option.flag == f"--no-{name}"
            assert option.turns_off
            assert option.arguments(False) == [f"--no-{name}"]


def rejections(kind, name, value):
    """Return the error of a value of one setting, or None where it is accepted."""
    try:
        checked_beside(kind, {name: value})
    except InvalidInput as error:
        return error
    return None


@EVERY_KIND
def test_a_value_of_another_type_is_rejected_by_the_name_of_its_setting(kind):
    mappings = {"model_config", "groups", "own_config", "learning_rates", "tolerance", "devices"}
    for name in set(all_options_of(kind)) - mappings:
        for value in (object(), [[]], {"a": {}}):
            error = rejections(kind, name, value)
            assert error is not None, name
            assert error.message.startswith(f"Invalid {name}: ")
            assert error.hint
            assert len(error.message) < 300


@EVERY_KIND
def test_true_is_no_number_and_a_number_no_switch_and_text_neither(kind):
    for name, option in all_options_of(kind).items():
        is_number = option.format.range is not None
        wrong = [True] if is_number else [1, "1"] if option.is_switch else []
        if is_number and not option.format.takes_text:
            wrong.append("1")
        assert [value for value in wrong if rejections(kind, name, value) is None] == [], name


@EVERY_KIND
def test_a_default_is_a_value_of_its_setting_and_is_read_as_it_is_written(kind):
    for name, option in all_options_of(kind).items():
        if option.default is None:
            continue
        assert checked_beside(kind, {name: option.default}) == {name: option.default}
        assert option.arguments(option.default) == []
        if not option.is_switch and not option.is_repeatable:
            assert option.parse(option.format.write(option.default)) == option.default


def test_a_request_is_frozen_and_is_checked_again_when_it_is_changed():
    request = SearchRequest(trials=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.trials = 4
    with pytest.raises(InvalidInput, match="Invalid trials: True"):
        dataclasses.replace(request, trials=True)
    with pytest.raises(InvalidInput, match="Invalid layers: 0"):
        dataclasses.replace(request, workload={"layers": 0})
    with pytest.raises(InvalidInput, match="there is no setting 'layerz'"):
        SearchRequest(workload={"layerz": 3})


def test_a_setting_of_a_part_can_stand_beside_it_whatever_form_the_part_has():
    changed = Preferences(max_perplexity_increase=0.05)
    for given in (changed, {"max_perplexity_increase": 0.05}):
        request = SearchRequest.of({"preferences": given, "prefer": "smallest"})
        assert request.preferences == dataclasses.replace(changed, prefer="smallest")
    with pytest.raises(InvalidInput, match="Invalid workload: 5"):
        SearchRequest.of({"workload": 5, "layers": 2})


@pytest.mark.parametrize("part", ["workload", "configuration"])
def test_a_key_that_is_no_text_is_a_setting_that_there_is_not(part):
    with pytest.raises(InvalidInput, match="there is no setting '1'"):
        PredictedTraining.of({part: {1: 2}})


@pytest.mark.parametrize("seconds", [1e300, -1.0, 0, float("nan"), True])
def test_a_duration_that_could_not_be_typed_is_rejected_as_a_number_too(seconds):
    with pytest.raises(InvalidInput, match="Invalid time_budget"):
        SearchRequest(time_budget=seconds)


def test_a_submission_of_the_form_is_json():
    body = form.filled({"tolerance": "speed=0.1", "learning_rates": "adamw=1e-3"}).body
    assert json.loads(json.dumps(body)) == body


def test_a_setting_of_a_part_that_stands_beside_it_over_http_is_answered_with_its_place():
    accepted = open_beside_parts(PredictedTraining)
    with pytest.raises(NotAllowed) as refused:
        check_names({"layers": 2}, PredictedTraining, accepted=accepted)
    assert refused.value.hint == "put it into workload"


OPEN = """
    compile_time_limit confirm confirm_share devices fresh full_trainings group kind max_mem
    max_perplexity_increase name perplexity_seeds predict prefer priority profile sampler scale seed
    space space_content step_time_limit time_budget tolerance trial_time_limit trials
    trials_per_device until_converged
"""


def test_over_http_a_submission_names_the_open_settings_and_those_of_the_workload():
    """To open another one is a decision about security: add it here, too."""
    of_workload = set(open_settings(Workload))
    assert set(open_settings(Submission)) - of_workload == set(OPEN.split()) - of_workload
    assert of_workload == set(all_options_of(Workload))
    closed = {"storage", "ray", "device", "workers", "database_wait", "memory_snapshot"}
    assert closed.isdisjoint(open_settings(Submission))
    assert all(isinstance(all_options_of(Submission)[name].over_http, str) for name in closed)


def test_over_http_a_question_names_neither_files_of_the_server_nor_trials():
    asked = {"study", "trial", "device", "workload", "configuration"}
    asked |= {"compute_capability", "torch_version"}
    assert set(open_beside_parts(PredictedTraining)) == asked
    assert set(open_beside_parts(FitRequest)) == asked | {
        "max_mem",
        "vary",
        "space",
        "scale",
        "context",
    }


def test_every_technique_is_a_setting_of_what_is_predicted():
    names = {field.name for field in dataclasses.fields(TrainingConfig)}
    assert names <= set(all_options_of(PredictedTraining))


def test_the_document_of_a_question_has_the_settings_of_its_parts():
    body = body_of(FitRequest, open_beside_parts(FitRequest), description="", examples={})
    schema = body["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert set(schema["configuration"]["properties"]) == set(all_options_of(TrainingConfig))
    layers = schema["workload"]["properties"]["layers"]["anyOf"][0]["anyOf"][0]
    assert (layers["minimum"], layers["maximum"]) == (1, 1000)


def test_the_devices_of_a_submission_are_a_text_or_a_number():
    types = json.dumps(schema_of(Submission, "devices"))
    assert '"string"' in types
    assert '"integer"' in types
