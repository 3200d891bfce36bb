import csv
import io
from dataclasses import replace

import pytest

from autotune.reporting.plain_tables import CSV_COLUMNS, csv_text, markdown_text
from autotune.spec.config import FIELD_ORDER, TrainingConfig
from autotune.spec.result import Pick
from tests.building.results import MIB, out_of_memory, record, shared_with, study_result

SMALL = record(0, memory=100 * MIB, name="small | not *large*", tokens_per_second_spread=50.0)
FAST = record(
    1, memory=200 * MIB, speed=2000.0, config=TrainingConfig(compile="block", memory_budget=0.5)
)
FAILED = out_of_memory(2, message="asked for\n2 GiB, held 1", seconds=1.5)
RESULT = study_result(
    (SMALL, FAST, FAILED), front=(0, 1), pick=Pick(number=1, criterion="the fastest"), baseline=0
)


def rows(result=RESULT):
    return list(csv.DictReader(io.StringIO(csv_text(result))))


def table(result=RESULT, *, title="### All trials"):
    lines = markdown_text(result).partition(title)[2].strip().split("\n\n")[0].splitlines()
    return [
        [cell.strip() for cell in line.strip("|").replace(r"\|", "¦").split("|")] for line in lines
    ]


KNOWN = replace(RESULT, initial_perplexity=9.5)
FAILED_BEFORE = replace(RESULT, initial_perplexity_remark="out of memory")


def test_the_perplexity_before_training_is_the_first_row_of_a_markdown_table():
    for title in ("### All trials", "and the baseline\n"):
        assert table(KNOWN, title=title)[2] == ["", "before training", "", "", "9.50", "", ""]


def test_where_the_perplexity_before_training_is_missing_its_row_says_why():
    assert table(FAILED_BEFORE)[2][-3:] == ["-", "", "not measured: out of memory"]


def test_a_trial_no_better_than_before_training_is_marked():
    assert "no better than before training" in table(KNOWN)[3][-1]
    assert "before training" not in markdown_text(replace(RESULT, initial_perplexity=None))


def test_csv_has_a_row_for_each_trial_and_none_before_training():
    assert rows(KNOWN) == rows()


# -- CSV -------------------------------------------------------------------------------------------


def test_every_trial_is_a_row():
    assert [row["number"] for row in rows()] == ["0", "1", "2"]


def test_every_flat_name_of_the_json_is_a_column():
    flat = {name for name, value in SMALL.to_dict().items() if name != "config"}
    flat -= {"bytes_by_kind", "peak_bytes_by_category", "seconds_by_part"}
    flat -= {"tokens_per_second_interval"}  # two columns
    assert flat <= set(CSV_COLUMNS)
    assert set(FIELD_ORDER) <= set(CSV_COLUMNS)
    assert len(set(CSV_COLUMNS)) == len(CSV_COLUMNS)


def test_an_interval_is_two_columns_that_are_empty_where_there_is_none():
    confirmed = replace(FAST, confirmations=3, tokens_per_second_interval=(1900.0, 2100.0))
    written = rows(study_result((SMALL, confirmed), front=(0, 1)))
    ends = [(row["tokens_per_second_low"], row["tokens_per_second_high"]) for row in written]
    assert ends == [("", ""), ("1900.0", "2100.0")]
    assert "speed_error" not in CSV_COLUMNS


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("peak_memory_bytes", str(200 * MIB)),
        ("tokens_per_second", "2000.0"),
        ("compile", "block"),
        ("memory_budget", "0.5"),
        ("feasible", "true"),
        ("front", "true"),
        ("pick", "true"),
        ("baseline", "false"),
        ("name", ""),
    ],
)
def test_a_cell_has_the_value_as_it_is(column, expected):
    assert rows()[1][column] == expected


@pytest.mark.parametrize("column", ["peak_memory_bytes", "tokens_per_second", "perplexity"])
def test_what_was_not_measured_is_empty(column):
    assert rows()[2][column] == ""


def test_what_is_not_finite_is_empty():
    assert (
        rows(study_result([record(0, outcome="diverged", perplexity=float("nan"))]))[0][
            "perplexity"
        ]
        == ""
    )


def test_a_message_of_two_lines_is_one_cell():
    assert rows()[2]["message"] == "asked for\n2 GiB, held 1"


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_a_name_that_a_spreadsheet_would_run_has_an_apostrophe_in_front(start):
    name = f"{start}HYPERLINK('x')"
    assert rows(study_result([record(0, name=name)]))[0]["name"] == f"'{name}".replace("\r", "\n")


def test_a_carriage_return_breaks_no_row():
    assert rows(study_result([record(0, message="a\rb"), FAST]))[0]["message"] == "a\nb"


def test_other_names_stay_as_they_are():
    assert rows()[0]["name"] == SMALL.name


# -- Markdown --------------------------------------------------------------------------------------


def test_all_tables_have_as_many_cells_in_every_row():
    assert {len(row) for row in table()} == {len(table()[0])}
    assert len(table()) == 2 + 3


def test_the_front_is_a_table_of_its_own():
    assert [row[0] for row in table(title="and the baseline")[2:]] == ["0", "1"]


def test_the_pick_is_a_sentence():
    text = markdown_text(RESULT)
    assert (
        "**Pick: trial 1, fp32, compile block, memory-budget 0.5, micro-batch 1: the fastest.**"
        in text
    )


def test_a_name_stays_within_its_cell_and_is_no_markup():
    assert r"small \| not \*large\*: fp32" in markdown_text(RESULT)
    assert table()[2][1].startswith("small ¦ not")


def test_a_perplexity_of_another_trial_is_marked_and_the_mark_explained():
    shared = record(1, perplexity=12.25, perplexity_source=shared_with(0))
    text = markdown_text(study_result((SMALL, shared)))
    assert "| =12.25 |" in text
    assert "= is the perplexity of the trial" in text
    assert "= is the perplexity" not in markdown_text(RESULT)


def test_a_message_of_two_lines_is_one_row():
    assert table()[4][-1] == "asked for 2 GiB, held 1"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)&gt;"),
        ("[a](b)", r"\[a\](b)"),
        ("`x`", r"\`x\`"),
    ],
)
def test_html_and_markup_in_names_stay_text(name, shown):
    assert shown in markdown_text(study_result([record(0, name=name)]))


def test_without_a_feasible_trial_it_says_so():
    text = markdown_text(study_result([out_of_memory(0)]))
    assert "Nothing that was tried trains under 256.0 MiB." in text
    assert "### Front" not in text


def test_without_a_trial_it_says_so():
    assert "No trial has finished yet." in markdown_text(study_result())


def test_memory_on_the_device_is_a_column_where_it_is_another():
    assert "on device" in table(study_result([SMALL], device="cuda:0"))[0]
    assert "on device" not in table()[0]


def test_a_confirmed_trial_is_marked_because_its_speed_is_another_measurement():
    confirmed = study_result([record(0), record(1, confirmations=13)])
    assert "confirmed 13x" in markdown_text(confirmed)
    assert "confirmed" not in markdown_text(study_result([record(0), record(1)]))


def test_csv_has_the_peaks_of_several_devices_in_one_cell_of_numbers():
    ranks = study_result([record(0, peak_memory_bytes_by_rank=(3, 4)), record(1)])
    found = list(csv.DictReader(io.StringIO(csv_text(ranks))))
    assert [row["peak_memory_bytes_by_rank"] for row in found] == ["3 4", ""]
