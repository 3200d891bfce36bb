"""Contract of every figure: drawn from records alone, readable on light and dark pages."""

import dataclasses
import json
import subprocess
import sys

import plotly.graph_objects as go
import plotly.io
import pytest

from autotune.errors import InvalidInput
from autotune.printable import printable
from autotune.reporting import style
from autotune.reporting.figures import FIGURES, FigureOptions, figure_kind
from autotune.spec.result import Pick
from tests.building.results import out_of_memory, study_result
from tests.building.views import HOSTILE, failures_only, ladder_view, many_trials, study_view
from tests.reporting.figures.test_memory_timeline import prediction

OPTIONS = FigureOptions(prediction=prediction())
WITH_OPTIONS = {
    "pareto": {"three_d": True},
    "parallel": {"feasible": True},
    "memory": {"trials": (2,)},
}
BLACKISH = ("#000", "black", "#111", "#202124", "rgb(0,0,0)")


@pytest.fixture(scope="module")
def view():
    return ladder_view(
        many_trials(), front=(1, 3), pick=Pick(number=3, criterion="the smallest"), baseline=0
    )


@pytest.fixture(scope="module")
def drawings(view):
    return {name: kind.draw(view, OPTIONS) for name, kind in FIGURES.items()}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_something(name, drawings):
    assert len(drawings[name].data) > 0


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_no_background_and_our_template(name, drawings):
    layout = drawings[name].layout
    assert layout.paper_bgcolor is None
    assert layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"
    assert layout.template.layout.font.color == style.LIGHT["layout"]["font"]["color"]


@pytest.mark.parametrize("name", FIGURES)
def test_no_colour_of_a_figure_is_lost_on_a_dark_page(name, drawings):
    drawn = drawings[name].to_plotly_json()
    drawn["layout"].pop("template")
    text = json.dumps(drawn, default=str).lower()
    assert [color for color in BLACKISH if f'"{color}"' in text] == []


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_json(name, drawings):
    assert json.loads(drawings[name].to_json())["data"]


@pytest.mark.parametrize("name", FIGURES)
def test_what_changes_on_a_narrow_screen_can_be_changed_back(name, drawings):
    meta = drawings[name].layout.meta
    assert set(meta.get("narrow", {})) == set(meta.get("wide", {}))


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_an_option_that_a_figure_takes_changes_it(name, view, drawings):
    assert set(WITH_OPTIONS[name]) <= set(FIGURES[name].takes)
    changed = FIGURES[name].draw(view, dataclasses.replace(OPTIONS, **WITH_OPTIONS[name]))
    assert changed.to_json() != drawings[name].to_json()


def test_a_figure_takes_only_existing_options():
    fields = {field.name for field in dataclasses.fields(FigureOptions)}
    assert all(set(kind.takes) <= fields for kind in FIGURES.values())


FAILED, EMPTY = failures_only(), study_view(study_result(study="empty"))
PICTURES_OF_FAILURES = ("pareto", "ladder")
"""The ablation says of each technique that it failed; the other figures have nothing to show."""
NOTHING_TO_SHOW = [
    (name, FAILED) for name in FIGURES if name not in (*PICTURES_OF_FAILURES, "memory")
]
"""The memory figure has the one peak that was measured."""
NOTHING_TO_SHOW += [(name, EMPTY) for name in FIGURES if name != "pareto"]


@pytest.mark.parametrize(
    ("name", "study"), NOTHING_TO_SHOW, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_study_with_nothing_to_show_is_answered_in_a_sentence_that_names_it(name, study):
    with pytest.raises(InvalidInput) as caught:
        FIGURES[name].draw(study, FigureOptions())
    assert repr(study.result.study) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", PICTURES_OF_FAILURES)
def test_a_study_in_which_all_failed_has_a_figure_without_a_number(name):
    drawing = FIGURES[name].draw(FAILED, FigureOptions())
    shown = [place for trace in drawing.data if trace.name != "not timed" for place in trace.x]
    assert set(shown) <= {None}


@pytest.fixture(scope="module")
def hostile_drawings():
    hostile = f"\x1b]52;c;\x07\x9b\u202e{HOSTILE}\u2066\u200e\ufeff"
    trials = [dataclasses.replace(trial, name=hostile) for trial in many_trials()]
    trials.append(out_of_memory(len(trials), name=hostile, message=hostile))
    view = ladder_view(trials, study=hostile, front=(1, 3), pick=Pick(number=3, criterion=hostile))
    return {name: kind.draw(view, OPTIONS).to_plotly_json() for name, kind in FIGURES.items()}


@pytest.mark.parametrize("name", FIGURES)
def test_hostile_text_is_no_markup_in_a_figure(name, hostile_drawings):
    drawn = hostile_drawings[name]
    # The note is plain text, which a page escapes.
    layout = {key: value for key, value in drawn["layout"].items() if key != "meta"}
    text = json.dumps({**drawn, "layout": layout}, default=str)
    assert "<script" not in text
    assert "<img" not in text


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_each_character_of_a_text(name, hostile_drawings):
    text = json.dumps(hostile_drawings[name], default=str, ensure_ascii=False)
    assert "\\u001b" not in text
    assert "\\u0007" not in text
    assert printable(text) == text


def test_an_unknown_figure_is_answered_with_the_known_ones():
    with pytest.raises(InvalidInput) as caught:
        figure_kind("pie")
    assert all(name in caught.value.hint for name in FIGURES)


def test_the_names_of_the_figures_need_no_plotly():
    code = (
        "import sys, autotune.reporting.figures; "
        "print({'plotly', 'optuna', 'numpy', 'torch'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


@pytest.mark.parametrize("name", ["plotly", "plotly_dark", "none", None])
def test_a_figure_has_what_the_template_of_its_user_says_besides_ours(name, monkeypatch):
    monkeypatch.setattr(plotly.io.templates, "default", name)
    merged = go.Figure().update_layout(template=style.LIGHT).layout.template
    assert style.styled(go.Figure()).layout.template == merged
