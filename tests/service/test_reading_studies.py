"""Reads of the interface give what the command line gives, once for however many ask."""

import asyncio
import io
import json
import os
import signal
import zipfile
from contextlib import suppress

import pytest
from typer.testing import CliRunner

from autotune.cli import app as command_line
from autotune.errors import UnknownStudy
from autotune.reporting.figures import FIGURES
from autotune.service import reading
from autotune.service.cache import Cache
from autotune.service.study_data import read_study
from autotune.spec.confirmation import PairedSpeed, new_confirmation_id
from autotune.storage.searches import Searches
from tests.building.service import BEARER, HOSTILE, ORIGIN, serving, write_example
from tests.building.studies import config, definition, keep, measured, open_store, write_study


def command(*arguments):
    ran = CliRunner().invoke(command_line, list(arguments))
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def numbers(answer):
    return [trial["number"] for trial in answer.json()["trials"]]


# -- the same as on the command line ---------------------------------------------------------------


@pytest.mark.parametrize("prefer", ["fastest", "smallest", "balanced"])
def test_a_study_is_the_json_of_show(get, served_storage, prefer):
    printed = command("show", "quick", "--json", "--prefer", prefer, "--storage", served_storage)
    expected = {**json.loads(printed), "storage": ORIGIN}
    assert get("/api/v1/studies/quick", prefer=prefer).json() == expected


def test_tolerances_are_those_of_show(get, served_storage):
    printed = command(
        *("show", "quick", "--json", "--tolerance", "speed=0.5", "--storage", served_storage)
    )
    shown = get("/api/v1/studies/quick", speed_tolerance=0.5).json()
    assert shown["front"] == json.loads(printed)["front"]


def test_the_zip_of_an_export_has_the_files_that_the_command_writes(
    get, served_storage, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    command("export", "quick", "--to", "transformers", "--storage", served_storage)
    (folder,) = (tmp_path / "studies").glob("quick-transformers-*")
    written = {
        f"{folder.name}/{file.relative_to(folder)}": file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
    answer = get("/api/v1/studies/quick/exports/transformers")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == written
    assert answer.headers["content-disposition"] == f'attachment; filename="{folder.name}.zip"'


def test_an_export_as_text_says_how_to_use_it_and_what_is_missing(get):
    path = "/api/v1/studies/quick/exports/pytorch"
    shown = get(path, {"Accept": "application/json"}, trial=2).json()
    assert (shown["target"], shown["trial"]) == ("pytorch", 2)
    assert {"command", "refusals", "notes"} <= set(shown)
    assert all(set(file) == {"name", "text"} for file in shown["files"])


def test_exporting_writes_nothing_on_the_server(get, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert get("/api/v1/studies/quick/exports/trl", trial=0).status_code == 200
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_report_is_the_page_of_the_command(get, served_storage, tmp_path):
    file = tmp_path / "report.html"
    command("report", "quick", "--out", str(file), "--storage", served_storage)
    answer = get("/api/v1/studies/quick/report")
    server = "--server http://127.0.0.1:8321"
    assert answer.text == file.read_text().replace(f"--storage {served_storage}", server)
    assert "sandbox allow-scripts" in answer.headers["content-security-policy"]
    assert "allow-same-origin" not in answer.headers["content-security-policy"]


NOT_OF_QUICK = {"timeline", "importance", "predicted", "predicted-speed", "roofline"}
"""Figures of what the study `quick` has not: predictions, enough trials, a measured device."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(FIGURES) - NOT_OF_QUICK))
def test_a_figure_is_that_of_plot(get, served_storage, tmp_path, kind):
    file = tmp_path / "figure.json"
    command("plot", "quick", kind, "--out", str(file), "--storage", served_storage)
    assert get(f"/api/v1/studies/quick/figures/{kind}").json() == json.loads(file.read_text())


def test_a_figure_without_the_data_it_shows_says_what_is_missing(get):
    answer = get("/api/v1/studies/quick/figures/importance")
    assert answer.status_code == 422
    assert "importance needs at least 20 trials" in answer.json()["detail"]


def kill_this_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_figure_whose_process_is_killed_can_be_asked_for_again(get, monkeypatch):
    address = "/api/v1/studies/quick/figures/importance"
    with monkeypatch.context() as patch:
        patch.setattr(reading, "_figure_of_a_process", kill_this_process)
        answer = get(address, prefer="smallest")
    assert answer.status_code == 503
    assert "has ended" in answer.json()["detail"]
    assert get(address, prefer="smallest").status_code == 422  # it has too few trials


def test_an_unknown_study_has_the_sentence_and_the_hint_of_the_command_line(get, served_storage):
    ran = CliRunner().invoke(command_line, ["show", "quik", "--storage", served_storage])
    answer = get("/api/v1/studies/quik")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert isinstance(ran.exception, UnknownStudy)
    message = ran.exception.message.replace(served_storage, "the database of the server")
    assert answer.json()["detail"] == message
    assert answer.json()["hint"] == ran.exception.hint


# -- trials ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"feasible": True}, [0, 1, 2]),
        ({"feasible": False}, [3, 4]),
        ({"outcome": "crashed"}, [3]),
        ({"outcome": ["crashed", "interrupted"]}, [3, 4]),
        ({"front": True}, [1, 2]),
        ({"front": False}, [0, 3, 4]),
        ({"technique": "micro_batch_size:7"}, [1]),
        ({"technique": ["micro_batch_size:7", "micro_batch_size:6"]}, [1, 2]),
        ({"technique": ["micro_batch_size:7", "precision:bf16-mixed"]}, []),
        ({"sort": "-tokens_per_second"}, [1, 0, 2, 3, 4]),
        ({"sort": "peak_memory_bytes"}, [2, 1, 0, 3, 4]),
        ({"sort": "-number"}, [4, 3, 2, 1, 0]),
        ({"sort": "micro_batch_size"}, [4, 3, 2, 1, 0]),
        ({"limit": 2, "offset": 1}, [1, 2]),
        ({"limit": 0}, []),
        ({"offset": 100}, []),
    ],
)
def test_trials_are_filtered_sorted_and_paged(get, query, expected):
    assert numbers(get("/api/v1/studies/quick/trials", **query)) == expected


def test_the_total_counts_all_pages(get):
    assert get("/api/v1/studies/quick/trials", feasible=True, limit=1).json()["total"] == 3


@pytest.mark.parametrize("sort", ["-tokens_per_second", "tokens_per_second"])
def test_what_was_not_measured_is_last_in_both_directions(get, sort):
    assert numbers(get("/api/v1/studies/quick/trials", sort=sort))[-2:] == [3, 4]


@pytest.mark.parametrize(
    "query",
    [
        {"sort": "nothing"},
        {"sort": ""},
        {"sort": "config"},
        {"technique": "precision"},
        {"technique": "nothing:1"},
        {"outcome": "nothing"},
        {"limit": 1001},
        {"limit": -1},
        {"offset": 2**63},
        {"feasible": "maybe"},
        {"max_perplexity_increase": "nan"},
        {"speed_tolerance": "inf"},
        {"technique": "precision:\0"},
    ],
)
def test_an_invalid_query_of_trials_says_which_value_is_wrong(get, query):
    answer = get("/api/v1/studies/quick/trials", **query)
    assert answer.status_code == 422
    assert answer.json()["hint"]


def test_one_trial_is_its_record_in_the_study(get):
    records = get("/api/v1/studies/quick").json()["trials"]
    assert [get(f"/api/v1/studies/quick/trials/{number}").json() for number in range(5)] == records


@pytest.mark.parametrize("number", ["5", str(2**31 - 1)])
def test_a_trial_that_there_is_not_is_not_found(get, number):
    answer = get(f"/api/v1/studies/quick/trials/{number}")
    assert answer.status_code == 404
    assert answer.json()["hint"] == "its trials are 0 to 4"


@pytest.mark.parametrize("number", ["-1", str(2**31), "9" * 400, "1.5", "%00", "x"])
def test_a_number_that_no_trial_has_is_invalid(get, number):
    assert get(f"/api/v1/studies/quick/trials/{number}").status_code == 422


def test_a_hostile_message_comes_as_json_only(get):
    answer = get("/api/v1/studies/quick/trials/3")
    assert answer.json()["message"] == HOSTILE
    assert answer.headers["content-type"] == "application/json"
    assert HOSTILE not in get("/api/v1/studies/quick/report").text


def test_the_front_follows_the_preferences(get):
    fastest, smallest = (
        get("/api/v1/studies/quick/front", prefer=prefer).json()
        for prefer in ("fastest", "smallest")
    )
    assert (fastest["pick"], smallest["pick"]) == (1, 2)
    assert fastest["front"] == [trial["number"] for trial in fastest["trials"]]
    assert smallest["preferences"]["prefer"] == "smallest"
    assert smallest["pick_reason"].startswith("the smallest")


# -- the list of studies ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three_studies(tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('three')}/a.db"
    for name, trials in (("Beta", 2), ("alpha", 1), ("gamma-2", 3)):
        write_study(url, [measured()] * trials, name=name)
    with serving(url) as client:
        yield lambda **query: client.get("/api/v1/studies", params=query, headers=BEARER).json()


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, ["gamma-2", "alpha", "Beta"]),
        ({"sort": "name"}, ["alpha", "Beta", "gamma-2"]),
        ({"sort": "-trials"}, ["gamma-2", "Beta", "alpha"]),
        ({"sort": "created"}, ["Beta", "alpha", "gamma-2"]),
        ({"query": "A-2"}, ["gamma-2"]),
        ({"limit": 1, "offset": 1}, ["alpha"]),
    ],
)
def test_studies_are_searched_sorted_and_paged(three_studies, query, expected):
    assert [study["name"] for study in three_studies(**query)["studies"]] == expected


def test_the_list_says_what_each_study_is(three_studies):
    (study,) = three_studies(query="beta")["studies"]
    assert study["trials"] == study["trials_wanted"] == 2
    assert study["state"] is None
    assert study["created_at"].endswith("+00:00")


# -- nothing is stale, and nothing is computed twice -----------------------------------------------


@pytest.fixture
def growing(tmp_path):
    """A client, and the store that another process would have."""
    url = f"sqlite:///{tmp_path}/a.db"
    write_example(url)
    with serving(url) as client, open_store(url) as store:
        client.headers.update(BEARER)
        yield client, store


def test_a_new_result_is_in_the_next_answer(growing):
    client, store = growing
    assert client.get("/api/v1/studies/quick").json()["pick"] == 1
    keep(store, config(5), measured(tokens_per_second=5000.0), study="quick")
    shown = client.get("/api/v1/studies/quick").json()
    assert shown["pick"] == 5
    assert len(shown["trials"]) == 6
    assert client.get("/api/v1/studies").json()["studies"][0]["trials"] == 5


def test_a_deleted_study_whose_name_is_used_again_is_the_new_one(growing):
    client, store = growing
    client.get("/api/v1/studies/quick")
    Searches(store.database).delete_study("quick")
    assert client.get("/api/v1/studies/quick").status_code == 404
    store.create_study(definition("quick"), trials_wanted=1)
    assert client.get("/api/v1/studies/quick").json()["trials"] == []


def test_a_renamed_study_has_its_new_name_in_its_answers(growing):
    client, store = growing
    client.get("/api/v1/studies/quick")
    Searches(store.database).rename_study("quick", "slow")
    assert client.get("/api/v1/studies/slow").json()["study"] == "slow"
    assert client.get("/api/v1/studies").json()["studies"][0]["name"] == "slow"


def test_a_confirmation_is_in_the_next_answer(growing):
    client, store = growing
    assert client.get("/api/v1/studies/quick/trials/2").json()["confirmations"] == 0
    paired = PairedSpeed(
        config=config(2),
        partner=config(1),
        schedule="in turn",
        rounds=4,
        speed_ratio=0.6,
        partner_tokens_per_second=1000.0,
        seconds=1.0,
    )
    for confirmation_id in (new_confirmation_id(), new_confirmation_id()):
        store.add_confirmation("quick", paired, confirmation_id=confirmation_id)
    assert client.get("/api/v1/studies/quick/trials/2").json()["confirmations"] == 2


def test_changed_trials_alone_are_read_and_give_what_reading_all_gives(tmp_path):
    url = f"sqlite:///{tmp_path}/a.db"
    write_example(url)
    with open_store(url) as store:
        earlier = read_study(store, "quick", store.version("quick"), None, address=ORIGIN)
        keep(store, config(4), measured(peak_memory_bytes=1000), study="quick")
        keep(store, config(5), study="quick")
        version = store.version("quick")
        added = read_study(store, "quick", version, earlier, address=ORIGIN)
        whole = read_study(store, "quick", version, None, address=ORIGIN)
        assert added.records == whole.records
        assert list(added.lines) == list(whole.lines)
        assert added.lines[0] is earlier.lines[0]


def test_an_answer_that_has_not_changed_is_not_sent_again(growing):
    client, store = growing
    first = client.get("/api/v1/studies/quick")
    tag = {"If-None-Match": first.headers["etag"]}
    again = client.get("/api/v1/studies/quick", headers=tag)
    assert (again.status_code, again.content) == (304, b"")
    keep(store, config(5), measured(), study="quick")
    changed = client.get("/api/v1/studies/quick", headers=tag)
    assert changed.status_code == 200
    assert changed.headers["etag"] != first.headers["etag"]


def test_a_client_without_gzip_gets_the_same_bytes(get):
    compressed = get("/api/v1/studies/quick", {"Accept-Encoding": "gzip"})
    plain = get("/api/v1/studies/quick", {"Accept-Encoding": "identity"})
    refused = get("/api/v1/studies/quick", {"Accept-Encoding": "gzip;q=0"})
    assert compressed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert "content-encoding" not in refused.headers
    assert compressed.content == plain.content


def test_many_who_ask_at_once_share_one_computation():
    computed = []

    async def slow():
        computed.append(1)
        await asyncio.sleep(0.01)
        return "result"

    async def ask_many():
        cache = Cache()
        asked = [cache.get("key", slow, bytes_of=len) for _ in range(50)]
        return await asyncio.gather(*asked)

    assert asyncio.run(ask_many()) == ["result"] * 50
    assert computed == [1]


def test_an_error_reaches_all_who_ask_and_is_not_kept():
    async def failing():
        await asyncio.sleep(0.01)
        raise ValueError("no")

    async def working():
        return "result"

    async def ask():
        cache = Cache()
        asked = [cache.get("key", failing, bytes_of=len) for _ in range(3)]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        return errors, await cache.get("key", working, bytes_of=len)

    errors, result = asyncio.run(ask())
    assert [str(error) for error in errors] == ["no"] * 3
    assert result == "result"


def test_a_client_that_leaves_takes_the_result_from_nobody():
    async def slow():
        await asyncio.sleep(0.05)
        return "result"

    async def ask():
        cache = Cache()
        leaving = asyncio.create_task(cache.get("key", slow, bytes_of=len))
        staying = asyncio.create_task(cache.get("key", slow, bytes_of=len))
        await asyncio.sleep(0.01)
        leaving.cancel()
        return await staying

    assert asyncio.run(ask()) == "result"


def test_the_cache_holds_no_more_than_its_limit():
    async def fill():
        cache = Cache(most_bytes=100)
        for number in range(50):

            async def text(number=number):
                return str(number) * 10

            await cache.get(number, text, bytes_of=len)
        return cache

    cache = asyncio.run(fill())
    assert cache.bytes <= 100
    assert cache.peek(49) is not None
    assert cache.peek(0) is None


# -- logs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A client, and the folder of the logs of its study; each test has a trial of its own."""
    parent = tmp_path_factory.mktemp("logs")
    url = f"sqlite:///{parent}/a.db"
    write_example(url)
    folder = parent / "work" / "a" / "quick" / "logs"
    folder.mkdir(parents=True)
    with serving(url) as client:
        client.headers.update(BEARER)
        yield client, folder


def test_a_log_is_the_end_of_the_last_attempts(logs):
    client, folder = logs
    (folder / "trial-1.log").write_text("first")
    (folder / "trial-1-attempt-2.log").write_bytes(b"begin\xff" + b"x" * 300_000 + b"end\n")
    answer = client.get("/api/v1/studies/quick/trials/1/log")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text.endswith("end\n")
    assert len(answer.content) == 256 * 1024
    assert client.get("/api/v1/studies/quick/trials/1/log?bytes=4").text == "end\n"


def test_a_link_is_no_log(logs, tmp_path):
    client, folder = logs
    (tmp_path / "secret").write_text("secret")
    (folder / "trial-3.log").symlink_to(tmp_path / "secret")
    assert client.get("/api/v1/studies/quick/trials/3/log").status_code == 404


def test_a_trial_without_a_log_here_says_so(logs):
    client, _ = logs
    answer = client.get("/api/v1/studies/quick/trials/2/log")
    assert answer.status_code == 404
    assert "there is no log of trial 2" in answer.json()["detail"]


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "..%2f..%2fetc", "%2fetc%2fpasswd", "a%00b", "quick%2f..", "%ff", "."]
)
def test_no_name_leads_out_of_the_folder(logs, name):
    client, _ = logs
    answer = client.get(f"/api/v1/studies/{name}/trials/1/log")
    assert answer.status_code in (404, 422)
    assert answer.headers["content-type"] == "application/problem+json"


# -- a database that is away -----------------------------------------------------------------------


def put_folder_in_place_of(database):
    """The server's other work may make the file anew between the two calls."""
    while not database.is_dir():
        database.unlink(missing_ok=True)
        with suppress(FileExistsError):
            database.mkdir()


def test_a_database_that_is_away_answers_503_and_says_when_to_ask_again(tmp_path):
    url = f"sqlite:///{tmp_path}/a.db"
    write_example(url)
    with serving(url) as client:
        put_folder_in_place_of(tmp_path / "a.db")
        client.app.state.service.store.database.engine.dispose()
        answer = client.get("/api/v1/studies/quick", headers=BEARER)
        health = client.get("/api/v1/health")
    assert (answer.status_code, health.status_code) == (503, 503)
    assert answer.headers["retry-after"]
    assert health.json()["database"] == "unreachable"
