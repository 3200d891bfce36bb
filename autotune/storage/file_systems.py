"""Which file system a studies database would be on; on a network file system SQLite loses results without a word.

Its write-ahead log is shared memory, which two machines do not share, and its locks are kept by
each machine for itself on many of them. What is not known here passes: the last word has SQLite,
which must grant the log.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from autotune.errors import StorageUnavailable

MOUNTINFO = Path("/proc/self/mountinfo")

# As they stand in mountinfo, without "fuse." in front: file servers; clusters, with disks that
# several machines mount (gfs, ocfs); other machines' files and object stores mounted by a program.
_NETWORK = """
nfs nfs3 nfs4 cifs smb2 smb3 smbfs smbnetfs afs auristorfs coda ncp ncpfs 9p davfs davfs2
ceph ceph-fuse glusterfs lustre lustre_lite gpfs beegfs beegfs_nodev fhgfs panfs wekafs pvfs2 orangefs daos dfuse
quobyte cvfs snfs vastnfs gfs gfs2 ocfs2 acfs ibrix moosefs mfs juicefs seaweedfs rozofs
sshfs curlftpfs ftpfs gvfsd-fuse rclone s3fs goofys gcsfuse mount-s3 blobfuse blobfuse2 hdfs fuse_dfs
"""
NETWORK_FILE_SYSTEMS = frozenset(_NETWORK.split())


@dataclass(frozen=True, kw_only=True)
class _Mount:
    id: str
    parent: str
    point: Path
    file_system: str


def refuse_network_file_system(file: Path, *, mountinfo: Path = MOUNTINFO) -> None:
    """Raises StorageUnavailable where `file`, which need not exist yet, would be on a network file system."""
    try:
        text = mountinfo.read_text(errors="surrogateescape")
    except OSError:
        return  # not Linux: it cannot be told
    found = file_system(file.resolve(), mountinfo=text)
    if found is not None and found.removeprefix("fuse.") in NETWORK_FILE_SYSTEMS:
        _refuse(f"is on a network file system ({found})", file)


def refuse_without_write_ahead_log(journal_mode: str, file: Path) -> None:
    """Raises StorageUnavailable unless `journal_mode`, what SQLite answered when it was asked for WAL, says so."""
    if journal_mode != "wal":
        _refuse(f"is on a file system where SQLite keeps its {journal_mode!r} journal", file)


def _refuse(why: str, file: Path) -> NoReturn:
    raise StorageUnavailable(
        f"the studies database {file} {why}, where SQLite's locks and its write-ahead log are not safe",
        hint="name a local folder, --storage sqlite:////local/folder/autotune.db, or use PostgreSQL, "
        "--storage postgresql+psycopg://user:password@host/database",
    )


def file_system(path: Path, *, mountinfo: str) -> str | None:
    """The type of the file system that `path`, absolute and without links, is on; None where `mountinfo` has none.

    Goes from mount to mount as the kernel does, so that what is mounted over something hides all
    below it.
    """
    mounts = _mounts(mountinfo)
    ids = {mount.id for mount in mounts}
    on_the_way = [mount for mount in mounts if path.is_relative_to(mount.point)]
    here: _Mount | None = None
    while True:
        from_here = [
            mount
            for mount in on_the_way
            if mount is not here and (mount.parent == here.id if here else _is_root(mount, ids))
        ]
        if not from_here:
            return here.file_system if here else None
        here = min(from_here, key=lambda mount: len(mount.point.parts))
        on_the_way.remove(here)


def _is_root(mount: _Mount, ids: set[str]) -> bool:
    return mount.parent == mount.id or mount.parent not in ids


def _mounts(mountinfo: str) -> list[_Mount]:
    mounts = []
    for line in mountinfo.split("\n"):
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if after and len(fields) > 4:
            point = Path(_unescaped(fields[4]))
            mounts.append(
                _Mount(id=fields[0], parent=fields[1], point=point, file_system=after.split(" ")[0])
            )
    return mounts


def _unescaped(text: str) -> str:
    """Space, tab, newline and backslash are written as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
