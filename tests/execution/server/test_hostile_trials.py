"""Trials that hold up or mislead their server: every request is answered all the same."""

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from autotune.errors import PreparationFailed, TrialServerLost
from autotune.execution.server import fork_server, trial_log
from autotune.execution.server.client import TrialServer
from autotune.execution.server.limits import TimeLimits
from autotune.execution.server.silence import Silence
from autotune.execution.tasks import ListDevices, Rehearse, Trace, Train
from autotune.spec.parity import NoTrace
from tests.building.hostile_server import TRAINING, Attack, hostile_command

TRAIN = Train(training=TRAINING)
REHEARSE = Rehearse(workload=TRAINING.workload, micro_batch_size=1, device="cpu")
WAIT_SECONDS = 60
SILENCE_SECONDS = 4.0
"""Above the interval of the heartbeat in these tests."""


@pytest.fixture(scope="module")
def command():
    """The hostile server with a quicker heartbeat, as no test can wait for minutes."""
    quicker = "from autotune.execution.server import fork_server; fork_server.BEAT_SECONDS = 0.5"
    return hostile_command(before=quicker)


@pytest.fixture(scope="module")
def server(command, tmp_path_factory):
    """One that all tests share but those that end it."""
    log_file = tmp_path_factory.mktemp("server") / "server.log"
    with TrialServer(log_file=log_file, command=command) as trial_server:
        yield trial_server


@pytest.fixture
def doomed_server(command, tmp_path):
    with TrialServer(
        log_file=tmp_path / "server.log", command=command, silence_seconds=SILENCE_SECONDS
    ) as trial_server:
        yield trial_server


@pytest.fixture
def attack(server, tmp_path):
    """attack("stop_the_server") is the future of a trial that does so."""

    def submit(doing, *, by=server, instead_of=TRAIN, seconds=600.0, **arguments):
        return by.submit(
            Attack(doing=doing, arguments=arguments, instead_of=instead_of),
            log_file=tmp_path / f"{instead_of.name}.log",
            limits=TimeLimits(trial_seconds=seconds, compile_seconds=seconds, step_seconds=seconds),
        )

    return submit


def outcome_of(future):
    return measurement_of(future).outcome


def measurement_of(future):
    return future.result(WAIT_SECONDS).measurement


# -- a server that no longer serves ----------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_a_trial_stops_again_and_again_is_ended(attack, doomed_server):
    future = attack("stop_the_server_again_and_again", by=doomed_server)
    with pytest.raises(TrialServerLost, match="did not answer for 4 s, and was ended"):
        future.result(WAIT_SECONDS)
    assert not Path(f"/proc/{doomed_server.pid}/environ").exists()


@pytest.mark.slow
def test_a_server_that_a_trial_stops_once_goes_on_and_ends_it_at_its_limit(attack, doomed_server):
    assert outcome_of(attack("stop_the_server", by=doomed_server, seconds=1.0)) == "timeout"
    assert outcome_of(attack("close_the_pipe", by=doomed_server)) == "crashed"  # it serves again


@pytest.mark.slow
def test_a_large_request_to_a_stopped_server_does_not_hold_up_the_search(attack, doomed_server):
    first = attack("stop_the_server_again_and_again", by=doomed_server)
    while not doomed_server._is_ready:
        time.sleep(0.01)
    futures = [attack("sleep", by=doomed_server, padding="x" * 10**6) for _ in range(2)]
    for future in (first, *futures):
        with pytest.raises(TrialServerLost):
            future.result(WAIT_SECONDS)


def test_the_end_of_a_server_is_noticed_while_a_process_holds_its_pipes(attack, command, tmp_path):
    holder = tmp_path / "holder"
    with TrialServer(log_file=tmp_path / "server.log", command=command) as server:
        future = attack("kill_the_server_and_hold_its_pipes", by=server, file=str(holder))
        try:
            with pytest.raises(TrialServerLost, match="has ended"):
                future.result(WAIT_SECONDS)
        finally:
            os.kill(int(holder.read_text()), signal.SIGKILL)


def test_a_server_that_serves_nothing_says_that_it_lives(server, attack):
    assert outcome_of(attack("close_the_pipe")) == "crashed"
    time.sleep(3 * 0.5)
    assert not server.is_lost


def test_the_heartbeat_is_far_more_frequent_than_the_silence_that_ends_a_server():
    from autotune.execution.server.client import SILENCE_SECONDS as LIMIT

    assert 10 * fork_server.BEAT_SECONDS < LIMIT


def test_time_in_which_this_process_did_not_run_is_no_silence():
    now = 0.0
    silence = Silence(step_seconds=1.0, clock=lambda: now)
    now = 1.0
    assert silence.seconds() == 1.0
    now = 10_000.0  # it was stopped
    assert silence.seconds() == 3.0
    silence.end()
    assert silence.seconds() == 0.0


# -- what a trial writes to the pipe ---------------------------------------------------------------

MALFORMED = [
    '{"result": null, "error": null}\n',
    '{"result": null, "error": {"kind": "Iterable", "message": "", "hint": ""}}\n',
    '{"result": null, "error": {"kind": "KeyboardInterrupt", "message": "", "hint": ""}}\n',
    '{"result": null, "error": {"kind": "Stopped", "message": "", "hint": ""}}\n',
    '{"result": {"measurement": {"outcome": "ok", "peak_memory_bytes": -1}, "seconds": 1.0}, '
    '"error": null}\n',
    '{"result": null, "error": {"kind": "InvalidInput", "message": "", "hint": ""}}\n',
    '{"result": null, "error": null, "ended": {"outcome": "splendid"}}\n',
    '{"phase": {"a": 1}}\n',
    "[" * 5000 + "\n",
    "\0\n",
]


@pytest.mark.slow
@pytest.mark.parametrize("data", MALFORMED, ids=lambda data: repr(data[:60]))
def test_a_training_that_writes_no_valid_reply_is_a_crash_that_says_so(attack, data):
    measurement = measurement_of(attack("write", data=data))
    assert measurement.outcome == "crashed"
    assert "wrote no valid reply" in measurement.message


def test_an_error_outside_of_a_training_is_a_crash_and_does_not_end_the_search(attack):
    measurement = measurement_of(attack("raise_an_error_of_ours"))
    assert measurement.outcome == "crashed"
    assert "TypeError: as where a script" in measurement.message


@pytest.mark.slow
def test_another_task_that_writes_no_valid_reply_fails(attack):
    with pytest.raises(PreparationFailed, match="wrote no valid reply"):
        attack("write", instead_of=REHEARSE, data=MALFORMED[0]).result(WAIT_SECONDS)


@pytest.mark.slow
def test_first_steps_without_a_valid_reply_are_a_crash_that_says_so(attack):
    future = attack("write", instead_of=Trace(training=TRAINING, dropout=False), data=MALFORMED[0])
    found = future.result(WAIT_SECONDS)
    assert isinstance(found, NoTrace)
    assert found.outcome == "crashed"
    assert "wrote no valid reply" in found.message


def test_half_a_line_without_end_is_a_crash(attack):
    assert outcome_of(attack("write_half_a_line_without_end")) == "crashed"


def test_a_trial_that_closes_its_pipe_is_a_crash(attack):
    assert outcome_of(attack("close_the_pipe")) == "crashed"


def test_a_child_that_goes_on_writing_to_the_pipe_does_not_hold_up_the_server(attack):
    assert outcome_of(attack("leave_a_child_with_the_pipe")) == "ok"
    assert outcome_of(attack("close_the_pipe")) == "crashed"


def test_a_flood_of_progress_ends_at_the_limit_of_the_trial(attack):
    assert outcome_of(attack("flood_with_progress", seconds=1.0)) == "timeout"


def test_a_group_of_processes_that_ignores_sigterm_ends_at_the_limit(attack):
    assert outcome_of(attack("ignore_sigterm_with_the_whole_group", seconds=0.5)) == "timeout"


def test_a_forged_reply_of_the_server_itself_answers_its_request(tmp_path):
    forged = """
        import json, sys
        for line in sys.stdin:
            request = json.loads(line)
            for reply in ({"id": [1]}, {"id": 99}, [], {"id": request["id"]}):
                print(json.dumps(reply), flush=True)
    """
    command = (sys.executable, "-c", textwrap.dedent(forged))
    with TrialServer(log_file=tmp_path / "server.log", command=command) as server:
        future = server.submit(TRAIN, log_file=tmp_path / "trial.log")
        assert outcome_of(future) == "crashed"
        with pytest.raises(PreparationFailed):
            server.submit(ListDevices(), log_file=tmp_path / "d.log").result(WAIT_SECONDS)


# -- logs ------------------------------------------------------------------------------------------


def test_a_log_that_is_too_large_keeps_its_beginning_and_its_end(attack, tmp_path):
    size = 25_000_000
    assert outcome_of(attack("print_much", size=size)) == "ok"
    text = (tmp_path / "train.log").read_bytes()
    assert len(text) <= trial_log.LARGEST_LOG_BYTES
    assert (text[:15], text[-14:]) == (b"the first line\n", b"the last line\n")
    assert b"[autotune: about " in text


def test_the_line_in_a_shortened_log_counts_what_was_left_out_each_time(tmp_path):
    file = tmp_path / "trial.log"
    log = trial_log.TrialLog(file)
    for printed, in_all in ((10_000_000, 10_000_000), (7_000_000, 17_000_000)):
        with file.open("ab") as opened:
            opened.write(b"x" * printed)
        assert log.shorten() == in_all
    left_out = int(file.read_bytes().partition(b"about ")[2].partition(b" bytes")[0])
    assert left_out == 17_000_000 - trial_log.FIRST_BYTES - trial_log.LAST_BYTES
    assert log.shorten() == 17_000_000


def test_a_file_that_a_trial_has_put_in_place_of_its_log_stays_as_it_is(tmp_path):
    other = tmp_path / "data"
    other.write_bytes(b"x" * 9_000_000)
    (tmp_path / "trial.log").symlink_to(other)
    trial_log.TrialLog(tmp_path / "trial.log").shorten()
    assert other.stat().st_size == 9_000_000


@pytest.mark.slow
def test_a_log_stays_small_while_it_is_written(attack, server, tmp_path):
    future = attack("print_without_end", seconds=8.0)
    largest = 0
    time.sleep(4.0)
    while not future.done():
        largest = max(largest, (tmp_path / "train.log").stat().st_size)
        time.sleep(0.05)
    assert outcome_of(future) == "timeout"
    assert largest < 10 * trial_log.LARGEST_LOG_BYTES
