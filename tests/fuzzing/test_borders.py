"""Every border accepts or rejects what is changed at random, and never does anything else.

`AUTOTUNE_EXAMPLES=10000` tries more inputs. An input that was mishandled once is a file in
`corpus/`, in the folder of its border.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzzing.borders import BORDERS
from tests.fuzzing.judging import Judge, quick_folder

CORPUS = Path(__file__).parent / "corpus"
LEAST_SHARE = 0.3
"""Of the inputs, that pass the first check: others only test the parser."""


@pytest.fixture(scope="module", params=list(BORDERS))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def judge(name):
    with quick_folder() as folder, Judge(BORDERS[name], folder) as judge:
        yield judge


def _for_each(border, number, look):
    inputs = settings(
        max_examples=max(number, settings.default.max_examples),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    inputs(given(border.inputs())(look))()


def test_valid_inputs_are_accepted_whole(name, judge):
    for content in BORDERS[name].valid():
        verdict = judge.judge(content)
        assert verdict.passed_first_check
        assert (verdict.error, verdict.message, verdict.defect) == ("", "", ""), verdict.details


def test_changed_inputs_are_accepted_or_rejected_with_a_documented_error(name, judge):
    def look(content):
        verdict = judge.judge(content)
        assert verdict.defect == "", verdict.details

    _for_each(BORDERS[name], BORDERS[name].inputs_in_suite, look)


def test_three_of_ten_changed_inputs_pass_the_first_check(name, judge):
    passed = []
    _for_each(BORDERS[name], 100, lambda content: passed.append(judge.passes(content)))
    assert sum(passed) >= LEAST_SHARE * len(passed)


def test_inputs_that_were_mishandled_once_are_accepted_or_rejected(name, judge):
    for file in _regressions(name):
        verdict = judge.judge(file.read_bytes())
        assert verdict.defect == "", f"{file}: {verdict.details}"


def test_every_folder_of_the_corpus_is_of_a_border():
    assert {folder.name for folder in CORPUS.iterdir()} <= set(map(_folder_name, BORDERS))


def _folder_name(border):
    return border.replace(" ", "-")


def _regressions(border):
    return sorted((CORPUS / _folder_name(border)).glob("*"))
