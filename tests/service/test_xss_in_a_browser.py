"""What users and databases can fill a page with is shown as text, and never runs.

Each payload is in every text of a database that a page shows. Pages are opened without the policy
of the server, which would keep what gets into a page from running, and some of them with it, which
must have nothing to complain of.
"""

import shutil
from dataclasses import replace
from urllib.parse import quote, urlencode

import pytest
from sqlalchemy import insert, update

from autotune.service.pages.field_names import FIELDS
from autotune.spec.result import DeviceInfo
from autotune.spec.workload import make_workload
from autotune.storage.identity import find_work_folder
from autotune.storage.searches import NewSearch, Searches
from autotune.storage.tables import ACTIONS, SEARCHES, STUDIES, TOKENS
from tests.building.page_server import RUNNING, TOKEN, page_server
from tests.building.service import cookie_of
from tests.building.studies import MIB, SPACE, config, definition, keep, measured, open_store

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
    pytest.mark.slow,
]
playwright.expect.set_options(timeout=15_000)
PAYLOADS = (
    "\"><img src=x onerror=window.hacked=1>'",
    "</title></textarea></script><script>window.hacked=1</script>",
    "javascript:window.hacked=1//{{7*7}}${7*7}<%=7*7%>",
)
STUDY_OF = {payload: f"payload-{number}" for number, payload in enumerate(PAYLOADS)}
QUICK = "tests.building.quick_stand_in"


def write_payload(url, payload):
    """Write a study, searches, a token, an action and logs that have the payload in each text."""
    name = STUDY_OF[payload]
    space = replace(
        SPACE,
        name=payload,
        description=payload,
        configurations=({"name": payload, "checkpointing": "block"},),
    )
    workload = make_workload("cpu", {"steps": 24, "text_sha256": "f" * 64})
    device = DeviceInfo(
        device="cpu", name=payload, total_memory_bytes=2**36, versions={payload: payload}
    )
    with open_store(url) as store:
        store.create_study(
            definition(
                name,
                space=space,
                workload=workload,
                device=device,
                unavailable={"precision": {"tf32": payload}},
            ),
            trials_wanted=9,
        )
        keep(store, config(0), measured(tokens_per_second=900.0), study=name, name=payload)
        keep(store, config(1), measured(peak_memory_bytes=20 * MIB), study=name, name=payload)
        failures = ("crashed", "out_of_memory", "over_cap", "diverged", "timeout", "parity_failed")
        for number, outcome in enumerate(failures, start=2):
            keep(
                store,
                config(number),
                measured(outcome=outcome, message=payload, perplexity=None),
                study=name,
                name=payload,
            )
        searches = Searches(store.database)
        fields = ("space", "name", "model", "dataset", "script", "space_content", payload)
        request = dict.fromkeys(fields, payload)
        for state in ("queued", "finished", "failed", "cancelled"):
            new = NewSearch(request=request, submitted_by=payload, is_of_admin=True, study=name)
            search, _ = searches.submit(new)
            changes = {
                "state": state,
                "reason": payload,
                "hint": payload,
                "version": payload[:40],
                "ended_at": None if state == "queued" else 1.0,
            }
            with store.database.writing() as connection:
                connection.execute(
                    update(SEARCHES).where(SEARCHES.c.id == search.id).values(**changes)
                )
        with store.database.writing() as connection:
            stored = dict(workload.to_dict())
            stored |= dict.fromkeys(("dataset", "tokenizer", "text_field"), payload)
            stored = {key: value for key, value in stored.items() if key in workload.to_dict()}
            connection.execute(
                update(STUDIES).where(STUDIES.c.name == name).values(workload=stored)
            )
            connection.execute(insert(TOKENS).values(name=payload, digest=name))
            connection.execute(
                insert(ACTIONS).values(
                    who=payload, action=payload[:40], target=payload, detail=payload
                )
            )
    work = find_work_folder(url)
    for folder, file in ((work / name / "logs", "trial-0.log"), (work / ".searches", "1.log")):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / file).open("a") as log:
            log.write(f"{payload}\n")
    return search.id


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("payloads")
    with page_server(folder, quick_module=QUICK) as served:
        for _ in range(2):
            served.add_trial()
        served.ended = {payload: write_payload(served.url, payload) for payload in PAYLOADS}
        yield served


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def has_policy():
    return False


@pytest.fixture
def page(has_policy, browser, server):
    """A page that is signed in; its `complaints` are those of scripts and of the policy."""
    context = browser.new_context(bypass_csp=not has_policy)
    cookie = cookie_of(server)
    context.add_cookies([{"name": cookie, "value": TOKEN, "url": server.address}])
    opened = context.new_page()
    opened.set_default_timeout(20_000)
    opened.complaints = []
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.on("console", lambda said: _note(opened, said))
    opened.on("dialog", lambda dialog: opened.complaints.append(dialog.message))
    yield opened
    context.close()


def _note(page, said):
    # What a browser says of every answer that is an error.
    is_of_status = said.text.startswith("Failed to load resource: the server responded with")
    if said.type == "error" and not is_of_status:
        page.complaints.append(said.text)


def look_everywhere(page):
    """Open what is folded, draw the figures, point at their marks and press what opens a dialog."""
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    for drawing in page.locator("[data-figure]").all():
        drawing.scroll_into_view_if_needed()
        page.wait_for_timeout(400)
    page.evaluate(
        """() => document.querySelectorAll('.js-plotly-plot').forEach(plot => {
            plot.data.forEach((trace, curve) => {
                if (trace.type === 'scatter' && trace.xaxis === undefined) {
                    Plotly.Fx.hover(plot, [{curveNumber: curve, pointNumber: 0}]);
                }
            });
        })"""
    )
    for number in range(page.locator("[data-action]").count()):
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        button = page.locator("[data-action]").nth(number)
        if button.is_visible():
            button.click()
            playwright.expect(page.locator("#dialog")).to_be_visible()
            page.locator("#dialog-close").click()


def assert_nothing_ran(page):
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0
    assert page.locator("[onerror], [onload], [onclick], iframe").count() == 0
    addresses = page.locator("a[href], form[action]").evaluate_all(
        "found => found.map(one => one.href || one.action)"
    )
    assert [one for one in addresses if str(one).startswith("javascript:")] == []
    assert page.complaints == []


def shown_text(page):
    """The text of a page with what is in its fields and folded parts."""
    return page.evaluate(
        """() => document.documentElement.textContent + '\\n' +
            [...document.querySelectorAll('input, textarea')].map(one => one.value).join('\\n')"""
    )


@pytest.mark.parametrize("payload", PAYLOADS, ids=STUDY_OF.values())
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/?query=PAYLOAD&sort=PAYLOAD&page=PAYLOAD",
        "/studies/STUDY",
        "/studies/STUDY?find=PAYLOAD&show=PAYLOAD&sort=PAYLOAD&page=PAYLOAD",
        "/studies/STUDY?technique=precision:PAYLOAD&technique=PAYLOAD",
        "/studies/STUDY/trials/0",
        "/studies/STUDY/trials/0?export=trl",
        "/studies/STUDY/trials/0?export=pytorch",
        "/studies/STUDY/trials/2",
        "/searches/ENDED?log=1",
        "/searches/1?log=1",
        "/compare?study=STUDY&study=other",
    ],
)
def test_what_is_stored_is_shown_as_text(page, server, path, payload):
    ended = str(server.ended[payload])
    address = path.replace("PAYLOAD", quote(payload)).replace("STUDY", STUDY_OF[payload])
    page.goto(server.path(address.replace("ENDED", ended)))
    playwright.expect(page.locator("#stream")).to_have_text("Live")
    look_everywhere(page)
    assert_nothing_ran(page)
    assert payload in shown_text(page)


@pytest.mark.parametrize("has_policy", [True], ids=["policy"])
@pytest.mark.parametrize("payload", PAYLOADS, ids=STUDY_OF.values())
@pytest.mark.parametrize("path", ["/", "/studies/STUDY", "/searches/ENDED?log=1"])
def test_the_policy_has_nothing_to_complain_of(page, server, path, payload):
    address = path.replace("STUDY", STUDY_OF[payload])
    page.goto(server.path(address.replace("ENDED", str(server.ended[payload]))))
    look_everywhere(page)
    assert_nothing_ran(page)


@pytest.mark.parametrize("payload", PAYLOADS, ids=STUDY_OF.values())
@pytest.mark.parametrize(
    "path",
    [
        "/PAYLOAD",
        "/studies/PAYLOAD",
        "/studies/STUDY?prefer=PAYLOAD",
        "/studies/STUDY?max_perplexity_increase=PAYLOAD",
        "/studies/STUDY?increase=PAYLOAD",
        "/studies/STUDY/trials/PAYLOAD",
        "/studies/STUDY/trials/0?export=PAYLOAD",
        "/studies/STUDY/parts/numbers/PAYLOAD",
        "/studies/STUDY/parts/files/0/PAYLOAD",
        "/searches/PAYLOAD",
        "/compare?study=PAYLOAD&study=STUDY",
        "/?token=PAYLOAD",
        "/studies/PAYLOAD?token=PAYLOAD",
        "/api/v1/PAYLOAD",
        "/api/v1/studies/STUDY",
        "/api/v1/studies/PAYLOAD",
        "/api/v1/studies/STUDY/exports/PAYLOAD",
        "/api/v1/studies/STUDY/trials/0/log",
        "/api/v1/searches/1/log",
        "/api/v1/actions",
        "/metrics",
    ],
)
def test_an_address_with_a_payload_is_answered_without_running_it(page, server, path, payload):
    encoded = quote(payload, safe="")
    address = path.replace("PAYLOAD", encoded).replace("STUDY", STUDY_OF[payload])
    answer = page.goto(server.path(address))
    assert answer.status < 500
    assert_nothing_ran(page)


@pytest.mark.parametrize("payload", PAYLOADS, ids=STUDY_OF.values())
def test_a_report_shows_payloads_as_text(page, server, payload):
    """It is a page of its own with scripts of its own, which a policy of its own allows."""
    page.goto(server.path(f"/api/v1/studies/{STUDY_OF[payload]}/report"))
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    page.wait_for_timeout(1500)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0
    assert page.complaints == []
    assert payload in shown_text(page)


@pytest.mark.parametrize("payload", PAYLOADS, ids=STUDY_OF.values())
def test_fields_of_the_address_fill_the_form_as_text(page, server, payload):
    page.goto(server.path(f"/new?{urlencode(dict.fromkeys(FIELDS, payload))}"))
    page.wait_for_timeout(1000)
    assert_nothing_ran(page)
    assert shown_text(page).count(payload) >= 10


@pytest.mark.parametrize("payload", PAYLOADS, ids=STUDY_OF.values())
def test_a_form_that_is_sent_back_shows_what_was_typed_as_text(page, server, payload):
    page.goto(server.path("/new"))
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    fields = page.locator("#new-search input:not([type=hidden], [type=checkbox]), textarea")
    for number in range(fields.count()):
        fields.nth(number).fill(payload)
    page.wait_for_timeout(2500)  # the plan says what is wrong, too
    page.get_by_role("button", name="Start the search").click()
    page.wait_for_load_state()
    assert page.get_by_role("alert").first.is_visible()
    assert_nothing_ran(page)
    assert shown_text(page).count(payload) >= 10


@pytest.mark.parametrize("payload", PAYLOADS, ids=STUDY_OF.values())
@pytest.mark.parametrize("field", ["space_content", "dataset", "name", "model"])
def test_the_plan_and_the_answer_to_one_wrong_field_show_it_as_text(page, server, field, payload):
    page.goto(server.path("/new"))
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    page.locator(f"[name={field}]").fill(payload)
    page.wait_for_timeout(2500)
    assert_nothing_ran(page)
    page.get_by_role("button", name="Start the search").click()
    page.wait_for_load_state()
    assert_nothing_ran(page)


@pytest.mark.parametrize("payload", PAYLOADS, ids=STUDY_OF.values())
@pytest.mark.parametrize("path", ["/", f"/studies/{RUNNING}", "/searches/1?log=1"])
def test_events_are_shown_as_text(page, server, path, payload):
    page.goto(server.path(path))
    playwright.expect(page.locator("#stream")).to_have_text("Live")
    record = {"number": 0, "outcome": payload, "name": payload, "message": payload}
    of_search = {"id": server.search.id, "state": payload, "reason": payload, "hint": payload}
    server.say_all(
        [
            ("opened", {"lines": [payload], "device": payload, "places": [payload]}),
            ("trial_began", {"number": 7, "name": payload, "label": payload, "device": ""}),
            ("step", {"number": 7, "doing": payload, "steps": [1, 2], "device": ""}),
            ("confirming", {"doing": payload}),
            ("front", {"front": [payload], "pick": payload}),
            ("trial_ended", {"trial": record}),
            ("search", of_search),
            ("study", {"action": payload}),
            ("notice", {"message": payload}),
        ]
    )
    if path != "/":
        playwright.expect(page.locator("#said")).to_have_text(payload)
    page.wait_for_timeout(1500)
    assert_nothing_ran(page)


@pytest.mark.parametrize("payload", PAYLOADS, ids=STUDY_OF.values())
def test_what_a_running_search_says_of_itself_is_shown_as_text(page, server, payload):
    place = {"name": payload, "trial": 3, "label": payload, "doing": payload}
    progress = {
        "doing": payload,
        "places": [place],
        "best": payload,
        "counts": payload,
        "time_left": payload,
        "seconds_left": 5.0,
    }
    with open_store(server.url) as store, store.database.writing() as connection:
        connection.execute(
            update(SEARCHES).where(SEARCHES.c.id == server.search.id).values(progress=progress)
        )
    for path in ("/", f"/studies/{RUNNING}", "/searches/1?log=1"):
        page.goto(server.path(path))
        page.wait_for_timeout(500)
        assert payload in shown_text(page)
        assert_nothing_ran(page)


@pytest.mark.parametrize("payload", PAYLOADS, ids=STUDY_OF.values())
def test_the_form_that_asks_for_the_token_shows_payloads_as_text(browser, server, payload):
    context = browser.new_context(bypass_csp=True)
    page = context.new_page()
    for path in (f"/studies/{quote(payload, safe='')}", f"/?token={quote(payload)}"):
        answer = page.goto(server.path(path))
        assert answer.status == 401
        page.get_by_label("Token").fill(payload)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_load_state()
        assert page.evaluate("window.hacked") is None
        assert page.locator("img[src=x]").count() == 0
    context.close()
