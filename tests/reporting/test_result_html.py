"""What a notebook shows of a result: the pick, the front, every trial."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from autotune.reporting.result_html import MOST_ROWS, result_html
from autotune.spec.result import Pick
from tests.building.results import MIB, out_of_memory, record, study_result
from tests.building.views import HOSTILE, four_trials, many_trials

PICK = Pick(number=3, criterion="the smallest")


@pytest.fixture
def result():
    return study_result(four_trials(), front=(3, 1, 2), pick=PICK, baseline=0)


def test_it_shows_the_pick_with_its_reason_and_a_row_for_every_trial(result):
    html = result_html(result)
    assert "Pick: #3" in html
    assert "the smallest" in html
    for trial in result.trials:
        assert f"{trial.tokens_per_second:,.0f}" in html


def test_the_perplexity_before_training_is_the_first_row(result):
    tables = result_html(replace(result, initial_perplexity=9.5)).split("<tbody>")[1:]
    assert tables
    for table in tables:
        first_row = table.partition("</tr>")[0]
        assert "before training" in first_row
        assert "9.50" in first_row
    assert "before training" not in result_html(result)


def test_it_is_well_formed(result):
    ElementTree.fromstring(result_html(result))


def test_a_study_without_a_pick_says_why():
    html = result_html(study_result([out_of_memory(0)]))
    assert "Nothing that was tried trains under" in html


def test_an_empty_study_is_shown():
    assert "No trial has finished yet." in result_html(study_result())


def test_names_of_users_are_escaped(result):
    hostile = [record(0, name=HOSTILE, message=HOSTILE, memory=100 * MIB)]
    html = result_html(study_result(hostile, study=HOSTILE, front=(0,), baseline=0))
    assert "<script" not in html
    assert "<img" not in html


def test_a_table_of_thousands_of_trials_is_cut_and_says_so():
    html = result_html(study_result(many_trials(MOST_ROWS + 800)))
    assert html.count("<tr ") == MOST_ROWS + 1
    assert "The first 200 of 1,000 trials" in html
