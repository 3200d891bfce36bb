"""A study of a script that reports rows: nothing that a user reads says tokens or perplexity."""

import dataclasses
import io
import json
import re

import pytest
from rich.console import Console

from autotune.analysis.front import pareto_front
from autotune.analysis.pick import DEFAULT_PREFERENCES, choose
from autotune.cli import compare as compare_command
from autotune.cli.tables import print_trials
from autotune.reporting.figures import FIGURES, FigureOptions, comparison
from autotune.reporting.plain_tables import markdown_text
from autotune.reporting.report import contents
from autotune.reporting.report.page import page
from autotune.reporting.result_html import trials_html
from autotune.spec.terms import ROWS, TOKENS
from autotune.spec.workload import make_workload
from autotune.study.event_text import record_line
from tests.building.results import MIB, record, shared_with, study_result
from tests.building.views import BASELINE, BF16, BLOCK, BOTH, many_trials, study_view
from tests.reporting.figures.test_memory_timeline import prediction

OF_TOKENS = re.compile(r"perplexit|perpl\.|token", re.IGNORECASE)
MODEL_ONLY = {"predicted", "predicted-speed", "roofline", "timeline"}
"""Figures of predictions, which a script does not have."""


@pytest.fixture(scope="module")
def workload():
    return dataclasses.replace(
        make_workload("cpu", {"global_batch": 8}), script="train.py", model="script"
    )


def view_of(trials, workload):
    records = [dataclasses.replace(one, counted="rows") for one in trials]
    front = pareto_front(records, tolerance=DEFAULT_PREFERENCES.tolerance)
    pick = choose(
        records, front, baseline=records[0], preferences=DEFAULT_PREFERENCES, workload=workload
    )
    result = study_result(records, front=front, pick=pick, baseline=0)
    result = dataclasses.replace(result, workload=workload)
    return study_view(result)


@pytest.fixture(scope="module")
def view(workload):
    return view_of(
        [
            record(0, speed=1000.0, perplexity=2.5, config=BASELINE, seconds=10.0, name="baseline"),
            record(
                1,
                memory=70 * MIB,
                speed=800.0,
                perplexity=2.5,
                perplexity_source=shared_with(0),
                config=BLOCK,
                seconds=9.0,
            ),
            record(2, memory=80 * MIB, speed=1500.0, perplexity=2.51, config=BF16, seconds=9.0),
            record(3, memory=60 * MIB, speed=1200.0, perplexity=2.51, config=BOTH, seconds=9.0),
        ],
        workload,
    )


def visible(html):
    """Returns the text of a page, and its labels, without scripts, styles and other attributes."""
    html = re.sub(r"<(script|style)\b.*?</\1>", " ", html, flags=re.DOTALL)
    labels = " ".join(re.findall(r'(?:aria-label|title|alt)="([^"]*)"', html))
    return f"{re.sub(r'<[^>]*>', ' ', html)} {labels}"


def of_tokens(text):
    """Returns the lines of a text with a word of tokens."""
    return [line for line in text.splitlines() if OF_TOKENS.search(line)]


def test_the_tables_of_the_terminal_of_pages_and_of_markdown_say_rows_and_loss(view):
    result = view.result
    file = io.StringIO()
    print_trials(Console(file=file, width=200), result, result.trials)
    for text in (file.getvalue(), visible(trials_html(result, result.trials))):
        assert "rows/s" in text
        assert "0.9163" in text  # ln 2.5
        assert of_tokens(text) == []
    assert of_tokens(markdown_text(result)) == []


def test_the_reason_of_the_pick_compares_losses(view):
    reason = view.result.pick.reason
    assert "whose loss is within 0.01 of the best, 0.9203" in reason
    assert "loss +0.0040" in reason


def test_an_event_of_a_trial_says_rows_and_loss(view):
    assert "800 ±0% rows/s loss 0.9163 (of trial 0)" in record_line(view.result.trials[1])


def test_a_report_says_rows_and_loss(view):
    text = visible(page(contents.compute(view, version="1")))
    assert "rows per second" in text
    assert "8 rows a step" in text
    assert of_tokens(text) == []


@pytest.mark.parametrize("name", sorted(FIGURES.keys() - MODEL_ONLY))
def test_a_figure_says_rows_and_loss(name, view, workload):
    if name in ("importance", "parallel"):
        view = view_of(many_trials(), workload)
    drawn = FIGURES[name].draw(view, FigureOptions(prediction=prediction())).to_plotly_json()
    drawn["layout"].pop("template")
    assert OF_TOKENS.findall(json.dumps(drawn, default=str)) == []


def test_a_comparison_says_rows_and_loss(view):
    other = dataclasses.replace(view, result=dataclasses.replace(view.result, study="other"))
    compared = comparison.compute([view, other])
    file = io.StringIO()
    Console(file=file, width=200).print(compare_command._table(compared))
    assert "rows/s" in file.getvalue()
    assert of_tokens(file.getvalue()) == []
    assert comparison.draw(compared).layout.yaxis.title.text == "rows per second"


def test_json_has_the_same_keys_for_rows(view):
    [first, *_] = view.result.to_dict()["trials"]
    assert (first["counted"], first["tokens_per_second"], first["perplexity"]) == (
        "rows",
        1000.0,
        2.5,
    )


def test_a_loss_below_zero_is_drawn_and_a_loss_of_any_size_is_no_doubt(workload):
    negative = view_of(
        [record(0, perplexity=0.5, config=BASELINE), record(1, perplexity=0.4, config=BLOCK)],
        workload,
    )
    drawn = FIGURES["pareto"].draw(negative, FigureOptions(x="perplexity", y="speed"))
    assert len(drawn.data) > 0
    large = view_of([record(0, perplexity=1e9, config=BASELINE)], workload)
    assert large.result.pick.doubt == ""


def test_the_words_of_rows_have_those_of_tokens_in_no_other_study():
    assert TOKENS.worded("tokens/s, perplexity") == "tokens/s, perplexity"
    assert ROWS.worded("Perplexity, perplexities, tokens per second") == (
        "Loss, losses, rows per second"
    )
