"""An outbox of finished results: each is a synced file until the database has stored it.

The next worker on this machine delivers the results of a dead one. Delivering one twice does no
harm, because a trial's result names its attempt (`storage/attempts.py`), and a confirmation has an
id; the file is removed after the delivery.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from autotune.errors import InvalidInput
from autotune.spec.attempt import FinishedTrial
from autotune.spec.confirmation import Confirmation
from autotune.spec.limits import Number
from autotune.spec.reading import check
from autotune.spec.schema import Schema
from autotune.storage.attempts import Delivery
from autotune.storage.rows import (
    confirmation_from_values,
    confirmation_values,
    measurement_from_values,
)
from autotune.system.failpoints import failpoint
from autotune.system.files import durable_file, read_plain_file

OUTBOX_FOLDER = "spool"
"""Name of the outbox in a study's work folder."""

_ID = re.compile(r"[\w-]{1,32}", re.ASCII)
_MOST_BYTES = 64 * 1024**2
"""Far more than a result has, even with the history of a script's files."""
_UNFINISHED, _UNREADABLE, _UNKNOWN = ".unfinished", ".unreadable", ".unknown"


@dataclass(frozen=True, kw_only=True)
class OutboxResult(Schema):
    """The result of an attempt at trial `number`."""

    attempt_id: str
    number: Number
    finished: FinishedTrial

    @property
    def id(self) -> str:
        """The name of its file."""
        return self.attempt_id


@dataclass(frozen=True, kw_only=True)
class OutboxConfirmation(Schema):
    """A measurement beside the trials of a study."""

    id: str
    study_begun: str
    """When the study was created (`StudyStore.begun`), by which another one of the same name, as in
    a new database, is not taken for it."""
    confirmation: Confirmation


OutboxEntry: TypeAlias = OutboxResult | OutboxConfirmation


class Outbox:
    """The undelivered results of one study, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, result: OutboxEntry) -> None:
        """Writes a result to disk and syncs it. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f"{result.id}{_UNFINISHED}"
        with durable_file(self._file(result.id), unfinished=unfinished):
            unfinished.write_text(json.dumps(_to_json(result)), encoding="utf-8")
            failpoint("result written, not in place")
        failpoint("result spooled")

    def settle(self, result_id: str, delivery: Delivery) -> None:
        """Removes a delivered result.

        One whose attempt or study the database does not know is renamed instead: it exists nowhere
        else.
        """
        file = self._file(result_id)
        if delivery == "unknown":
            _set_aside(file, _UNKNOWN)
        file.unlink(missing_ok=True)

    def waiting(self) -> Iterator[OutboxEntry]:
        """Yields the complete results, oldest first.

        A file that cannot be read is renamed, so that it stays and is reported. Another worker may
        be delivering the same results: a file that disappears has been delivered.
        """
        for file in sorted(self._folder.glob("*.json"), key=_modified_at):
            try:
                result = read_result(file)
            except FileNotFoundError:
                continue
            if result is None:
                _set_aside(file, _UNREADABLE)
            else:
                yield result

    def left_over(self) -> list[Path]:
        """Returns the files that were set aside: unreadable, or of an unknown attempt or study."""
        unreadable = self._folder.glob(f"*{_UNREADABLE}")
        unknown = self._folder.glob(f"*{_UNKNOWN}")
        return sorted([*unreadable, *unknown])

    def deliver(self, finish: Callable[[OutboxEntry], Delivery]) -> None:
        """Passes every waiting result to `finish` and removes its file.

        The file of an attempt or study that the database does not know, as after it was replaced by
        an older copy, is renamed and stays.
        """
        for result in self.waiting():
            self.settle(result.id, finish(result))

    def half_written(self) -> set[str]:
        """Returns the ids of partly written results; their worker may be dead."""
        return {file.stem for file in self._folder.glob(f"*{_UNFINISHED}")}

    def sweep(self, result_ids: Iterable[str]) -> None:
        """Removes these partly written results."""
        for result_id in result_ids:
            (self._folder / f"{result_id}{_UNFINISHED}").unlink(missing_ok=True)

    def _file(self, result_id: str) -> Path:
        return self._folder / f"{result_id}.json"


def _set_aside(file: Path, why: str) -> None:
    with suppress(FileNotFoundError):  # another worker has renamed or delivered it
        file.rename(file.with_name(file.name + why))


def _modified_at(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def read_result(file: Path) -> OutboxEntry | None:
    """Returns the result in a file; None where it is not a complete result.

    Raises FileNotFoundError.
    """
    try:
        content = read_plain_file(file, most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        raise
    except OSError:  # a link, a folder, a pipe, or one that this user may not read
        return None
    return parse_result(content, result_id=file.stem)


def parse_result(content: bytes, *, result_id: str) -> OutboxEntry | None:
    """Returns the result in the content of a file; None where it is not that of `result_id`."""
    try:
        values = json.loads(content)
        result: OutboxEntry
        if "confirmation" in values:
            result = _confirmation_from_json(**values)
        else:
            result = _result_from_json(**values)
        check(result)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError):
        return None
    except (RecursionError, InvalidInput):
        return None
    # The id becomes a part of a path, and the key of a row.
    if result.id != result_id or not _ID.fullmatch(result.id):
        return None
    return result


def _to_json(result: OutboxEntry) -> dict[str, Any]:
    """Returns the content of a file; a later version of autotune may deliver it."""
    if isinstance(result, OutboxConfirmation):
        return {
            "id": result.id,
            "study_begun": result.study_begun,
            "confirmation": confirmation_values(result.confirmation),
        }
    return {
        "attempt_id": result.attempt_id,
        "number": result.number,
        "measurement": asdict(result.finished.measurement),
        "seconds": result.finished.seconds,
    }


def _confirmation_from_json(*, id: Any, study_begun: Any, confirmation: Any) -> OutboxConfirmation:
    return OutboxConfirmation(
        id=id, study_begun=study_begun, confirmation=confirmation_from_values(confirmation)
    )


def _result_from_json(
    *, attempt_id: Any, number: Any, measurement: dict[str, Any], seconds: Any
) -> OutboxResult:
    """Returns the result of a file's content; an earlier version may have written it."""
    finished = FinishedTrial(measurement=measurement_from_values(measurement), seconds=seconds)
    return OutboxResult(attempt_id=attempt_id, number=number, finished=finished)
