"""Who a worker is, and whether another one still lives."""

import subprocess
import sys

import pytest

from autotune.study.workers.liveness import WorkerIdentity
from autotune.system.files import is_free

PROGRAM = """
import sys, time
from pathlib import Path
from autotune.study.workers.liveness import WorkerIdentity
identity = WorkerIdentity(Path(sys.argv[1]))
print(identity.name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def me(tmp_path):
    identity = WorkerIdentity(tmp_path)
    yield identity
    identity.close()


@pytest.fixture
def other(tmp_path):
    """A worker in its own process, and its name."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


def test_a_worker_that_lives_is_not_dead(me, other):
    _, name = other
    assert not me.is_dead(name)


def test_a_killed_worker_is_dead_at_once(me, other):
    process, name = other
    process.kill()
    process.wait()
    assert me.is_dead(name)


def test_it_does_not_take_itself_for_dead(me):
    assert not me.is_dead(me.name)


def test_of_a_worker_on_another_machine_nothing_is_known(me):
    assert not me.is_dead("elsewhere:17:0123456789ab")


def test_a_worker_that_ended_leaves_no_file(tmp_path):
    WorkerIdentity(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_file_of_a_forgotten_dead_worker_is_removed(me, other, tmp_path):
    process, name = other
    process.kill()
    process.wait()
    me.forget(name)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_worker_that_leaves_an_attempt_is_seen_to_be_dead(me, tmp_path):
    other = WorkerIdentity(tmp_path)
    other.close(leaves_attempts=True)
    assert me.is_dead(other.name)


def test_only_locks_of_dead_workers_without_attempts_are_removed(me, tmp_path):
    gone, left, alive = (WorkerIdentity(tmp_path) for _ in range(3))
    for one in (gone, left):
        one.close(leaves_attempts=True)
    me.sweep(me.dead(), but={left.name})
    assert (me.is_dead(gone.name), me.is_dead(left.name), me.is_dead(alive.name)) == (
        False,
        True,
        False,
    )
    assert len(list(tmp_path.iterdir())) == 3
    alive.close()


def test_of_a_worker_on_another_machine_its_lock_says_nothing(me, tmp_path):
    """Where a shared file system keeps locks to one machine, all of the others' would look free."""
    (tmp_path / "0123456789ab.lock").touch()
    assert not me.is_dead("elsewhere:17:0123456789ab")


NO_WORKERS = {
    "a path": "{host}:1:{folder}/poetry",
    "a path from here": "{host}:1:../poetry",
    "no digits": "{host}:1:poetry",
    "one digit more": "{host}:1:0123456789abc",
    "capitals": "{host}:1:0123456789AB",
    "a line more": "{host}:1:0123456789ab\n",
    "digits of another script": "{host}:1:٠١٢٣٤٥٦٧٨٩٠١",
    "no host": "0123456789ab",
    "nothing": "",
}
"""What a row of a shared database may contain instead of a worker's name."""


@pytest.fixture(params=NO_WORKERS.values(), ids=NO_WORKERS)
def no_worker(request, me, tmp_path):
    """An invalid worker name, and the unlocked files that it could be mistaken for."""
    project = tmp_path / "project"
    project.mkdir()
    name = request.param.format(host=me.name.split(":")[0], folder=project)
    ending = name.rpartition(":")[2]
    files = [
        project / "poetry.lock",
        tmp_path / "poetry.lock",
        tmp_path.parent / "poetry.lock",
        tmp_path / ".lock",
    ]
    files += [tmp_path / f"{ending}.lock"] if "/" not in ending else []
    for file in files:
        file.touch()
    yield name, files
    (tmp_path.parent / "poetry.lock").unlink(missing_ok=True)


def test_nothing_is_known_of_an_invalid_worker_name(me, no_worker):
    name, _ = no_worker
    assert not me.is_dead(name)


def test_no_file_is_removed_for_an_invalid_worker_name(me, no_worker):
    name, files = no_worker
    me.forget(name)
    assert [file for file in files if not file.exists()] == []


def test_a_name_that_is_no_workers_keeps_no_dead_lock_from_being_swept(me, tmp_path):
    gone = WorkerIdentity(tmp_path)
    gone.close(leaves_attempts=True)
    me.sweep(me.dead(), but={"somebody", "../else"})
    assert len(list(tmp_path.iterdir())) == 1


def test_a_lock_is_never_seen_free_while_it_is_made(tmp_path):
    seen = []
    for _ in range(200):
        identity = WorkerIdentity(tmp_path)
        seen += [is_free(file) for file in tmp_path.glob("*.lock")]
        identity.close()
    assert seen == [False] * 200
