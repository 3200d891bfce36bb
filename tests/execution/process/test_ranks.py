"""The processes of a training on several devices: their results, and what one of them may do."""

import os
import re
import resource
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import TrialLost
from autotune.execution.joint_outcome import together
from autotune.execution.process import ranks as ranks_module
from autotune.execution.process.ranks import TurnsOfRanks, interface_with, run_on_ranks
from autotune.execution.server.forked import run_in_fork
from autotune.execution.server.replies import TrainingFailed
from autotune.memory.host import available_bytes
from autotune.spec.node_ranks import NodeRanks, divided
from autotune.spec.result import Measurement


def out_of_memory():
    return TrainingFailed(Measurement(outcome="out_of_memory", message="no memory"))


def outcome_of(run, *, size=2):
    """Run the ranks in a fork of this process, which torch's threads are in."""

    def ranks():
        try:
            return {"results": run_on_ranks(run, NodeRanks(size=size, count=size))}
        except TrainingFailed as failed:
            return {"outcome": failed.ending.outcome, "message": failed.ending.message}

    return run_in_fork(ranks)


def test_every_rank_gives_its_result_in_order():
    def run(rank):
        time.sleep(0.2 * (2 - rank.index))
        return {"rank": rank.index, "of": rank.size}

    found = outcome_of(run, size=3)
    assert found["results"] == [{"rank": rank, "of": 3} for rank in range(3)]


def test_the_ranks_are_one_process_group():
    def run(rank):
        import torch

        with rank.joined("cpu"):
            number = torch.tensor(rank.index + 1)
            torch.distributed.all_reduce(number)
            return {"sum": int(number)}

    assert outcome_of(run)["results"] == [{"sum": 3}, {"sum": 3}]


def test_a_rank_that_waits_for_the_turn_of_the_first_one_says_so():
    def run(rank):
        stages = []
        turns = TurnsOfRanks(
            address="/nowhere", progress=lambda stage, *_: stages.append(stage), rank=rank.index
        )
        with rank.joined("cpu"), turns:
            turns.begin(step_seconds=1.0)
        return {"stages": stages}

    assert outcome_of(run)["results"][1] == {"stages": ["waiting", "step"]}


def ranks_of_two_nodes(port):
    """The results of four ranks, of which each node runs two."""

    def run(rank):
        import torch

        with rank.joined("cpu"):
            number = torch.tensor(10**rank.index)
            torch.distributed.all_reduce(number)
            return {"rank": rank.index, "sum": int(number)}

    def of_node(ranks):
        here = replace(ranks, address="127.0.0.1")
        return run_in_fork(lambda: {"results": run_on_ranks(run, here)})

    parts = divided(4, nodes=["a", "b"], store=("127.0.0.1", port))
    with ThreadPoolExecutor(2) as nodes:
        return [found["results"] for found in nodes.map(of_node, parts)]


def test_the_ranks_of_two_nodes_are_one_process_group():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port = opened.getsockname()[1]
    first, second = ranks_of_two_nodes(port)
    assert first == [{"rank": rank, "sum": 1111} for rank in (0, 1)]
    assert second == [{"rank": rank, "sum": 1111} for rank in (2, 3)]


def test_a_port_that_is_taken_loses_the_trial_and_says_where_the_ranks_would_meet():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ranks = NodeRanks(size=2, count=1, node="a", store=("127.0.0.1", port))
        with pytest.raises(TrialLost, match=f"cannot meet at 127.0.0.1:{port}"):
            run_in_fork(lambda: {"results": run_on_ranks(lambda rank: {}, ranks)})


def test_the_interface_with_an_address_is_found():
    assert interface_with("127.0.0.1") == "lo"
    assert interface_with("192.0.2.77") == ""


def test_the_ranks_share_what_the_host_has_left():
    def run(rank):
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        return {"left": available_bytes(), "limit": limit}

    def ranks():
        resource.setrlimit(resource.RLIMIT_DATA, (2**45, 2**45))
        return {"results": run_on_ranks(run, NodeRanks(size=4, count=4))}

    left = available_bytes()
    for found in run_in_fork(ranks)["results"]:
        assert found["left"] < 0.3 * left
        assert found["limit"] < 0.3 * 2**45


def test_a_rank_that_fails_ends_the_others_and_says_why():
    def run(rank):
        if rank.index:
            raise out_of_memory()
        time.sleep(600)

    assert outcome_of(run) == {"outcome": "out_of_memory", "message": "rank 1: no memory"}


def test_a_rank_that_lost_another_one_is_not_to_blame():
    def run(rank):
        if rank.index:
            time.sleep(0.3)
            raise out_of_memory()
        message = "RuntimeError: Connection closed by peer [127.0.0.1]:1234"
        raise TrainingFailed(Measurement(outcome="crashed", message=message))

    assert outcome_of(run)["message"] == "rank 1: no memory"


def kills_itself(number):
    def run(rank):
        if rank.index:
            os.kill(os.getpid(), number)
        time.sleep(600)

    return run


def test_a_killed_rank_ends_the_others_and_says_nothing_of_the_configuration():
    with pytest.raises(TrialLost, match=r"rank 1: .* SIGKILL"):
        outcome_of(kills_itself(signal.SIGKILL))


def test_a_rank_that_crashes_ends_the_others_with_that_outcome():
    ended = outcome_of(kills_itself(signal.SIGSEGV))
    assert ended["outcome"] == "crashed"
    assert re.search("rank 1: .* SIGSEGV", ended["message"])


@pytest.mark.slow
def test_a_rank_that_does_not_end_when_asked_is_killed():
    def run(rank):
        if rank.index:
            raise out_of_memory()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)

    assert outcome_of(run)["message"] == "rank 1: no memory"


def test_a_failure_of_the_machine_is_raised():
    def run(rank):
        raise TrialLost("the device fell off the bus", hint="restart the machine")

    with pytest.raises(TrialLost, match="fell off the bus"):
        outcome_of(run)


def test_a_rank_that_is_stopped_counts_as_lost(monkeypatch):
    monkeypatch.setattr(ranks_module, "SECONDS_STOPPED", 0.2)

    def run(rank):
        if rank.index:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
        return {}

    with pytest.raises(TrialLost, match=r"rank 1: .* stopped"):
        outcome_of(run)


def trial_of_sleeping_ranks(folder, **options):
    """Fork a process whose ranks sleep; return its pid and theirs, once all have begun."""

    def run(rank):
        (folder / f"{rank.index}.new").write_text(str(os.getpid()))
        (folder / f"{rank.index}.new").rename(folder / str(rank.index))
        time.sleep(600)
        return {}

    trial = os.fork()
    if trial == 0:
        run_on_ranks(run, NodeRanks(size=2, count=2), **options)
    files = [folder / "0", folder / "1"]
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    return trial, [int(file.read_text()) for file in files]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
def test_the_end_of_a_rank_is_noticed_while_what_it_has_forked_holds_its_pipe(tmp_path):
    def run(rank):
        if rank.index:
            child = os.fork()
            if child == 0:
                time.sleep(20)
                os._exit(0)
            (tmp_path / "child").write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        return {}

    trial = os.fork()
    if trial == 0:
        try:
            run_on_ranks(run, NodeRanks(size=2, count=2))
        finally:
            os._exit(0)
    os.waitpid(trial, 0)
    child = int((tmp_path / "child").read_text())
    assert is_running(child)
    os.kill(child, signal.SIGKILL)


def test_the_ranks_of_a_killed_trial_end_with_it(tmp_path):
    trial, ranks = trial_of_sleeping_ranks(tmp_path)
    os.kill(trial, signal.SIGKILL)
    os.waitpid(trial, 0)
    end = time.monotonic() + 60
    while any(map(is_running, ranks)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(is_running, ranks))


def test_a_trial_that_is_ended_says_what_each_rank_was_doing(tmp_path):
    trial, _ = trial_of_sleeping_ranks(tmp_path, remark=(tmp_path / "remark").write_text)
    os.kill(trial, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1]) == -signal.SIGTERM
    remark = (tmp_path / "remark").read_text()
    assert remark.startswith("rank 0 was in run (process/test_ranks.py, line ")
    assert "rank 1 was in run (" in remark


def measured(**values):
    return Measurement(outcome="ok", **values)


def test_the_memory_of_a_trial_is_that_of_the_rank_that_needs_most():
    ranks = [
        measured(peak_memory_bytes=10, device_bytes=12, peak_phase="forward", perplexity=3.0),
        measured(peak_memory_bytes=11, device_bytes=13, peak_phase="step", perplexity=3.0),
    ]
    found = together(ranks)
    assert (found.peak_memory_bytes, found.device_bytes, found.peak_phase) == (11, 13, "step")
    assert found.peak_memory_bytes_by_rank == (10, 11)
    assert found.perplexity == 3.0


def test_the_time_in_collectives_is_the_mean_over_the_ranks_and_unknown_if_one_is():
    ranks = [
        measured(peak_memory_bytes=1, communication_seconds=seconds, communication_share=seconds)
        for seconds in (0.25, 0.75)
    ]
    found = together(ranks)
    assert (found.communication_seconds, found.communication_share) == (0.5, 0.5)
    assert together([*ranks, measured(peak_memory_bytes=1)]).communication_seconds is None


def test_a_trial_is_over_the_cap_where_one_rank_is():
    over = Measurement(
        outcome="over_cap", message="needs 3 GiB", peak_memory_bytes=3, device_bytes=3
    )
    found = together([measured(peak_memory_bytes=2, device_bytes=2), over])
    assert (found.outcome, found.message) == ("over_cap", "needs 3 GiB")
