"""Commands that ask a server: the same output and exit codes as those that run here."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

import autotune
from tests.building.commands import run_here
from tests.building.listening_service import listening_service
from tests.building.queued_searches import TOKEN, wait_until


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('remote')}/studies/autotune.db"


@pytest.fixture(scope="module")
def url(storage):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAND_IN_SECONDS", "0.4")
        with listening_service(storage) as found:
            yield found


@pytest.fixture
def run(url, tmp_path):
    """run("queue") runs a command with the server and its token in the environment."""

    def run(*words, **environment):
        settings = {"AUTOTUNE_SERVER": url, "AUTOTUNE_TOKEN": TOKEN, **environment}
        return run_here(*words, folder=tmp_path, **settings)

    return run


@pytest.fixture(scope="module")
def study(url):
    """The name of a study of the server, whose search has ended."""
    with autotune.Client(url, TOKEN) as client:
        assert client.wait(client.submit(trials=3, name="made").id).state == "finished"
    return "made"


@pytest.mark.slow
def test_a_study_of_a_server_is_compared_with_the_file_that_it_is_exported_into(
    run, url, study, tmp_path
):
    (tmp_path / "args.json").write_text('{"per_device_train_batch_size": 1}')
    ended = run("export", study, "--into", "args.json", "--server", url)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "a step of args.json has 1 sequences" in ended.stderr


@pytest.mark.slow  # the parser of transformers imports torch
def test_a_study_of_a_server_is_exported_into_a_file_here(run, url, study, tmp_path):
    (tmp_path / "args.json").write_text('{"per_device_train_batch_size": 24}')
    ended = run("export", study, "--into", "args.json", "--server", url, "--json")
    assert ended.returncode == 0, ended.stderr
    written = json.loads((tmp_path / "args.autotune.json").read_text())
    micro_batch = written["per_device_train_batch_size"]
    assert micro_batch * written["gradient_accumulation_steps"] == 24


def test_a_submission_says_where_to_look(run, url):
    ended = run("submit", "--trials", "1", "--name", "looked-for", "--space", "quick")
    assert (ended.returncode, ended.stderr) == (0, "")
    first, watch, page = ended.stdout.splitlines()
    number = first.split()[1]
    assert first.startswith(f"Search {number} for study looked-for is queued")
    assert watch == f"  autotune watch {number} --server {url}  # follow it"
    assert page == f"  {url}/searches/{number}  # its page"
    assert run("watch", number, "--quiet").returncode == 0


def test_a_search_on_a_server_is_printed_as_a_search_here(run, url, storage):
    ended = run("search", "--trials", "3", "--name", "whole", "--server", url)
    assert ended.returncode == 0
    assert "Study whole by hand" in ended.stderr
    trials = [line for line in ended.stderr.splitlines() if line.startswith("[3/3")]
    assert "#2 trial 2" in trials[0]
    assert "Study whole: 3 trials: 3 ok" in ended.stdout
    assert "Pick: #2" in ended.stdout
    assert f"autotune search --server {url} --name whole --trials 6" in ended.stdout


@pytest.mark.slow
def test_json_is_that_of_the_server_and_nothing_else(run, url, storage):
    ended = run("search", "--trials", "2", "--name", "as-json", "--server", url, "--json", "-q")
    assert (ended.returncode, ended.stderr) == (0, "")
    local = autotune.show("as-json", storage=storage).to_dict()
    assert json.loads(ended.stdout) == {**json.loads(json.dumps(local)), "storage": url}


@pytest.mark.slow
def test_a_search_without_a_feasible_trial_ends_with_1(run, url):
    ended = run("search", "--trials", "1", "--max-mem", "1MiB", "--name", "none", "--server", url)
    assert ended.returncode == 1
    assert "over the cap" in ended.stdout


@pytest.mark.slow
def test_a_search_that_fails_ends_with_its_code_its_reason_and_its_hint(run, url):
    ended = run("search", "--trials", "1", "--seed", "13", "--server", url, "--quiet")
    assert ended.returncode == 70
    assert ended.stderr == "error: the workload cannot be built\nhint: use another seed\n"


@pytest.mark.slow
def test_a_dry_run_of_a_server_says_what_one_here_says(run, url):
    words = ["search", "--space", "quick", "--layers", "1", "--width", "32", "--heads", "2"]
    words += ["--max-mem", "8MiB", "--trials", "3", "--dry-run", "--quiet"]
    here, there = run(*words).stdout, run(*words, "--server", url).stdout
    expected = [line for line in here.splitlines() if not line.startswith("Time ")]
    assert [line for line in there.splitlines() if not line.startswith("Time ")] == expected
    assert "the first are" in there


def test_what_the_server_rejects_is_printed_as_a_mistake_here(run, url):
    ended = run("search", "--script", "train.py", "--server", url)
    assert ended.returncode == 2
    assert "error: " in ended.stderr
    assert "--allow-code" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["show", "made"],
        ["show", "made", "--json"],
        ["show", "made", "--csv"],
        ["show", "made", "--markdown", "--prefer", "smallest"],
        ["show", "nope"],
        ["export", "made", "--to", "pytorch", "--out", "out"],
        ["export", "made", "--to", "nope", "--out", "out"],
        ["export", "made", "--to", "pytorch", "--trial", "99"],
        ["report", "made", "--out", "report.html"],
        ["report", "made", "--out", "report.pdf"],
        ["plot", "made", "memory", "--out", "figure.html"],
        ["plot", "made", "pie"],
    ],
    ids=" ".join,
)
def test_a_command_prints_and_writes_what_it_does_on_the_server(
    words, run, url, storage, study, tmp_path
):
    here = run(*words, "--storage", storage)
    written = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for file in written:
        file.unlink()
    there = run(*words, "--server", url)

    def of_server(text):
        """The text without where the database is, which a server tells nobody."""
        for local, remote in (
            (f"--storage {storage}", f"--server {url}"),
            (f'"{storage}"', f'"{url}"'),
        ):
            text = text.replace(local, remote)
        text = text.partition("; for a study of ")[0]  # where else it may be
        return text.replace(storage, "the database of the server")

    assert there.returncode == here.returncode
    assert there.stdout == of_server(here.stdout)
    assert there.stderr.partition("; for a study of ")[0] == of_server(here.stderr)
    again = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert again.keys() == written.keys()
    if "plot" not in words:  # whose pages have random names of elements
        assert again == {file: of_server(page.decode()).encode() for file, page in written.items()}


def test_the_studies_of_a_server_are_listed(run, url, study):
    ended = run("studies", "--server", url)
    assert f"{study} " in ended.stdout
    assert "3/3" in ended.stdout


def test_the_queue_lists_searches_with_their_state(run, study):
    assert " finished " in run("queue").stdout
    assert json.loads(run("queue", "--json").stdout)["searches"]
    assert run("queue", "--state", "queued").stdout.startswith("no queued searches")


@pytest.mark.slow
def test_a_search_that_runs_is_cancelled_and_watched_to_that_end(run, url):
    number = run("submit", "--trials", "8", "--name", "cancelled", "--quiet").stdout.strip()
    assert "cancelled" in run("cancel", number).stdout
    watched = run("watch", "cancelled", "--quiet")
    assert watched.returncode == 75
    assert f"error: search {number} was cancelled" in watched.stderr
    assert f"autotune search --name cancelled --server {url}" in watched.stderr


def test_a_study_is_read_of_the_server_of_the_environment(run, url, study):
    ended = run("show", study, "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["storage"] == url
    assert f"defaults from the environment: server = {url}" in ended.stderr


def test_a_study_that_the_server_of_the_environment_lacks_may_be_in_this_folder(run):
    ended = run("show", "unknown")
    assert ended.returncode == 2
    assert "for a study of this folder: --storage sqlite:///studies/autotune.db" in ended.stderr


@pytest.mark.slow
def test_a_server_that_is_not_there_can_be_tried_again(run):
    ended = run("queue", "--server", "http://127.0.0.1:9")
    assert ended.returncode == 75
    assert "http://127.0.0.1:9 cannot be reached" in ended.stderr


@pytest.mark.slow
def test_a_token_in_the_url_is_used_and_never_printed(run, url):
    server = f"{url}/?token={TOKEN}"
    ended = run("submit", "--trials", "1", AUTOTUNE_TOKEN="", AUTOTUNE_SERVER=server)
    assert ended.returncode == 0
    assert TOKEN not in ended.stdout + ended.stderr
    number = ended.stdout.split()[1]
    default = {"AUTOTUNE_TOKEN": "", "AUTOTUNE_DEFAULT_SERVER": server}
    ended = run("watch", number, "-q", AUTOTUNE_SERVER=server, **default)
    assert ended.returncode == 0
    assert f"defaults from the environment: server = {url}\n" in ended.stderr
    assert TOKEN not in ended.stdout + ended.stderr


def test_a_file_that_lies_in_a_folder_does_not_choose_the_server(run, tmp_path):
    for text in (
        'server = "http://evil.example.org"',
        '[queue]\nserver = "http://evil.example.org"',
    ):
        (tmp_path / "autotune.toml").write_text(text)
        ended = run("queue")
        assert ended.returncode == 2
        assert "would choose who gets what is submitted" in ended.stderr


def test_trials_that_have_ended_are_not_said_to_begin(run, study):
    ended = run("watch", study)
    assert ended.returncode == 0
    assert "#0" not in ended.stderr
    assert "Study made: 3 trials" in ended.stdout


def test_the_searches_of_a_study_are_cancelled_by_its_name(run, url):
    with autotune.Client(url, TOKEN) as client:
        ids = [client.submit(trials=40, name=name).id for name in ("by-name", "kept", "by-name")]
        assert run("cancel", "by-name").returncode == 0
        assert client.wait(ids[0]).state == client.wait(ids[2]).state == "cancelled"
        assert client.search(ids[1]).state != "cancelled"
        client.cancel(ids[1])
    ended = run("cancel", "by-name")
    assert ended.returncode == 2
    assert "no search of a study 'by-name' waits or runs" in ended.stderr


def test_a_search_that_was_cancelled_in_the_queue_is_not_to_be_continued(run, url):
    """Its name alone would begin another study, with the defaults."""
    with autotune.Client(url, TOKEN) as client:
        first = client.submit(trials=40, name="before-it")
        queued = client.submit(trials=2, name="never-begun", space="quick")
        client.cancel(queued.id)
        client.cancel(first.id)
    ended = run("watch", str(queued.id), "--quiet")
    assert ended.returncode == 75
    assert f"search {queued.id} was cancelled" in ended.stderr
    assert "before its study began" in ended.stderr
    assert f"its settings are on {url}/searches/{queued.id}" in ended.stderr
    assert "autotune search --name" not in ended.stderr


# -- Ctrl-C ----------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(url, tmp_path):
    """interrupted("watch", "3", when="#1") sends SIGINT once stderr has that text."""

    def interrupted(*words, when, folder=tmp_path):
        environment = {**os.environ, "AUTOTUNE_SERVER": url, "AUTOTUNE_TOKEN": TOKEN}
        process = subprocess.Popen(
            [sys.executable, "-m", "autotune", *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
        reader.start()
        wait_until(lambda: any(when in line for line in lines) or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
        reader.join(10)
        return code, "".join(lines)

    return interrupted


@pytest.mark.slow
def test_an_interrupt_of_watch_leaves_the_search_to_the_server(interrupted, run, url):
    number = run("submit", "--trials", "8", "--name", "left", "--quiet").stdout.strip()
    code, stderr = interrupted("watch", number, when="#1 trial 1")
    assert code == 130
    assert f"Search {number} goes on" in stderr
    assert f"autotune watch {number} --server {url}" in stderr
    assert run("watch", number, "--quiet").returncode == 0


@pytest.mark.slow
def test_an_interrupt_of_a_search_on_a_server_cancels_it(interrupted, run, url):
    words = ["search", "--trials", "8", "--name", "stopped", "--server", url]
    code, stderr = interrupted(*words, when="#1 trial 1")
    assert code == 130
    assert stderr.endswith(
        "Cancelled; every finished trial is stored. Continue with:\n"
        f"  autotune search --name stopped --server {url}\n"
    )
    with autotune.Client(url, TOKEN) as client:
        assert client.wait(client.searches(study="stopped")[0].id).state == "cancelled"
    assert run(*words, "--quiet").returncode == 0
