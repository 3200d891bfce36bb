"""`autotune.Client` against a real server on a real port."""

import json
import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import autotune
from autotune import errors
from autotune.errors import InvalidInput, ServerUnreachable, StudyMismatch, UnknownStudy
from tests.building.listening_service import BreakingProxy, listening_service
from tests.building.queued_searches import TOKEN, wait_until
from tests.building.results import record, study_result

TRIALS = 3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('client')}/studies/autotune.db"


@pytest.fixture(scope="module")
def url(storage):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAND_IN_SECONDS", "0.02")
        with listening_service(storage) as found:
            yield found


@pytest.fixture(scope="module")
def client(url):
    with autotune.Client(url, TOKEN) as connected:
        yield connected


@pytest.fixture(scope="module")
def ended(client):
    """A search that has ended, of the study `made`."""
    return client.wait(client.submit(space="quick", trials=TRIALS, name="made").id)


def as_json(value):
    return json.loads(json.dumps(value))


@contextmanager
def other_server(answers):
    """Yield the URL of a server that is not ours: {path: (status, content type, body)}."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0]
            status, kind, body = answers.get(path, (404, "text/html", "<h1>none</h1>"))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


# -- searches --------------------------------------------------------------------------------------


def test_a_search_ends_as_the_server_says(client, ended):
    assert (ended.state, ended.study, ended.exit_code) == ("finished", "made", 0)
    assert ended.submitted_by == "owner"
    assert ended.url == f"{client.url}/searches/{ended.id}"


def test_a_submission_has_what_was_asked_for_and_not_what_is_at_its_default(client):
    search = client.submit(trials=1, layers=2, predict=True, time_budget="none", priority=-3)
    assert search.request == {
        "trials": 1,
        "layers": 2,
        "time_budget": "none",
        "priority": -3,
    }
    assert (search.priority, search.state) == (-3, "queued")
    client.wait(search.id)


def test_a_search_is_watched_to_its_end_event_by_event(client, ended):
    events = list(client.watch(ended.id))
    numbers = [event.id for event in events]
    assert numbers == sorted(set(numbers))
    trials = [event.data["trial"]["number"] for event in events if event.kind == "trial_ended"]
    assert trials == list(range(TRIALS))
    assert (events[-1].kind, events[-1].data["state"]) == ("search", "finished")
    assert {event.search for event in events} == {ended.id}


def test_no_event_is_lost_or_doubled_where_the_stream_breaks_again_and_again(url, client):
    with BreakingProxy(url, answer_bytes=5000) as proxy, autotune.Client(proxy.url, TOKEN) as far:
        search = client.submit(trials=8, name="broken")
        seen = list(far.watch(search.id))
        assert proxy.broken > 2
    assert seen == list(client.watch(search.id))


@pytest.mark.slow
def test_watching_goes_on_with_the_next_server(tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_SECONDS", "0.5")
    storage = f"sqlite:///{tmp_path}/studies/autotune.db"
    seen, waits = [], []
    with listening_service(storage) as url:
        watching = autotune.Client(url, TOKEN)
        search = watching.submit(trials=8, name="outlives")
        events = watching.watch(search.id, on_wait=waits.append)
        while not seen or seen[-1].kind != "trial_ended":
            seen.append(next(events))
    port = int(url.rpartition(":")[2])
    reader = threading.Thread(target=lambda: seen.extend(events), daemon=True)
    reader.start()
    wait_until(lambda: waits)
    with listening_service(storage, port=port), autotune.Client(url, TOKEN) as again:
        reader.join(60)
        assert seen[-1].data["state"] == "finished"
        assert seen == list(again.watch(search.id))


def test_watching_goes_on_after_the_event_that_is_named(client, ended):
    events = list(client.watch(ended.id))
    assert list(client.watch(ended.id, after=events[2].id)) == events[3:]


def test_a_submission_whose_answer_is_lost_is_made_once(url, client):
    before = len(client.searches())
    with (
        BreakingProxy(url, answer_bytes=20, connections=2) as proxy,
        autotune.Client(proxy.url, TOKEN) as far,
    ):
        search = far.submit(trials=1, name="lost-answer")
        assert proxy.broken == 2
    assert len(client.searches()) == before + 1
    client.wait(search.id)


def test_an_ended_search_is_continued_on_its_study(client):
    first = client.wait(client.submit(trials=1, name="again").id)
    more = client.wait(client.continue_search(first.id, trials=2).id)
    assert (more.study, more.state) == ("again", "finished")
    assert len(client.show("again").trials) == 3


def test_a_queued_search_is_cancelled_and_its_priority_changed(client):
    running = client.submit(trials=8, name="runs")
    queued = client.submit(trials=1, name="waits")
    assert client.set_priority(queued.id, 7).priority == 7
    assert client.cancel(queued.id).state == "cancelled"
    client.cancel(running.id)
    assert client.wait(running.id).state in ("cancelled", "finished")
    assert queued.id in [search.id for search in client.searches(state="cancelled")]
    client.remove(queued.id)
    assert queued.id not in [search.id for search in client.searches()]


# -- studies ---------------------------------------------------------------------------------------


def test_a_study_is_the_one_that_python_shows_on_the_server(client, ended, storage):
    remote, local = client.show("made"), autotune.show("made", storage=storage)
    assert as_json(remote.to_dict()) == {**as_json(local.to_dict()), "storage": client.url}
    assert remote.pick.reason == local.pick.reason
    assert client.trial("made", 1) == local.trial(1)


def test_the_pick_follows_the_preferences(client, ended):
    preferences = autotune.Preferences(prefer="smallest")
    assert "smallest" in client.show("made", preferences=preferences).pick.reason


def test_figures_reports_and_exports_come_from_the_server(client, ended, storage, tmp_path):
    client.wait(client.submit(trials=1, name="longer").id)
    result = client.show("made")
    local = autotune.show("made", storage=storage)
    assert result.plot("memory").data
    assert client.compare("made", "longer").data
    page = result.write_report(tmp_path / "report.html").read_text()
    expected_page = local.write_report(tmp_path / "local.html").read_text()
    assert page == expected_page.replace(f"--storage {storage}", f"--server {client.url}")
    written = result.export("pytorch", out=tmp_path / "remote")
    expected = local.export("pytorch", out=tmp_path / "remote", overwrite=True)
    assert (written.files, str(written)) == (expected.files, str(expected))
    assert [study["name"] for study in client.studies(query="made")] == ["made"]


def test_an_export_overwrites_no_other_file(client, ended, tmp_path):
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(InvalidInput, match="already exists, with other content"):
        client.export("made", "pytorch", out=tmp_path)
    assert (tmp_path / "train.py").read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["../evil.py", "/etc/evil", "a/b.py", "..", "", "a\\b.py", "C:evil", "a\0b"]
)
def test_a_file_of_an_export_that_leads_out_of_the_folder_is_rejected(name, tmp_path):
    files = [{"name": name, "text": "x"}]
    answer = {"files": files, "command": "", "refusals": [], "notes": []}
    study = study_result([record(0)], study="made").to_dict()
    answers = {
        "/api/v1/studies/made": (200, "application/json", json.dumps(study)),
        "/api/v1/studies/made/exports/pytorch": (200, "application/json", json.dumps(answer)),
    }
    with (
        other_server(answers) as url,
        autotune.Client(url, TOKEN) as hostile,
        pytest.raises(InvalidInput, match="would lie outside the folder"),
    ):
        hostile.export("made", "pytorch", trial=0, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# -- errors ----------------------------------------------------------------------------------------


def test_what_the_server_rejects_is_the_error_that_python_raises_there(client, storage):
    with pytest.raises(UnknownStudy) as there:
        autotune.show("nope", storage=storage)
    with pytest.raises(UnknownStudy) as here:
        client.show("nope")
    assert here.value.message == there.value.message.replace(storage, "the database of the server")
    assert here.value.hint == there.value.hint


def test_an_invalid_setting_is_rejected_with_its_hint(client):
    with pytest.raises(InvalidInput, match="there is no setting 'trialz'") as error:
        client.submit(trialz=3)
    assert "did you mean 'trials'?" in error.value.hint


def test_a_conflict_is_an_error_of_its_own_class(client, ended):
    with pytest.raises(StudyMismatch, match="cannot be cancelled: it is finished"):
        client.cancel(ended.id)


@pytest.mark.parametrize(
    ("token", "message"),
    [("wrong-token", "does not accept the token"), (None, "asks for a token")],
)
def test_without_the_right_token_a_sentence_says_where_it_belongs(
    url, token, message, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(InvalidInput, match=message) as error:
        autotune.Client(url, token).studies()
    assert error.value.exit_code == 2
    assert str(tmp_path / "autotune" / "tokens.toml") in error.value.hint
    assert "wrong-token" not in f"{error.value.message}{error.value.hint}"


def test_health_needs_no_token(url, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert autotune.Client(url).health()["version"] == autotune.__version__


def test_a_server_that_is_not_there_can_be_tried_again_later():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ServerUnreachable, match=f"{url} cannot be reached") as error:
        autotune.Client(url, TOKEN).searches()
    assert error.value.exit_code == 75


def test_another_program_on_the_port_is_named_as_such():
    with other_server({}) as url, pytest.raises(InvalidInput) as error:
        autotune.Client(url, TOKEN).studies()
    assert error.value.message == (
        f"{url} is not a server of autotune: it answered 404 with text/html"
    )


def test_a_server_of_another_version_that_lacks_a_route_is_named():
    health = json.dumps({"status": "ok", "version": "9.9.9"})
    with (
        other_server({"/api/v1/health": (200, "application/json", health)}) as url,
        pytest.raises(InvalidInput, match="does not know GET /api/v1/studies") as error,
    ):
        autotune.Client(url, TOKEN).studies()
    assert "the server runs autotune 9.9.9" in error.value.hint


def test_a_proxy_without_its_server_is_named():
    answers = {"/api/v1/studies": (502, "text/html", "<h1>Bad Gateway</h1>")}
    with other_server(answers) as url, pytest.raises(ServerUnreachable, match="answered 502"):
        autotune.Client(url, TOKEN).studies()


def test_a_redirect_does_not_carry_the_token_away():
    with (
        other_server({"/api/v1/studies": (302, "text/html", "")}) as url,
        pytest.raises(InvalidInput, match="is not a server of autotune"),
    ):
        autotune.Client(url, TOKEN).studies()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The files of a certificate that signs itself, and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "certificate.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run(command, check=True, capture_output=True)
    return files


def test_a_certificate_is_verified_and_can_be_trusted(certificate, tmp_path, monkeypatch):
    with listening_service(f"sqlite:///{tmp_path}/autotune.db", tls=certificate) as url:
        with pytest.raises(InvalidInput, match=r"certificate of https://.* self.signed") as error:
            autotune.Client(url, TOKEN).health()
        assert "SSL_CERT_FILE=" in error.value.hint
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert autotune.Client(url, TOKEN).health()["status"] == "ok"
        plain = url.replace("https", "http")
        with pytest.raises(ServerUnreachable, match="cannot be reached"):
            autotune.Client(plain, TOKEN).health()


def test_a_server_without_tls_is_named(url):
    with pytest.raises(InvalidInput, match="does not speak TLS") as error:
        autotune.Client(url.replace("http", "https"), TOKEN).health()
    assert url in error.value.hint


def test_every_error_of_autotune_has_a_name_of_its_own():
    kinds = [
        error
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.AutotuneError)
    ]
    names = {errors.problem_name(kind) for kind in kinds}
    assert len(names) == len(kinds) > 15
    assert errors.problem_name(UnknownStudy) == "unknown-study"


def test_a_client_shows_no_token():
    shown = repr(autotune.Client("http://127.0.0.1:8321/?token=very-secret"))
    assert shown == "<autotune server at http://127.0.0.1:8321>"
