"""What is said while predictions are made, where stderr is no terminal."""

import re
import time

import pytest

from autotune.cli.predicting import predicting


def said_until(capsys, last, *, tell, quiet=False, wait_seconds=30.0):
    """Returns the lines on stderr until one matches `last`; nothing may be on stdout."""
    lines = []
    ends = time.monotonic() + wait_seconds
    with predicting(quiet=quiet, seconds_between_lines=0.01) as told:
        for numbers in tell:
            told(*numbers)
        while time.monotonic() < ends and not any(re.fullmatch(last, line) for line in lines):
            time.sleep(0.01)
            captured = capsys.readouterr()
            assert captured.out == ""
            lines += captured.err.splitlines()
    return lines


def test_a_long_prediction_says_that_it_goes_on(capsys):
    lines = said_until(capsys, r"still predicting, after .+", tell=[])
    assert lines[0] == "Predicting ..."
    assert re.fullmatch(r"still predicting, after .+", lines[-1])


@pytest.mark.parametrize(("wanted", "of"), [(12, "3 of 12"), (None, "3")])
def test_it_says_how_many_rows_are_predicted(capsys, wanted, of):
    last = rf"{of} predicted, after .+"
    assert re.fullmatch(last, said_until(capsys, last, tell=[(3, wanted)])[-1])


def test_nothing_is_said_where_it_is_to_be_quiet(capsys):
    assert said_until(capsys, "never", tell=[(3, 12)], quiet=True, wait_seconds=0.1) == []


def test_nothing_is_said_after_the_end(capsys):
    with predicting(quiet=False, seconds_between_lines=0.01):
        pass
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
