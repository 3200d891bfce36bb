"""The server ends only what it could have started, whatever pid the database has."""

import os
import subprocess
import sys

import psutil
import pytest

from autotune.service.processes import (
    _start_of,
    find_process,
    kill_process,
    machine_of,
    stop_process,
    this_host,
)
from autotune.spec.queued_search import SearchProcess
from tests.building.queued_searches import wait_until

WAIT = "import sys; sys.stdin.read()"


@pytest.mark.parametrize("end", [stop_process, kill_process])
@pytest.mark.parametrize(
    ("command", "is_leader"),
    [([sys.executable, "-c", WAIT], True), (["cat"], True), (["cat", "-"], False)],
)
def test_a_process_that_is_no_search_is_not_ended(end, command, is_leader):

    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=is_leader) as process:
        start = _start_of(psutil.Process(process.pid))
        stored = SearchProcess(host=this_host(), pid=process.pid, started_at=start)
        assert find_process(stored) is not None
        end(stored)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=30) == 0


def test_a_search_is_ended():

    command = [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        wait_until(psutil.Process(process.pid).cmdline)  # it is empty for a moment
        start = _start_of(psutil.Process(process.pid))
        kill_process(SearchProcess(host=this_host(), pid=process.pid, started_at=start))
        assert process.wait(timeout=30) != 0


def test_another_namespace_of_pids_is_another_machine(monkeypatch):
    """Two containers may have the name and the boot of one host."""
    hosts = set()
    for namespace in ("pid:[4026531836]", "pid:[4026532501]"):
        monkeypatch.setattr(os, "readlink", lambda path, namespace=namespace: namespace)
        hosts.add(this_host.__wrapped__())
    assert len(hosts) == 2
    assert len(set(map(machine_of, hosts))) == 1


def test_a_machine_without_namespaces_has_a_name(monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", missing)
    assert this_host.__wrapped__()
