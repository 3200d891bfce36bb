"""Writes the configuration of a trial into a trainer's file, and says what changed.

The original is never lost: the changed file lies beside it, or, where it takes its place, a copy of
the original does.
"""

import dataclasses
import difflib
import itertools
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import IllegalConfiguration, InvalidInput, StorageUnavailable
from autotune.exporters.export import Unsupported
from autotune.exporters.into.changes import (
    ChangedFile,
    KeyChange,
    TrainerFile,
    changed_file,
    read_file_of_trainer,
)
from autotune.exporters.into.comparison import check_file, remarks
from autotune.exporters.into.edited import REMOVED
from autotune.exporters.into.gains import gain_of_all, gains
from autotune.exporters.into.trainer_parser import parser_of, refusal
from autotune.exporters.recipe import recipe_of
from autotune.importers.trainer_file import LARGEST_BYTES
from autotune.printable import printable
from autotune.spec.result import JSON_SCHEMA, StudyResult, TrialRecord
from autotune.spec.user_files import read_file
from autotune.spec.user_paths import expanded
from autotune.system.files import durable_file

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, repr=False)
class WrittenInto:
    """A trainer's file with the configuration of a trial."""

    trainer: str
    """Trainer and version, such as `TRL 1.16`."""
    record: TrialRecord
    source: Path
    """The file that was read."""
    file: Path
    """The file that was written; that which was read, where nothing was to change."""
    original: Path | None
    """The copy of the original, where the changed file took its place."""
    difference: str
    """In the unified format; empty where nothing was to change."""
    changed: ChangedFile
    gain: str | None
    """What all changes bring, where the study has measured the file as it is."""
    gains: Mapping[str, str]
    """{technique that the trial changes: what it brings}."""
    remarks: tuple[str, ...]
    """Where the file is not what the study has measured, a sentence each."""
    checked_by: str | None
    """The trainer's own parser, where it is installed and has read the changed file."""

    @property
    def changes(self) -> tuple[KeyChange, ...]:
        return self.changed.changes

    @property
    def unsupported(self) -> tuple[Unsupported, ...]:
        return self.changed.unsupported

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that were written."""
        if not self.changes:
            return ()
        return (self.file, *(self.file.parent / name for name in self.changed.files))

    @property
    def command(self) -> str:
        return self.changed.command

    @property
    def read_back(self) -> str:
        """What was done to make sure that the file says what it should."""
        says = "it describes the trial"
        if self.changed.not_read is not None:
            says = f"it could not be compared with the trial, as {self.changed.not_read}"
        elif self.unsupported:
            says = "it describes the trial, but for what is not expressed"
        taken = "" if self.checked_by is None else f"; {self.checked_by} takes it"
        return f"read back: {says}{taken}"

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        """Yield a title and its lines for each part of what a user should know."""
        if self.remarks:
            yield "The file and the study", list(self.remarks)
        if self.changes:
            yield "What it brings", [*([self.gain] if self.gain else []), *self._gain_lines()]
        lacking = [
            f"{each.setting} {each.value} ({each.instead} instead): {each.why}"
            for each in self.unsupported
        ]
        if lacking:
            yield "Not expressed", lacking
        if self.changed.notes:
            yield "Good to know", list(self.changed.notes)
        yield "Use it:", self.command.splitlines()

    def _gain_lines(self) -> Iterator[str]:
        """Yield what each technique brings, with its keys."""
        for technique, gain in self.gains.items():
            keys = [change.name for change in self.changes if technique in change.techniques]
            value = f"{technique} {getattr(self.record.config, technique)}"
            yield f"{value} ({', '.join(keys)}): {gain}" if keys else f"{value}: {gain}"
        others = [change.name for change in self.changes if not change.techniques]
        if others:
            yield f"{', '.join(others)}: by all of them together"

    def __str__(self) -> str:
        """Returns the difference and all sections as text."""
        lines = [f"#{self.record.number} {self.record.config.describe()}"]
        if self.changes:
            lines += [f"for {self.trainer}: {self.file}", "", self.difference]
        else:
            lines.append(f"{self.source} already describes it: nothing was written")
        for title, of_section in self.sections():
            lines += ["", title, *(f"  {line}" for line in of_section)]
        return printable("\n".join(lines), keep_lines=True)

    def __repr__(self) -> str:
        """Returns the text, which Python and notebooks show, instead of the fields."""
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object that `autotune export --into --json` prints."""
        return {
            "schema": JSON_SCHEMA,
            "trainer": self.trainer,
            "trial": self.record.number,
            "source": str(self.source),
            "files": [str(file) for file in self.files],
            "original": None if self.original is None else str(self.original),
            "changes": [
                {
                    "key": list(change.path),
                    "before": change.before,
                    "after": None if change.after is REMOVED else change.after,
                    "is_removed": change.after is REMOVED,
                    "techniques": list(change.techniques),
                }
                for change in self.changes
            ],
            "difference": self.difference,
            "gain": self.gain,
            "gains": dict(self.gains),
            "command": self.command,
            "read_back": self.read_back,
            "refusals": [dataclasses.asdict(entry) for entry in self.unsupported],
            "remarks": list(self.remarks),
            "notes": list(self.changed.notes),
        }


def write_into(
    result: StudyResult,
    record: TrialRecord,
    path: str | Path,
    *,
    out: str | Path | None = None,
    in_place: bool = False,
    strict: bool = False,
    overwrite: bool = False,
) -> WrittenInto:
    """Write a trainer's file with the configuration of a trial, and return what changed.

    By default `sft.yaml` becomes `sft.autotune.yaml` beside it; another file of that name is only
    replaced with `overwrite`. With `in_place` the file itself is replaced, and its original is
    copied to `sft.yaml.orig`. Nothing is written if nothing is to change. With `strict`, raises
    IllegalConfiguration if the file cannot express all that the trial changes. Raises InvalidInput,
    also for a file whose training the study says nothing about, and StorageUnavailable.
    """
    source = expanded(str(path))
    text = read_file(source, most_bytes=LARGEST_BYTES)
    file = read_file_of_trainer(source, text, result.workload)
    check_file(result.study, result.workload, record.config, file)
    changed = changed_file(file, recipe_of(result, record))
    if strict:
        _check_complete(file, changed)
    written = _with_mark(changed.text, text)
    checked_by: str | None = None
    of_parser: tuple[str, ...] = ()
    if changed.changes:
        checked_by, of_parser = _checked_by_trainer(file, written)
    target, original = source, None
    if changed.changes:
        target = source if in_place else _file_beside(source, out)
        others = {target.parent / name: content for name, content in changed.files.items()}
        contents = {file: content.encode() for file, content in others.items()}
        _check_free(contents if in_place else {target: written, **contents}, overwrite=overwrite)
        original = _write(target, written, contents, copy_first=in_place)
    command = _with_paths(changed, target, of_exporter=file.dialect.file)
    changed = dataclasses.replace(changed, command=command.replace("{source}", source.name))
    return WrittenInto(
        trainer=file.title,
        record=record,
        source=source,
        file=target,
        original=original,
        difference=_difference(file.text, changed.text, source=source, target=target),
        changed=changed,
        gain=gain_of_all(result, record, file.config),
        gains=gains(result, record, before=file.config, techniques=changed.techniques),
        remarks=(*remarks(result.workload, record.config, file), *of_parser),
        checked_by=checked_by,
    )


def _with_paths(changed: ChangedFile, target: Path, *, of_exporter: str) -> str:
    """Returns the command with the paths of the files, which may lie in another folder."""
    command = changed.command
    for name in changed.files:
        command = command.replace(name, shlex.quote(str(target.parent / name)))
    for name in ("{file}", of_exporter):
        command = command.replace(name, shlex.quote(str(target)))
    return command


def _with_mark(text: str, original: bytes) -> bytes:
    mark = _BYTE_ORDER_MARK if original.startswith(_BYTE_ORDER_MARK) else b""
    return mark + text.encode()


def _check_complete(file: TrainerFile, changed: ChangedFile) -> None:
    if not changed.unsupported:
        return
    first = changed.unsupported[0]
    message = f"{file.path} cannot express {first.setting} {first.value}: {first.why}"
    if len(changed.unsupported) > 1:
        message += f" (and {len(changed.unsupported) - 1} more)"
    raise IllegalConfiguration(
        message, hint="leave --strict out to write what it can, or use --to pytorch"
    )


def _checked_by_trainer(file: TrainerFile, written: bytes) -> tuple[str | None, tuple[str, ...]]:
    """Returns the name of the trainer's parser that takes the changed file, and remarks.

    None where it is not installed, and where it refuses the original as well, which is remarked.
    Raises InvalidInput for a file that it refuses while it takes the original.
    """
    name = parser_of(file.trainer)
    if name is None:
        return None, ()
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / file.path.name
        changed.write_bytes(written)
        why = refusal(file.trainer, changed)
    if why is None:
        return name, ()
    before = refusal(file.trainer, file.path)
    if before is not None:
        return None, (f"{name}, as installed here, refuses {file.path} as it is: {before}",)
    raise InvalidInput(
        f"{name} refuses {file.path} with the trial's configuration: {why}",
        hint=f"write a new file: --to {file.dialect.target}",
    )


# -- files -----------------------------------------------------------------------------------------


def _file_beside(source: Path, out: str | Path | None) -> Path:
    """Returns the file to write. Raises InvalidInput where that is the file that was read."""
    target = source.with_name(f"{source.stem.removesuffix('.autotune')}.autotune{source.suffix}")
    if out is not None:
        target = expanded(str(out))
        if target.suffix.lower() != source.suffix.lower():
            raise InvalidInput(
                f"{target} does not end in {source.suffix}, as {source} does",
                hint=f"name a {source.suffix} file with --out",
            )
    if target.resolve() == source.resolve():
        raise InvalidInput(
            f"{target} is the file itself",
            hint="name another file with --out, or change it with --in-place, which keeps a copy",
        )
    return target


def _check_free(contents: Mapping[Path, bytes], *, overwrite: bool) -> None:
    """Raise InvalidInput where a file exists already, with other content."""
    for file, content in contents.items():
        try:
            is_other = not overwrite and file.exists() and file.read_bytes() != content
        except OSError as error:
            raise _not_writable(file, error) from None
        if is_other:
            raise InvalidInput(
                f"{file} already exists, with other content",
                hint="name another file with --out, or overwrite it with --force",
            )


def _write(
    target: Path, written: bytes, others: Mapping[Path, bytes], *, copy_first: bool
) -> Path | None:
    """Write all files, and return the copy of the original, where one was made.

    Raises StorageUnavailable.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        original = _copied(target) if copy_first else None
        for file, content in {**others, target.resolve(): written}.items():
            with durable_file(file) as unfinished:
                unfinished.write_bytes(content)
                if file.exists():
                    shutil.copymode(file, unfinished)
    except OSError as error:
        raise _not_writable(target, error) from None
    return original


def _copied(file: Path) -> Path:
    """Copy a file to `.orig`, or the first free name after that, and return the copy."""
    content = file.read_bytes()
    for number in itertools.count():
        copy = file.with_name(f"{file.name}.orig{number or ''}")
        try:
            with open(copy, "xb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
        except FileExistsError:
            if copy.is_file() and copy.read_bytes() == content:
                return copy
            continue
        shutil.copymode(file, copy)
        return copy
    raise AssertionError("a name is free")


def _not_writable(file: Path, error: OSError) -> StorageUnavailable:
    return StorageUnavailable(
        f"{file} cannot be written: {error.strerror or error}", hint="name another file with --out"
    )


def _difference(before: str, after: str, *, source: Path, target: Path) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), str(source), str(target), lineterm=""
    )
    return "\n".join(lines)
