"""`autotune studies export` and `import`: write whole studies to a SQLite file, and read them.

`export` also writes them to an Optuna database.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from autotune.cli.database import open_store
from autotune.cli.lines import print_line
from autotune.cli.options import InStorage, storage_of
from autotune.errors import InvalidInput, StorageUnavailable
from autotune.spec.setting import FilePath, Texts, setting
from autotune.spec.study import StudyName
from autotune.spec.user_files import open_file
from autotune.system.files import durable_file

if TYPE_CHECKING:
    from autotune.storage.store import StudyStore
    from autotune.storage.transfer import StudyRows


@dataclass(frozen=True, kw_only=True)
class ExportStudiesCommand(InStorage):
    """Studies to write, and where to."""

    study: Texts = setting(
        help="Names of studies; see autotune studies.", metavar="STUDY", is_argument=True
    )
    out: FilePath | None = setting(
        None, "File to write, completely or not at all. [default: stdout]"
    )
    to_optuna: str | None = setting(
        None,
        "Write them to an Optuna database instead, such as sqlite:///optuna.db, which "
        "optuna-dashboard opens: all of them or nothing.",
        metavar="URL",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is not None and self.to_optuna is not None:
            raise InvalidInput("--out and --to-optuna exclude each other", hint="give one of them")


def export(context: typer.Context, request: ExportStudiesCommand) -> None:
    """Write studies with all their trials, predictions and attempts to a SQLite file."""
    # This imports SQLAlchemy, as in `database.py`.
    from autotune.storage.transfer import read_studies  # noqa: PLC0415

    out, to_optuna = request.out, request.to_optuna
    names = list(dict.fromkeys(request.study))
    if out is not None:
        _check_target(out)
    elif to_optuna is None and sys.stdout.isatty():
        raise InvalidInput(
            "a terminal cannot show a file of studies", hint="name a file with --out FILE"
        )
    with open_store(storage_of(context, request.storage)) as store:
        if to_optuna is not None:
            _export_to_optuna(store, names, to_optuna)
            return
        studies = read_studies(store.database, names)
    _write(studies, out)


@dataclass(frozen=True, kw_only=True)
class ImportCommand(InStorage):
    """A file of studies to import."""

    file: FilePath = setting(
        help="File that autotune studies export has written.", is_argument=True
    )
    name: StudyName | None = setting(
        None, "New name for the study. [default: its name in the file]", metavar="NEW"
    )


def import_file(context: typer.Context, request: ImportCommand) -> None:
    """Import exported studies into a database: all of the file, or nothing."""
    # This imports SQLAlchemy, as in `database.py`.
    from autotune.storage.transfer import add_studies, read_file  # noqa: PLC0415

    name = request.name
    studies = read_file(request.file)  # before a database is created for them
    with open_store(storage_of(context, request.storage), create=True) as store:
        add_studies(store.database, studies, new_name=name)
    names = ", ".join(study.name for study in studies) if name is None else name
    print_line(f"imported {names}: {sum(len(study.trials) for study in studies)} trials")


def _export_to_optuna(store: "StudyStore", studies: list[str], url: str) -> None:
    # Optuna takes 0.3 s to import.
    from autotune.study.optuna_export import export_to_optuna  # noqa: PLC0415

    for exported in export_to_optuna(store, studies, url):
        trials = "1 trial" if exported.trials == 1 else f"{exported.trials} trials"
        line = f"exported {exported.study} to {exported.url}: {trials}"
        if exported.left_out:
            line += f"; left out without a result: {', '.join(map(str, exported.left_out))}"
        print_line(line)


def _check_target(file: Path) -> None:
    """Raises InvalidInput if `file` is a database, which nobody wants to overwrite."""
    try:
        with open_file(file) as opened:
            is_database = opened.read(15) == b"SQLite format 3"
    except OSError:
        return  # a pipe, a new file, or one about which writing says what is wrong
    if is_database:
        raise InvalidInput(
            f"{file} is a database", hint="name another file with --out, or remove this one"
        )


def _write(studies: Sequence["StudyRows"], out: Path | None) -> None:
    """Writes a file of studies, completely or not at all; None is stdout."""
    # This imports SQLAlchemy, as in `database.py`.
    from autotune.storage.transfer import write_file  # noqa: PLC0415

    if out is None:
        write_file(studies, sys.stdout.buffer)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not out.is_file():  # a pipe or a device; a folder raises an error
            with out.open("wb") as opened:
                write_file(studies, opened)
            return
        with durable_file(out) as unfinished, unfinished.open("wb") as opened:
            write_file(studies, opened)
    except OSError as error:
        raise StorageUnavailable(
            f"{out} cannot be written: {error.strerror or error}",
            hint="name another file with --out",
        ) from None
