"""Tables of trials at the widths of terminals."""

import dataclasses
import io

import pytest
from rich.console import Console

from autotune.cli.tables import print_trials
from tests.building.reports import TRIALS, plain_view


def printed(width):
    file = io.StringIO()
    print_trials(Console(file=file, width=width), plain_view().result, TRIALS)
    return file.getvalue()


def test_a_narrow_terminal_shows_what_differs_from_the_baseline():
    lines = printed(80).splitlines()
    assert any("mb 4, ckpt block" in line for line in lines)
    assert "fp32, micro-batch 1" in " ".join(printed(80).split())
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("width", [110, 200])
def test_a_wide_terminal_shows_whole_configurations(width):
    assert "fp32, checkpointing block," in " ".join(printed(width).split())


def test_at_80_columns_a_configuration_takes_at_most_three_lines():
    rows = [line for line in printed(80).splitlines() if line[:2].strip().isdigit()]
    assert len(rows) == len(TRIALS)
    assert len(printed(80).splitlines()) <= 1 + 3 * len(TRIALS) + 3


def test_a_narrow_terminal_says_below_the_rows_why_a_trial_failed():
    crashed = dataclasses.replace(
        TRIALS[0], number=7, outcome="crashed", message="RuntimeError: no kernel for this matrix"
    )
    file = io.StringIO()
    print_trials(Console(file=file, width=80), plain_view().result, [crashed])
    lines = " ".join(file.getvalue().split())
    assert "#7 crashed: RuntimeError: no kernel for this matrix" in lines
