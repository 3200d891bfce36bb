"""Every server of a database answers as the one that has the files."""

import re
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

import autotune
from autotune.service.application import create_app
from autotune.service.routes.devices import devices
from autotune.service.routes.study_changes import follow_change
from autotune.service.settings import ServerSettings
from autotune.service.state import Caller
from autotune.spec.queued_search import ServiceEvent
from autotune.storage.searches import NewSearch, Searches
from autotune.storage.servers import RunningServer, Servers
from autotune.storage.tables import REVISION, VERSION
from autotune.storage.tokens import OWNER, Tokens
from tests.building.listening_service import listening_service
from tests.building.profiles import write_profile_of
from tests.building.queued_searches import TOKEN, wait_until
from tests.building.service import STAND_IN, TRIALS, cookie_of, routes_of, serving
from tests.building.studies import open_store, write_study

BEARER = {"Authorization": f"Bearer {TOKEN}"}
OF_ONE_SERVER = {
    "/api/v1/health": "which of them leads",
    **dict.fromkeys(("/api/v1/devices", "/parts/devices", "/"), "how much memory is in use"),
    **dict.fromkeys(("/new", "/fit"), "a key that is drawn for each form"),
    "/api/v1/events": "a stream without an end",
    "/metrics": "what it counts of itself",
}
"""Routes whose answers differ between servers, and by what."""
VALUES = {
    "name": "quick",
    "number": "1",
    "kind": "pareto",
    "target": "pytorch",
    "version": "0",
    "file": "trace.json.gz",
    "part": "least",
}
READS = [
    path
    for method, path in routes_of(create_app(ServerSettings()))
    if method == "GET" and path not in OF_ONE_SERVER
]
FILES = {
    "/api/v1/searches/1/log": "what the search has printed",
    "/api/v1/studies/quick/trials/1/log": "what the trial has printed",
    "/api/v1/studies/quick/profiles": "trace.json.gz",
    "/api/v1/studies/quick/trials/1/profile": "trace.json.gz",
    "/api/v1/studies/quick/trials/1/profile/memory.html": "<title>memory</title>",
    "/api/v1/studies/quick/trials/1/profile/code/graph-0.py": "<b>one</b>",
    "/searches/1?log=1": "what the search has printed",
    "/studies/quick/trials/1": "what the trial has printed",
    "/studies/quick/trials/1#profiles": "trace.json.gz",
}
"""Addresses of what is in a file, and a part of it."""


def write_files(storage):
    """Writes a study with a profile, the log of a trial, and the log of a search that has run."""
    write_study(storage, TRIALS, name="quick")
    result = autotune.show("quick", storage=storage)
    write_profile_of(result, 1)
    (result.folder / "logs").mkdir()
    (result.folder / "logs" / "trial-1.log").write_text("what the trial has printed\n")
    with open_store(storage) as store:
        searches = Searches(store.database)
        new = NewSearch(request={}, submitted_by=OWNER, study="later", group="nowhere")
        searches.submit(new)
    logs = result.folder.parent / ".searches"
    logs.mkdir()
    (logs / "1.log").write_text("what the search has printed\n")


def linked(folder):
    """Returns the URLs of a new database and of a link to it, in folders of their own."""
    for name in ("one", "two"):
        (folder / name).mkdir()
    (folder / "two" / "autotune.db").symlink_to(folder / "one" / "autotune.db")
    return [f"sqlite:///{folder}/{name}/autotune.db" for name in ("one", "two")]


@contextmanager
def in_its_own_folder():
    """Lets a server that is started have its files beside the link to its database.

    So two servers on machines of their own have them apart, and one database.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "autotune.storage.database.sqlite_file",
            lambda url: Path(url.removeprefix("sqlite:///")),
        )
        yield


@pytest.fixture(scope="module")
def storages(tmp_path_factory):
    one, two = linked(tmp_path_factory.mktemp("servers"))
    write_files(one)
    return one, two


@pytest.fixture(scope="module")
def servers(storages):
    """The URLs of a server that has the files, and of one that has not."""
    one, two = storages
    with listening_service(one, search_module=STAND_IN) as first, ExitStack() as opened:
        with in_its_own_folder():
            second = opened.enter_context(listening_service(two, search_module=STAND_IN))
        yield first, second


def asked(server, path, **headers):
    return httpx.get(f"{server}{path}", headers={**BEARER, **headers}, timeout=60)


def content_of(answer, server):
    """Returns an answer without what names its server."""
    return re.sub(r"(127\.0\.0\.1|localhost):[0-9]+|/(one|two)/", "HERE", answer.text)


@pytest.mark.slow
@pytest.mark.parametrize("template", READS)
def test_a_server_without_the_files_answers_as_the_one_that_has_them(servers, template):
    path = re.sub(r"{(\w+)(:\w+)?}", lambda found: VALUES[found[1]], template)
    answers = [asked(server, path) for server in servers]
    first, second = [
        (answer.status_code, content_of(answer, server))
        for answer, server in zip(answers, servers, strict=True)
    ]
    assert first == second


@pytest.mark.parametrize("path", FILES)
def test_a_file_of_one_server_is_had_of_the_other(servers, path):
    for server in servers:
        answer = asked(server, path)
        assert (answer.status_code, FILES[path] in answer.text) == (200, True)


def test_the_second_server_has_none_of_the_files(servers, storages):
    folder = Path(storages[1].removeprefix("sqlite:///")).parent
    assert not [file for file in folder.rglob("*") if file.suffix in (".log", ".html", ".gz")]


def test_a_file_of_a_profile_has_the_same_headers_and_bytes(servers):
    path = "/api/v1/studies/quick/trials/1/profile/"
    for name in ("trace.json.gz", "memory.html", "snapshot.pickle", "code/graph-0.py"):
        first, second = (asked(server, path + name) for server in servers)
        assert first.content == second.content
        for header in ("content-type", "content-disposition", "content-security-policy"):
            assert first.headers[header] == second.headers[header]


@pytest.mark.parametrize("name", ["nothing", "../profile", "../../../../../actions", "%2e%2e/log"])
def test_only_a_name_that_is_a_file_of_the_profile_is_asked_for(servers, name):
    path = f"/api/v1/studies/quick/trials/1/profile/{quote(name, safe='%')}"
    for server in servers:
        answer = asked(server, path)
        assert (answer.status_code, "has no file" in answer.text) == (404, True)


def test_a_server_asks_no_third_one_for_another(servers, storages):
    """Otherwise two servers that both lack a file would ask each other for ever."""
    missing = "/api/v1/studies/quick/trials/2/log"
    for server in servers:
        assert asked(server, missing).status_code == 404


def test_what_a_machine_has_that_no_server_reaches_is_one_sentence(storages):
    with serving(storages[1]) as client:
        service = client.app.state.service
        away = {"digest": "d" * 64, "owner_digest": "", "host": "gpu-7 0a1b"}
        service.servers.renew(RunningServer(address="http://127.0.0.1:1", **away))
        headers = {"Authorization": "Bearer the-token-of-this-test-Zq9"}
        answer = client.get("/api/v1/studies/quick/trials/0/log", headers=headers)
        page = client.get("/studies/quick/trials/0", headers=headers)
        service.servers.remove(RunningServer(address="", **away))
    sentence = (
        "the log of trial 0 of study 'quick' is not on this machine, and may be on gpu-7, where no "
        "server is that this one reaches"
    )
    assert (answer.status_code, answer.json()["detail"]) == (503, sentence)
    assert "may be on gpu-7" in page.text


def test_another_server_only_reads(tmp_path):
    with serving(f"sqlite:///{tmp_path}/a.db") as client:
        service = client.app.state.service
        secret = service.others._http.headers["authorization"]
        assert client.get("/api/v1/studies", headers={"Authorization": secret}).status_code == 200
        body = {"max_mem": "8GiB"}
        answer = client.post("/api/v1/searches", json=body, headers={"Authorization": secret})
        assert answer.status_code == 403


def test_the_random_token_of_each_server_opens_all_of_the_database(tmp_path):
    storage = f"sqlite:///{tmp_path}/a.db"
    with serving(storage, token=None) as one, serving(storage, token=None, port=8322) as two:
        token = one.app.state.settings.owner_token
        cookie = {"Cookie": f"{cookie_of(one)}={token}"}
        for client, port in ((one, 8321), (two, 8322)):
            host = {"Host": f"127.0.0.1:{port}"}
            assert client.get("/api/v1/actions", headers={**cookie, **host}).status_code == 200


def test_neither_a_chosen_token_nor_a_secret_is_stored(tmp_path):
    with serving(f"sqlite:///{tmp_path}/a.db") as client:
        (running,) = client.app.state.service.servers.running()
        assert running.owner_digest == ""
        secret = client.app.state.service.others._http.headers["authorization"].split()[1]
        assert secret not in (tmp_path / "a.db").read_bytes().decode("latin-1")


def test_a_server_is_known_by_the_address_that_it_gives_others(tmp_path):
    given = {"internal_address": "http://node-1.lan:8321/"}
    with serving(f"sqlite:///{tmp_path}/a.db", **given) as client:
        (running,) = client.app.state.service.servers.running()
        assert running.address == "http://node-1.lan:8321"
        answer = client.get("/api/v1/health", headers={"Host": "node-1.lan:8321"})
        assert answer.status_code == 200


def test_a_server_that_has_ended_is_off_the_list(tmp_path):
    storage = f"sqlite:///{tmp_path}/a.db"
    with serving(storage) as client:
        assert len(client.app.state.service.servers.running()) == 1
    with open_store(storage) as store:
        assert Servers(store.database).running() == []
        assert Tokens(store.database).valid() == {}


# -- what one of them changes ----------------------------------------------------------------------


@pytest.fixture
def two_folders(storages, tmp_path):
    """Servers of one database, each with a log of the same study, and their folders of files."""
    first, second = linked(tmp_path)
    write_study(first, TRIALS, name="quick")
    folders = [tmp_path / name / "work" / "autotune" for name in ("one", "two")]
    for folder in folders:
        (folder / "quick" / "logs").mkdir(parents=True)
    with serving(first) as one, ExitStack() as opened:
        with in_its_own_folder():
            opened.enter_context(serving(second, port=8322))
        yield one, folders


OF_ONE = {"Authorization": "Bearer the-token-of-this-test-Zq9"}


def test_the_files_of_a_renamed_study_have_its_name_on_every_server(two_folders):
    one, folders = two_folders
    answer = one.patch("/api/v1/studies/quick", json={"name": "renamed"}, headers=OF_ONE)
    assert answer.status_code == 200
    wait_until(lambda: all((folder / "renamed" / "logs").is_dir() for folder in folders))


def test_the_files_of_a_deleted_study_are_gone_on_every_server(two_folders):
    one, folders = two_folders
    code = one.delete("/api/v1/studies/quick", headers=OF_ONE).json()["confirm"]
    deleted = one.delete(f"/api/v1/studies/quick?confirm={code}", headers=OF_ONE).json()
    assert deleted["machine"] in socket.gethostname()
    wait_until(lambda: not any((folder / "quick").exists() for folder in folders))


@pytest.mark.parametrize(
    "data", [{"action": "deleted"}, {"action": "renamed", "name": "../../stolen"}], ids=str
)
@pytest.mark.parametrize("study", ["quick", "..", "../autotune", "logs"])
def test_an_event_that_somebody_has_forged_moves_no_file(two_folders, study, data):
    one, folders = two_folders
    service = one.app.state.service
    (folders[0] / "logs").mkdir()
    before = sorted(folders[0].parent.rglob("*"))
    event = ServiceEvent(number=1, search=0, study=study, kind="study", data=data, at=0.0)
    follow_change(folders[0], service.store, service.searches, event)
    assert sorted(folders[0].parent.rglob("*")) == before


def test_the_devices_of_every_machine_are_shown(tmp_path):
    with serving(f"sqlite:///{tmp_path}/a.db") as client:
        others = client.app.state.service.others
        answers = [httpx.Response(200, json={"devices": [{"name": "B", "machine": "gpu-7"}]})]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(others, "answers_of_machines", lambda path: answers)
            found = client.app.state.service
            shown = devices(found, Caller(name="ada", role="reader"))["devices"]
            own = devices(found, Caller(name="x", role="reader", is_server=True))["devices"]
    assert [device["machine"] for device in shown] == [*(one["machine"] for one in own), "gpu-7"]


# -- an upgrade ------------------------------------------------------------------------------------


def test_a_server_whose_database_a_later_autotune_has_upgraded_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.service.other_servers._RENEW_SECONDS", 0.01)
    with serving(f"sqlite:///{tmp_path}/a.db") as client:
        service = client.app.state.service
        with service.store.database.writing() as connection:
            connection.execute(VERSION.update().values(version_num="9999"))
        wait_until(lambda: service.others.error is not None)
        assert f"has schema 9999, this autotune knows them up to {REVISION}" in str(
            service.others.error
        )


@pytest.mark.slow
def test_the_command_ends_then_with_one_sentence(tmp_path):
    storage = f"sqlite:///{tmp_path}/a.db"
    command = [sys.executable, "-m", "autotune", "serve", "--port", "0", "--storage", storage]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout.readline().startswith("http://")
        with open_store(storage) as store, store.database.writing() as connection:
            connection.execute(VERSION.update().values(version_num="9999"))
        _, said = running.communicate(timeout=60)
    sentences = [line for line in said.splitlines() if "has schema 9999" in line]
    assert (running.returncode, sentences[-1].partition(":")[0]) == (2, "error")
    assert "Traceback" not in said
