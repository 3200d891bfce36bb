"""A study of somebody's own model goes on only with the file it was begun with."""

import pytest

from autotune.errors import StudyMismatch
from autotune.execution.local import LocalExecutor
from autotune.spec.user_code import sha256_of
from autotune.spec.workload import make_workload
from autotune.study.resume import check_same_model
from tests.building.studies import definition


def test_a_changed_file_is_rejected_and_the_old_content_accepted(tmp_path, one_trial_server):
    file = tmp_path / "mine.py"
    file.write_text("def make(): ...\n")
    workload = make_workload("cpu", {"model": f"{file}:make", "model_sha256": sha256_of(file)})
    stored = definition(workload=workload)
    with LocalExecutor(tmp_path / "work") as executor:
        check_same_model(stored, executor=executor)
        file.write_text("def make(): ...  # otherwise\n")
        with pytest.raises(StudyMismatch, match=r"mine\.py:make is no longer"):
            check_same_model(stored, executor=executor)
