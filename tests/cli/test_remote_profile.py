"""`autotune profile --server`, and the calls of `autotune.Client` behind it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import autotune
from autotune.errors import InvalidInput, StorageUnavailable
from tests.building.commands import run_here
from tests.building.listening_service import listening_service
from tests.building.profiles import FILES, PROFILE, write_profile_of
from tests.building.queued_searches import TOKEN
from tests.building.service import TRIALS
from tests.building.studies import write_study

ALL = {*FILES, "profile.json"}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server with a study, of which trial 0 has a profile."""
    storage = f"sqlite:///{tmp_path_factory.mktemp('remote')}/studies/autotune.db"
    write_study(storage, TRIALS, name="quick")
    write_profile_of(autotune.show("quick", storage=storage), 0)
    with listening_service(storage, search_module="tests.building.profile_stand_in") as found:
        yield found


@pytest.fixture
def run(url, tmp_path):
    def run(*words):
        return run_here(
            "profile", "quick", *words, "--server", url, folder=tmp_path, AUTOTUNE_TOKEN=TOKEN
        )

    return run


@pytest.fixture
def client(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with autotune.Client(url, TOKEN) as connected:
        yield connected


def names_in(folder):
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_a_profile_that_the_server_has_is_downloaded_and_printed(run, tmp_path):
    ended = run("0")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "aten::mm" in ended.stdout
    folder = tmp_path / "studies" / "quick-profile-0"
    assert "Files in studies/quick-profile-0" in ended.stdout
    assert names_in(folder) == ALL
    assert (folder / "trace.json.gz").read_bytes() == FILES["trace.json.gz"]


def test_a_trial_without_a_profile_is_profiled_there_first(run, client, tmp_path):
    ended = run("--steps", "4", "--json")  # the pick
    assert ended.returncode == 0, ended.stderr
    (profile,) = json.loads(ended.stdout)["profiles"]
    assert (profile["trial"], profile["steps"]) == (1, 4)
    assert "Profiling by hand" in ended.stderr
    assert names_in(tmp_path / profile["folder"]) == ALL
    before = len(client.searches())
    assert run("1", "--steps", "4", "--quiet").returncode == 0
    assert len(client.searches()) == before


def test_a_profile_that_fails_ends_the_command_with_its_sentence(run):
    ended = run("2", "--steps", "13")
    assert ended.returncode == 2
    assert "no luck" in ended.stderr
    assert "try 12" in ended.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("3",), "never came to a steady step"),
        (("99",), "has no trial 99"),
        (("0", "--steps", "0"), "invalid number of steps to profile: 0"),
        (("0", "--quota", "1GiB"), "--quota is the server's to decide"),
        (("0", "--storage", "sqlite:///x.db"), "both say where the study is"),
    ],
)
def test_a_mistake_is_one_sentence(run, words, sentence):
    ended = run(*words)
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_profile_is_not_written_over_other_files(client, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(InvalidInput, match="mine"):
        client.download_profile("quick", 0, out="mine")
    assert names_in(tmp_path / "mine") == {"notes.txt"}


def test_the_profiles_of_a_study_are_listed(client):
    profiles = client.profiles("quick")
    assert 0 in [profile["trial"] for profile in profiles]
    assert {file["name"] for file in profiles[0]["files"]} == ALL


# -- a server that means harm ----------------------------------------------------------------------


@pytest.fixture
def download_from(tmp_path, monkeypatch, url):
    """download_from(files, content) downloads from a server that lists files and sends content."""
    monkeypatch.chdir(tmp_path)
    with autotune.Client(url, TOKEN) as real:
        trial = real._connection.send("GET", "/studies/quick/trials/0").content

    def download(files, content):
        answer = {"files": [{"name": name, "bytes": size} for name, size in files]}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = trial if self.path.endswith("/trials/0") else content
                if self.path.endswith("/profile"):
                    body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            try:
                with autotune.Client(f"http://127.0.0.1:{server.server_port}", "x") as client:
                    return client.download_profile("quick", 0, out="here")
            finally:
                server.shutdown()

    return download


GOOD = json.dumps(PROFILE.to_dict()).encode()


def test_what_a_good_server_sends_is_a_profile(download_from):
    assert download_from([("profile.json", len(GOOD))], GOOD).profile == PROFILE


@pytest.mark.parametrize(
    "name", ["../evil", "/tmp/evil", "code/../../evil", "a\\b", "c:evil", "", "code//x", "a?b", 7]
)
def test_a_file_that_would_lie_elsewhere_is_not_written(download_from, tmp_path, name):
    with pytest.raises(InvalidInput):
        download_from([("profile.json", len(GOOD)), (name, 1)], GOOD)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [len(GOOD) - 1, len(GOOD) + 1])
def test_a_file_of_another_size_than_was_said_is_rejected(download_from, tmp_path, size):
    with pytest.raises(InvalidInput, match="was to have"):
        download_from([("profile.json", size)], GOOD)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        json.dumps({**PROFILE.to_dict(), "steps": "three"}).encode(),
        json.dumps({**PROFILE.to_dict(), "operators": [{}]}).encode(),
        json.dumps({**PROFILE.to_dict(), "bytes_by_category": {}}).encode(),
        json.dumps({**PROFILE.to_dict(), "timeline": 5}).encode(),
    ],
)
def test_what_is_no_profile_is_one_sentence(download_from, tmp_path, content):
    with pytest.raises(InvalidInput):
        download_from([("profile.json", len(content))], content)
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_is_larger_than_the_disk_is_not_begun(download_from, tmp_path):
    with pytest.raises(StorageUnavailable, match="left"):
        download_from([("profile.json", len(GOOD)), ("trace.json.gz", 2**60)], GOOD)
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_was_watched_ends_with_how_to_have_its_files(url, client, tmp_path):
    number = str(client.profile("quick", 0, steps=5).id)
    client.wait(int(number))
    watch = ("watch", number, "--server", url, "--quiet")
    ended = run_here(*watch, folder=tmp_path, AUTOTUNE_TOKEN=TOKEN)
    assert ended.returncode == 0
    assert f"autotune profile quick 0 --server {url}" in ended.stdout
    ended = run_here(*watch, "--json", folder=tmp_path, AUTOTUNE_TOKEN=TOKEN)
    assert json.loads(ended.stdout)["profiled_trial"] == 0
