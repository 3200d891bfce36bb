import json
from html.parser import HTMLParser

import pytest
from building import MIB, out_of_memory, record, study_result

from autotune.config import TrainingConfig
from autotune.reporting.pareto import compute, draw, page
from autotune.result import Pick

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
FETCHING = {"src", "href", "data", "srcset", "poster", "action"}


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.found, self.words, self._inside = [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.words.append(data)

    @property
    def tags(self):
        return [tag for tag, _ in self.found]

    @property
    def text(self):
        return " ".join(self.words)


BASELINE = record(0, memory=300 * MIB, speed=900.0, perplexity=10.0, outcome="over_cap", message="too large")
SMALL = record(1, memory=100 * MIB, speed=1000.0, perplexity=10.0, tokens_per_second_spread=12.0)
FAST = record(2, memory=200 * MIB, speed=2000.0, perplexity=10.0, name="bf16 & more", peak_phase="backward")
DOMINATED = record(3, memory=220 * MIB, speed=1100.0, perplexity=10.0)
FAILED = out_of_memory(4, config=TrainingConfig(compile="model"))


def result(**changes):
    trials = (BASELINE, SMALL, FAST, DOMINATED, FAILED)
    settings = {"front": (1, 2), "pick": Pick(number=2, reason="the fastest"), "baseline": 0, "study": "a study"}
    return study_result(trials, **{**settings, **changes})


def mark(number, **changes):
    return next(mark for mark in compute(result(**changes)).marks if mark.number == number)


def hostile_result():
    trials = [
        record(0, name=HOSTILE),
        record(1, name=HOSTILE, outcome="over_cap", message=HOSTILE),
        out_of_memory(2, name=HOSTILE, message=HOSTILE),
    ]
    return study_result(trials, study=HOSTILE, front=(0,), pick=Pick(number=0, reason=HOSTILE), baseline=0)


# -- compute -----------------------------------------------------------------------------------------------------


def test_every_trial_with_numbers_is_a_mark():
    assert [mark.number for mark in compute(result()).marks] == [0, 1, 2, 3]


def test_a_trial_without_a_speed_is_told_in_words():
    assert compute(result()).without_numbers == (
        "#4 fp32, compile model, micro-batch 1: out of memory (out of memory)",
    )


def test_a_trial_is_told_in_words_or_drawn():
    figure = compute(result())
    assert len(figure.marks) + len(figure.without_numbers) == len(result().trials)


@pytest.mark.parametrize(
    ("cap_bytes", "unit", "cap"),
    [(8 * 1024 * MIB, "GiB", 8.0), (256 * MIB, "MiB", 256.0), (512 * 1024, "KiB", 512.0), (512, "KiB", 0.5)],
)
def test_the_cap_decides_the_unit(cap_bytes, unit, cap):
    figure = compute(result(cap_bytes=cap_bytes))
    assert (figure.unit, figure.cap) == (unit, cap)


def test_a_mark_stands_where_the_device_memory_is():
    trial = record(0, memory=100 * MIB, device_bytes=150 * MIB)
    assert compute(study_result([trial])).marks[0].memory == 150.0


@pytest.mark.parametrize(("device", "words"), [("cpu", "peak memory"), ("cuda:1", "memory the device must have")])
def test_the_axis_says_which_memory_it_shows(device, words):
    assert compute(result(device=device)).memory_is == words


@pytest.mark.parametrize(("number", "on_front"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_mark_knows_whether_it_is_on_the_front(number, on_front):
    assert mark(number).on_front is on_front


def test_a_mark_knows_that_it_is_not_feasible():
    assert [mark(number).feasible for number in (0, 1)] == [False, True]


def test_the_answer_names_the_pick_and_the_reason():
    assert compute(result()).answer == "Pick: #2 bf16 & more: fp32, micro-batch 1 - the fastest."


def test_without_a_pick_the_answer_names_the_cap():
    assert compute(result(pick=None, front=())).answer == "Nothing that was tried trains under 256.0 MiB."


@pytest.mark.parametrize("field", TrainingConfig().to_dict())
def test_a_hover_text_holds_every_technique(field):
    assert f"{field.replace('_', ' ')}: {FAST.config.to_dict()[field]}" in mark(2).hover


@pytest.mark.parametrize(
    "words",
    ["#2 bf16 &amp; more", "200.0 MiB, in backward", "tokens/s: 2,000", "perplexity: 10.000", "33 % less memory"],
)
def test_a_hover_text_holds_what_was_measured(words):
    assert words in mark(2).hover


def test_the_hover_text_of_a_trial_over_the_cap_says_so():
    assert "over cap: too large" in mark(0).hover


# -- draw --------------------------------------------------------------------------------------------------------


def test_the_pick_is_drawn_where_it_was_measured():
    trace = next(trace for trace in draw(compute(result())).data if trace.name == "pick")
    assert (trace.x, trace.y) == ((200.0,), (2000.0,))


def test_the_front_is_drawn_in_the_order_of_its_memory():
    trace = next(trace for trace in draw(compute(result(front=(2, 1)))).data if trace.name == "front")
    assert trace.x == (100.0, 200.0)


def test_the_cap_is_inside_the_picture():
    drawing = draw(compute(result(cap_bytes=4096 * MIB)))
    assert drawing.layout.xaxis.range[1] > 4


def test_the_largest_trial_is_inside_the_picture():
    assert draw(compute(result())).layout.xaxis.range[1] > 300


# -- page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [result, hostile_result, study_result], ids=["plain", "hostile", "empty"])
def test_a_page_fetches_nothing(of):
    addresses = [
        value
        for _, attributes in Elements(page(compute(of()))).found
        for n, value in attributes.items()
        if n in FETCHING
    ]
    assert [address for address in addresses if not address.startswith("data:")] == []


def test_a_page_imports_nothing_into_its_styles():
    text = page(compute(result()))
    assert "@import" not in text.partition("</style>")[0]


def test_a_page_is_one_document():
    text = page(compute(result()))
    assert text.startswith("<!doctype html>")
    assert [Elements(text).tags.count(tag) for tag in ("html", "head", "body")] == [1, 1, 1]


def test_a_page_says_the_answer():
    assert "Pick: #2 bf16 & more" in Elements(page(compute(result()))).text


def test_a_page_lists_what_ended_without_a_speed():
    assert "#4 fp32, compile model, micro-batch 1: out of memory" in Elements(page(compute(result()))).text


def test_hostile_names_add_no_element_to_a_page():
    plain = study_result([record(0), record(1, outcome="over_cap"), out_of_memory(2)], front=(0,), baseline=0)
    assert Elements(page(compute(hostile_result()))).tags == Elements(page(compute(plain))).tags


def test_hostile_names_are_shown_as_they_are():
    text = Elements(page(compute(hostile_result()))).text
    assert text.count(HOSTILE) >= 3


def test_hostile_names_are_no_markup_in_a_hover_text():
    hovers = [mark.hover for mark in compute(hostile_result()).marks]
    assert not any("<script" in hover or "<img" in hover for hover in hovers)


def test_hostile_names_are_no_markup_in_the_figure_either():
    texts = json.dumps(draw(compute(hostile_result())).to_plotly_json(), default=str)
    assert "<script" not in texts
    assert "<img" not in texts


def test_a_study_without_a_feasible_trial_has_a_page():
    text = page(compute(study_result([record(0, outcome="over_cap"), out_of_memory(1)])))
    assert "Nothing that was tried trains under 256.0 MiB." in Elements(text).text


def test_a_study_without_a_trial_has_a_page():
    text = page(compute(study_result()))
    assert "Nothing that was tried" in Elements(text).text
    assert "Ended without a speed" not in text
