"""The files that are sent to nodes."""

import pytest

from autotune.errors import InvalidInput
from autotune.execution.cluster import files
from autotune.execution.cluster.files import user_files


@pytest.fixture
def project(tmp_path):
    for path in (
        "train.py",
        "data/train.bin",
        ".git/HEAD",
        ".env",
        "venv/pyvenv.cfg",
        "venv/lib/torch.py",
        "__pycache__/train.pyc",
        "autotune.db",
        "autotune/logs/server.log",
    ):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(path)
    return tmp_path


def test_code_and_data_are_sent_but_not_caches_environments_or_results(project):
    excluded = [project / "autotune.db", project / "autotune"]
    assert sorted(user_files(project, excluded=excluded)) == ["data/train.bin", "train.py"]


def test_a_folder_with_too_much_is_an_error_that_names_it(project, monkeypatch):
    monkeypatch.setattr(files, "MOST_FILES", 1)
    with pytest.raises(InvalidInput, match=str(project)):
        user_files(project, excluded=[])
