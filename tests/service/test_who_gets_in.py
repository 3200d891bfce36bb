"""Nobody gets past the gate without a token, with a foreign Host or from a foreign page."""

import asyncio
import html
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlencode

import pytest

from autotune.service.application import create_app
from autotune.service.callers import Callers
from autotune.service.gate import own_path
from autotune.service.hosts import OwnHosts
from autotune.service.settings import ServerSettings
from autotune.storage.servers import Servers
from autotune.storage.tokens import Tokens
from tests.building.service import BEARER, ORIGIN, TOKEN, cookie_of, routes_of, serving
from tests.building.studies import open_store

HEALTH = ("GET", "/api/v1/health")
SIGN_IN = (("GET", "/sign-in"), ("POST", "/sign-in"))
PARAMETERS = {
    "name": "quick",
    "number": "1",
    "kind": "pareto",
    "target": "pytorch",
    "version": "v",
    "file": "page.css",
    "id": "1",
}
ROUTES = [
    route for route in routes_of(create_app(ServerSettings(token=TOKEN))) if route not in SIGN_IN
]
WRITES = [route for route in ROUTES if route[0] not in ("GET", "HEAD", "OPTIONS")]


def sent(client, route, **headers):
    """Sends a request to a route whose parameters are filled in."""
    method, path = route
    path = re.sub(r"{(\w+)(:\w+)?}", lambda found: PARAMETERS.get(found[1], "1"), path)
    shown = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.request(method, path, headers=shown)


@pytest.fixture
def _unlimited_wrong_tokens(monkeypatch):
    """Spare a test of many wrong tokens the wait before each reading of the database."""
    monkeypatch.setattr("autotune.service.callers._SECONDS_BETWEEN_READS", 0.0)


@pytest.fixture(scope="module")
def read_only(served_storage, anonymous):
    return anonymous.app.state.service.tokens.add("a-reader", role="reader")


def test_the_routes_of_every_subject_are_there():
    paths = {path for _, path in ROUTES}
    assert {"/api/v1/studies/{name}", "/api/v1/searches", "/metrics", "/"} <= paths


def test_without_a_token_only_health_answers(anonymous):
    for route in ROUTES:
        answer = sent(anonymous, route)
        found = (answer.status_code, answer.headers.get("www-authenticate"))
        assert found == ((200, None) if route == HEALTH else (401, "Bearer")), route


@pytest.mark.usefixtures("_unlimited_wrong_tokens")
@pytest.mark.parametrize("token", ["Bearer wrong", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}"])
def test_with_a_wrong_token_only_health_answers(anonymous, token):
    for route in ROUTES:
        expected = 200 if route == HEALTH else 401
        assert sent(anonymous, route, Authorization=token).status_code == expected, route


def test_a_read_only_token_writes_nothing(anonymous, read_only):
    for route in WRITES:
        assert sent(anonymous, route, Authorization=f"Bearer {read_only}").status_code == 403, route


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1:8322", "127.0.0.1.evil.example:8321"])
def test_a_foreign_host_gets_nothing_even_with_the_token(anonymous, host):
    for route in ROUTES:
        assert sent(anonymous, route, Host=host, **BEARER).status_code == 421, route


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:8322"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
    ids=str,
)
def test_a_foreign_page_gets_nothing_even_with_the_token(anonymous, headers):
    for route in ROUTES:
        assert sent(anonymous, route, **headers, **BEARER).status_code == 403, route


# -- tokens ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_unlimited_wrong_tokens")
@pytest.mark.parametrize("by_cookie", [False, True])
def test_a_stream_of_events_ends_with_its_token(browser, monkeypatch, by_cookie):
    monkeypatch.setattr("autotune.service.callers._FRESH_SECONDS", 0.0)
    monkeypatch.setattr("autotune.service.stream.SIGN_OF_LIFE_SECONDS", 0.05)
    tokens = browser.app.state.service.tokens
    token = tokens.add("leaver")
    headers = {"Authorization": f"Bearer {token}"}
    if by_cookie:
        headers = {"Cookie": f"{cookie_of(browser)}={token}"}
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(browser.get, "/api/v1/events", headers=headers)
        with pytest.raises(TimeoutError):
            stream.result(0.3)
        tokens.revoke("leaver")
        assert stream.result(30).status_code == 200


def test_the_own_origin_and_every_loopback_name_are_let_in(anonymous):
    for host in ("127.0.0.1:8321", "localhost:8321", "[::1]:8321", "LocalHost:8321"):
        headers = {**BEARER, "Host": host, "Origin": f"http://{host.lower()}"}
        assert anonymous.get("/api/v1/studies", headers=headers).status_code == 200


def test_a_named_token_is_let_in_until_it_is_revoked(tmp_path):
    with serving(f"sqlite:///{tmp_path}/a.db") as client:
        tokens = client.app.state.service.tokens
        headers = {"Authorization": f"Bearer {tokens.add('ann')}"}
        assert client.get("/api/v1/studies", headers=headers).status_code == 200
        tokens.revoke("ann")
        with serving(f"sqlite:///{tmp_path}/a.db") as restarted:
            assert restarted.get("/api/v1/studies", headers=headers).status_code == 401


def test_a_revoked_token_is_refused_within_seconds_without_a_restart(anonymous, monkeypatch):
    monkeypatch.setattr("autotune.service.callers._FRESH_SECONDS", 0.0)
    tokens = anonymous.app.state.service.tokens
    headers = {"Authorization": f"Bearer {tokens.add('bob')}"}
    assert anonymous.get("/api/v1/studies", headers=headers).status_code == 200
    tokens.revoke("bob")
    assert anonymous.get("/api/v1/studies", headers=headers).status_code == 401


def test_a_token_that_is_added_right_after_a_wrong_one_is_let_in(tmp_path):
    with serving(f"sqlite:///{tmp_path}/a.db") as client:
        wrong = {"Authorization": "Bearer wrong"}
        assert client.get("/api/v1/studies", headers=wrong).status_code == 401
        headers = {"Authorization": f"Bearer {client.app.state.service.tokens.add('ann')}"}
        assert client.get("/api/v1/studies", headers=headers).status_code == 200


def test_wrong_tokens_at_once_share_one_reading_of_the_database(tmp_path):
    readings = []

    class CountedTokens(Tokens):
        def valid(self):
            readings.append(1)
            return super().valid()

    async def callers_of_wrong_tokens(tokens):
        callers = Callers("the owner's")
        servers = Servers(tokens._database)
        wrong = (callers.caller_of(f"wrong {number}", tokens, servers) for number in range(20))
        return await asyncio.gather(*wrong)

    with open_store(f"sqlite:///{tmp_path}/a.db") as store:
        found = asyncio.run(callers_of_wrong_tokens(CountedTokens(store.database)))
    assert found == [None] * 20
    assert len(readings) <= 2


def test_a_wrong_bearer_token_is_not_made_good_by_a_cookie(anonymous):
    headers = {"Authorization": "Bearer wrong", "Cookie": f"{cookie_of(anonymous)}={TOKEN}"}
    assert anonymous.get("/api/v1/studies", headers=headers).status_code == 401


@pytest.mark.usefixtures("_unlimited_wrong_tokens")
@pytest.mark.parametrize("token", ["ÄÖ", "a" * 5000, "\x7f", "%00", "\u2028"])
def test_an_odd_token_is_just_wrong(anonymous, token):
    headers = {"Authorization": f"Bearer {token}".encode()}
    assert anonymous.get("/api/v1/studies", headers=headers).status_code == 401
    headers = {"Cookie": f"{cookie_of(anonymous)}={token}".encode()}
    assert anonymous.get("/api/v1/studies", headers=headers).status_code == 401


@pytest.mark.parametrize("token", ["a;b c", 'quo"te', "ÄÖ%41"])
def test_a_token_of_odd_characters_works_as_a_cookie(tmp_path, token):
    with serving(f"sqlite:///{tmp_path}/a.db", token=token) as client:
        assert client.get("/", params={"token": token}).status_code == 303
        assert client.get("/api/v1/studies").status_code == 200


def test_a_random_token_is_in_the_printed_url_and_a_chosen_one_is_not():
    random = ServerSettings()
    assert random.owner_token in random.url
    assert TOKEN not in ServerSettings(token=TOKEN).url
    assert TOKEN not in repr(ServerSettings(token=TOKEN))
    assert ServerSettings().owner_token != random.owner_token


# -- signing in ------------------------------------------------------------------------------------


@pytest.fixture
def browser(anonymous):
    """A client that keeps cookies until the end of the test."""
    yield anonymous
    anonymous.cookies.clear()


def sign_in(browser, **fields):
    """Sends the form of the page that asks for the token."""
    return browser.post("/sign-in", data=fields, headers={"Origin": ORIGIN})


def test_the_printed_url_sets_a_cookie_and_leads_to_the_page_without_the_token(browser):
    answer = browser.get(f"/studies/quick?token={TOKEN}&prefer=smallest")
    assert (answer.status_code, answer.headers["location"]) == (
        303,
        "/studies/quick?prefer=smallest",
    )
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Path=/" in cookie
    assert browser.get("/api/v1/studies").status_code == 200


def test_a_wrong_token_in_a_url_sets_no_cookie(browser):
    answer = browser.get("/?token=wrong", headers={"Accept": "text/html"})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


def test_the_interface_takes_no_token_in_a_url(browser):
    assert browser.get(f"/api/v1/studies?token={TOKEN}").status_code == 401


def test_the_cookie_is_only_sent_by_tls_where_the_server_speaks_it(tmp_path):
    pem = tmp_path / "a.pem"
    with serving(f"sqlite:///{tmp_path}/a.db", tls_certificate=pem, tls_key=pem) as client:
        assert "Secure" in client.get(f"/?token={TOKEN}").headers["set-cookie"]


def test_the_cookie_is_only_sent_by_tls_where_a_proxy_speaks_it(tmp_path):
    of_proxy = {"Host": "tuning.example.org", "Origin": "https://tuning.example.org"}
    with serving(f"sqlite:///{tmp_path}/a.db", allowed_hosts=("tuning.example.org",)) as client:
        for headers, is_secure in ((of_proxy, True), ({"Origin": ORIGIN}, False)):
            answer = client.post("/sign-in", data={"token": TOKEN}, headers=headers)
            assert ("Secure" in answer.headers["set-cookie"]) == is_secure, headers


def test_a_page_without_a_token_asks_for_it(browser):
    answer = browser.get("/studies/quick", headers={"Accept": "text/html"})
    assert answer.status_code == 401
    assert 'action="/sign-in"' in answer.text
    assert 'value="/studies/quick"' in answer.text


def test_a_page_that_asks_for_the_token_keeps_the_query_but_no_token(browser):
    query = urlencode({"text": "a: 'b'\n\u00e9+&", "empty": ""})
    answer = browser.get(f"/fit?{query}&token=wrong-secret", headers={"Accept": "text/html"})
    [following] = re.findall(r'name="next" value="(.*)"', answer.text)
    assert html.unescape(following) == f"/fit?{query}"
    assert "wrong-secret" not in answer.text


def test_an_address_too_long_for_a_header_is_in_a_page_that_leads_there(browser):
    path = "/fit?" + urlencode({"text": '\u00e9"; ' * 3000})
    answer = sign_in(browser, token=TOKEN, next=path)
    [leads_to] = re.findall(r'http-equiv="refresh" content="0;url=(.*)"', answer.text)
    assert html.unescape(leads_to) == path
    assert "location" not in answer.headers
    assert browser.get("/api/v1/studies").status_code == 200


def test_the_form_of_the_page_signs_in_and_leads_back(browser):
    answer = sign_in(browser, token=TOKEN, next="/studies/quick")
    assert (answer.status_code, answer.headers["location"]) == (303, "/studies/quick")
    assert browser.get("/api/v1/studies").status_code == 200


def test_a_wrong_token_in_the_form_asks_again_and_is_not_repeated(browser):
    answer = sign_in(browser, token="wrong-secret", next="/")
    assert answer.status_code == 401
    assert "wrong-secret" not in answer.text


@pytest.mark.parametrize(
    "path", ["//evil.example/", "/\\evil.example", "https://evil.example", "/\t/evil.example", ""]
)
def test_signing_in_never_leads_to_another_server(browser, path):
    answer = sign_in(browser, token=TOKEN, next=path)
    assert re.fullmatch(r"/(evil\.example/?)?", answer.headers["location"])


def test_a_path_of_this_server_stays_as_it_is():
    assert own_path("/studies/a?b=c") == "/studies/a?b=c"
    assert own_path("///evil.example") == "/evil.example"


# -- signing out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [None, "reader", "member"])
def test_who_signs_out_has_no_cookie_any_more(browser, role):
    tokens = browser.app.state.service.tokens
    token = TOKEN if role is None else tokens.add(f"leaving-{role}", role=role)
    sign_in(browser, token=token)
    assert 'action="/sign-out"' in browser.get("/").text
    answer = browser.post("/sign-out", headers={"Origin": ORIGIN})
    assert (answer.status_code, answer.headers["location"]) == (303, "/sign-in")
    assert cookie_of(browser) not in browser.cookies
    assert browser.get("/").status_code == 401


def test_an_address_alone_signs_nobody_out(browser):
    sign_in(browser, token=TOKEN)
    answer = browser.get("/sign-out")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert browser.get("/").status_code == 200


# -- what a page without a token shows -------------------------------------------------------------


def test_the_page_to_sign_in_and_that_of_an_error_need_no_other_file(browser, served_storage):
    for path, headers in (("/sign-in", {}), ("/", {}), ("/nothing", {}), ("/nothing", BEARER)):
        text = browser.get(path, headers={**headers, "Accept": "text/html"}).text
        assert "--page: light-dark(" in text
        assert not re.findall(r'<link rel="stylesheet"|<script|<img', text)
        assert served_storage not in text
        assert served_storage.removeprefix("sqlite:///") not in text


def test_only_who_has_signed_in_sees_what_pages_there_are(browser):
    page = {"Accept": "text/html"}
    for path in ("/sign-in", "/nothing"):
        assert "<nav" not in browser.get(path, headers=page).text
    assert "<nav" in browser.get("/nothing", headers={**page, **BEARER}).text


# -- what a cookie may do --------------------------------------------------------------------------


OWN_PAGES = (
    {"Origin": ORIGIN},
    {"Sec-Fetch-Site": "same-origin"},
    {"Origin": ORIGIN, "Sec-Fetch-Site": "same-origin"},
)
OTHER_PORT = "http://127.0.0.1:9000"
"""Another service of the same host: the browser sends it the cookie, as it is of the same site."""
OTHER_SENDERS = (
    {},
    {"Content-Type": "text/plain"},
    {"Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Origin": ""},
    {"Origin": "null"},
    {"Origin": OTHER_PORT},
    {"Origin": OTHER_PORT, "Sec-Fetch-Site": "same-site", "Content-Type": "text/plain"},
    {"Origin": "https://127.0.0.1:8321"},
    {"Origin": ORIGIN, "Sec-Fetch-Site": "same-site"},
    {"Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"},
)


def test_with_the_cookie_only_a_page_of_this_server_writes(browser):
    browser.cookies.set(cookie_of(browser), TOKEN)
    for headers in OTHER_SENDERS:
        for method, path in WRITES:
            answer = browser.request(method, path, headers=headers, content=b"{}")
            assert answer.status_code == 403, (method, path, headers)
    for headers in OWN_PAGES:
        answer = browser.patch("/api/v1/studies/unknown", headers=headers, json={"name": "other"})
        assert answer.status_code == 404, headers


def test_a_program_with_a_token_says_of_no_page(anonymous):
    answer = anonymous.patch("/api/v1/studies/unknown", headers=BEARER, json={"name": "other"})
    assert answer.status_code == 404


def test_only_the_own_page_signs_out(browser):
    for headers in OTHER_SENDERS:
        answer = browser.post("/sign-out", headers=headers)
        assert answer.status_code == 403, headers
        assert "set-cookie" not in answer.headers
    for headers in OWN_PAGES:
        assert browser.post("/sign-out", headers=headers).status_code == 303, headers


def test_only_the_own_page_signs_in(browser):
    """Otherwise another page could sign somebody in as another, whom it then watches."""
    form = {"data": {"token": TOKEN}}
    for headers in OTHER_SENDERS:
        answer = browser.post("/sign-in", headers=headers, **form)
        assert answer.status_code == 403, headers
        assert "set-cookie" not in answer.headers
    for headers in OWN_PAGES:
        assert browser.post("/sign-in", headers=headers, **form).status_code == 303, headers


def test_the_form_to_sign_in_is_small(browser):
    assert sign_in(browser, token=TOKEN, next="/" + "a" * 200_000).status_code == 413


def test_a_link_on_another_site_leads_to_the_page(browser):
    """The browser leaves the cookie out; the answer makes it ask again, as our own page."""
    link = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
        "Accept": "text/html",
    }
    assert 'http-equiv="refresh"' in browser.get("/", headers=link).text
    again = {**link, "Sec-Fetch-Site": "same-origin"}
    assert 'http-equiv="refresh"' not in browser.get("/", headers=again).text


def test_another_site_may_not_show_a_page_in_a_frame(browser):
    frame = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "iframe",
    }
    assert browser.get("/", headers={**BEARER, **frame}).status_code == 403


# -- hosts -----------------------------------------------------------------------------------------


def test_a_proxys_name_is_let_in_with_its_own_origin(tmp_path):
    hosts = ("tuning.example.org",)
    with serving(f"sqlite:///{tmp_path}/a.db", allowed_hosts=hosts) as client:
        headers = {**BEARER, "Host": hosts[0], "Origin": f"https://{hosts[0]}"}
        assert client.get("/api/v1/studies", headers=headers).status_code == 200
        headers["Host"] = f"{hosts[0]}:8443"
        assert client.get("/api/v1/studies", headers=headers).status_code == 421


def test_an_internal_address_is_known_without_its_default_port():
    hosts = OwnHosts(ServerSettings(internal_address="http://10.0.0.7:80"))
    assert hosts.is_own_host("10.0.0.7")
    assert hosts.is_own_host("10.0.0.7:80")


def test_a_server_on_one_address_has_no_other_names():
    hosts = OwnHosts(ServerSettings(host="10.0.0.5"))
    assert hosts.is_own_host("10.0.0.5:8321")
    assert not hosts.is_own_host("localhost:8321")
    assert not hosts.is_own_host("10.0.0.5")


def test_a_server_on_all_addresses_has_that_of_the_connection():
    hosts = OwnHosts(ServerSettings(host="0.0.0.0"))
    assert hosts.is_own_host("10.0.0.5:8321", address="10.0.0.5")
    assert not hosts.is_own_host("10.0.0.6:8321", address="10.0.0.5")
    assert not hosts.is_own_host("evil.example:8321", address="10.0.0.5")


def test_the_default_port_is_left_out_by_browsers():
    assert OwnHosts(ServerSettings(port=80)).is_own_host("localhost")
    assert not OwnHosts(ServerSettings(port=8321)).is_own_host("localhost")


# -- the token stays secret ------------------------------------------------------------------------


def test_the_token_is_never_logged(browser, caplog):
    caplog.set_level(logging.DEBUG)
    browser.get(f"/?token={TOKEN}")
    browser.get("/api/v1/studies")
    browser.get(f"/nothing?token={TOKEN}x")
    sign_in(browser, token=TOKEN)
    own = [record for record in caplog.records if record.name == "autotune.service"]
    assert len(own) >= 4
    assert TOKEN not in "\n".join(record.getMessage() for record in own)


def test_the_token_is_in_no_page(browser):
    browser.get(f"/?token={TOKEN}")
    for path in ("/", "/studies/quick", "/new", "/sign-in", "/nothing"):
        assert TOKEN not in browser.get(path, headers={"Accept": "text/html"}).text


def test_a_line_break_in_a_path_makes_no_line_of_the_log(browser, caplog):
    caplog.set_level(logging.INFO, logger="autotune.service")
    browser.get("/nothing%0AGET%20/forged", headers=BEARER)
    assert all("\n" not in record.getMessage() for record in caplog.records)


# -- every response --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/api/v1/health", "/api/v1/studies", "/nothing", "/metrics"])
@pytest.mark.parametrize("headers", [{}, BEARER], ids=["without a token", "with it"])
def test_every_response_has_the_security_headers(anonymous, path, headers):
    found = anonymous.get(path, headers=headers).headers
    assert "script-src 'self';" in found["content-security-policy"]
    assert "frame-ancestors 'none'" in found["content-security-policy"]
    assert found["x-content-type-options"] == "nosniff"
    # Any other hides the origin of our own forms, or tells other sites our addresses.
    assert found["referrer-policy"] == "same-origin"
    assert found["cross-origin-opener-policy"] == "same-origin"
    assert found["cross-origin-resource-policy"] == "same-origin"
    assert "cache-control" in found
    assert found["x-request-id"]


def test_a_body_may_not_be_larger_than_the_limit(anonymous):
    body = b"x" * (2**20 + 1)
    answer = anonymous.post("/api/v1/searches", content=body, headers=BEARER)
    assert answer.status_code == 413


def test_a_body_in_chunks_is_counted_while_it_is_read(anonymous):
    read = []

    def chunks():
        for number in range(1000):
            read.append(number)
            yield b"x" * 2**16

    answer = anonymous.post("/api/v1/searches", content=chunks(), headers=BEARER)
    assert answer.status_code == 413


def test_a_small_body_in_chunks_is_read(anonymous):
    answer = anonymous.patch(
        "/api/v1/studies/unknown", content=iter([b'{"name":', b'"b"}']), headers=BEARER
    )
    assert answer.status_code in (404, 422)


def test_a_study_that_is_asked_for_shows_who_asked(anonymous, caplog):
    caplog.set_level(logging.INFO, logger="autotune.service")
    anonymous.get("/api/v1/studies/quick", headers=BEARER)
    lines = [record.getMessage() for record in caplog.records]
    assert any(re.fullmatch(r"GET /api/v1/studies/quick 200 \d+ ms owner", line) for line in lines)
