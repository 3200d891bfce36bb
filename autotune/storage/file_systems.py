"""Rejects SQLite databases on network file systems, where results would be lost silently.

SQLite's write-ahead log uses shared memory, which two machines do not share, and many network file
systems manage locks on each machine separately. File systems that are not listed here are accepted,
as long as SQLite can enable its write-ahead log there.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from autotune.errors import StorageUnavailable

MOUNTINFO = Path("/proc/self/mountinfo")

# Names as in mountinfo, without the prefix "fuse.": file servers; cluster file systems, including
# those on shared disks (gfs, ocfs); remote files and object stores mounted through FUSE.
_NETWORK = """
nfs nfs3 nfs4 cifs smb2 smb3 smbfs smbnetfs afs auristorfs coda ncp ncpfs 9p davfs davfs2
ceph ceph-fuse glusterfs lustre lustre_lite gpfs beegfs beegfs_nodev fhgfs panfs wekafs pvfs2
orangefs daos dfuse
quobyte cvfs snfs vastnfs gfs gfs2 ocfs2 acfs ibrix moosefs mfs juicefs seaweedfs rozofs
sshfs curlftpfs ftpfs gvfsd-fuse rclone s3fs goofys gcsfuse mount-s3 blobfuse blobfuse2 hdfs
fuse_dfs
"""
NETWORK_FILE_SYSTEMS = frozenset(_NETWORK.split())


@dataclass(frozen=True, kw_only=True)
class _Mount:
    id: str
    parent: str
    point: Path
    file_system: str


def reject_network_file_system(file: Path, *, mountinfo: Path = MOUNTINFO) -> None:
    """Raises StorageUnavailable where `file`, existing or not, is on a network file system."""
    try:
        text = mountinfo.read_text(errors="surrogateescape")
    except OSError:
        return  # not Linux: the file system cannot be determined
    found = file_system(Path(os.path.realpath(file)), mountinfo=text)
    if found is not None and found.removeprefix("fuse.") in NETWORK_FILE_SYSTEMS:
        _raise_unsafe(f"is on a network file system ({found})", file)


def check_journal_mode(journal_mode: str, file: Path) -> None:
    """Raises StorageUnavailable unless SQLite's reply to `PRAGMA journal_mode=WAL` was "wal"."""
    if journal_mode != "wal":
        _raise_unsafe(f"is on a file system where SQLite keeps its {journal_mode!r} journal", file)


def _raise_unsafe(why: str, file: Path) -> NoReturn:
    raise StorageUnavailable(
        f"the studies database {file} {why}, "
        "where SQLite's locks and its write-ahead log are not safe",
        hint="name a local folder, --storage sqlite:////local/folder/autotune.db, "
        "or use PostgreSQL, --storage postgresql+psycopg://user:password@host/database",
    )


def file_system(path: Path, *, mountinfo: str) -> str | None:
    """Returns the type of the file system of `path`; None where `mountinfo` does not list it.

    `path` must be absolute and without links. Follows the mounts from the root as the kernel does,
    so that a mount hides what is mounted below its mount point.
    """
    mounts = _mounts(mountinfo)
    ids = {mount.id for mount in mounts}
    candidates = [mount for mount in mounts if path.is_relative_to(mount.point)]
    current: _Mount | None = None
    while True:
        if current is None:
            children = [mount for mount in candidates if _is_root(mount, ids)]
        else:
            children = [mount for mount in candidates if mount.parent == current.id]
        if not children:
            return current.file_system if current else None
        current = min(children, key=lambda mount: len(mount.point.parts))
        candidates.remove(current)


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
    """Decodes space, tab, newline and backslash, which mountinfo writes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
