"""The ablation as a table and as bars; its numbers: tests/analysis/test_ablation.py."""

import dataclasses

import pytest

from autotune.errors import InvalidInput
from autotune.reporting.figures.ablation import compute, draw
from autotune.spec.result import Pick
from tests.building.results import MIB, record, study_result
from tests.building.views import BASELINE, four_trials, ladder_view, predicted, study_view


def rows(view):
    return {row.words: row.cells for row in compute(view).rows}


def test_a_row_says_what_a_technique_gains_alone():
    alone, _, _ = rows(ladder_view())["checkpointing block"]
    assert (alone.memory, alone.memory_share, alone.speed) == (
        "200.0 MiB less",
        "50 % less",
        "-20 %",
    )
    assert (alone.perplexity, alone.source) == ("0 %", "#1 against #0")


def test_a_row_says_what_it_gains_on_top_of_the_others():
    _, on_top, _ = rows(ladder_view())["precision bf16-mixed"]
    assert (on_top.memory, on_top.speed, on_top.perplexity) == (
        "100.0 MiB less",
        "+50 %",
        "+5.00 %",
    )


def test_a_row_says_the_median_and_range_over_pairs_and_how_many():
    _, _, pairs = rows(ladder_view())["checkpointing block"]
    assert (pairs.memory_share, pairs.source) == ("55 % less (-60 % to -50 %)", "2 pairs")


def test_a_spread_is_shown_with_its_speed():
    trials = [
        dataclasses.replace(trial, tokens_per_second_spread=0.1 * trial.tokens_per_second)
        for trial in four_trials()
    ]
    alone, _, _ = rows(ladder_view(trials))["checkpointing block"]
    assert alone.speed == "-20 ± 11 %"


def test_a_predicted_saving_is_called_so():
    trials = [
        record(0, outcome="predicted_over_cap", memory=None, speed=None, config=BASELINE),
        four_trials()[1],
    ]
    view = ladder_view(trials, front=(1,), pick=None)
    predicted_baseline = dataclasses.replace(
        view.result.trials[0], predicted_peak_memory_bytes=800 * MIB, perplexity=None
    )
    view = ladder_view([predicted_baseline, trials[1]], front=(1,), pick=None)
    alone, on_top, _ = rows(view)["checkpointing block"]
    assert (alone.memory, alone.source, alone.is_predicted) == (
        "600.0 MiB less",
        "#1 against #0, memory predicted",
        True,
    )
    assert on_top.source == "no pick"


def test_what_was_not_tried_says_so():
    trials = [trial for trial in four_trials() if trial.number in (0, 3)]
    alone, on_top, pairs = compute(ladder_view(trials, front=(3,))).rows[0].cells
    assert [cells.source for cells in (alone, on_top, pairs)] == [
        "not tried",
        "not tried",
        "no pair",
    ]


def test_a_value_without_any_number_is_named_in_the_note_and_has_no_row():
    config = dataclasses.replace(BASELINE, optimizer_fusion="foreach")
    untried = record(4, outcome="crashed", memory=None, speed=None, perplexity=None, config=config)
    figure = compute(ladder_view([*four_trials(), untried]))
    assert "optimizer-fusion foreach" not in [row.words for row in figure.rows]
    assert [row.words for row in figure.folded] == ["optimizer-fusion foreach"]
    assert "Not known for optimizer-fusion foreach (alone: failed;" in figure.note
    assert len(figure.steps) == len(figure.rows) == len(draw(figure).layout.yaxis.tickvals)


def test_what_has_no_bar_is_not_in_the_legend():
    trials = [trial for trial in four_trials() if trial.number in (0, 1)]
    drawing = draw(compute(ladder_view(trials, front=(1,), pick=None)))
    assert "on top of the others" not in [trace.name for trace in drawing.data]


def test_the_bars_are_percent_alone_on_top_and_over_pairs():
    memory = [trace for trace in draw(compute(ladder_view())).data if trace.xaxis == "x"]
    assert [trace.name for trace in memory] == ["alone", "on top of the others", "over all pairs"]
    assert [trace.x[1] for trace in memory] == pytest.approx([50.0, 60.0, 55.0])


def test_the_range_over_pairs_is_an_error_bar():
    pairs = next(
        trace for trace in draw(compute(ladder_view())).data if trace.name == "over all pairs"
    )
    assert (pairs.error_x.array[1], pairs.error_x.arrayminus[1]) == pytest.approx((5.0, 5.0))


def test_what_is_better_is_on_the_right_of_every_panel():
    layout = draw(compute(ladder_view())).layout
    directions = (layout.xaxis.autorange, layout.xaxis2.autorange, layout.xaxis3.autorange)
    assert directions == (None, None, "reversed")


def test_predicted_bars_are_hatched():
    trials = [dataclasses.replace(trial, peak_memory_bytes=None) for trial in four_trials()]
    for number, trial in enumerate(four_trials()):
        trials[number] = dataclasses.replace(
            trials[number], predicted_peak_memory_bytes=trial.peak_memory_bytes
        )
    alone = draw(compute(ladder_view(trials))).data[0]
    assert alone.marker.pattern.shape == ("/", "/")


def test_a_saving_of_nothing_says_whether_it_is_predicted():
    trials = [dataclasses.replace(trial, peak_memory_bytes=None) for trial in four_trials()]
    known = [(trial.config, predicted(peak=100 * MIB)) for trial in trials]
    found = {"front": (3, 1, 2), "pick": Pick(number=3, criterion="the smallest"), "baseline": 0}
    bars = draw(compute(study_view(study_result(trials, **found), known))).data
    assert (bars[0].text, bars[6].text) == (("0 predicted", "0 predicted"), ("", "0"))


def test_where_the_pick_was_not_tried_without_its_choices_the_note_says_so():
    alone = [trial for trial in four_trials() if trial.number in (0, 3)]
    note = compute(ladder_view(alone, front=(3,))).note
    assert "The effect on top of the others is unknown" in note
    assert "is unknown" not in compute(ladder_view()).note


def test_on_a_phone_texts_instead_of_bars_are_short():
    trials = [trial for trial in four_trials() if trial.number in (0, 3)]
    drawing = draw(compute(ladder_view(trials, front=(3,))))
    meta = drawing.layout.meta
    assert meta["narrow"]["annotations[0].text"] == " not known"
    assert meta["wide"]["annotations[0].text"] == drawing.layout.annotations[0].text


def test_on_a_phone_the_panels_lie_below_each_other():
    narrow = draw(compute(ladder_view())).layout.meta["narrow"]
    assert narrow["xaxis.domain"] == narrow["xaxis3.domain"] == [0, 1]
    assert narrow["yaxis3.domain"][1] < narrow["yaxis2.domain"][0]


def test_trials_that_are_all_the_baseline_have_no_ablation():
    with pytest.raises(InvalidInput, match="uses a technique that the baseline does not"):
        compute(ladder_view([record(0, config=BASELINE)], front=(0,), pick=None))
