"""Files that are written whole or not at all, and locks that end with their process."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from autotune.study.opening.open_study import opening_lock
from autotune.system.files import (
    create_locked,
    durable_file,
    hold_lock,
    is_free,
    open_lock_file,
    read_plain_file,
    try_acquire,
)

# -- writing ---------------------------------------------------------------------------------------


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    file = tmp_path / "result.json"
    file.write_text("old")
    with durable_file(file) as unfinished:
        unfinished.write_text("new")
        assert file.read_text() == "old"
    assert (file.read_text(), list(tmp_path.iterdir())) == ("new", [file])


def write_on_a_full_disk(file, unfinished):
    with durable_file(file, unfinished=unfinished) as opened_file:
        opened_file.write_text("ne")
        raise OSError("the disk is full")


@pytest.mark.parametrize("name", [None, "result.unfinished"])
def test_where_writing_fails_the_file_is_unchanged_and_nothing_else_is_left(tmp_path, name):
    file = tmp_path / "result.json"
    file.write_text("old")
    with pytest.raises(OSError, match="full"):
        write_on_a_full_disk(file, None if name is None else tmp_path / name)
    assert (file.read_text(), list(tmp_path.iterdir())) == ("old", [file])


def test_a_partly_written_file_has_the_name_that_others_look_for(tmp_path):
    named = tmp_path / "result.unfinished"
    with durable_file(tmp_path / "result.json", unfinished=named) as unfinished:
        unfinished.write_text("{")
        assert list(tmp_path.iterdir()) == [named]


# -- locking ---------------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from autotune.system.files import acquire, open_lock_file
acquire(open_lock_file(Path(sys.argv[1]), mode=0o600), shared=sys.argv[2] == "shared")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked_by_another_process(file, *, shared=False):
    """Yields the process, which holds the lock until it is killed or the block ends."""
    kind = "shared" if shared else "exclusive"
    command = [sys.executable, "-c", HOLDER, str(file), kind]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


@contextmanager
def opened(file):
    descriptor = open_lock_file(file, mode=0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_lock_of_another_process_is_free_once_that_was_killed(tmp_path):
    with locked_by_another_process(tmp_path / "lock") as process:
        before = is_free(tmp_path / "lock")
        process.kill()
        process.wait()
        assert (before, is_free(tmp_path / "lock")) == (False, True)


def test_the_lock_of_a_file_that_is_not_there_is_free(tmp_path):
    assert is_free(tmp_path / "lock")


def test_a_file_that_is_created_locked_is_free_when_it_is_closed(tmp_path):
    descriptor = create_locked(tmp_path / "lock")
    before = is_free(tmp_path / "lock")
    os.close(descriptor)
    assert (before, is_free(tmp_path / "lock"), len(list(tmp_path.iterdir()))) == (False, True, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "mine", "is_locked"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
def test_only_shared_locks_are_held_together(tmp_path, theirs, mine, is_locked):
    file = tmp_path / "lock"
    with locked_by_another_process(file, shared=theirs), opened(file) as descriptor:
        assert try_acquire(descriptor, shared=mine) is is_locked


def test_a_link_is_not_opened_as_a_lock_file(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        open_lock_file(tmp_path / "lock", mode=0o600)
    assert not (tmp_path / "elsewhere").exists()


def test_who_waits_for_a_lock_has_it_when_its_holder_has_ended(tmp_path):
    pauses = []
    with locked_by_another_process(tmp_path / "lock") as process:

        def pause():
            pauses.append(1)
            process.kill()
            process.wait()

        with hold_lock(tmp_path / "lock", pause):
            assert (len(pauses), is_free(tmp_path / "lock")) == (1, False)
    assert is_free(tmp_path / "lock")


def test_a_stop_ends_the_waiting_for_the_lock_of_a_study_that_another_search_opens(tmp_path):
    def check_stop():
        raise InterruptedError

    with (
        locked_by_another_process(tmp_path / ".quick.opening"),
        pytest.raises(InterruptedError),
        opening_lock(tmp_path / ".quick.opening", check_stop),
    ):
        pass


def test_a_link_is_no_lock_that_is_free(tmp_path):
    (tmp_path / "elsewhere").touch()
    (tmp_path / "linked.lock").symlink_to(tmp_path / "elsewhere")
    assert is_free(tmp_path / "elsewhere")
    assert not is_free(tmp_path / "linked.lock")


def test_a_file_that_is_larger_than_expected_is_not_read(tmp_path):
    (tmp_path / "large").write_bytes(b"12345")
    assert read_plain_file(tmp_path / "large", most_bytes=5) == b"12345"
    with pytest.raises(OSError, match="too large"):
        read_plain_file(tmp_path / "large", most_bytes=4)
