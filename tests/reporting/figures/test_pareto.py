"""Pareto figure: two objectives as axes, the third as colour."""

import json
from dataclasses import replace

import pytest

from autotune.errors import InvalidInput
from autotune.reporting.figures import pareto_space
from autotune.reporting.figures.pareto import MANY, compute
from autotune.reporting.figures.pareto_drawing import LABELLED, draw
from autotune.reporting.style import note_of
from autotune.reporting.trial_text import full_hover
from autotune.spec.config import CHOICES, TECHNIQUES, TrainingConfig
from autotune.spec.result import Pick
from tests.building.results import MIB, out_of_memory, record, study_result
from tests.building.views import HOSTILE, study_view

BASELINE = record(
    0, memory=300 * MIB, speed=900.0, perplexity=10.0, outcome="over_cap", message="too large"
)
SMALL = record(1, memory=100 * MIB, speed=1000.0, perplexity=10.0, tokens_per_second_spread=12.0)
FAST = record(
    2, memory=200 * MIB, speed=2000.0, perplexity=10.0, name="bf16 & more", peak_phase="backward"
)
DOMINATED = record(3, memory=220 * MIB, speed=1100.0, perplexity=10.0)
FAILED = out_of_memory(4, config=TrainingConfig(compile="model"))


def view(**changes):
    trials = (BASELINE, SMALL, FAST, DOMINATED, FAILED)
    settings = {
        "front": (1, 2),
        "pick": Pick(number=2, criterion="the fastest"),
        "baseline": 0,
        "study": "a study",
    }
    return study_view(study_result(trials, **{**settings, **changes}))


def view_of(*trials, **settings):
    return study_view(study_result(trials, **settings))


def mark(number, **changes):
    return next(mark for mark in compute(view(**changes)).marks if mark.number == number)


def hostile_view():
    trials = [
        record(0, name=HOSTILE),
        record(1, name=HOSTILE, outcome="over_cap", message=HOSTILE),
        out_of_memory(2, name=HOSTILE, message=HOSTILE),
    ]
    return study_view(
        study_result(
            trials, study=HOSTILE, front=(0,), pick=Pick(number=0, criterion=HOSTILE), baseline=0
        )
    )


def trace(drawing, name):
    return next(trace for trace in drawing.data if trace.name == name)


# -- compute ---------------------------------------------------------------------------------------


def test_every_trial_with_numbers_is_a_mark():
    assert [mark.number for mark in compute(view()).marks] == [0, 1, 2, 3]


def test_the_note_counts_the_trials_that_are_no_mark():
    assert "Without a measured memory or speed: 1 of 5 trials." in compute(view()).note


@pytest.mark.parametrize(
    ("cap_bytes", "unit", "cap"),
    [
        (256 * MIB, "MiB", 256.0),
        (512 * 1024, "KiB", 512.0),
        (512, "KiB", 0.5),
        (4096 * MIB, "MiB", 4096.0),
    ],
)
def test_the_unit_suits_the_cap_and_the_largest_trial(cap_bytes, unit, cap):
    figure = compute(view(cap_bytes=cap_bytes))
    assert (figure.x.unit.name, figure.cap) == (unit, cap)


def test_a_mark_stands_where_the_device_memory_is_on_a_gpu():
    trial = record(0, memory=100 * MIB, device_bytes=150 * MIB)
    assert compute(view_of(trial, device="cuda:0")).marks[0].x == 150.0


@pytest.mark.parametrize(
    ("device", "words"), [("cpu", "peak memory"), ("cuda:1", "memory the device must have")]
)
def test_the_axis_says_which_memory_it_shows(device, words):
    assert compute(view(device=device)).x.title == f"{words}, MiB"


def test_on_a_gpu_the_cap_is_no_line_over_peak_memory_and_its_offset_is_in_the_note():
    trial = record(0, memory=100 * MIB, device_bytes=150 * MIB)
    figure = compute(view_of(trial, device="cuda:0"), x="memory")
    assert figure.cap_axis is None
    assert "which is 50.00 MiB to 50.00 MiB more" in figure.note


@pytest.mark.parametrize(
    ("x", "y", "shown"),
    [
        (None, None, ("memory", "speed", "perplexity")),
        ("speed", None, ("speed", "memory", "perplexity")),
        (None, "memory", ("speed", "memory", "perplexity")),
        ("perplexity", "speed", ("perplexity", "speed", "memory")),
        ("memory", "perplexity", ("memory", "perplexity", "speed")),
    ],
)
def test_any_two_objectives_are_axes_and_the_third_is_the_colour(x, y, shown):
    figure = compute(view(), x=x, y=y)
    assert (figure.x.name, figure.y.name, figure.colour.name) == shown


@pytest.mark.parametrize(("x", "y"), [("speed", "speed"), ("height", None), (None, "loss")])
def test_an_unknown_axis_or_one_axis_twice_is_rejected(x, y):
    with pytest.raises(InvalidInput):
        compute(view(), x=x, y=y)


@pytest.mark.parametrize(("number", "on_front"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_mark_knows_whether_it_is_on_the_front(number, on_front):
    assert mark(number).on_front is on_front


def test_a_mark_knows_that_it_is_not_feasible():
    assert [mark(number).feasible for number in (0, 1)] == [False, True]


SELDOM_USED = {
    name: next(value for value in CHOICES.get(name, (2,)) if value != plain)
    for name, plain in TrainingConfig().to_dict().items()
    if TECHNIQUES[name].is_added_later
}


@pytest.mark.parametrize("field", TrainingConfig().to_dict())
def test_a_hover_text_holds_every_technique(field):
    used = {**FAST.config.to_dict(), **SELDOM_USED}
    drawn = replace(FAST, config=TrainingConfig(**used))
    assert f"{field.replace('_', ' ')}: {used[field]}" in full_hover(drawn, None)


@pytest.mark.parametrize("field", SELDOM_USED)
def test_a_hover_text_leaves_out_what_few_trials_use_and_this_one_does_not(field):
    assert f"<br>{field.replace('_', ' ')}: " not in full_hover(FAST, None)


@pytest.mark.parametrize(
    "words",
    [
        "#2 bf16 &amp; more",
        "200.0 MiB, in backward",
        "tokens/s: 2,000",
        "perplexity: 10.000",
        "33 % less memory",
    ],
)
def test_a_hover_text_holds_what_was_measured(words):
    assert words in mark(2).hover


def test_the_hover_text_of_a_trial_over_the_cap_says_so():
    assert "over the cap: too large" in mark(0).hover


def test_a_study_without_a_trial_is_an_empty_figure():
    assert compute(view_of()).marks == ()
    assert draw(compute(view_of())).layout.xaxis.range[1] > 0


# -- draw ------------------------------------------------------------------------------------------


def test_the_pick_is_drawn_where_it_was_measured():
    star = trace(draw(compute(view())), "pick")
    assert (star.x, star.y, star.marker.symbol) == ((200.0,), (2000.0,), "star")


def test_the_baseline_is_marked_where_it_was_measured():
    square = trace(draw(compute(view())), "baseline")
    assert (square.x, square.y) == ((300.0,), (900.0,))


@pytest.mark.parametrize(
    ("x", "y", "corners"),
    [
        (None, None, [(100.0, 1000.0), (200.0, 2000.0)]),
        ("speed", "memory", [(2000.0, 200.0), (1000.0, 100.0)]),
        ("speed", "perplexity", [(2000.0, 10.0)]),
    ],
)
def test_the_line_goes_along_the_front_from_the_best_to_the_worst(x, y, corners):
    line = trace(draw(compute(view(front=(2, 1)), x=x, y=y)), "front line")
    assert list(zip(line.x, line.y, strict=True)) == corners


def test_a_dominated_trial_is_dimmed_and_smaller_than_the_front():
    drawing = draw(compute(view()))
    dimmed, front = trace(drawing, "dominated").marker, trace(drawing, "front").marker
    assert dimmed.opacity < 1
    assert dimmed.size < front.size


def test_a_trial_over_the_cap_has_no_colour_of_its_own():
    assert trace(draw(compute(view())), "not feasible").marker.coloraxis is None


def test_groups_differ_in_shape_too():
    symbols = [
        trace.marker.symbol for trace in draw(compute(view())).data if trace.showlegend is None
    ]
    assert len(set(symbols)) == len(symbols)


def test_error_bars_are_the_measured_spread():
    assert trace(draw(compute(view())), "front").error_y.array == (12.0, 0.0)


def test_what_lies_beyond_the_cap_is_shaded():
    drawing = draw(compute(view()))
    (shade,) = [shape for shape in drawing.layout.shapes if shape.type == "rect"]
    assert (shade.x0, shade.x1) == (256.0, drawing.layout.xaxis.range[1])


def test_the_cap_is_inside_the_figure():
    drawing = draw(compute(view(cap_bytes=4096 * MIB)))
    assert drawing.layout.xaxis.range[1] > 4


def test_the_largest_trial_is_inside_the_figure():
    assert draw(compute(view())).layout.xaxis.range[1] > 300


def test_a_trial_over_the_cap_without_a_speed_is_a_tick_on_the_memory_axis():
    stopped = record(5, memory=900 * MIB, speed=None, perplexity=None, outcome="over_cap")
    tick = trace(draw(compute(view_of(SMALL, stopped))), "not timed")
    assert (tick.x, tick.y) == ((900.0,), (0.0,))


def test_the_note_says_what_a_tick_is_where_there_is_one():
    stopped = record(5, memory=900 * MIB, speed=None, perplexity=None, outcome="over_cap")
    assert "Ticks at the bottom" in note_of(draw(compute(view_of(SMALL, stopped))))
    assert "Ticks" not in note_of(draw(compute(view())))
    assert "Ticks" not in note_of(pareto_space.draw(compute(view_of(SMALL, stopped))))


def test_a_trial_over_the_cap_that_was_timed_stands_at_its_speed_without_a_perplexity():
    timed = record(5, memory=900 * MIB, speed=700.0, perplexity=None, outcome="over_cap")
    figure = compute(view_of(SMALL, timed))
    grey = trace(draw(figure), "not feasible")
    assert (grey.x, grey.y) == ((900.0,), (700.0,))
    assert trace(pareto_space.draw(figure), "not feasible").x == ()


def test_where_nothing_is_feasible_there_is_no_key_to_marks_and_colours_that_are_not_there():
    over = record(0, outcome="over_cap")
    for drawing in (draw(compute(view_of(over))), pareto_space.draw(compute(view_of(over)))):
        keys = {one.name for one in drawing.data if one.showlegend is not False}
        assert keys - {"cap 256.0 MiB"} == {"not feasible"}
        assert drawing.layout.coloraxis.showscale is False


@pytest.mark.parametrize(("trials", "is_labelled"), [(LABELLED, True), (LABELLED + 1, False)])
def test_only_a_small_front_has_numbers_next_to_its_marks(trials, is_labelled):
    records = [record(number, memory=(number + 1) * MIB) for number in range(trials)]
    drawing = draw(compute(view_of(*records, front=range(trials))))
    assert any(trace.mode == "markers+text" for trace in drawing.data) is is_labelled


def test_many_trials_are_drawn_with_webgl_and_short_texts():
    records = [record(number, memory=(number % 97 + 1) * MIB) for number in range(MANY + 1)]
    drawing = draw(compute(view_of(*records, front=(0,))))
    dominated = trace(drawing, "dominated")
    assert (dominated.type, trace(drawing, "front").type) == ("scattergl", "scatter")
    assert max(len(hover) for hover in dominated.customdata) < 200


def test_all_three_objectives_can_be_drawn_in_3d():
    front = trace(pareto_space.draw(compute(view())), "front")
    assert (front.x, front.y, front.z) == ((100.0, 200.0), (1000.0, 2000.0), (10.0, 10.0))


def test_in_3d_the_cap_is_a_plane():
    wall = trace(pareto_space.draw(compute(view())), "cap 256.0 MiB")
    assert set(wall.x) == {256.0}


def test_hostile_names_are_no_markup_in_a_hover_text():
    hovers = [mark.hover for mark in compute(hostile_view()).marks]
    assert not any("<script" in hover or "<img" in hover for hover in hovers)


def test_hostile_names_are_no_markup_in_the_figure_either():
    texts = json.dumps(draw(compute(hostile_view())).to_plotly_json(), default=str)
    assert "<script" not in texts
    assert "<img" not in texts
