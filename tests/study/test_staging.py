"""Staging directories are removed once their process has ended, and not before."""

import errno
import os
from pathlib import Path

import pytest

from autotune.errors import DiskFull, StorageUnavailable
from autotune.execution.prepared_folder import PREPARED
from autotune.study.opening.new_study import NewStudy
from autotune.study.opening.staging import StagingFolder, staged, sweep
from autotune.study.workers.outbox import OUTBOX_FOLDER
from tests.building.studies import definition


def test_the_staging_directory_of_a_running_search_is_not_removed(tmp_path):
    waiting = StagingFolder(tmp_path)
    waiting.folder.mkdir()
    sweep(tmp_path)
    assert waiting.folder.is_dir()
    waiting.close()


def test_closed_it_leaves_nothing(tmp_path):
    waiting = StagingFolder(tmp_path)
    waiting.folder.mkdir()
    waiting.close()
    assert not [*tmp_path.iterdir()]


def test_a_staged_folder_is_there_during_its_block_alone(tmp_path):
    work = tmp_path / "not" / "made"
    with staged(work) as folder:
        (folder / "file").touch()
        sweep(work)
        assert (folder / "file").exists()
    assert not [*work.iterdir()]


@pytest.mark.parametrize(
    ("number", "error", "sentence"),
    [
        (errno.ENOSPC, DiskFull, "no room for temporary files"),
        (errno.EROFS, StorageUnavailable, "no temporary file can be written to .*Read-only"),
    ],
)
def test_a_staged_folder_that_cannot_be_made_is_one_sentence(
    tmp_path, monkeypatch, number, error, sentence
):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(error, match=sentence), staged(tmp_path):
        pass


def test_a_study_of_any_name_is_no_waiting_folder(tmp_path):
    (tmp_path / "waiting-room").mkdir()
    sweep(tmp_path)
    assert (tmp_path / "waiting-room").is_dir()


def test_what_a_trial_server_makes_after_its_search_was_swept_goes_with_the_next(tmp_path):
    (tmp_path / ".waiting-0123.unfinished-4567").mkdir()
    sweep(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_new_study_takes_the_folder_of_an_earlier_one_and_leaves_the_results_that_wait(tmp_path):
    earlier = tmp_path / "study"
    (earlier / PREPARED).mkdir(parents=True)
    (earlier / PREPARED / "old.pt").touch()
    (earlier / OUTBOX_FOLDER).mkdir()
    (earlier / OUTBOX_FOLDER / "result.json").touch()
    (earlier / "notes.txt").touch()
    staging = StagingFolder(tmp_path)
    staging.folder.mkdir()
    (staging.folder / "new.pt").touch()
    NewStudy(definition=definition(), staging=staging).settle(earlier)
    files = {str(file.relative_to(earlier)) for file in earlier.rglob("*") if file.is_file()}
    assert files == {f"{PREPARED}/new.pt", f"{OUTBOX_FOLDER}/result.json", "notes.txt"}
