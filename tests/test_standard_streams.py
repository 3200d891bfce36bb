"""What cannot be shown is dropped; an answer that is lost is an error.

Each test starts a small process of its own, whose standard streams are real descriptors.
"""

import os
import pty
import subprocess
import sys
from contextlib import closing

import pytest

TIMEOUT_SECONDS = 60.0
BEGIN = (
    "import sys\nfrom autotune.system.standard_streams import protect_streams\nprotect_streams()\n"
)
ALL_CLOSED = 'exec "$@" <&- >&- 2>&-'


def run(code, *, begin=BEGIN, shell='exec "$@"', **streams):
    """Run `code` after `begin`, by default with protected streams; `shell` redirects them."""
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, **streams}
    return subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, "-c", begin + code],
        timeout=TIMEOUT_SECONDS,
        check=False,
        text=True,
        **streams,
    )


class Terminal:
    """A terminal: `theirs` is for a process, `ours` is the end that shows it."""

    def __init__(self):
        self.ours, self.theirs = pty.openpty()

    def close(self):
        for end in (self.ours, self.theirs):
            try:
                os.close(end)
            except OSError:
                pass  # closed by the test


@pytest.fixture
def terminal():
    with closing(Terminal()) as opened:
        yield opened


def test_no_file_gets_the_number_of_a_stream_that_was_closed(tmp_path):
    file = tmp_path / "results"
    code = f"""
with open({str(file)!r}, "w") as results:
    print("said"), print("said", file=sys.stderr), sys.stdout.flush()
    results.write(f"{{results.fileno() > 2}} {{sys.stdin is None}}")
"""
    assert run(code, shell=ALL_CLOSED).returncode == 0
    assert file.read_text().startswith("True")


def test_the_streams_say_of_themselves_what_those_of_python_say():
    said = "print([(each.name, each.mode, each.encoding) for each in (sys.stdout, sys.stderr)])"
    both = [
        run(said, begin=begin, stdout=subprocess.PIPE).stdout for begin in (BEGIN, "import sys\n")
    ]
    assert both[0] == both[1] != ""


@pytest.mark.parametrize("shell", ['exec "$@" 2>/dev/full', 'exec "$@" 2</dev/null'])
def test_what_a_full_or_read_only_stderr_does_not_take_is_dropped(shell, tmp_path):
    code = f"print('x', file=sys.stderr); open({str(tmp_path / 'later')!r}, 'w')"
    assert run(code, shell=shell).returncode == 0
    assert (tmp_path / "later").exists()


def test_a_disk_that_has_room_again_gets_what_is_shown_then(tmp_path):
    code = """
import os, resource
limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (5, limit))
print("first", file=sys.stderr)
print("dropped", file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
print("last", file=sys.stderr)
"""
    with (tmp_path / "log").open("w") as log:
        assert run(code, stderr=log).returncode == 0
    assert (tmp_path / "log").read_text() == "firstlast\n"


def test_a_terminal_that_is_gone_ends_nothing(terminal):
    code = "input(); print('x', file=sys.stderr); print('y', file=sys.stderr); sys.exit(7)"
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + code], stdin=subprocess.PIPE, stderr=terminal.theirs
    )
    os.close(terminal.theirs)
    os.close(terminal.ours)
    process.communicate(b"\n", timeout=TIMEOUT_SECONDS)
    assert process.returncode == 7


def test_the_progress_stands_above_the_answer_on_one_terminal(terminal):
    code = "[print(2 * n, file=sys.stderr) or print(2 * n + 1, flush=True) for n in range(100)]"
    run(code, stdout=terminal.theirs, stderr=terminal.theirs)
    os.close(terminal.theirs)
    shown = b""
    while not shown.endswith(b"199\r\n"):
        shown += os.read(terminal.ours, 4096)
    assert shown.split() == [str(number).encode() for number in range(200)]


def test_an_answer_waits_for_a_reader_that_another_program_has_made_non_blocking():
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    code = "print('x' * 500_000, flush=True); print('y' * 500_000, file=sys.stderr)"
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + code], stdout=theirs, stderr=theirs, bufsize=0
    )
    os.close(theirs)
    with open(ours, "rb") as reader:
        said = reader.read()
    assert process.wait(timeout=TIMEOUT_SECONDS) == 0
    assert (said.count(b"x"), said.count(b"y")) == (500_000, 500_000)


@pytest.mark.parametrize("has_gone", [False, True])
def test_an_answer_that_cannot_be_written_is_an_error_that_says_whether_it_is_read(has_gone):
    read_end, pipe = os.pipe()
    os.close(read_end)
    code = """
from autotune.errors import OutputLost
try:
    print("x", flush=True)
except OutputLost as lost:
    print(lost.reader_has_gone, file=sys.stderr)
    print("dropped", flush=True)
"""
    with open("/dev/full", "w") as full, open(pipe, "w") as closed:
        ended = run(code, stdout=closed if has_gone else full)
    assert (ended.returncode, ended.stderr) == (0, f"{has_gone}\n")


def test_a_log_of_a_trial_whose_disk_is_full_drops_what_the_trial_prints():
    code = """
from pathlib import Path
from autotune.execution.process.request import _redirect_output
_redirect_output(Path("/dev/full"))
print("x", flush=True), print("y", file=sys.stderr)
sys.exit(7)
"""
    assert run(code, begin="import sys\n").returncode == 7
