"""A search outlives what it is shown on: its trials are stored, and exit codes keep their meaning.

Real processes with real descriptors; only the trials of the searches are a stand-in.
"""

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import termios
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.building.studies import measured, write_study

TIMEOUT_SECONDS = 120.0
SPACE = Path(__file__).parents[1] / "quick_study" / "space.toml"
TRIALS = 4
SEARCH = (
    *("-m", "tests.building.quick_search", "search", "--name", "quick", "--space", str(SPACE)),
    *("--max-mem", "1GiB", "--device", "cpu", "--sampler", "random", "--trials", str(TRIALS)),
    *("--no-predict", "--no-confirm", "--fresh", "--database-wait", "1s"),
)
AS_IT_IS = 'exec "$@"'


def run(arguments, *, folder, shell=AS_IT_IS, **streams):
    """Run Python in `folder`, with its standard streams redirected by `shell`."""
    return subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path()},
        timeout=TIMEOUT_SECONDS,
        check=False,
        text=True,
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        | streams,
    )


def python_path():
    """Returns the path with this checkout in front; an empty entry would be the current folder."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(__file__).parents[2]), *([inherited] if inherited else [])])


def stored(folder):
    """How many results the study has; 0 while there is no database."""
    file = folder / "studies" / "autotune.db"
    query = "SELECT count(*) FROM autotune_trials WHERE finished_at IS NOT NULL"
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
            return connection.execute(query).fetchone()[0]
    except sqlite3.Error:
        return 0


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A folder with a study called `by-hand`."""
    folder = tmp_path_factory.mktemp("study")
    write_study(f"sqlite:///{folder}/studies/autotune.db", [measured(), measured()])
    return folder


# -- searches --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_whose_display_has_no_reader_ends_with_its_result(tmp_path):
    ended = run(SEARCH, folder=tmp_path, shell='"$@" 2>&1 >out | head -1; cat out')
    assert stored(tmp_path) == TRIALS
    assert re.search("^Pick.*: #", ended.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_search_without_standard_streams_stores_its_trials(tmp_path):
    assert run(SEARCH, folder=tmp_path, shell='exec "$@" <&- >&- 2>&-').returncode == 0
    assert stored(tmp_path) == TRIALS


@pytest.mark.slow
def test_a_search_whose_answer_finds_no_room_is_complete_and_says_where_the_answer_is(tmp_path):
    ended = run([*SEARCH, "--json", "--quiet"], folder=tmp_path, shell='exec "$@" >/dev/full')
    assert stored(tmp_path) == TRIALS
    assert (ended.returncode, ended.stderr) == (
        74,
        "error: standard output cannot be written: No space left on device\n"
        "hint: every result is stored; make room and print them: autotune show quick --json\n",
    )


FROM_PYTHON = f"""
import os, sys
import autotune
from autotune.study.search import search
from tests.quick_study.quick_executor import QuickExecutor
search.__kwdefaults__["make_executor"] = QuickExecutor
result = autotune.search(
    name="quick", space={str(SPACE)!r}, max_mem="1GiB", device="cpu", sampler="random",
    trials={TRIALS}, predict=False, confirm=False, fresh=True,
)
print(result), print(result, file=sys.stderr)
with open("seen", "w") as file:
    file.write(f"{{[os.readlink(f'/proc/self/fd/{{number}}') for number in range(3)]}}")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_script_without_standard_streams_can_search(tmp_path):
    ended = run(["-c", FROM_PYTHON], folder=tmp_path, shell='exec "$@" <&- >&- 2>&-')
    assert (ended.returncode, stored(tmp_path)) == (0, TRIALS)
    assert (tmp_path / "seen").read_text() == str(["/dev/null"] * 3)


class Terminal:
    """A search on a terminal that it controls, and the end that shows the terminal."""

    def __init__(self, folder, *, before=(), **streams):
        self.folder = folder
        self.ours, theirs = pty.openpty()

        def take_terminal():
            os.setsid()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

        settings = {"PYTHONPATH": python_path(), "TERM": "xterm", "STAND_IN_SECONDS": "0.3"}
        self.process = subprocess.Popen(
            [*before, sys.executable, *SEARCH],
            cwd=folder,
            env={**os.environ, **settings},
            **{"stdin": theirs, "stdout": theirs, "stderr": theirs} | streams,
            preexec_fn=take_terminal,
        )
        os.close(theirs)

    def read_until(self, said):
        shown = b""
        while said not in shown:
            assert select.select([self.ours], [], [], TIMEOUT_SECONDS)[0], shown
            shown += os.read(self.ours, 65536)

    def wait_for_results(self, number):
        end = time.monotonic() + TIMEOUT_SECONDS
        while stored(self.folder) < number:
            assert time.monotonic() < end
            assert self.process.poll() is None
            time.sleep(0.1)


@contextmanager
def on_a_terminal(folder, **options):
    search = Terminal(folder, **options)
    try:
        yield search
    finally:
        search.process.kill()
        search.process.wait()
        with suppress(OSError):  # the test has closed it
            os.close(search.ours)


@pytest.mark.slow
def test_a_terminal_that_closes_stops_a_search_in_order(tmp_path):
    with on_a_terminal(tmp_path) as search:
        search.read_until(b"#1")
        os.close(search.ours)
        assert search.process.wait(timeout=TIMEOUT_SECONDS) == 128 + signal.SIGHUP
    with closing(sqlite3.connect(tmp_path / "studies" / "autotune.db")) as connection:
        states = connection.execute("SELECT DISTINCT state FROM autotune_attempts").fetchall()
    assert "running" not in [state for (state,) in states]


@pytest.mark.slow
def test_under_nohup_a_search_goes_on_without_its_terminal(tmp_path):
    with on_a_terminal(tmp_path, before=["nohup"]) as search:
        search.wait_for_results(1)
        os.close(search.ours)
        assert search.process.wait(timeout=TIMEOUT_SECONDS) == 0
    assert stored(tmp_path) == TRIALS


@pytest.mark.slow
def test_a_search_whose_folder_is_removed_says_so_and_can_be_repeated(tmp_path):
    folder = tmp_path / "removed"
    folder.mkdir()
    with (
        (tmp_path / "said").open("w") as said,
        on_a_terminal(folder, stderr=said, stdout=said) as search,
    ):
        search.wait_for_results(1)
        shutil.rmtree(folder)
        assert search.process.wait(timeout=TIMEOUT_SECONDS) == 75
    last = (tmp_path / "said").read_text().splitlines()[-2]
    assert last.startswith("error: the database sqlite:///studies/autotune.db was removed")


# -- other commands --------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_answer_that_finds_no_room_is_one_sentence(study):
    shell = 'exec "$@" >/dev/full'
    ended = run(["-m", "autotune", "show", "by-hand"], folder=study, shell=shell)
    assert ended.returncode == 74
    assert ended.stderr.startswith("error: standard output cannot be written: No space left")


@pytest.mark.slow
def test_a_reader_that_has_gone_ends_a_command_quietly(study):
    read_end, pipe = os.pipe()
    os.close(read_end)
    with open(pipe, "w") as unread:
        ended = run(["-m", "autotune", "show", "by-hand"], folder=study, stdout=unread)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_current_folder_that_was_removed_is_named(tmp_path):
    shell = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    ended = run(["-m", "autotune", "studies"], folder=tmp_path, shell=shell)
    assert (ended.returncode, ended.stderr) == (
        2,
        "error: the current folder has been removed\nhint: change to a folder that is there\n",
    )
