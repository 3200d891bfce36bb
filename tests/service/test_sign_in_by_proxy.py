"""A trusted proxy says who a person is, and nobody else does."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import httpx
import pytest

from tests.building import nginx
from tests.building.listening_service import listening_service
from tests.building.queued_searches import TOKEN as OF_OWNER
from tests.building.service import BEARER, ORIGIN, STAND_IN, serving
from tests.service.test_who_gets_in import HEALTH, ROUTES, WRITES, sent

PROXY, STRANGER = "10.0.0.5", "10.0.1.5"
BELIEVED = {"trusted_user_header": "X-Forwarded-User", "trusted_proxies": ("10.0.0.0/24", "::1")}
ADA = "ada+tuning@example.org"
OWN_PAGE = {"Origin": ORIGIN}
NEW = {"max_mem": "8GiB", "priority": 1}
"""A submission that says in its answer whether it comes from an admin."""


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('proxy')}/autotune.db"


@pytest.fixture(scope="module")
def proxied(storage):
    """A client at the address of the proxy, of a server that has tokens of some people."""
    with serving(storage, peer=PROXY, **BELIEVED) as client:
        tokens = client.app.state.service.tokens
        tokens.add("eve@example.org", role="reader")
        tokens.add("root@example.org", role="admin")
        yield client


@pytest.fixture(scope="module")
def stranger(storage):
    with serving(storage, peer=STRANGER, **BELIEVED) as client:
        yield client


def named(name):
    return {"X-Forwarded-User": name}


def test_a_person_whom_the_proxy_names_gets_in_everywhere(proxied):
    for route in ROUTES:
        if route[0] == "GET" and route[1] != "/api/v1/events":
            assert sent(proxied, route, X_Forwarded_User=ADA).status_code not in (401, 403), route


def test_from_any_other_address_the_header_is_refused_even_with_the_token(stranger):
    for route in [*ROUTES, ("POST", "/sign-in"), ("POST", "/sign-out")]:
        for headers in ({}, BEARER):
            answer = sent(stranger, route, X_Forwarded_User=ADA, **headers)
            assert answer.status_code == 403, route
    assert answer.json()["detail"] == (
        f"only a trusted proxy may send X-Forwarded-User, and {STRANGER} is none"
    )


def test_what_a_client_says_of_its_own_address_is_not_believed(stranger):
    said = {"X-Forwarded-For": PROXY, "X-Real-IP": PROXY, "Forwarded": f"for={PROXY}"}
    answer = stranger.get("/api/v1/studies", headers={**named(ADA), **said})
    assert answer.status_code == 403


def test_without_the_header_a_token_is_needed_at_every_address(proxied, stranger):
    for client in (proxied, stranger):
        for route in ROUTES:
            assert sent(client, route).status_code == (200 if route == HEALTH else 401), route
        assert client.get("/api/v1/studies", headers=BEARER).status_code == 200


def test_an_empty_header_names_nobody(proxied):
    assert proxied.get("/api/v1/studies", headers=named("")).status_code == 401


@pytest.mark.parametrize(
    "name", ["owner", "Owner", "a b", "ada,bob", "ada\x7f", "ä", "a" * 101, "../ada", "<b>"]
)
def test_a_name_that_nobody_can_have_is_refused(proxied, name):
    answer = proxied.get("/api/v1/studies", headers=named(name.encode()))
    assert answer.status_code == 403
    assert answer.json()["hint"]


def test_a_header_that_the_proxy_has_only_added_to_is_refused(proxied):
    headers = [("X-Forwarded-User", "root@example.org"), ("X-Forwarded-User", ADA)]
    answer = proxied.get("/api/v1/studies", headers=headers)
    assert answer.json()["detail"] == "X-Forwarded-User stands 2 times in the request"


@pytest.mark.parametrize(
    ("name", "status"), [(ADA, 422), ("eve@example.org", 403), ("root@example.org", 202)]
)
def test_a_person_has_the_role_of_a_token_of_that_name(proxied, name, status):
    answer = proxied.post("/api/v1/searches", json=NEW, headers={**named(name), **OWN_PAGE})
    assert answer.status_code == status
    if status == 202:
        assert answer.json()["submitted_by"] == name


def test_a_person_whom_the_proxy_names_is_told_to_sign_out_there(proxied):
    answer = proxied.post("/sign-out", headers={**named(ADA), **OWN_PAGE})
    assert answer.status_code == 200
    assert f"The proxy in front of this server has signed you in as {ADA}." in answer.text
    assert "/oauth2/sign_out" in answer.text
    assert proxied.post("/sign-out", headers=named(ADA)).status_code == 403


def test_a_person_without_a_token_is_a_member(proxied):
    body = {**NEW, "priority": 0}
    answer = proxied.post("/api/v1/searches", json=body, headers={**named(ADA), **OWN_PAGE})
    assert (answer.status_code, answer.json()["submitted_by"]) == (202, ADA)


def test_a_token_that_was_removed_makes_no_admin_and_no_member_of_a_reader(tmp_path):
    with serving(f"sqlite:///{tmp_path}/a.db", peer=PROXY, **BELIEVED) as client:
        tokens = client.app.state.service.tokens
        for name, role in (("ada", "admin"), ("eve", "reader")):
            tokens.add(name, role=role)
            tokens.revoke(name)
        assert tokens.roles() == {"ada": "member", "eve": "reader"}


def test_a_write_needs_a_page_of_this_server_as_with_a_cookie(proxied):
    for headers in ({}, {"Origin": "http://127.0.0.1:9000"}, {"Sec-Fetch-Site": "same-site"}):
        for method, path in WRITES:
            answer = proxied.request(method, path, headers={**named(ADA), **headers})
            assert answer.status_code == 403, (method, path, headers)


def test_a_program_with_a_token_is_who_has_the_token(proxied):
    token = proxied.app.state.service.tokens.add("nightly")
    body = {**NEW, "priority": 0}
    headers = {"Authorization": f"Bearer {token}", **named(ADA)}
    answer = proxied.post("/api/v1/searches", json=body, headers=headers)
    assert answer.json()["submitted_by"] == "nightly"
    wrong = {"Authorization": "Bearer wrong", **named(ADA)}
    assert proxied.get("/api/v1/studies", headers=wrong).status_code == 401


def test_the_password_that_a_proxy_has_checked_is_none_of_the_servers(proxied):
    headers = {"Authorization": "Basic YWRhOnB3", **named(ADA)}
    assert proxied.get("/api/v1/studies", headers=headers).status_code == 200


def test_without_the_options_the_header_means_nothing(anonymous):
    assert anonymous.get("/api/v1/studies", headers=named("root")).status_code == 401
    assert anonymous.get("/api/v1/studies", headers={**named("root"), **BEARER}).status_code == 200


# -- a real proxy ----------------------------------------------------------------------------------

needs_nginx = pytest.mark.skipif(nginx.NGINX is None, reason=nginx.MISSING)
SESSION = {"Cookie": "session=of-ada"}


class OAuth2Proxy(BaseHTTPRequestHandler):
    """Answers what nginx asks oauth2-proxy: whose session a request has."""

    def do_GET(self):
        is_ada = SESSION["Cookie"] in self.headers.get("Cookie", "")
        is_question = self.path == "/oauth2/auth"
        self.send_response((202 if is_ada else 401) if is_question else 200)
        if is_question and is_ada:
            self.send_header("X-Auth-Request-Email", ADA)
        self.end_headers()
        if not is_question:
            self.wfile.write(b"sign in here")

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def of_nginx(tmp_path_factory):
    """The URL of nginx with the lines of the documentation, in front of a server."""
    folder = tmp_path_factory.mktemp("nginx")
    port = nginx.free_port()
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), OAuth2Proxy) as sign_in,
        listening_service(
            f"sqlite:///{folder}/autotune.db",
            search_module=STAND_IN,
            allowed_hosts=(f"127.0.0.1:{port}",),
            trusted_user_header="X-Forwarded-User",
            trusted_proxies=("127.0.0.1",),
        ) as url,
    ):
        threading.Thread(target=sign_in.serve_forever, daemon=True).start()
        lines = nginx.documented("By a proxy", port=port, servers=[urlsplit(url).port] * 2)
        lines = lines.replace("127.0.0.1:4180", f"127.0.0.1:{sign_in.server_port}")
        with nginx.nginx(folder, lines, port=port):
            yield f"http://127.0.0.1:{port}"
        sign_in.shutdown()


@needs_nginx
@pytest.mark.slow
def test_nginx_signs_people_in_and_lets_programs_pass(of_nginx):
    assert httpx.get(f"{of_nginx}/").text == "sign in here"
    assert ADA in httpx.get(f"{of_nginx}/", headers=SESSION).text
    forged = {**named("root@example.org"), "Origin": of_nginx}
    body = {"max_mem": "8GiB"}
    submitted = httpx.post(f"{of_nginx}/api/v1/searches", headers=forged | SESSION, json=body)
    assert (submitted.status_code, submitted.json()["submitted_by"]) == (202, ADA)
    program = {"Authorization": f"Bearer {OF_OWNER}", **named("root@example.org")}
    submitted = httpx.post(f"{of_nginx}/api/v1/searches", headers=program, json=body)
    assert submitted.json()["submitted_by"] == "owner"
    wrong = {"Authorization": "Bearer wrong", **named("root@example.org")}
    assert httpx.get(f"{of_nginx}/api/v1/searches", headers=wrong).status_code == 401
