"""Tables of trials at the widths of terminals."""

import dataclasses
import io

import pytest
from rich.console import Console

from autotune.cli.tables import MOST_FOLDED, indented, make_console, print_trials
from autotune.reporting.outcomes import outcome_counts
from tests.building.reports import TRIALS, plain_view


def printed(width):
    file = io.StringIO()
    print_trials(Console(file=file, width=width), plain_view().result, TRIALS)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_the_perplexity_before_training_is_the_first_row(width):
    file = io.StringIO()
    result = dataclasses.replace(plain_view().result, initial_perplexity=9.5)
    console = Console(file=file, width=width)
    print_trials(console, result, TRIALS, with_before_training=True)
    first = file.getvalue().splitlines()[1]
    assert first.split()[0] == "before"
    assert "9.50" in first
    assert "no better than before training" in " ".join(file.getvalue().split())


def test_without_pretrained_weights_the_table_begins_with_the_first_trial():
    file = io.StringIO()
    console = Console(file=file, width=140)
    print_trials(console, plain_view().result, TRIALS, with_before_training=True)
    assert file.getvalue() == printed(140)


def test_thousands_of_trials_come_after_the_perplexity_before_training():
    file = io.StringIO()
    many = [dataclasses.replace(TRIALS[0], number=number) for number in range(MOST_FOLDED + 1)]
    result = dataclasses.replace(plain_view().result, initial_perplexity=9.5)
    print_trials(Console(file=file, width=140), result, many, with_before_training=True)
    assert file.getvalue().splitlines()[1].split() == ["before", "training", "9.50"]


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


def test_no_line_ends_with_blanks_where_it_is_not_a_terminal():
    file = io.StringIO()
    print_trials(make_console(file), plain_view().result, TRIALS, title="All trials")
    lines = file.getvalue().splitlines()
    assert len(lines) > len(TRIALS)
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(("is_running", "label"), [(True, "running"), (False, "interrupted")])
def test_a_trial_that_a_process_works_on_is_running(is_running, label):
    begun = dataclasses.replace(TRIALS[0], outcome="interrupted", is_running=is_running)
    file = io.StringIO()
    print_trials(Console(file=file, width=200), plain_view().result, [begun])
    assert label in file.getvalue()
    assert outcome_counts([begun]) == f"1 trial: 1 {label}"
    assert "is_running" not in begun.to_dict()


def test_a_narrow_terminal_says_below_the_rows_why_a_trial_failed():
    crashed = dataclasses.replace(
        TRIALS[0], number=7, outcome="crashed", message="RuntimeError: no kernel for this matrix"
    )
    file = io.StringIO()
    print_trials(Console(file=file, width=80), plain_view().result, [crashed])
    lines = " ".join(file.getvalue().split())
    assert "#7 crashed: RuntimeError: no kernel for this matrix" in lines


def test_a_reason_that_several_trials_failed_for_is_printed_once():
    failed = [
        dataclasses.replace(TRIALS[0], number=number, outcome="crashed", message="no kernel")
        for number in (7, 8)
    ]
    file = io.StringIO()
    print_trials(Console(file=file, width=80), plain_view().result, failed)
    assert "#7, #8 crashed: no kernel" in file.getvalue()
    assert file.getvalue().count("no kernel") == 1


def test_the_folded_lines_of_a_reason_stay_indented():
    file = io.StringIO()
    Console(file=file, width=40).print(indented("the fastest on the front " * 4))
    lines = file.getvalue().splitlines()
    assert len(lines) > 1
    assert all(line.startswith("  ") and line[2] != " " for line in lines)
