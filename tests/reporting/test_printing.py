"""Pages as they are printed: what a browser has laid out between `beforeprint` and `afterprint`."""

import functools
import shutil

import pytest

from autotune.reporting.figure_page import figure_page
from autotune.reporting.figures import FIGURES, FigureOptions
from autotune.reporting.report.page import page
from tests.building.reports import large_view, plain_view, report_of
from tests.building.results import record
from tests.building.views import ladder_view

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium: apt-get install chromium"
)
PAPER = {"A4": 703, "Letter": 725}
"""Pixels between the margins that the pages set."""


def thirty_trials():
    trials = [record(number, memory=(30 + number) * 2**20) for number in range(30)]
    return plain_view(trials=trials, front=(0,), pick=None, baseline=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("printed")
    for name, view in (
        ("plain", plain_view()),
        ("ladder", ladder_view()),
        ("thirty", thirty_trials()),
        ("large", large_view(1_000)),
    ):
        (folder / f"{name}.html").write_text(page(report_of(view)), encoding="utf-8")
    drawing = FIGURES["ladder"].draw(ladder_view(), FigureOptions())
    text = figure_page(ladder_view().result, FIGURES["ladder"], drawing)
    (folder / "figure.html").write_text(text, encoding="utf-8")
    drawing = FIGURES["pareto"].draw(plain_view(), FigureOptions(three_d=True))
    text = figure_page(plain_view().result, FIGURES["pareto"], drawing)
    (folder / "space.html").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def open_page(browser, files):
    def open_page(name, *, scheme="light", size=(1280, 800)):
        width, height = size
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        shown = context.new_page()
        shown.complaints = []
        shown.on("pageerror", lambda error: shown.complaints.append(str(error)))
        shown.goto((files / f"{name}.html").as_uri())
        return shown

    return open_page


@pytest.fixture
def opened(open_page):
    """opened(name, scheme="dark") is a new page, closed after the test."""
    pages = []

    def open_new(name, **options):
        pages.append(open_page(name, **options))
        return pages[-1]

    yield open_new
    for shown in pages:
        shown.context.close()


@pytest.fixture(scope="module")
def printed(open_page):
    """printed(name, scheme="dark") is a page being printed, of tests that only look at it."""

    @functools.cache
    def print_page(name, **options):
        shown = open_page(name, **options)
        begin_printing(shown)
        return shown

    return print_page


@pytest.fixture(scope="module")
def plain(open_page):
    """A page on the screen, of tests that end what they print."""
    return open_page("plain")


@pytest.fixture(scope="module")
def space(open_page):
    """The page of a figure in three dimensions on a light screen; drawing one takes seconds."""
    return open_page("space")


def begin_printing(shown, *, paper="A4"):
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    # Chromium prints in light colours, whatever those of the screen.
    shown.emulate_media(media="print", color_scheme="light")
    shown.set_viewport_size({"width": PAPER[paper], "height": 1000})


def end_printing(shown):
    shown.emulate_media(media="screen")
    shown.set_viewport_size({"width": 1280, "height": 800})
    shown.evaluate("dispatchEvent(new Event('afterprint'))")


DRAWN = """() => [...document.querySelectorAll(".on-paper")].map(one => {
  const box = one.getBoundingClientRect();
  const marks = one.querySelectorAll(".trace path").length;
  return [Math.round(box.left), Math.round(box.width), marks > 0];
})"""


@pytest.mark.parametrize(
    ("name", "figures", "screen"),
    [
        ("ladder", 4, {"size": (1280, 800)}),
        ("ladder", 4, {"size": (375, 812)}),
        ("figure", 1, {"scheme": "dark"}),
    ],
)
def test_every_figure_is_printed_whole_though_no_reader_scrolled_to_it(
    name, figures, screen, printed
):
    shown = printed(name, **screen)
    drawn = shown.evaluate(DRAWN)
    assert len(drawn) == figures
    assert all(left >= 0 and left + width <= PAPER["A4"] for left, width, _ in drawn)
    assert all(has_marks for _, _, has_marks in drawn)
    assert shown.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPER)
def test_nothing_is_wider_than_the_paper(paper, plain):
    begin_printing(plain, paper=paper)
    width = plain.evaluate("document.documentElement.scrollWidth")
    end_printing(plain)
    assert width == PAPER[paper]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "figure"])
def test_a_figure_is_printed_in_light_colours_from_a_dark_screen(name, printed):
    shown = printed(name, scheme="dark")
    tick = shown.locator(".on-paper .xtick text").first
    assert tick.evaluate("one => getComputedStyle(one).fill") == "rgb(32, 33, 36)"


@pytest.mark.slow
def test_colours_that_the_reader_chose_are_not_printed(opened):
    shown = opened("plain")
    shown.get_by_role("button", name="Dark colours").click()
    begin_printing(shown)
    background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(255, 255, 255)"


def row_count(shown):
    return shown.locator("#table tbody tr.row").count()


@pytest.mark.slow
def test_all_rows_of_the_trials_are_printed_and_then_paged_again(opened):
    shown = opened("thirty")
    shown.get_by_role("button", name="Next").click()
    begin_printing(shown)
    assert row_count(shown) == 30
    assert shown.locator("#shown").inner_text() == "1 to 30 of 30 trials"
    end_printing(shown)
    assert row_count(shown) == 5
    assert shown.locator("#shown").inner_text() == "26 to 30 of 30 trials"


@pytest.mark.slow
def test_of_a_thousand_trials_some_are_printed_and_the_page_says_how_many(opened):
    shown = opened("large")
    begin_printing(shown)
    assert row_count(shown) == 500
    assert shown.locator("#shown").inner_text() == "1 to 500 of 1,000 trials"


def test_headings_and_numbers_of_trials_are_printed_though_they_are_buttons(printed):
    shown = printed("plain", scheme="dark")
    heading = shown.locator("th[data-key=tokens_per_second]")
    assert heading.inner_text().strip() == "tokens/s"
    assert shown.locator("#table tbody th").first.inner_text().strip() == "#0"
    assert (
        shown.locator("thead").first.evaluate("one => getComputedStyle(one).display")
        == "table-header-group"
    )  # which a browser repeats on every page


@pytest.mark.slow
def test_the_toolbar_of_a_figure_on_its_page_covers_no_legend(opened):
    shown = opened("figure")
    bar = shown.locator(".modebar").bounding_box()
    assert bar["y"] + bar["height"] <= shown.locator(".legend").first.bounding_box()["y"]


def test_a_long_command_is_printed_whole(printed):
    shown = printed("plain", scheme="dark")
    cut = "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).length"
    assert shown.locator(".command pre").evaluate_all(cut) == 0


def test_after_printing_the_page_is_as_it_was(plain):
    open_details = "document.querySelectorAll('details[open]').length"
    before = plain.evaluate(open_details)
    begin_printing(plain)
    closed = plain.locator("details:not([open])").count()
    end_printing(plain)
    assert closed == 0 < plain.locator("details:not([open])").count()
    assert plain.evaluate(open_details) == before
    assert plain.locator(".on-paper").count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "figure"])
def test_a_browser_calls_all_this_when_it_saves_a_pdf(name, opened):
    shown = opened(name)
    shown.evaluate(
        "addEventListener('beforeprint', () => {"
        " window.printed = document.querySelectorAll('.on-paper .main-svg').length })"
    )
    assert shown.pdf(format="A4").startswith(b"%PDF")
    assert shown.evaluate("window.printed") > 0
    assert shown.locator(".on-paper").count() == 0


PICTURE = """() =>
  document.querySelector(".on-paper .gl-container > canvas:last-child").toDataURL()"""
TURN = """() => Plotly.relayout(document.querySelector(".js-plotly-plot"),
  {"scene.camera.eye": {x: -1.8, y: 1.7, z: 0.9}})"""


DARK_POINTS = """() => {
  const picture = document.querySelector(".on-paper .gl-container > canvas:last-child");
  const bytes = picture.getContext("2d").getImageData(0, 0, picture.width, picture.height).data;
  let dark = 0;
  for (let at = 0; at < bytes.length; at += 4)
    if (bytes[at + 3] > 128 && Math.max(bytes[at], bytes[at + 1], bytes[at + 2]) < 90) dark++;
  return dark;
}"""


@pytest.mark.slow
def test_the_words_of_a_figure_in_three_dimensions_are_printed_dark_from_a_dark_screen(
    opened, space
):
    dark = {}
    for scheme, shown in (("dark", opened("space", scheme="dark")), ("light", space)):
        begin_printing(shown)
        dark[scheme] = shown.evaluate(DARK_POINTS)
        assert shown.complaints == []
        end_printing(shown)
    assert dark["dark"] > dark["light"] / 2 > 0


@pytest.mark.slow
def test_a_figure_in_three_dimensions_is_printed_as_the_reader_turned_it(space):
    begin_printing(space)
    before = space.evaluate(PICTURE)
    end_printing(space)
    space.evaluate(TURN)
    begin_printing(space)
    assert space.evaluate(PICTURE) != before
