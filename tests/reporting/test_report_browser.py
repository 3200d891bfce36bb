"""The page of a report in a real browser: Debian's chromium, one for the whole module, no network."""

import shutil
import subprocess

import pytest
from report_building import HOSTILE, hostile_view, large_view, plain_view, report_of

from autotune.reporting.report.commands import rerun_command
from autotune.reporting.report.page import page

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
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
    for name, view in (("plain", plain_view()), ("hostile", hostile_view()), ("large", large_view())):
        (folder / f"{name}.html").write_text(page(report_of(view)), encoding="utf-8")
    return folder


@pytest.fixture
def open_page(browser, files):
    """open_page("plain", size="phone", scheme="dark") is the opened page; `.complaints` and `.requests` are kept."""
    contexts = []

    def opened(name, *, size="laptop", scheme="light", **settings):
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce", **settings
        )
        contexts.append(context)
        shown = context.new_page()
        shown.set_default_timeout(10_000)
        shown.complaints, shown.requests = [], []
        shown.on("console", lambda said: shown.complaints.append(said.text))
        shown.on("pageerror", lambda error: shown.complaints.append(str(error)))
        shown.on("request", lambda request: shown.requests.append(request.url))
        shown.goto((files / f"{name}.html").as_uri())
        return shown

    yield opened
    for context in contexts:
        context.close()


def draw_everything(shown):
    for drawing in shown.locator(".drawing").all():
        drawing.scroll_into_view_if_needed()
        drawing.locator(".main-svg").first.wait_for()
    return shown


def rows(shown):
    return [" ".join(text.split()) for text in shown.locator("#table tbody tr.row").all_inner_texts()]


def numbers(shown):
    return [int(row.partition("#")[2].split(":")[0].split()[0]) for row in rows(shown)]


# -- nothing goes wrong, nothing goes out ------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_drawn_without_a_complaint_a_request_or_a_sideways_scroll(size, scheme, open_page):
    shown = draw_everything(open_page("plain", size=size, scheme=scheme))
    assert shown.complaints == []
    assert [url for url in shown.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert shown.evaluate("document.documentElement.scrollWidth") == SIZES[size][0]


def test_hostile_words_are_words(open_page):
    shown = draw_everything(open_page("hostile"))
    shown.locator(".open").first.click()
    assert shown.title().endswith(": autotune report")
    assert shown.locator("img, script[src], h1 *").count() == 0
    assert shown.locator("h1").inner_text() == HOSTILE
    assert shown.locator("#table .note").first.inner_text() == HOSTILE
    assert shown.complaints == []


def test_a_script_that_is_not_ours_would_not_run(open_page):
    shown = open_page("plain")
    shown.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.owned=1\">')")
    shown.wait_for_timeout(100)
    assert shown.evaluate("window.owned") is None


# -- the table ---------------------------------------------------------------------------------------------------


def test_a_heading_sorts_and_says_so(open_page):
    shown = open_page("plain")
    head = shown.locator("th[data-key=tokens_per_second]")
    head.locator("button").click()
    assert (numbers(shown), head.get_attribute("aria-sort")) == ([0, 1, 2, 3], "ascending")
    head.locator("button").click()
    assert (numbers(shown), head.get_attribute("aria-sort")) == ([2, 1, 0, 3], "descending")
    assert shown.locator("th[aria-sort]").count() == 1


@pytest.mark.parametrize(("words", "found"), [("bf16", [2]), ("micro-batch 8 memory", [3]), ("#1", [1]), ("nope", [])])
def test_what_is_written_is_found(words, found, open_page):
    shown = open_page("plain")
    shown.get_by_label("Find").fill(words)
    assert numbers(shown) == found


@pytest.mark.parametrize(("shown_are", "found"), [("front", [1, 2]), ("others", [0, 3]), ("out_of_memory", [3])])
def test_outcomes_can_be_chosen(shown_are, found, open_page):
    shown = open_page("plain")
    shown.get_by_label("Show").select_option(shown_are)
    assert numbers(shown) == found
    assert f"of {len(found)} trials, of 4 in all" in shown.locator("#shown").inner_text()


def test_a_row_says_what_was_measured(open_page):
    assert rows(open_page("plain"))[2].startswith(
        "#2: all that is known bf16 & morebf16-mixed, micro-batch 8 200.0 MiB 2,000 ±0 % =10.00 pick front 1 m 30 s"
    )


def test_on_a_phone_a_trial_opens_to_everything(open_page):
    shown = open_page("plain", size="phone")
    shown.get_by_label("Sort by").select_option("peak_memory_bytes down")
    assert numbers(shown) == [0, 2, 1, 3]
    opener = shown.locator(".open").first
    opener.click()
    assert opener.get_attribute("aria-expanded") == "true"
    assert "needs 300 MiB" in shown.locator(".detail").inner_text()
    assert shown.evaluate("document.documentElement.scrollWidth") == SIZES["phone"][0]


# -- copying -----------------------------------------------------------------------------------------------------


@pytest.fixture
def copying(open_page):
    return open_page("plain", permissions=["clipboard-read", "clipboard-write"])


def clipboard(shown):
    return shown.evaluate("navigator.clipboard.readText()")


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_the_button_of_a_row_copies_the_command_that_reruns_it(number, copying):
    view = plain_view()
    copying.get_by_role("button", name=f"Re-run: copy the command for trial {number}").click()
    copying.locator("#said", has_text=f"Copied: the command that re-runs trial {number}").wait_for()
    assert clipboard(copying) == rerun_command(view.definition, number=number, config=view.result.trial(number).config)


def test_an_export_is_copied_for_the_chosen_target(copying):
    copying.get_by_label("Export to").select_option("trl")
    copying.get_by_role("button", name="Export: copy the command for trial 1").click()
    copying.locator("#said", has_text="exports trial 1 to trl").wait_for()
    assert clipboard(copying) == "autotune export a-study --trial 1 --to trl"


def test_a_command_of_the_page_is_copied_whole(copying):
    box = copying.locator("#repeat .command").first
    box.get_by_role("button").click()
    copying.locator("#said", has_text="Copied").wait_for()
    assert clipboard(copying) == box.locator("code").inner_text()


# -- for everybody -----------------------------------------------------------------------------------------------


def test_everything_can_be_reached_by_the_keyboard_and_shows_that_it_was(open_page):
    shown = open_page("plain")
    reached, unseen = [], []
    for _ in range(60):
        shown.keyboard.press("Tab")
        name, outline = shown.evaluate(
            "[document.activeElement.id || document.activeElement.textContent.trim().slice(0, 30),"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached.append(name)
        unseen += [name] if outline == "none" else []
    assert reached[0] == "Skip to the answer"
    assert {"theme", "find", "outcome", "target", "peak", "tokens/s"} <= set(reached)
    assert any(name.startswith("#1: all that is known") for name in reached)
    assert unseen == []


def test_a_heading_sorts_by_the_keyboard(open_page):
    shown = open_page("plain")
    shown.locator("th[data-key=peak_memory_bytes] button").focus()
    shown.keyboard.press("Enter")
    assert numbers(shown) == [1, 2, 0, 3]


def background(shown):
    return shown.evaluate("getComputedStyle(document.body).backgroundColor")


def test_the_colours_follow_the_system_until_the_reader_says_otherwise(open_page):
    light, dark = (background(open_page("plain", scheme=scheme)) for scheme in ("light", "dark"))
    assert light != dark
    shown = draw_everything(open_page("plain"))
    shown.get_by_role("button", name="Dark colours").click()
    assert background(shown) == dark
    shown.get_by_role("button", name="Light colours").click()
    assert background(shown) == light


CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  function rgb(colour) {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  }
  function luminance(colour) {
    const [r, g, b] = colour.slice(0, 3).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  }
  function behind(element) {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255];
  }
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const isText = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!isText || element.closest("svg, script, .drawing, :disabled") || !element.checkVisibility()) continue;
    const [a, b] = [luminance(rgb(getComputedStyle(element).color)), luminance(behind(element))].sort((x, y) => y - x);
    const contrast = (a + .05) / (b + .05);
    if (contrast < 4.5) faint.push([element.tagName, element.className, contrast.toFixed(2)].join(" "));
  }
  return faint;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(scheme, open_page):
    shown = open_page("plain", scheme=scheme)
    shown.locator("summary").first.click()
    shown.locator(".open").first.click()
    assert shown.evaluate(CONTRASTS) == []


# -- ten thousand trials -----------------------------------------------------------------------------------------


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
    assert shown.complaints == []


def test_the_browser_is_the_one_of_the_system():
    said = subprocess.run([CHROMIUM, "--version"], capture_output=True, text=True, check=True).stdout
    assert "Chromium" in said
