"""The study of claims about memory: its tables are those of its results."""

import pytest

from studies.claims.claims import HERE, as_markdown, parameters_by_hand, read_results

CASES = read_results()["cases"]


def test_the_tables_are_those_of_the_results():
    assert as_markdown(CASES) in (HERE / "README.md").read_text()


@pytest.mark.parametrize(("case", "parameters"), parameters_by_hand().items())
def test_the_parameters_of_a_model_are_those_counted_by_hand(case, parameters):
    assert CASES[case]["parameters"] == parameters


def test_every_case_was_predicted():
    assert [name for name, case in CASES.items() if "error" in case] == []
