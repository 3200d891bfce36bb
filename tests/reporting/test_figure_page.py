"""A figure as an HTML page: one document, offline, the answer first, hostile text as text."""

from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest

from autotune.reporting.figure_page import figure_page
from autotune.reporting.figures import FIGURES, FigureOptions
from autotune.reporting.style import with_heading
from autotune.spec.result import Pick
from tests.building.results import out_of_memory, record, study_result
from tests.building.views import HOSTILE, failures_only, ladder_view, study_view

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


def page(view, kind="pareto"):
    return figure_page(view.result, FIGURES[kind], FIGURES[kind].draw(view, FigureOptions()))


def study_of(text):
    trials = [
        record(0, name=text),
        record(1, name=text, outcome="over_cap"),
        out_of_memory(2, name=text, message=text),
    ]
    return study_view(
        study_result(
            trials, study=text, front=(0,), pick=Pick(number=0, criterion=text), baseline=0
        )
    )


@pytest.fixture(scope="module")
def plain():
    return page(ladder_view())


@pytest.fixture(scope="module")
def hostile():
    return page(study_of(HOSTILE))


def test_a_page_fetches_nothing(plain, hostile):
    values = [
        value
        for text in (plain, hostile)
        for _, at in Elements(text).found
        for n, value in at.items()
        if n in FETCHING
    ]
    assert [address for address in values if not address.startswith("data:")] == []


def test_a_page_has_no_logo_that_links_to_its_maker(plain):
    assert '"displaylogo": false' in plain


def test_a_page_imports_nothing_into_its_styles(plain):
    assert "@import" not in plain.partition("</style>")[0]


def test_a_page_is_one_document(plain):
    assert plain.startswith("<!doctype html>")
    assert [Elements(plain).tags.count(tag) for tag in ("html", "head", "body")] == [1, 1, 1]


def test_a_page_has_plotly_inside_once(plain):
    assert plain.count("* plotly.js v") == 1


def test_a_page_says_the_answer_the_title_and_the_note(plain):
    text = Elements(plain).text
    assert "Pick: #3 bf16-mixed, checkpointing block, micro-batch 8 - the smallest." in text
    assert FIGURES["pareto"].title in text


def test_a_page_lists_what_ended_without_a_speed(hostile):
    assert "Without a speed: 1" in Elements(hostile).text


def test_a_page_of_trials_with_speeds_has_no_such_list(plain):
    assert "Without a speed" not in Elements(plain).text


def test_hostile_names_add_no_element_to_a_page(hostile):
    assert Elements(hostile).tags == Elements(page(study_of("plain"))).tags


def test_hostile_names_are_shown_as_they_are(hostile):
    assert Elements(hostile).text.count(HOSTILE) >= 3


def test_before_a_trial_has_finished_a_page_does_not_say_that_nothing_fits():
    text = Elements(page(study_view(study_result([out_of_memory(0)])))).text
    waiting = Elements(
        page(study_view(study_result([record(0, outcome="interrupted", feasible=False)])))
    ).text
    assert "Nothing that was tried" in text
    assert "No trial has finished yet." in waiting


def test_a_study_without_a_feasible_trial_has_a_page():
    assert "Nothing that was tried trains under 256.0 MiB." in Elements(page(failures_only())).text


def test_the_title_of_an_image_stands_at_its_top_whatever_the_height_of_the_figure():
    tall = go.Figure(layout={"height": 1500})
    headed = with_heading(tall, "a study", width=1000, height=600)
    assert (1 - headed.layout.title.y) * 600 == pytest.approx(18)
