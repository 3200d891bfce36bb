"""The folder next to a database, for logs, prepared files and compiler caches."""

import pytest

from autotune.errors import InvalidInput
from autotune.study.work_folder import work_folder


def refused_once_the_trial_server_began(storage):
    with work_folder(storage) as work:
        (work / "logs").mkdir()
        (work / "inductor").mkdir()  # torch makes it when it is imported
        raise InvalidInput("it cannot be done as asked")


def test_a_rejected_request_leaves_no_folder(tmp_path):
    with pytest.raises(InvalidInput):
        refused_once_the_trial_server_began(f"sqlite:///{tmp_path}/new/autotune.db")
    assert list(tmp_path.iterdir()) == []
