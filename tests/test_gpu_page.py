"""The page on what has run on a GPU has a row for every technique, command and trainer."""

import re
from pathlib import Path

import pytest
from typer.main import get_group

from autotune.cli import app
from autotune.exporters import TARGETS
from autotune.spec.config import CHOICES, FIELD_ORDER, SEARCHED, TrainingConfig
from studies.compressed import read_json

STUDY = Path(__file__).parents[1] / "studies" / "gpu"
TABLE = (
    (STUDY / "README.md").read_text().partition("## What has run where")[2].partition("\n## ")[0]
)
ROWS = {
    what: (gpu, stand_in)
    for what, gpu, stand_in in re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", TABLE, re.M)
}
DAY = r"20\d\d-\d\d-\d\d"
NEVER = "never"


@pytest.mark.parametrize("technique", FIELD_ORDER)
def test_every_value_of_a_technique_has_a_row(technique):
    assert any(what.startswith(f"{technique} ") for what in ROWS)
    assert [
        value for value in SEARCHED.get(technique, ()) if f"{technique} {value}" not in ROWS
    ] == []


def test_no_row_is_of_a_value_that_is_gone():
    known = {f"{technique} {value}" for technique, values in CHOICES.items() for value in values}
    of_techniques = {what for what in ROWS if what.split()[0] in CHOICES and len(what.split()) == 2}
    assert of_techniques - known == set()


def test_every_command_has_a_row():
    assert [name for name in get_group(app).commands if f"`autotune {name}`" not in ROWS] == []


def test_every_trainer_that_can_be_exported_to_has_a_row():
    assert [name for name in TARGETS if f"export to {name}" not in ROWS] == []


def test_every_row_says_where_and_when_or_never():
    for what, (gpu, stand_in) in ROWS.items():
        assert what == "what" or gpu == NEVER or re.fullmatch(rf"\S.* on {DAY}", gpu), what
        assert what == "what" or re.fullmatch(rf"{NEVER}|(tests|{DAY})(, tests)?", stand_in), what


def test_a_value_that_ran_on_a_gpu_has_a_trial_in_this_folder_that_ended_well():
    """Without it, the claim could not be verified."""
    searches = [
        read_json(STUDY / "h200" / f"{name}.json.xz")
        for name in ("techniques", "default-model", "table")
    ]
    tried = [
        {**TrainingConfig().to_dict(), **trial["config"]}  # of before there was a technique
        for search in searches
        for trial in search["trials"]
        if trial["outcome"] == "ok" and search["device"]["name"] == "NVIDIA H200"
    ]
    claimed = [
        (technique, value)
        for technique, values in SEARCHED.items()
        for value in values
        if re.search(DAY, ROWS[f"{technique} {value}"][0])
    ]
    assert len(claimed) >= 50
    for technique, value in claimed:
        assert any(config[technique] == value for config in tried), (technique, value)
