"""Reads and checks a file of exported studies, line by line.

The last line says how many lines there are and what they hash to. Lines are yielded before it was
checked: use them only in a transaction that can be rolled back.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, BinaryIO

from autotune.errors import InvalidInput
from autotune.spec.study import check_study_name
from autotune.storage.old_measurements import upgraded_measurement
from autotune.storage.rows import (
    DamagedRow,
    check_attempt_row,
    confirmation_from_row,
    definition_from_row,
    finite_values,
    forecast_from_row,
    record_from_row,
)
from autotune.storage.transfer.json_lines import FORMAT, KINDS, Kind, column_values

LONGEST_LINE_BYTES = 2**28

_COPY_AGAIN = "copy the file again, or export the studies again"
_HOW_TO_EXPORT = "such a file is written by: autotune studies export STUDY --out FILE"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the file `source`; `number` starts at 1."""

    source: str
    number: int
    content: dict[str, Any]

    @property
    def kind(self) -> Any:
        return self.content.get("kind")

    @cached_property
    def values(self) -> dict[str, Any]:
        """Its values by column name. Raises InvalidInput."""
        if self.kind not in KINDS:
            raise self.error(f"there is no kind {self.kind!r:.60} of line")
        kind: Kind = self.kind
        try:
            values = column_values(kind, self.content)
        except ValueError as error:
            raise self.error(str(error)) from None
        if "measurement" in values:
            measurement = values["measurement"]
            if isinstance(measurement, dict):
                measurement = finite_values(measurement)
            values["measurement"] = upgraded_measurement(measurement)
        return values

    def studies(self) -> list[str]:
        """Returns the names of the studies in a header line. Raises InvalidInput."""
        names = self.content.get("studies")
        if (
            not isinstance(names, list)
            or not names
            or not all(isinstance(name, str) for name in names)
        ):
            raise self.error("it names no studies")
        for name in names:
            check_study_name(name)
        return names

    def error(self, why: str) -> InvalidInput:
        """Returns the error for a line that cannot be read."""
        return InvalidInput(
            f"line {self.number} of {self.source} cannot be read: {why}", hint=_COPY_AGAIN
        )


def read_lines(file: BinaryIO, *, source: str) -> Iterator[Line]:
    """Yields all lines but the last, and checks the last one. Raises InvalidInput."""
    digest, count = hashlib.sha256(), 0
    while text := _read_line(file, source=source):
        line = _parse_line(text, source=source, number=count + 1)
        if count == 0:
            _check_header(line)
        if line.kind == "end":
            _check_end(line, count=count, sha256=digest.hexdigest())
            if _read_line(file, source=source):
                raise InvalidInput(
                    f"{source} was changed: something follows its last line", hint=_COPY_AGAIN
                )
            return
        digest.update(text)
        count += 1
        yield line
    if not count:
        raise InvalidInput(f"{source} is empty", hint=_HOW_TO_EXPORT)
    raise _truncated(source, count)


def _read_line(file: BinaryIO, *, source: str) -> bytes:
    """Returns the next line, empty at the end. Raises InvalidInput where a disk fails."""
    try:
        return file.readline(LONGEST_LINE_BYTES)
    except OSError as error:
        raise InvalidInput(
            f"{source} cannot be read: {error.strerror or error}",
            hint="copy the file to another disk, or export the studies again",
        ) from None


def _parse_line(text: bytes, *, source: str, number: int) -> Line:
    try:
        content = json.loads(text.decode(), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        if number == 1:
            raise _not_an_export(source) from None
        if not text.endswith(b"\n") and len(text) < LONGEST_LINE_BYTES:
            raise _truncated(source, number - 1) from None
        why = str(error).partition(": line")[0]
        raise InvalidInput(
            f"line {number} of {source} is no JSON: {why}", hint=_COPY_AGAIN
        ) from None
    if not isinstance(content, dict):
        if number == 1:
            raise _not_an_export(source)
        raise InvalidInput(f"line {number} of {source} is no JSON object", hint=_COPY_AGAIN)
    return Line(source=source, number=number, content=content)


def _reject_constant(name: str) -> Any:
    """Raises ValueError: Python reads NaN and Infinity, and other databases do not store them."""
    raise ValueError(f"{name} is not a number")


def _check_header(line: Line) -> None:
    version, written = line.content.get("autotune"), line.content.get("format")
    if line.kind != "studies" or not isinstance(version, str) or type(written) is not int:
        raise _not_an_export(line.source)
    if written not in range(1, FORMAT + 1):
        raise InvalidInput(
            f"{line.source} has format {written}, this autotune reads formats up to {FORMAT}",
            hint=f"import it with autotune {version[:40]}, which wrote it, or a later one",
        )


def _check_end(line: Line, *, count: int, sha256: str) -> None:
    if line.content.get("lines") != count:
        raise InvalidInput(
            f"{line.source} was changed: it has {count} lines before its last, which says "
            f"{line.content.get('lines')!r:.20}",
            hint=_COPY_AGAIN,
        )
    if line.content.get("sha256") != sha256:
        raise InvalidInput(
            f"{line.source} was changed: its lines are not those that its last line was made for",
            hint=_COPY_AGAIN,
        )


def _not_an_export(source: str) -> InvalidInput:
    return InvalidInput(f"{source} is not a file of exported studies", hint=_HOW_TO_EXPORT)


def _truncated(source: str, count: int) -> InvalidInput:
    return InvalidInput(f"{source} is truncated: it ends after line {count}", hint=_COPY_AGAIN)


class ImportReader:
    """Reads one study of the file: trials, predictions, attempts and confirmations, in this order.

    All methods raise InvalidInput.
    """

    def __init__(self, line: Line, lines: "_Lookahead") -> None:
        self._lines = lines
        self.trials_read = 0
        self.row = line.values
        check_study_name(self.row["name"])
        with _damage_as_invalid_input(line):
            self._definition = definition_from_row(SimpleNamespace(**self.row))

    @staticmethod
    def read_studies(
        lines: Iterator[Line], *, names: Sequence[str], source: str
    ) -> Iterator["ImportReader"]:
        """Yields a reader for each of `names`; it must be read to its end before the next one."""
        ahead = _Lookahead(lines)
        for name in names:
            if ahead.next is not None and ahead.next.content.get("name") != name:
                raise ahead.unexpected(f"study {name!r}", source=source)
            line = ahead.take("study")
            if line is None:
                raise ahead.unexpected(f"study {name!r}", source=source)
            yield ImportReader(line, ahead)
        if ahead.next is not None:
            raise ahead.unexpected("the end", source=source)

    def trials(self) -> Iterator[Line]:
        number = 0
        while line := self._lines.take("trial"):
            values = line.values
            if values["number"] != number:
                raise line.error(f"it is trial {values['number']}, where {number} is next")
            if values["revision"] > self.row["revision"]:
                raise line.error(
                    f"it has revision {values['revision']}, the study {self.row['revision']}"
                )
            if (values["measurement"] is None) != (values["finished_at"] is None):
                raise line.error("it has a result without its date, or a date without a result")
            with _damage_as_invalid_input(line):
                record_from_row(SimpleNamespace(**values), cap_bytes=self._definition.cap_bytes)
            number += 1
            self.trials_read = number
            yield line

    def predictions(self) -> Iterator[Line]:
        while line := self._lines.take("prediction"):
            with _damage_as_invalid_input(line):
                forecast_from_row(SimpleNamespace(**line.values))
            yield line

    def attempts(self) -> Iterator[Line]:
        while line := self._lines.take("attempt"):
            with _damage_as_invalid_input(line):
                check_attempt_row(SimpleNamespace(**line.values))
            if not 0 <= line.content["trial"] < self.trials_read:
                raise line.error(f"there is no trial {line.content['trial']}")
            yield line

    def confirmations(self) -> Iterator[Line]:
        ordinal = 1
        while line := self._lines.take("confirmation"):
            values = line.values
            if values["ordinal"] != ordinal:
                raise line.error(f"it is confirmation {values['ordinal']}, where {ordinal} is next")
            with _damage_as_invalid_input(line):
                confirmation_from_row(SimpleNamespace(**values))
            ordinal += 1
            yield line


def check_export(file: BinaryIO, *, source: str) -> None:
    """Reads a file to its end as an import does, and stores nothing. Raises InvalidInput."""
    lines = read_lines(file, source=source)
    names = next(lines).studies()
    for study in ImportReader.read_studies(lines, names=names, source=source):
        for section in (study.trials, study.predictions, study.attempts, study.confirmations):
            for _ in section():
                pass


class _Lookahead:
    """Lines with one line of lookahead, to read as long as they are of the wanted kind."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self.next = next(lines, None)

    def take(self, kind: Kind) -> Line | None:
        """Returns the next line where it is of that kind; else None, and the line stays."""
        line = self.next
        if line is None or line.kind != kind:
            return None
        self.next = next(self._lines, None)
        return line

    def unexpected(self, expected: str, *, source: str) -> InvalidInput:
        if self.next is None:
            return InvalidInput(
                f"{source} has not {expected}, which its first line names", hint=_COPY_AGAIN
            )
        return self.next.error(f"it is a {self.next.kind!r:.60} where {expected} is expected")


@contextmanager
def _damage_as_invalid_input(line: Line) -> Iterator[None]:
    try:
        yield
    except DamagedRow as error:
        raise line.error(str(error)) from None
