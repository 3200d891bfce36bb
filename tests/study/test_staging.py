"""Staging directories are removed once their process has ended, and not before."""

from autotune.study.staging import StagingFolder, sweep


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


def test_a_study_of_any_name_is_no_waiting_folder(tmp_path):
    (tmp_path / "waiting-room").mkdir()
    sweep(tmp_path)
    assert (tmp_path / "waiting-room").is_dir()


def test_what_a_trial_server_makes_after_its_search_was_swept_goes_with_the_next(tmp_path):
    (tmp_path / ".waiting-0123.unfinished-4567").mkdir()
    sweep(tmp_path)
    assert not [*tmp_path.iterdir()]
