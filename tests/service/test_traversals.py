"""No request names a file outside of the folders that a server reads from.

Next to each such folder lies a file with SECRET in it. Requests go over a plain connection, because
clients of HTTP normalise the paths that they are given.
"""

import http.client
import json
import shutil
from itertools import product
from types import SimpleNamespace
from urllib.parse import quote, urlencode, urljoin, urlsplit

import pytest

import autotune
import autotune.service.pages.assets as assets
from autotune.storage.identity import find_work_folder
from tests.building.listening_service import listening_service
from tests.building.profiles import write_profile_of
from tests.building.queued_searches import TOKEN
from tests.building.service import STAND_IN, write_example

SECRET = "the-secret-of-another-folder-7Qk2"
SECRETS_OF_PACKAGE = ("{% extends", "def static_file", "python_requires")
"""What is in files next to the static ones, and in no answer."""
BEARER = {"Authorization": f"Bearer {TOKEN}"}
FILE = "secret.txt"

DOTS = {
    "plain": "..",
    "encoded": "%2e%2e",
    "half encoded": ".%2E",
    "encoded twice": "%252e%252e",
    "overlong": "%c0%ae%c0%ae",
    "overlong, three bytes": "%e0%80%ae%e0%80%ae",
    "two dot leader": "%e2%80%a5",
    "full width": "%ef%bc%8e%ef%bc%8e",
    "more dots": "....",
    "with a parameter": "..;",
    "with a space": "..%20",
    "with NUL": "..%00",
}
SLASHES = {
    "slash": "/",
    "encoded slash": "%2f",
    "slash encoded twice": "%252f",
    "backslash": "%5c",
    "both": "/%5c",
    "two slashes": "//",
    "overlong slash": "%c0%af",
    "full width slash": "%ef%bc%8f",
}
PLACES = (
    "/{}",
    "/static/{}",
    "/static/VERSION/{}",
    "/api/v1/studies/{}",
    "/api/v1/studies/{}/trials/0/log",
    "/api/v1/studies/quick/trials/{}/log",
    "/api/v1/studies/quick/trials/{}",
    "/api/v1/studies/quick/figures/{}",
    "/api/v1/studies/quick/exports/{}",
    "/api/v1/studies/quick/exports/pytorch?version={}",
    "/api/v1/studies/{}/profiles",
    "/api/v1/studies/{}/trials/0/profile/profile.json",
    "/api/v1/studies/quick/trials/{}/profile/profile.json",
    "/api/v1/studies/quick/trials/0/profile/{}",
    "/api/v1/studies/quick/trials/0/profile/code/{}",
    "/api/v1/searches/{}",
    "/api/v1/searches/{}/log",
    "/api/v1/searches?study={}",
    "/api/v1/compare?study=quick&study={}",
    "/api/v1/studies?query={}",
    "/studies/{}",
    "/studies/{}/trials/0",
    "/studies/quick/trials/{}",
    "/studies/quick/trials/0?export={}",
    "/studies/quick/parts/files/0/{}",
    "/studies/quick/parts/numbers/{}",
    "/searches/{}?log=1",
    "/compare?study=quick&study={}",
    "/new?dataset={}&space={}",
)


def ways_out(folder):
    """Yields paths from a folder of the server to the file with the secret, in every writing."""
    for dots, slash in product(DOTS.values(), SLASHES.values()):
        yield slash.join([dots, dots, FILE])
        yield f"{slash.join([dots] * 5)}{quote(str(folder))}/{FILE}"
    absolute = f"{folder}/{FILE}"
    yield absolute
    yield quote(absolute, safe="")
    yield quote(quote(absolute, safe=""), safe="")
    yield f"/{absolute}"
    yield f"file://{absolute}"
    yield quote(f"file://{absolute}", safe="")
    yield f"quick/../../../{FILE}"
    yield f"..%2f{FILE}%00"
    yield f"..%2f{FILE}%00.log"
    yield f"..%2f{FILE}."
    yield f"..%2f{FILE}%20"
    yield f"..%2f{FILE}::$DATA"
    yield "%2e" * 3000
    yield "..%2f" * 1500 + FILE
    yield "~"
    yield "~root"
    yield "."
    yield ".."
    yield "-"
    yield "0x0"
    yield "%00"
    yield "%ff%fe"
    yield "..%2fassets.py"
    yield "..%2ftemplates%2fbase.html"


def text_of(lines):
    return "".join(f"line {number} of a text that may be read\n" for number in range(lines))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A server with secrets next to each of its folders, and a file in each that may be read."""
    home = tmp_path_factory.mktemp("traversals")
    storage = f"sqlite:///{home}/studies/autotune.db"
    work = find_work_folder(storage)
    data, code = home / "data", home / "code"
    for folder in (data / "inner", code, work / "quick" / "logs", work / ".searches"):
        folder.mkdir(parents=True)
    folders = (home, work, work.parent, work / "quick", work / "quick" / "logs", home / "studies")
    for folder in folders:
        (folder / FILE).write_text(SECRET)
    (home / "secret.py").write_text(f"{SECRET} = 1\n")
    (home / "secrets").mkdir()
    (home / "secrets" / "text.txt").write_text(f"{SECRET}\n" * 50)
    (home / "secrets" / "config.json").write_text(json.dumps({"model_type": SECRET}))
    (data / "allowed.txt").write_text(text_of(5000))
    (data / "inner" / "more.txt").write_text(text_of(5000))
    (code / "model.py").write_text("def make():\n    return None\n")
    write_example(storage)
    profile = write_profile_of(autotune.show("quick", storage=storage), 0)
    for folder in (profile, profile.parent):
        (folder.parent / FILE).write_text(SECRET)
    settings = {"data_roots": (data,), "code_folders": (code,), "longest_wait_seconds": 5.0}
    with listening_service(storage, search_module=STAND_IN, **settings) as url:
        port = urlsplit(url).port
        yield SimpleNamespace(
            home=home, work=work, data=data, code=code, port=port, url=url, storage=storage
        )


def answer_of(world, method, path, *, body=None, headers=BEARER, connection=None):
    """Returns the status, the headers and the text of an answer, sending the path as it is."""
    used = connection or http.client.HTTPConnection("127.0.0.1", world.port, timeout=30)
    try:
        used.putrequest(method, path, skip_accept_encoding=True)
        content = b"" if body is None else body
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            used.putheader(name, value)
        used.endheaders(content)
        answer = used.getresponse()
        return answer.status, answer.headers, answer.read().decode(errors="replace")
    finally:
        if connection is None:
            used.close()


def assert_nothing_is_told(got, what):
    status, headers, text = got
    assert status < 500, (what, status, text[:300])
    for secret in (SECRET, *SECRETS_OF_PACKAGE):
        assert secret not in text, what
        assert secret not in str(headers), what


def submit(world, path="/api/v1/searches", **settings):
    headers = {**BEARER, "Content-Type": "application/json"}
    body = json.dumps({"trials": 1, "max_mem": "1GiB", **settings}).encode()
    return answer_of(world, "POST", path, body=body, headers=headers)


# -- addresses -------------------------------------------------------------------------------------


def test_no_address_leads_out_of_its_folder(world):
    """At each place a few of the writings; the slow test has them all."""
    ways = list(ways_out(world.home))
    connection = http.client.HTTPConnection("127.0.0.1", world.port, timeout=30)
    for number, place in enumerate(PLACES):
        if "/numbers/" in place:
            continue  # it imports plotly
        for way in ways[number :: len(PLACES)]:
            path = place.replace("VERSION", assets.VERSION).replace("{}", way)
            got = answer_of(world, "GET", path, connection=connection)
            assert_nothing_is_told(got, path)
    connection.close()
    assert len(ways) > 200


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_no_address_in_any_writing_leads_out_of_its_folder(world, place):
    ways = list(ways_out(world.home))
    assert len(ways) > 200
    connection = http.client.HTTPConnection("127.0.0.1", world.port, timeout=30)
    for way in ways:
        path = place.replace("VERSION", assets.VERSION).replace("{}", way)
        got = answer_of(world, "GET", path, connection=connection)
        assert_nothing_is_told(got, path)
    connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["PATCH", "DELETE"])
def test_no_name_in_any_writing_is_changed_or_deleted_outside(world, method):
    for way in ways_out(world.home):
        path = f"/api/v1/studies/{way}"
        body = b'{"name": "renamed"}' if method == "PATCH" else None
        headers = {**BEARER, "Content-Type": "application/json"}
        got = answer_of(world, method, path, body=body, headers=headers)
        assert got[0] >= 400
        assert_nothing_is_told(got, path)
    assert (world.home / FILE).read_text() == SECRET
    assert (world.work / "quick").is_dir()


@pytest.mark.parametrize(
    "name",
    ["../renamed", "..", "/tmp/renamed", "a/b", "a\\b", "a\0", ".hidden", "-x", "a" * 101, "‥/x"],
)
def test_a_study_is_not_renamed_to_a_path(world, name):
    headers = {**BEARER, "Content-Type": "application/json"}
    body = json.dumps({"name": name}).encode()
    got = answer_of(world, "PATCH", "/api/v1/studies/quick", body=body, headers=headers)
    assert got[0] == 422
    assert_nothing_is_told(got, name)
    assert (world.work / "quick").is_dir()


# -- links among the files -------------------------------------------------------------------------


def linked_folder(world):
    logs = world.work / "quick" / "logs"
    shutil.rmtree(logs)
    (world.home / "secrets" / "trial-0.log").write_text(SECRET)
    logs.symlink_to(world.home / "secrets")


def linked_file(world):
    logs = world.work / "quick" / "logs"
    if logs.is_symlink():
        logs.unlink()
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    (logs / "trial-0.log").symlink_to(world.home / FILE)
    (logs / "trial-0-attempt-2.log").symlink_to(world.home / FILE)


@pytest.mark.parametrize("plant", [linked_folder, linked_file])
@pytest.mark.parametrize("path", ["/api/v1/studies/quick/trials/0/log", "/studies/quick/trials/0"])
def test_links_among_the_logs_of_a_study_are_not_followed(world, plant, path):
    linked_file(world)
    plant(world)
    assert_nothing_is_told(answer_of(world, "GET", path), path)


@pytest.mark.parametrize("path", ["/api/v1/searches/{}/log", "/searches/{}?log=1"])
def test_a_link_in_place_of_the_log_of_a_search_is_not_followed(world, path):
    status, _, text = submit(world)
    assert status == 202
    number = json.loads(text)["id"]
    log = world.work / ".searches" / f"{number}.log"
    link = log.with_suffix(".link")
    link.symlink_to(world.home / FILE)
    link.replace(log)  # at once: the search that begins makes its log meanwhile
    assert_nothing_is_told(answer_of(world, "GET", path.format(number)), path)


def test_the_log_of_a_study_without_links_is_shown(world):
    linked_file(world)
    (world.work / "quick" / "logs" / "trial-1.log").write_text("what the trial has printed")
    status, _, text = answer_of(world, "GET", "/api/v1/studies/quick/trials/1/log")
    assert (status, text) == (200, "what the trial has printed")


# -- submissions -----------------------------------------------------------------------------------


def paths_out(world):
    """Yields paths of files outside of the folders for data and code, as JSON can name them."""
    home = world.home
    yield str(home / FILE)
    yield str(home / "secrets")
    yield f"../{FILE}"
    yield f"inner/../../{FILE}"
    yield f"./../{FILE}"
    yield f"..//{FILE}"
    yield f"....//....//{FILE}"
    yield f"{world.data}/../{FILE}"
    yield f"{world.data}/inner/../../secrets"
    yield f"{world.data}\\..\\{FILE}"
    yield f"..\\{FILE}"
    yield f"allowed.txt/../../{FILE}"
    yield f"%2e%2e/{FILE}"
    yield f"..%2f{FILE}"
    yield f"‥/{FILE}"
    yield f"../{FILE}"
    yield f"../{FILE}\0"
    yield f"../{FILE}\0.txt"
    yield f"../{FILE}."
    yield f"../{FILE}/"
    yield f"../{FILE} "
    yield f" ../{FILE}"
    yield f"../{FILE}\n"
    yield "../" * 1300 + FILE
    yield "a" * 5000
    yield "a" * 300
    yield f"file://{home}/{FILE}"
    yield f"file:{home}/{FILE}"
    yield f"//{home}/{FILE}"
    yield f"zip://x::{home}/{FILE}"
    yield "~"
    yield "~/.bashrc"
    yield "~root"
    yield "$HOME"
    yield "/etc/passwd"
    yield "/proc/self/environ"
    yield "/proc/self/cwd"
    yield "/dev/zero"
    yield "."
    yield ".."
    yield "../.."
    yield "/"
    yield "\ud800"
    yield "link.txt"
    yield "linked_folder"
    yield "linked_folder/text.txt"
    yield "inner_links"


@pytest.fixture(scope="module")
def links(world):
    """Links in the folder for data that lead out of it."""
    (world.data / "link.txt").symlink_to(world.home / FILE)
    (world.data / "linked_folder").symlink_to(world.home / "secrets")
    (world.data / "inner_links" / "deep").mkdir(parents=True)
    (world.data / "inner_links" / "text.txt").write_text(text_of(50))
    (world.data / "inner_links" / "deep" / "link.txt").symlink_to(world.home / FILE)


@pytest.mark.parametrize(
    "name",
    [
        "dataset",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tokenizer", "model", "model_source", "script")
        ),
    ],
)
def test_no_field_of_a_submission_names_a_file_outside(world, links, name):
    for path in paths_out(world):
        if name == "dataset" and path == "/dev/zero":
            continue
        got = submit(world, **{name: path})
        assert got[0] == 422, (name, path, got[2][:300])
        assert_nothing_is_told(got, (name, path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dataset", "tokenizer", "model", "model_source", "script"])
def test_no_search_space_names_a_file_outside(world, links, name):
    for path in list(paths_out(world))[::3]:
        if "\ud800" in path:
            continue
        content = f"[workload]\n{name} = {json.dumps(path)}\n"
        got = submit(world, space_content=content)
        assert got[0] == 422, (name, path, got[2][:300])
        assert_nothing_is_told(got, (name, path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["space", "extends"])
def test_no_search_space_is_read_from_a_file_outside(world, links, name):
    for path in paths_out(world):
        if name == "space":
            got = submit(world, space=path)
        elif "\ud800" not in path:
            got = submit(world, space_content=f"extends = {json.dumps(path)}\n")
        assert got[0] == 422, (name, path, got[2][:300])
        assert_nothing_is_told(got, (name, path))


def test_no_function_is_taken_from_a_file_outside(world, links):
    paths = [f"{world.home}/secret.py", "../secret.py", f"{world.code}/../secret.py", "secret.py"]
    for path in (*paths, f"{world.data}/allowed.txt", "os", "tests.building.service"):
        got = submit(world, model=f"{path}:make")
        assert got[0] == 422, (path, got[2][:300])
        assert_nothing_is_told(got, path)


@pytest.mark.parametrize("dataset", ["allowed.txt", "inner", "inner/../allowed.txt"])
def test_a_file_of_the_folder_for_data_is_taken(world, dataset):
    status, _, text = submit(world, dataset=dataset)
    assert status == 202, text


def test_a_link_within_the_folder_for_data_is_taken(world):
    folder = world.data / "linked_within"
    folder.mkdir()
    (folder / "text.txt").symlink_to(world.data / "allowed.txt")
    status, _, text = submit(world, dataset="linked_within")
    assert status == 202, text


@pytest.mark.slow
@pytest.mark.parametrize("question", ["predict", "fit", "dry-run"])
def test_no_quick_question_names_a_file_outside(world, links, question):
    names = ("dataset", "tokenizer", "model", "model_source", "script")
    paths = (str(world.home / FILE), f"../{FILE}", "link.txt", "linked_folder", "inner_links")
    for name, path in zip(names, paths, strict=True):
        headers = {**BEARER, "Content-Type": "application/json"}
        settings = {"max_mem": "1GiB"} if question != "predict" else {}
        asked = {name: path} if question == "dry-run" else {"workload": {name: path}}
        body = json.dumps({**settings, **asked}).encode()
        got = answer_of(world, "POST", f"/api/v1/{question}", body=body, headers=headers)
        assert got[0] == 422, (name, path, got[2][:300])
        assert_nothing_is_told(got, (name, path))


# -- where signing in leads ------------------------------------------------------------------------

NEXT = (
    "//evil.example",
    "///evil.example",
    "/\\evil.example",
    "\\\\evil.example",
    "/\t/evil.example",
    "/\r\n/evil.example",
    "/\r\nLocation: //evil.example",
    "/\x00/evil.example",
    "https://evil.example",
    "https:evil.example",
    "javascript:window.hacked=1",
    "data:text/html,<script>window.hacked=1</script>",
    "evil.example",
    "@evil.example",
    "/..//evil.example",
    "/.//evil.example",
    "/%2f/evil.example",
    "/%5cevil.example",
    "/studies/../..//evil.example",
    "／／evil.example",
    "/／evil.example",
    "/\u2028/evil.example",
    " //evil.example",
    "/ /evil.example",
    "",
)


@pytest.mark.parametrize("path", NEXT)
def test_signing_in_leads_to_no_other_server(world, path):
    form = urlencode({"token": TOKEN, "next": path}).encode()
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Origin": world.url}
    status, got, _ = answer_of(world, "POST", "/sign-in", body=form, headers=headers)
    assert status == 303
    location = got["Location"]
    assert location.startswith("/")
    assert not location.startswith(("//", "/\\"))
    assert urlsplit(urljoin(world.url, location)).netloc == urlsplit(world.url).netloc
    assert got.get_all("Set-Cookie")[0].startswith("autotune_token_")


@pytest.mark.parametrize(
    "path", ["//evil.example/", "/%5cevil.example", "/%09/evil.example", "/..%2f/evil.example"]
)
def test_a_url_with_the_token_leads_to_no_other_server(world, path):
    status, got, _ = answer_of(world, "GET", f"{path}?token={TOKEN}", headers={})
    assert status == 303
    location = got["Location"]
    assert not location.startswith(("//", "/\\"))
    assert urlsplit(urljoin(world.url, location)).netloc == urlsplit(world.url).netloc
