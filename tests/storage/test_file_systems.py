"""Where a SQLite file may be: decided by the text of mountinfo and by SQLite's journal mode."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from autotune.errors import StorageUnavailable
from autotune.storage.file_systems import MOUNTINFO, file_system, reject_network_file_system
from tests.building.studies import definition, open_store

LAPTOP = r"""
22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/sda2 rw
30 22 0:30 / /home rw,relatime shared:2 master:7 - nfs4 server:/home rw,vers=4.2
31 30 8:3 / /home/me/disk rw,relatime - xfs /dev/sdb1 rw
32 22 0:32 / /mnt/two\040words\134and\011more rw - cifs //server/share rw
33 22 0:33 / /home2 rw - btrfs /dev/sdc1 rw
34 22 0:30 /me/data /data rw,relatime - nfs4 server:/home rw,vers=4.2
35 22 8:2 /srv/work /work rw,relatime - ext4 /dev/sda2 rw
36 22 0:36 / /remote rw,relatime - fuse.sshfs me@host: rw,user_id=1000
37 22 0:37 / /net rw,relatime - autofs systemd-1 rw,fd=29
38 37 0:38 / /net rw,relatime - nfs server:/net rw,vers=3
39 22 8:9 / /cover/inner rw - nfs4 server:/hidden rw
40 22 8:9 / /cover rw - ext4 /dev/sdd1 rw
"""
# The root of a container: its own parent, and nothing above it.
CONTAINER = """
500 500 0:50 / / rw,relatime - overlay overlay rw,lowerdir=/var/lib/x
501 500 0:51 /studies /studies rw - lustre 10.0.0.1@tcp:/scratch rw
"""


@pytest.mark.parametrize(
    ("mountinfo", "path", "found"),
    [
        pytest.param(LAPTOP, "/", "ext4", id="the root itself"),
        pytest.param(LAPTOP, "/tmp/x.db", "ext4", id="below the root"),
        pytest.param(LAPTOP, "/home", "nfs4", id="a mount point"),
        pytest.param(LAPTOP, "/home/me/x.db", "nfs4", id="below a mount point"),
        pytest.param(
            LAPTOP, "/home/me/disk/x.db", "xfs", id="a local disk inside a network folder"
        ),
        pytest.param(LAPTOP, "/home2/x.db", "btrfs", id="a name that begins like a mount point's"),
        pytest.param(LAPTOP, "/home3/x.db", "ext4", id="no mount point of that name"),
        pytest.param(
            LAPTOP, "/mnt/two words\\and\tmore/x.db", "cifs", id="a mount point with escapes"
        ),
        pytest.param(
            LAPTOP, "/data/x.db", "nfs4", id="a folder of a network mount, bound elsewhere"
        ),
        pytest.param(LAPTOP, "/work/x.db", "ext4", id="a local folder, bound elsewhere"),
        pytest.param(LAPTOP, "/remote/x.db", "fuse.sshfs", id="by a program"),
        pytest.param(LAPTOP, "/net/x.db", "nfs", id="mounted on the automounter's own mount point"),
        pytest.param(LAPTOP, "/cover/inner/x.db", "ext4", id="hidden by what was mounted over it"),
        pytest.param(CONTAINER, "/x.db", "overlay", id="the root of a container"),
        pytest.param(CONTAINER, "/studies/x.db", "lustre", id="a volume of a container"),
        pytest.param("", "/x.db", None, id="nothing is mounted"),
        pytest.param(
            "not what\nit should be - \n1 2 - \n\xff",
            "/x.db",
            None,
            id="a text that is no mountinfo",
        ),
    ],
)
def test_the_file_system_of_a_path_is_the_one_the_kernel_would_reach(mountinfo, path, found):
    assert file_system(Path(path), mountinfo=mountinfo) == found


@pytest.mark.skipif(not MOUNTINFO.is_file(), reason="there is no mountinfo on this system")
def test_the_mounts_of_this_system_can_be_read():
    text = MOUNTINFO.read_text()
    assert file_system(Path("/proc/self"), mountinfo=text) == "proc"


@pytest.fixture
def mounted(tmp_path):
    """mounted("nfs4") is a file that says so of `tmp_path`/mnt."""

    def write(kind):
        point = str(tmp_path.resolve() / "mnt").replace(" ", "\\040")
        file = tmp_path / "mountinfo"
        file.write_text(
            "22 1 0:21 / / rw - ext4 /dev/sda2 rw\n"
            f"30 22 0:30 / {point} rw - {kind} server:/home rw\n"
        )
        return file

    return write


NETWORK = (
    "nfs nfs4 cifs smb3 smbfs afs ceph fuse.ceph-fuse lustre gpfs beegfs fuse.glusterfs "
    "fuse.sshfs 9p panfs wekafs"
)


@pytest.mark.parametrize("kind", [*NETWORK.split(), "pvfs2", "fuse.daos", "fuse.juicefs", "gfs2"])
def test_the_error_for_a_network_file_system_has_its_kind_the_file_and_two_alternatives(
    tmp_path, mounted, kind
):
    file = tmp_path / "mnt" / "studies" / "autotune.db"
    with pytest.raises(StorageUnavailable) as raised:
        reject_network_file_system(file, mountinfo=mounted(kind))
    assert f"{file} is on a network file system ({kind})" in raised.value.message
    assert "--storage sqlite:///" in raised.value.hint
    assert "--storage postgresql+psycopg://" in raised.value.hint


@pytest.mark.parametrize(
    "kind",
    [
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "tmpfs",
        "overlay",
        "fuseblk",
        "fuse.mergerfs",
        "virtiofs",
        "apfs",
    ],
)
def test_a_local_file_system_is_accepted(tmp_path, mounted, kind):
    reject_network_file_system(tmp_path / "mnt" / "autotune.db", mountinfo=mounted(kind))


def test_a_link_to_a_network_file_system_is_rejected(tmp_path, mounted):
    (tmp_path / "mnt").mkdir()
    (tmp_path / "studies").symlink_to("mnt")
    with pytest.raises(StorageUnavailable, match=r"studies/autotune\.db"):
        reject_network_file_system(tmp_path / "studies" / "autotune.db", mountinfo=mounted("nfs4"))


def test_a_system_without_mountinfo_accepts_every_file(tmp_path):
    reject_network_file_system(tmp_path / "autotune.db", mountinfo=tmp_path / "missing")


def test_a_database_without_a_write_ahead_log_is_rejected(tmp_path):
    """With unix-none, SQLite opens a file without locks, and so without the log's shared memory."""
    with closing(sqlite3.connect(tmp_path / "autotune.db")) as connection:
        connection.execute("VACUUM")  # writes the header
    url = f"sqlite:///file:{tmp_path}/autotune.db?vfs=unix-none&uri=true"
    with (
        pytest.raises(StorageUnavailable, match=r"autotune\.db") as raised,
        open_store(url) as store,
    ):
        store.create_study(definition(), trials_wanted=1)
    assert "'delete' journal" in raised.value.message
    assert "--storage postgresql+psycopg://" in raised.value.hint


def test_a_line_that_is_no_mount_is_passed_over():
    cut = "99 22 8:9 / /tmp rw,relatime shared:1 ext4 /dev/sde1 rw\n22 - ext4\n"
    assert file_system(Path("/tmp/x.db"), mountinfo=cut + LAPTOP) == "ext4"
    assert file_system(Path("/tmp/x.db"), mountinfo=cut + CONTAINER) == "overlay"
