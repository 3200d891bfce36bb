"""Texts about a trial: one form for tables, pages and figures."""

from dataclasses import replace

import pytest

from autotune.reporting.trial_text import (
    SAYS_NOTHING_NOTE,
    SHARED_MARK_NOTE,
    format_perplexity,
    format_speed,
    full_hover,
    outcome_line,
    perplexity_notes,
    short_hover,
    utilization_sentence,
)
from autotune.spec.provenance import MEASURED
from tests.building.results import (
    OVER_RANDOM,
    out_of_memory,
    record,
    shared_with,
    study_result,
    trial,
)

HOVERS = (lambda one: full_hover(one, None), short_hover)


@pytest.mark.parametrize(
    ("speed", "spread", "words"),
    [(None, None, ""), (1234.5, None, "1,234 ±0%"), (2000.0, 60.0, "2,000 ±3%")],
)
def test_a_speed_stands_with_its_spread(speed, spread, words):
    assert format_speed(speed, spread) == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"perplexity": None}, ""),
        ({"perplexity": 1234.567}, "1,234.57"),
        ({"perplexity": 20.0, "perplexity_spread": 0.125}, "20.00 ±0.12"),
        ({"perplexity": 20.0, "perplexity_source": shared_with(3)}, "=20.00"),
        ({"perplexity": 20.0, "perplexity_source": MEASURED}, "20.00"),
        ({"perplexity": 20.0, "perplexity_source": OVER_RANDOM}, "(20.00)"),
    ],
)
def test_a_perplexity_stands_with_its_spread_and_a_mark_where_it_is_that_of_another(fields, words):
    assert format_perplexity(record(0, **fields)) == words


def test_marks_at_perplexities_are_explained_where_there_are_any():
    shared, random = record(1, perplexity_source=shared_with(0)), OVER_RANDOM
    assert perplexity_notes([record(0)]) == []
    both = perplexity_notes([record(0), shared, record(2, perplexity_source=random)])
    assert both == [SHARED_MARK_NOTE, SAYS_NOTHING_NOTE]


@pytest.mark.parametrize("hover", HOVERS)
def test_quotes_in_a_name_stay_quotes_in_a_hover_text(hover):
    assert 'it\'s "mine"' in hover(record(0, name='it\'s "mine"'))


@pytest.mark.parametrize("hover", HOVERS)
def test_a_link_in_a_name_is_none_in_a_hover_text(hover):
    text = hover(
        record(
            0,
            name="<a href='https://example.org'>x</a>",
            outcome="crashed",
            message="<a href='y'>z</a>",
        )
    )
    assert "<a" not in text


@pytest.mark.parametrize("hover", HOVERS)
def test_no_line_of_a_hover_text_is_wider_than_a_phone(hover):
    text = hover(record(0, name="long " * 60, outcome="crashed", message="message " * 60))
    assert max(map(len, text.replace("</b>", "").split("<br>"))) < 60


@pytest.mark.parametrize("hover", HOVERS)
def test_a_hover_text_says_which_study_measured_a_trial_as_text(hover):
    text = hover(record(0, reused_from=trial(3, "<a>")))
    assert ("measured as trial 3" in text, "<a>" in text) == (True, False)


def test_the_comparison_with_the_baseline_is_no_wider_either():
    text = full_hover(record(1, perplexity=11.0), record(0, memory=300 * 2**20, speed=900.0))
    assert "against the baseline" in text
    assert max(map(len, text.split("<br>"))) < 60


def test_an_outcome_has_the_same_text_everywhere():
    failed = out_of_memory(3, name="x", message="too much")
    assert outcome_line(failed) == "#3 x: fp32, micro-batch 1: out of memory (too much)"
    assert "parity failed: other losses" in short_hover(
        record(1, outcome="parity_failed", message="other losses")
    )


# -- utilization -----------------------------------------------------------------------------------

DEVICE = study_result().device
WITH_FLOPS = record(
    0,
    speed=10_000.0,
    model_flops_per_token=1e6,
    recomputed_flops_per_token=2e5,
    model_flops_utilization=0.25,
)


def test_utilization_names_the_rate_and_what_is_recomputed():
    assert utilization_sentence(WITH_FLOPS, DEVICE) == (
        "25 % of the 40 GFLOP/s that fp32 products reach on this device, 5 % more to recompute"
    )


def test_utilization_is_not_known_where_a_trial_is_faster_than_its_roof():
    sentence = utilization_sentence(replace(WITH_FLOPS, model_flops_utilization=None), DEVICE)
    assert sentence.startswith("not known, as a trial was faster than the 40 GFLOP/s")


def test_utilization_is_not_known_where_the_peaks_were_disturbed():
    disturbed = replace(DEVICE, matrix_flops_per_second={})
    sentence = utilization_sentence(replace(WITH_FLOPS, model_flops_utilization=None), disturbed)
    assert sentence.startswith("not known, as something else used the device all the time")


def test_nothing_is_said_of_utilization_where_flops_or_peaks_were_not_measured():
    assert utilization_sentence(record(0), DEVICE) == ""
    unmeasured = replace(DEVICE, matrix_flops_per_second=None)
    assert utilization_sentence(WITH_FLOPS, unmeasured) == ""
