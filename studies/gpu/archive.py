"""Archive of results, databases and the ends of logs, without weights and caches."""

import gzip
import io
import os
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 16 * 1024**2
LOG_BYTES = 32 * 1024
"""Size of the end of each log that is stored."""

TEXTS = frozenset({".json", ".jsonl", ".md", ".toml", ".py", ".yaml"})
LOGS = frozenset({".log", ".txt"})
DATABASES = frozenset({".db"})
NEVER = frozenset({"prepared", "inductor", "triton", "snapshots", "predictions", "__pycache__"})
"""Folders within a part's with weights, tokens, compiled code and allocation histories."""
EXCLUDED = "LEFT_OUT.txt"


@dataclass(frozen=True, kw_only=True)
class Member:
    name: str
    content: bytes

    def compressed_bytes(self) -> int:
        return len(gzip.compress(self.content, 6)) + 1024  # with its header and padding


def write_archive(out: Path, file: Path, *, most_bytes: int = MOST_BYTES) -> list[str]:
    """Replaces `file` atomically by an archive of at most `most_bytes`.

    Returns the names of the files that did not fit: the largest ones, also named in the archive.
    """
    members = sorted(_members(out), key=Member.compressed_bytes)
    excluded: list[str] = []
    while True:
        packed = _packed(members, excluded)
        if len(packed) <= most_bytes or not members:
            break
        excluded.append(members.pop().name)
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_bytes(packed)
    os.replace(unfinished, file)
    return excluded


def unpack_archive(file: Path, out: Path) -> None:
    """Restores the files of the archive in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as archive:
        archive.extractall(out, filter="data")
    (out / EXCLUDED).unlink(missing_ok=True)


def _packed(members: list[Member], excluded: list[str]) -> bytes:
    packed = io.BytesIO()
    extra = [Member(name=EXCLUDED, content="\n".join(excluded).encode())] if excluded else []
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        for member in sorted([*members, *extra], key=lambda member: member.name):
            header = tarfile.TarInfo(member.name)
            header.size = len(member.content)
            archive.addfile(header, io.BytesIO(member.content))
    return packed.getvalue()


def _members(out: Path) -> Iterator[Member]:
    for file in sorted(out.rglob("*")):
        name = file.relative_to(out)
        if not file.is_file() or file.is_symlink() or NEVER & set(name.parts[1:]):
            continue
        if file.suffix in TEXTS:
            yield Member(name=str(name), content=file.read_bytes())
        elif file.suffix in LOGS:
            yield Member(name=str(name), content=file.read_bytes()[-LOG_BYTES:])
        elif file.suffix in DATABASES:
            yield Member(name=str(name), content=_database(file))


def _database(file: Path) -> bytes:
    """As of now, also while a search writes to it, without what SQLite keeps for later."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.db"
        with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
            target.execute("VACUUM")
        return copy.read_bytes()
