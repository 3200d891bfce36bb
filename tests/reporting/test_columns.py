"""A column of the table of trials is the same on a terminal, on a page, in Markdown and in CSV."""

import csv
import io

import pytest
from rich.console import Console

from autotune.cli.tables import print_trials
from autotune.reporting import columns as module
from autotune.reporting.columns import BLANK, COLUMNS, Column, trial_table
from autotune.reporting.plain_tables import CSV_COLUMNS, csv_text, markdown_text
from autotune.reporting.result_html import trials_html
from autotune.spec.result import Pick
from tests.building.results import MIB, out_of_memory, record, study_result

KNOWN = record(
    1,
    memory=100 * MIB,
    predicted_peak_memory_bytes=101 * MIB,
    model_flops_utilization=0.31,
    name="a name",
)
RESULT = study_result(
    [record(0), KNOWN, out_of_memory(2)],
    device="cuda:0",
    front=(1,),
    pick=Pick(number=1, criterion="the fastest"),
    baseline=0,
)
OPTIONAL = [column.key for column in COLUMNS if column.is_optional]


def on_a_terminal():
    file = io.StringIO()
    print_trials(Console(file=file, width=300), RESULT, RESULT.trials, with_predictions=True)
    return " ".join(file.getvalue().split())


@pytest.mark.parametrize("column", [c for c in COLUMNS if not c.is_optional], ids=lambda c: c.key)
def test_every_writer_has_each_column(column):
    text = column.text(RESULT, KNOWN)
    number = column.key == "number"
    assert text in on_a_terminal()
    assert f"| {column.title} |" in markdown_text(RESULT)
    assert f"| {text} |" in markdown_text(RESULT)
    assert f">{column.title}</th>" in trials_html(RESULT, RESULT.trials)
    assert (f"#{text}" if number else text.rpartition(": ")[2].split(",")[0]) in trials_html(
        RESULT, RESULT.trials
    )
    assert column.key in CSV_COLUMNS


def test_a_new_column_is_a_new_entry_of_one_list(monkeypatch):
    seeds = Column(
        key="seeds",
        title="seeds",
        text=lambda _, trial: str(17 + trial.number),
        computed=lambda trial: 17 + trial.number,
    )
    monkeypatch.setattr(module, "COLUMNS", (*COLUMNS, seeds))
    assert "seeds" in on_a_terminal()
    assert "18" in on_a_terminal()
    assert "| seeds |" in markdown_text(RESULT)
    assert ">seeds</th>" in trials_html(RESULT, RESULT.trials)


def test_an_optional_column_is_where_it_is_asked_for():
    keys = [column.key for column in trial_table(RESULT, RESULT.trials, optional=OPTIONAL).columns]
    assert set(OPTIONAL) <= set(keys)
    assert not set(OPTIONAL) & {c.key for c in trial_table(RESULT, RESULT.trials).columns}


@pytest.mark.parametrize("column", COLUMNS, ids=lambda c: c.key)
def test_what_is_not_known_is_blank_and_has_no_value(column):
    empty = study_result([record(0, memory=None, speed=None, perplexity=None, seconds=None)])
    (row,) = trial_table(empty, empty.trials, optional=OPTIONAL).rows
    if column.key in ("number", "name"):
        assert row.texts[column.key] != BLANK
    elif column.key in row.texts:
        assert row.texts[column.key] == BLANK
    if column.is_number and column.key != "number":
        assert column.value(empty.trials[0]) is None


def test_what_is_computed_from_other_columns_has_a_column_of_csv():
    rows = list(csv.DictReader(io.StringIO(csv_text(RESULT))))
    assert [row["predicted_to_measured"] for row in rows] == ["", "1.01", ""]
