"""The form of a new search says what the server allows, beside the fields that it limits."""

import dataclasses
import html
import re

import pytest

from autotune.service.settings import ServerSettings, SubmissionRules
from autotune.service.submissions import limits_of
from autotune.units import format_duration
from tests.building.service import BEARER, serving, write_example

LIMITS = {
    "most_trials": (7, ["trials"], "7"),
    "most_seconds": (5400.0, ["time_budget"], format_duration(5400.0)),
    "most_devices": (3, ["devices", "trials_per_device"], "3"),
    "data_roots": (("FOLDER",), ["dataset", "tokenizer", "model"], "FOLDER"),
    "code_folders": (("FOLDER",), ["script", "model"], "FOLDER"),
}
"""{rule: (a value, the fields that it limits, how it is said)}."""
DECIDED = {"storage", "devices", "ray", "device_type", "device_kind"}
"""What a submission cannot ask for."""


def test_every_rule_is_a_limit_or_decided_by_the_server():
    assert {field.name for field in dataclasses.fields(SubmissionRules)} == {*LIMITS, *DECIDED}


@pytest.mark.parametrize("rule", LIMITS)
def test_a_rule_is_said_beside_each_field_that_it_limits(rule, tmp_path):
    value, fields, said = LIMITS[rule]
    if value == ("FOLDER",):
        value, said = (str(tmp_path),), str(tmp_path)
    limits = limits_of(SubmissionRules(storage="sqlite://", **{rule: value}))
    for field in fields:
        assert said in limits[field]
        assert limits[field][0].isupper()
        assert limits[field].endswith(".")


def test_a_server_without_limits_says_which_files_there_are_none_of():
    limits = limits_of(SubmissionRules(storage="sqlite://"))
    assert set(limits) == {"model", "dataset", "tokenizer", "script"}
    assert "no folder for data" in limits["dataset"]


def test_the_limits_of_a_person_are_those_of_the_settings():
    settings = ServerSettings(
        storage="sqlite://",
        most_queued_of_person=4,
        most_running_of_person=2,
        most_device_hours_of_person="40/7d",
    )
    said = " ".join(settings.limits_of_person())
    assert re.findall(r"\d+", said)[:3] == ["4", "2", "40"]
    assert not [*ServerSettings(storage="sqlite://").limits_of_person()]


def test_the_page_has_each_limit_in_the_help_of_its_field(tmp_path):
    storage = f"sqlite:///{tmp_path}/autotune.db"
    write_example(storage)
    with serving(storage, most_trials=7, most_queued_of_person=4) as client:
        page = html.unescape(client.get("/new", headers=BEARER).text)
    assert re.search(r'id="help-trials">[^<]*<span class="limit">At most 7 in a search', page)
    assert "At most 4 of your searches wait in the queue." in page
