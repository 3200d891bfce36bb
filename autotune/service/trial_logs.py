"""Reads the end of a log, here or on the server that has it.

Nothing outside of the folder of a study's logs is read. A search that another server went on with
has left a log on both: the newest one counts.
"""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path

import httpx
from starlette.responses import PlainTextResponse

from autotune.printable import printable
from autotune.service.problems import Problem
from autotune.service.state import Caller, ServiceState
from autotune.storage.hidden_url import HiddenUrl


@dataclass(frozen=True, kw_only=True)
class Log:
    """The end of a log."""

    text: str
    written_at: float
    """When something was last written to it, in seconds since 1970."""

    def response(self) -> PlainTextResponse:
        headers = {"Last-Modified": formatdate(self.written_at, usegmt=True)}
        return PlainTextResponse(self.text, headers=headers)


def log_of_search(
    service: ServiceState, caller: Caller, number: int, *, most_bytes: int
) -> Log | None:
    """Returns the log of a search's process; None while it has none.

    Raises UnknownSearch, and Problem where its log cannot be had.
    """
    process = service.searches.get(number).process
    own = end_of_file(service.worker.log_file(number), most_bytes=most_bytes)
    if own is not None:
        own = replace(own, text=HiddenUrl(service.settings.storage).without(own.text))
    if not caller.is_server:
        path = f"/api/v1/searches/{number}/log"
        own = _newest(own, service.others.answers(path, bytes=most_bytes))
    if own is None and (process is not None or caller.is_server):
        missing = Problem(
            404,
            f"there is no log of search {number} any more",
            hint="logs are deleted with --keep and --quota of the server",
        )
        machines = [] if process is None else [process.host]
        raise _missing(service, caller, missing, f"the log of search {number}", machines)
    return own


def log_of_trial(
    service: ServiceState, caller: Caller, study: str, number: int, *, most_bytes: int
) -> Log:
    """Returns the log of a trial's last attempt. Raises Problem where it cannot be had.

    `study` must be the name of a stored study.
    """
    own, missing = None, None
    try:
        own = end_of_log(service.work_folder, study, number, most_bytes=most_bytes)
    except Problem as problem:
        missing = problem
    if not caller.is_server:
        path = f"/api/v1/studies/{study}/trials/{number}/log"
        own = _newest(own, service.others.answers(path, bytes=most_bytes))
    if own is None:
        assert missing is not None
        what = f"the log of trial {number} of study {study!r}"
        raise _missing(service, caller, missing, what, machines_of(service, study))
    return own


def machines_of(service: ServiceState, study: str) -> list[str]:
    """Returns the machines on which searches of a study ran."""
    searches, _ = service.searches.find(study=study)
    return [search.process.host for search in searches if search.process is not None]


def _missing(
    service: ServiceState, caller: Caller, missing: Problem, what: str, machines: list[str]
) -> Problem:
    return missing if caller.is_server else service.others.problem(missing, what, machines)


def _newest(own: Log | None, answers: Iterable[httpx.Response]) -> Log | None:
    logs = [] if own is None else [own]
    for answer in answers:
        written_at = parsedate_to_datetime(answer.headers["last-modified"]).timestamp()
        logs.append(Log(text=answer.text, written_at=written_at))
    return max(logs, key=lambda log: log.written_at, default=None)


def end_of_log(work_folder: Path, study: str, number: int, *, most_bytes: int) -> Log:
    """Returns the end of the log of a trial's last attempt on this machine.

    Raises Problem where there is none.

    `work_folder` is that of the database, and `study` must be the name of a stored study. Links
    among its files are not followed: only somebody with access to the machine can have put them
    there.
    """
    folder = work_folder.resolve() / study / "logs"
    candidates = [folder / f"trial-{number}.log", *folder.glob(f"trial-{number}-attempt-*.log")]
    files = [(state.st_mtime_ns, file) for file in candidates if (state := _state(file))]
    if not files or folder.resolve() != folder:
        raise Problem(
            404,
            f"there is no log of trial {number} of study {study!r} on this machine",
            hint="it is where the trial ran, unless the trial was reused or only predicted",
        )
    _, newest = max(files)
    log = end_of_file(newest, most_bytes=most_bytes)
    if log is None:
        raise Problem(404, f"the log {newest.name} cannot be read")
    return log


def end_of_file(file: Path, *, most_bytes: int) -> Log | None:
    """Returns the end of a text file; None for a link, and for what is missing or unreadable.

    Scripts write into logs what they like: control characters are shown as escapes.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as opened:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            return None
        opened.seek(max(0, state.st_size - most_bytes))
        text = opened.read(most_bytes).decode("utf-8", errors="replace")
    # What a progress bar has written over itself becomes lines.
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return Log(text=printable(lines, keep_lines=True), written_at=state.st_mtime)


def _state(file: Path) -> os.stat_result | None:
    """Returns the state of a regular file, and None for anything else and for a link."""
    try:
        state = file.lstat()
    except OSError:
        return None
    return state if stat.S_ISREG(state.st_mode) else None
