"""The folder of a search on a node."""

import hashlib
import subprocess
import sys

import pytest

from autotune.errors import TrialLost
from autotune.execution.cluster.node_folder import NodeFolder

TEXT = b"four tokens of text"
DIGEST = hashlib.sha256(TEXT).hexdigest()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return NodeFolder("a-search")


def test_a_content_is_lacking_until_it_has_been_received(folder):
    assert folder.lacking([DIGEST]) == [DIGEST]
    folder.receive(DIGEST, [TEXT[:4], TEXT[4:]])
    assert folder.lacking([DIGEST]) == []


def test_a_content_that_changed_on_the_way_is_not_kept(folder):
    with pytest.raises(TrialLost, match="another content"):
        folder.receive(DIGEST, [TEXT, b"!"])
    assert folder.lacking([DIGEST]) == [DIGEST]
    assert list((folder.path / "contents").iterdir()) == []


def test_an_assembled_folder_has_the_files_under_their_names(folder):
    folder.receive(DIGEST, [TEXT])
    folder.assemble("home", {"data/train.bin": DIGEST, "copy.txt": DIGEST}, may_change=True)
    assert (folder.path / "home/data/train.bin").read_bytes() == TEXT
    assert (folder.path / "home/copy.txt").read_bytes() == TEXT


def test_what_a_script_writes_does_not_change_the_content(folder):
    folder.receive(DIGEST, [TEXT])
    folder.assemble("home", {"train.bin": DIGEST}, may_change=True)
    (folder.path / "home/train.bin").write_bytes(b"overwritten")
    folder.assemble("again", {"train.bin": DIGEST}, may_change=True)
    assert (folder.path / "again/train.bin").read_bytes() == TEXT


def test_prepared_files_are_on_the_disk_once(folder):
    folder.receive(DIGEST, [TEXT])
    folder.assemble("prepared", {"tokens": DIGEST}, may_change=False)
    assert (folder.path / "prepared/tokens").stat().st_nlink == 2


def test_the_folder_goes_with_the_last_worker_of_its_search(folder):
    other = NodeFolder("a-search")
    folder.receive(DIGEST, [TEXT])
    other.close()
    assert folder.lacking([DIGEST]) == []
    folder.close()
    assert list(folder.path.parent.iterdir()) == []


def test_the_next_worker_removes_what_a_killed_one_has_left(folder):
    program = (
        "import os, signal; from autotune.execution.cluster.node_folder import NodeFolder; "
        "NodeFolder('killed'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    left = folder.path.with_name("killed")
    assert left.is_dir()
    NodeFolder("the-next").close()
    assert not left.exists()
    assert folder.path.is_dir()
