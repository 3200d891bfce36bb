"""Uses a stored study as its readers do: tables, JSON, a figure, the page, files for a trainer."""

import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from autotune import api
from autotune.cli import main
from autotune.cli.tables import make_console, print_result, print_trials
from autotune.errors import InvalidInput
from autotune.exporters import TARGETS
from autotune.reporting.plain_tables import csv_text, markdown_text
from autotune.result import Result
from autotune.spec.result import StudyResult
from autotune.storage.store import StudyStore
from autotune.storage.transfer import add_studies, read_studies
from autotune.study.records import result_of


class CommandFailed(Exception):
    """A command ended as no command may."""


def printed(*arguments: str) -> str:
    """Run a command in this process; return what it prints. Raises CommandFailed."""
    return run_command(*arguments)[1]


def run_command(*arguments: str) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it prints.

    Raises CommandFailed for an exit code of a defect.
    """
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    before, sys.argv = sys.argv, ["autotune", *arguments]
    code: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = before
    texts = []
    for stream in (out, err):
        stream.flush()
        stream.buffer.seek(0)
        texts.append(stream.buffer.read().decode())
    if code not in (0, 1, 2, 75, None):
        raise CommandFailed(f"{arguments[0]} ended with {code}: {texts[1][-1500:]}")
    return int(code or 0), "".join(texts)


def shown(result: StudyResult) -> Iterator[str]:
    """Yield a result as JSON and in one of the other forms of `autotune show`."""
    content = json.dumps(result.to_dict(), allow_nan=False)
    yield content
    form = hashlib.sha256(content.encode()).digest()[0] % 3
    if form < 2:
        yield csv_text(result) if form == 0 else markdown_text(result)
        return
    text = io.StringIO()
    console = make_console(text)
    print_trials(console, result, result.trials, title=result.study, with_predictions=True)
    print_result(result, console)
    yield text.getvalue()


def used(store: StudyStore, study: str) -> Iterator[str]:
    """Yield what is shown of a stored study; it is also written for a trainer and exported."""
    result = result_of(store, study)
    yield from shown(result)
    store.forecasts(study)
    read_studies(store.database, [study])


def used_in_full(url: str, study: str, folder: Path) -> Iterator[str]:
    """Yield what commands print of a stored study; its figure, page and files are written."""
    result = api.show(study, storage=url)
    yield repr(result)
    for form in ([], ["--json"], ["--csv"], ["--markdown"]):
        yield printed("show", study, "--storage", url, *form)
    yield str(result._repr_html_())
    result.plot("pareto").to_json()
    result.write_report(folder / "report.html")
    api.optuna_study(study, storage=url)
    if result.pick is not None:
        for target in TARGETS:
            yield from _exported(result, target, folder)
    with closing(StudyStore(url)) as store:
        studies = read_studies(store.database, [study])
    with closing(StudyStore(f"sqlite:///{_empty(folder)}")) as other:
        add_studies(other.database, studies)


def _exported(result: Result, target: str, folder: Path) -> Iterator[str]:
    try:
        yield str(result.export(target, out=folder / target, overwrite=True))
    except InvalidInput:
        return  # this trainer has no such technique, or files that the workload names are not there


def empty_database(folder: Path) -> bytes:
    """Returns the bytes of a database without studies."""
    file = folder / "without studies.db"
    StudyStore(f"sqlite:///{file}", create=True).close()
    return file.read_bytes()


def _empty(folder: Path) -> Path:
    file, template = folder / "other.db", folder / "template.db"
    if not template.exists():
        template.write_bytes(empty_database(folder))
    for each in (file, file.with_name("other.db-wal"), file.with_name("other.db-shm")):
        each.unlink(missing_ok=True)
    file.write_bytes(template.read_bytes())
    return file
