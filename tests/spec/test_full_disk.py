"""A disk without room is said to be that, whoever noticed it."""

import errno
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from autotune.errors import InvalidInput
from autotune.models.weights import draw_weights
from autotune.spec.full_disk import is_of_full_disk
from autotune.spec.model_size import check_weights_fit
from autotune.spec.workload import make_workload

FULL = Path("/dev/full")
"""A device of Linux that takes nothing, as if its disk were full."""
SMALL = {"layers": 1, "width": 16, "heads": 2}


@pytest.fixture
def small_disk(monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_errors_of_the_system_and_of_databases_are_known(number):
    assert is_of_full_disk(OSError(number, os.strerror(number)))
    assert is_of_full_disk(sqlite3.OperationalError("database or disk is full"))
    assert not is_of_full_disk(OSError(errno.EACCES, os.strerror(errno.EACCES)))


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
def test_weights_that_cannot_be_written_say_that_the_disk_is_full():
    with pytest.raises((OSError, RuntimeError)) as raised:
        draw_weights(make_workload("cpu", SMALL), file=FULL)
    assert is_of_full_disk(raised.value)


def test_a_model_for_which_the_disk_has_no_room_need_not_be_smaller(small_disk, tmp_path):
    with pytest.raises(InvalidInput, match="has 1000 B left") as raised:
        check_weights_fit(SMALL, folder=tmp_path)
    assert str(tmp_path) in raised.value.message
    assert "room" in raised.value.hint
