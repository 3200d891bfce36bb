"""`autotune serve`: its URL, its token, its port, its end, and the named tokens."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from tests.building.commands import run_here

READY_SECONDS = 60.0
HEALTH = "/api/v1/health"


@contextmanager
def served(folder, *arguments, token=None):
    """Start `autotune serve` in `folder`; yield the process and the URL that it has printed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("AUTOTUNE_TOKEN",)}
    if token is not None:
        environment["AUTOTUNE_TOKEN"] = token
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune", "serve", "--port", "0", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate(timeout=READY_SECONDS)


def end(process, number):
    """Send a signal; return the exit code and what was printed since."""
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=READY_SECONDS)
    return process.returncode, stdout, stderr


def test_it_prints_one_url_with_a_token_that_lets_in_and_ends_with_the_signal(tmp_path):
    with served(tmp_path) as (process, url):
        base, token = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/\?token=([\w-]{40,})", url).groups()
        assert httpx.get(base + HEALTH).json()["status"] == "ok"
        path = f"{base}/api/v1/searches"
        assert httpx.get(path).status_code == 401
        assert httpx.get(path, headers={"Authorization": f"Bearer {token}"}).status_code == 200
        code, stdout, stderr = end(process, signal.SIGTERM)
    assert (code, stdout) == (143, "")
    assert "Traceback" not in stderr
    assert token not in stderr
    assert (tmp_path / "studies" / "autotune.db").is_file()


@pytest.mark.slow
def test_a_token_of_the_environment_is_not_printed(tmp_path):
    with served(tmp_path, token="of-the-team") as (process, url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        bearer = {"Authorization": "Bearer of-the-team"}
        assert httpx.get(f"{url}api/v1/searches", headers=bearer).status_code == 200
        code, stdout, stderr = end(process, signal.SIGINT)
    assert code == 130
    assert "of-the-team" not in stdout + stderr


@pytest.mark.slow
def test_it_is_ready_within_two_seconds(tmp_path):
    waits = []
    for _ in range(3):
        began = time.monotonic()
        with served(tmp_path) as (_, url):
            assert httpx.get(url.partition("?")[0] + HEALTH.removeprefix("/")).status_code == 200
            waits.append(time.monotonic() - began)
    assert min(waits) < 2.0


@pytest.mark.slow
def test_an_open_stream_does_not_keep_it_from_ending(tmp_path):
    with served(tmp_path, token="abc") as (process, url):
        headers = {"Authorization": "Bearer abc"}
        with httpx.stream("GET", f"{url}api/v1/events", headers=headers) as stream:
            assert stream.status_code == 200
            began = time.monotonic()
            code, _, stderr = end(process, signal.SIGTERM)
    assert code == 143
    assert time.monotonic() - began < 15.0
    assert "Traceback" not in stderr


def test_a_port_that_is_taken_is_one_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_here("serve", "--port", str(port), folder=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"error: port {port} of 127.0.0.1 is in use\n"
        "hint: stop the other program, or choose another port with --port\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_packages_of_the_extra_are_named_where_they_are_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    ended = run_here("serve", folder=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr == (
        'error: this command needs uvicorn\nhint: pip install "autotune[service]"\n'
    )


def test_a_file_in_a_folder_does_not_choose_who_gets_in(tmp_path):
    for line in ('allow-code = ["."]', 'host = "0.0.0.0"', 'webhook = "http://x"', "keep = 1"):
        (tmp_path / "autotune.toml").write_text(f"[serve]\n{line}\n")
        ended = run_here("serve", "--port", "0", folder=tmp_path)
        assert ended.returncode == 2
        assert "which a file that is found in a folder may not do" in ended.stderr


# -- named tokens ----------------------------------------------------------------------------------


def test_a_token_is_added_listed_and_removed(tmp_path):
    def tokens(*words):
        return run_here("serve", "tokens", *words, folder=tmp_path)

    made = tokens("add", "screen", "--read-only").stdout.strip()
    assert re.fullmatch(r"[\w-]{40,}", made)
    tokens("add", "ada")
    listed = tokens().stdout
    assert listed == tokens("list").stdout
    assert re.search(r"^ada +member ", listed, re.MULTILINE)
    assert re.search(r"^screen +reader  ", listed, re.MULTILINE)
    assert made not in listed
    assert tokens("remove", "screen").returncode == 0
    again = tokens("remove", "screen")
    assert (again.returncode, "no valid token 'screen'" in again.stderr) == (2, True)


def test_the_list_of_tokens_shows_where_somebody_is_told_without_the_secret_path(tmp_path):
    url = "https://hooks.example.org/services/very-secret"
    run_here("serve", "tokens", "add", "ada", "--webhook", url, folder=tmp_path)
    listed = run_here("serve", "tokens", folder=tmp_path).stdout
    assert "hooks.example.org" in listed
    assert "very-secret" not in listed


def test_tokens_are_those_of_the_database_that_is_named_before_or_after(tmp_path):
    storage = ["--storage", f"sqlite:///{tmp_path}/other.db"]
    run_here("serve", "tokens", "add", "ada", *storage, folder=tmp_path)
    for words in ([*storage, "tokens", "list"], ["tokens", *storage], ["tokens", "list", *storage]):
        assert "ada" in run_here("serve", *words, folder=tmp_path).stdout
    assert not (tmp_path / "studies").exists()


@pytest.mark.slow
def test_a_named_token_lets_in_and_a_read_only_one_only_looks(tmp_path):
    made = run_here("serve", "tokens", "add", "screen", "--read-only", folder=tmp_path)
    bearer = {"Authorization": f"Bearer {made.stdout.strip()}"}
    with served(tmp_path, token="abc") as (_, url):
        assert httpx.get(f"{url}api/v1/searches", headers=bearer).status_code == 200
        assert httpx.post(f"{url}api/v1/searches", json={}, headers=bearer).status_code == 403


def test_every_line_is_json_and_that_of_a_request_has_its_route_and_person(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_STORAGE", f"sqlite:///{tmp_path}/a.db")  # which is printed first
    with served(tmp_path, "--log-format", "json", token="x" * 40) as (process, url):
        headers = {"Authorization": f"Bearer {'x' * 40}"}
        httpx.get(f"{url.rstrip('/')}/api/v1/searches/7", headers=headers)
        _, _, stderr = end(process, signal.SIGTERM)
    lines = [json.loads(line) for line in stderr.splitlines()]
    assert lines[0]["message"].startswith("defaults from the environment")
    assert "The server has stopped" in lines[-1]["message"]
    [line] = [line for line in lines if "milliseconds" in line]
    assert line["route"] == "/api/v1/searches/{number}"
    assert (line["method"], line["status"], line["person"]) == ("GET", 404, "owner")


IN_JSON = """
import logging, sys, threading
from autotune.cli.serve import write_log
write_log("json")
"""


def said_in_json(program, **streams):
    return subprocess.run(
        [sys.executable, "-c", IN_JSON + program],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        **{"stderr": subprocess.PIPE, **streams},
    )


def test_a_log_that_cannot_be_written_ends_nothing():
    program = "logging.getLogger('autotune.service').warning('something'); print('goes on')"
    with open("/dev/full", "w") as full:
        assert said_in_json(program, stderr=full).stdout == "goes on\n"


@pytest.mark.parametrize("where", ["{0}()", "threading.Thread(target={0}).start()"])
def test_an_exception_that_nothing_catches_is_one_line_of_json(where):
    program = "def fail():\n    raise ValueError('no such thing')\n" + where.format("fail")
    (line,) = said_in_json(program).stderr.splitlines()
    said = json.loads(line)
    assert (said["level"], "no such thing" in said["message"]) == ("ERROR", True)
    assert "in fail" in said["traceback"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "worker"])
def test_an_error_is_json_too_where_the_log_is(command, tmp_path):
    storage = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"
    words = ["--log-format", "json", "--storage", storage, "--port", "0"]
    program = [sys.executable, "-m", "autotune", command, *words]
    ended = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [line["message"] for line in lines if line["level"] == "ERROR"]
    assert ended.returncode == 2
