"""The page of a report in a real browser: one chromium for the whole module, no network."""

import shutil
from pathlib import Path

import pytest

from autotune.reporting.report.commands import rerun_command
from autotune.reporting.report.page import page
from tests.building.reports import HOSTILE, hostile_view, large_view, plain_view, report_of

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium: apt-get install chromium"
)
SIZES = {"phone": (375, 812), "laptop": (1280, 800), "screen": (1920, 1080)}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, view in (
        ("plain", plain_view()),
        ("hostile", hostile_view()),
        ("large", large_view()),
    ):
        (folder / f"{name}.html").write_text(page(report_of(view)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def open_page(browser, files):
    """open_page("plain", size="phone") opens a page once, with `.complaints` and `.requests`."""
    pages = {}

    def opened(name, *, size="laptop"):
        if (name, size) not in pages:
            pages[name, size] = _open(browser, files / f"{name}.html", *SIZES[size])
        return pages[name, size]

    return opened


def _open(browser, file, width, height):
    context = browser.new_context(
        viewport={"width": width, "height": height},
        reduced_motion="reduce",
        permissions=["clipboard-read", "clipboard-write"],
    )
    shown = context.new_page()
    shown.set_default_timeout(30_000)
    shown.complaints, shown.requests = [], []
    shown.on("console", lambda message: shown.complaints.append(message.text))
    shown.on("pageerror", lambda error: shown.complaints.append(str(error)))
    shown.on("request", lambda request: shown.requests.append(request.url))
    shown.goto(file.as_uri())
    return shown


@pytest.fixture
def plain(open_page):
    """The plain page with all rows in the order of their numbers, in light colours."""
    shown = open_page("plain")
    shown.emulate_media(color_scheme="light")
    shown.get_by_label("Find").fill("")
    shown.get_by_label("Show").select_option("all")
    for head in ("seconds", "number"):  # a second click would turn the order
        shown.locator(f"th[data-key={head}] button").click()
    return shown


def draw_everything(shown):
    for drawing in shown.locator(".drawing").all():
        drawing.scroll_into_view_if_needed()
        drawing.locator(".main-svg").first.wait_for()
    return shown


def rows(shown):
    return [
        " ".join(text.split()) for text in shown.locator("#table tbody tr.row").all_inner_texts()
    ]


def numbers(shown):
    return [int(row.partition("#")[2].split(":")[0].split()[0]) for row in rows(shown)]


# -- nothing goes wrong, nothing goes out ----------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_page_is_drawn_without_a_complaint_a_request_or_a_sideways_scroll(size, open_page):
    shown = draw_everything(open_page("plain", size=size))
    for scheme in ("dark", "light"):
        shown.emulate_media(color_scheme=scheme)
        assert shown.evaluate("document.documentElement.scrollWidth") == SIZES[size][0]
    assert shown.complaints == []
    assert [url for url in shown.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_a_perplexity_of_another_trial_is_marked_in_the_table(plain):
    assert ["=10.00" in row for row in rows(plain)] == [False, False, True, False]


def test_hostile_text_is_text(open_page):
    shown = draw_everything(open_page("hostile"))
    shown.locator(".open").first.click()
    assert shown.title().endswith(": autotune report")
    assert shown.locator("img, script[src], h1 *, [href^=http], svg a").count() == 0
    assert shown.locator("h1").inner_text() == HOSTILE
    assert shown.locator("#table .note").first.inner_text() == HOSTILE
    assert shown.complaints == []


HOVER = """name => {
  const figure = document.getElementById("figure-pareto");
  const curveNumber = figure.data.findIndex(trace => trace.name === name);
  Plotly.Fx.hover(figure, [{curveNumber, pointNumber: 0}]);
}"""


@pytest.mark.parametrize("marks", ["front", "not feasible"])
def test_hostile_text_is_text_in_a_hover_label_too(marks, open_page):
    shown = draw_everything(open_page("hostile"))
    shown.evaluate(HOVER, marks)
    hover = shown.locator("#figure-pareto .hoverlayer")
    words = "".join(hover.locator("text").first.text_content().split())
    assert "".join(HOSTILE.split()) in words
    assert hover.locator("a").count() == 0


def test_a_script_that_is_not_ours_would_not_run(open_page):
    shown = open_page("hostile")
    shown.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.owned=1\">')"
    )
    shown.wait_for_timeout(100)
    assert shown.evaluate("window.owned") is None


# -- the table -------------------------------------------------------------------------------------


def test_a_heading_sorts_and_says_so(plain):
    shown = plain
    head = shown.locator("th[data-key=tokens_per_second]")
    head.locator("button").click()
    assert (numbers(shown), head.get_attribute("aria-sort")) == ([0, 1, 2, 3], "ascending")
    head.locator("button").click()
    assert (numbers(shown), head.get_attribute("aria-sort")) == ([2, 1, 0, 3], "descending")
    assert shown.locator("th[aria-sort]").count() == 1


@pytest.mark.parametrize(
    ("words", "found"), [("bf16", [2]), ("micro-batch 8 memory", [3]), ("#1", [1]), ("nope", [])]
)
def test_what_is_written_is_found(words, found, plain):
    shown = plain
    shown.get_by_label("Find").fill(words)
    assert numbers(shown) == found


@pytest.mark.parametrize(
    ("shown_are", "found"), [("front", [1, 2]), ("others", [0, 3]), ("out_of_memory", [3])]
)
def test_outcomes_can_be_chosen(shown_are, found, plain):
    shown = plain
    shown.get_by_label("Show").select_option(shown_are)
    assert numbers(shown) == found
    assert f"of {len(found)} trials, of 4 in all" in shown.locator("#shown").inner_text()


def test_a_row_says_what_was_measured(plain):
    assert rows(plain)[2] == (
        "#2 bf16 & more bf16-mixed, micro-batch 8 200.0 MiB 2,000 ±0% =10.00 pick front "
        "perplexity: of trial 1 1 m 30 s Re-run Export"
    )


def test_on_a_phone_a_trial_opens_to_everything(open_page):
    shown = open_page("plain", size="phone")
    shown.locator("#sort").select_option("peak_memory_bytes down")
    assert numbers(shown) == [0, 2, 1, 3]
    opener = shown.locator(".open").first
    opener.click()
    assert opener.get_attribute("aria-expanded") == "true"
    assert "needs 300 MiB" in shown.locator(".detail").inner_text()
    assert shown.evaluate("document.documentElement.scrollWidth") == SIZES["phone"][0]


def test_on_a_phone_the_marks_of_the_front_have_no_numbers_next_to_them(open_page):
    shown = draw_everything(open_page("plain", size="phone"))
    playwright.expect(shown.locator("#figure-pareto .textpoint")).to_have_count(0)


# -- plain -----------------------------------------------------------------------------------------


def clipboard(shown):
    return shown.evaluate("navigator.clipboard.readText()")


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_the_button_of_a_row_copies_the_command_that_reruns_it(number, plain):
    view = plain_view()
    plain.get_by_role("button", name=f"Re-run: copy the command for trial {number}").click()
    plain.locator("#said", has_text=f"Copied: the command that re-runs trial {number}").wait_for()
    assert clipboard(plain) == rerun_command(
        view.definition, number=number, config=view.result.trial(number).config
    )


def test_an_export_is_copied_for_the_chosen_target(plain):
    plain.get_by_label("Export to").select_option("trl")
    plain.get_by_role("button", name="Export: copy the command for trial 1").click()
    plain.locator("#said", has_text="exports trial 1 to trl").wait_for()
    assert clipboard(plain) == "autotune export a-study --trial 1 --to trl"


def test_a_command_of_the_page_is_copied_whole(plain):
    box = plain.locator("#repeat .command").first
    box.get_by_role("button").click()
    plain.locator("#said", has_text="Copied").wait_for()
    assert clipboard(plain) == box.locator("code").inner_text()


# -- for everybody ---------------------------------------------------------------------------------


def test_everything_can_be_reached_by_the_keyboard_and_shows_that_it_was(plain):
    shown = plain
    shown.evaluate("document.body.tabIndex = -1; document.body.focus()")
    reached, unseen = [], []
    while "#2: all data" not in reached and len(reached) < 200:
        shown.keyboard.press("Tab")
        name, outline = shown.evaluate(
            "(now => [now.id || now.ariaLabel || now.textContent.trim(), "
            "getComputedStyle(now).outlineStyle])"
            "(document.activeElement)"
        )
        reached.append(name)
        unseen += [name] if outline == "none" else []
    assert reached[0] == "Skip to the answer"
    assert {"theme", "find", "outcome", "target", "peak memory", "tokens/s"} <= set(reached)
    assert {"#1: all data", "Re-run: copy the command for trial 1"} <= set(reached)
    assert unseen == []


def test_a_heading_sorts_by_the_keyboard(plain):
    plain.locator("th[data-key=peak_memory_bytes] button").focus()
    plain.keyboard.press("Enter")
    assert numbers(plain) == [1, 2, 0, 3]


def background(shown):
    return shown.evaluate("getComputedStyle(document.body).backgroundColor")


def test_the_colours_follow_the_system_until_the_reader_chooses_others(open_page):
    shown = draw_everything(open_page("plain", size="screen"))
    shown.emulate_media(color_scheme="light")
    light = background(shown)
    shown.emulate_media(color_scheme="dark")
    dark = background(shown)
    assert light != dark
    shown.get_by_role("button", name="Light colours").click()
    assert background(shown) == light
    shown.get_by_role("button", name="Dark colours").click()
    assert background(shown) == dark


def test_figures_take_the_colours_of_the_page(open_page):
    shown = draw_everything(open_page("plain"))
    shown.emulate_media(color_scheme="light")
    tick = shown.locator("#figure-pareto .xtick text").first
    light = tick.evaluate("one => getComputedStyle(one).fill")
    shown.emulate_media(color_scheme="dark")
    playwright.expect(tick).not_to_have_css("fill", light)


CONTRASTS = (Path(__file__).parent / "contrasts.js").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(scheme, plain):
    plain.emulate_media(color_scheme=scheme)
    plain.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    plain.locator(".open").first.click()
    assert plain.evaluate(CONTRASTS) == []


# -- ten thousand trials ---------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_thousand_trials_can_be_paged_sorted_and_searched(open_page):
    shown = open_page("large")
    assert "1 to 25 of 10,000 trials" in shown.locator("#shown").inner_text()
    assert shown.locator("#table tbody tr").count() == 25
    shown.get_by_role("button", name="Next").click()
    assert numbers(shown)[0] == 25
    shown.locator("th[data-key=tokens_per_second] button").click()
    assert "500" in rows(shown)[0]
    shown.get_by_label("Find").fill("#9876")
    assert numbers(shown) == [9876]
    # Chromium reports on its own graphics when there is no graphics card.
    assert [message for message in shown.complaints if "GL Driver Message" not in message] == []


# -- the toolbar of figures ------------------------------------------------------------------------

COVERED = """() => [...document.querySelectorAll(".js-plotly-plot")].flatMap(figure => {
  const bar = figure.querySelector(".modebar").getBoundingClientRect();
  return [...figure.querySelectorAll(".legend, .annotation, .cartesianlayer, .cb")].filter(one => {
    const box = one.getBoundingClientRect();
    return box.top < bar.bottom && box.bottom > bar.top && box.right > bar.left;
  });
}).length"""


def test_the_toolbar_covers_nothing_of_a_figure(open_page):
    assert draw_everything(open_page("plain")).evaluate(COVERED) == 0
