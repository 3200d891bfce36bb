"""Finished results on their way to the database: each a synced file until the database has it.

Whoever works on the study next, on this machine, delivers what a dead worker left. A result is
delivered once: the database knows the attempt it belongs to (`storage/attempts.py`), and the file
goes when it has it.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune.failpoints import failpoint
from autotune.spec.result import Measurement
from autotune.storage.attempts import Delivery
from autotune.storage.typed import check_types

OUTBOX_FOLDER = "spool"
"""Folder of a study's results on their way."""

_UNFINISHED, _UNREADABLE, _UNKNOWN = ".unfinished", ".unreadable", ".unknown"


@dataclass(frozen=True, kw_only=True)
class OutboxResult:
    attempt_id: str
    number: int
    measurement: Measurement
    seconds: float


class Outbox:
    """The results of one study in one folder. Raises OSError where they cannot be written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, result: OutboxResult) -> None:
        """When this returns, the result is on disk."""
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f"{result.attempt_id}{_UNFINISHED}"
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                json.dump(asdict(result), file)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            unfinished.unlink(missing_ok=True)  # what there is of it takes room on a full disk
            raise
        failpoint("result written, not in place")
        unfinished.rename(self._file(result.attempt_id))
        _sync(self._folder)
        failpoint("result spooled")

    def settle(self, attempt_id: str, delivery: Delivery) -> None:
        """Removes the result, which the database has.

        What it does not know, it renames: the file is all there is.
        """
        file = self._file(attempt_id)
        if delivery == "unknown":
            _put_aside(file, _UNKNOWN)
        file.unlink(missing_ok=True)

    def waiting(self) -> Iterator[OutboxResult]:
        """The results that are whole, oldest first.

        What cannot be read is renamed, so that it is seen and kept.

        Another worker may be delivering the same ones: a file that goes meanwhile is delivered.
        """
        for file in sorted(self._folder.glob("*.json"), key=_written_at):
            try:
                result = read_result(file)
            except FileNotFoundError:
                continue
            if result is None:
                _put_aside(file, _UNREADABLE)
            else:
                yield result

    def left_over(self) -> list[Path]:
        """Files that no database took: unreadable, or of an attempt that it does not know."""
        return sorted(
            file for suffix in (_UNREADABLE, _UNKNOWN) for file in self._folder.glob(f"*{suffix}")
        )

    def deliver(self, finish: Callable[[OutboxResult], Delivery]) -> dict[int, Delivery]:
        """Hands every waiting result to `finish` and removes its file: {number of the trial: what became of it}.

        That of an attempt the database does not know, as one brought back from a copy, is renamed
        and stays.
        """
        delivered: dict[int, Delivery] = {}
        for result in self.waiting():
            delivered[result.number] = finish(result)
            self.settle(result.attempt_id, delivered[result.number])
        return delivered

    def half_written(self) -> set[str]:
        """Attempts whose worker was at writing the result, or died at it: the attempt is made again."""
        return {file.stem for file in self._folder.glob(f"*{_UNFINISHED}")}

    def sweep(self, attempt_ids: Iterable[str]) -> None:
        """Removes what was only half written of these attempts."""
        for attempt_id in attempt_ids:
            (self._folder / f"{attempt_id}{_UNFINISHED}").unlink(missing_ok=True)

    def _file(self, attempt_id: str) -> Path:
        return self._folder / f"{attempt_id}.json"


def _put_aside(file: Path, why: str) -> None:
    with suppress(FileNotFoundError):  # another worker was quicker
        file.rename(file.with_name(file.name + why))


def _written_at(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def read_result(file: Path) -> OutboxResult | None:
    """None for a file that is not a whole result."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        result = OutboxResult(**{**stored, "measurement": Measurement(**stored["measurement"])})
        check_types(result)
        check_types(result.measurement)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return result if result.attempt_id == file.stem else None


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
