"""Reads one input at a border and says what happened: accepted, rejected, or a defect.

A border may reject an input by its documented errors only, whose printed form has no character that
a terminal could act on. It may write nothing outside of the folder that it was given, and has
`MOST_SECONDS` for an input.
"""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import strategies

from autotune.cli.lines import on_one_line
from autotune.errors import AutotuneError, InvalidInput

MOST_SECONDS = 60
"""An input takes milliseconds; this is what a machine may need that has a lot else to do."""


@dataclass(frozen=True, kw_only=True)
class Border:
    """A place where autotune reads what others wrote."""

    first_check: str
    """What an input has that passes the first check, as a sentence."""
    inputs: Callable[[], strategies.SearchStrategy[bytes]]
    valid: Callable[[], list[bytes]]
    """Inputs that are accepted whole."""
    reader: Callable[[Path], "contextlib.AbstractContextManager[Reader]"]
    """Makes the reader of one process, which may write into the folder."""
    modules: tuple[str, ...]
    """Modules whose line coverage is reported, as paths below `autotune/`."""
    errors: tuple[type[Exception], ...] = (InvalidInput,)
    """The documented errors."""
    inputs_in_suite: int = 60
    """How many changed inputs the test suite tries: a border that takes long has fewer."""


class Reader:
    """Reads the inputs of one border, one after the other."""

    def passes_first_check(self, given: bytes) -> bool:
        raise NotImplementedError

    def read(self, given: bytes) -> Iterable[str]:
        """Read an input and use what was accepted. Return the texts that a user sees of it."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a border made of an input."""

    passed_first_check: bool
    error: str = ""
    """The class of the documented error; empty if the input was accepted whole."""
    message: str = ""
    defect: str = ""
    """What must not happen, such as `KeyError in client.py:_resolve`; empty: nothing."""
    details: str = ""
    """The traceback of a defect."""


class TookTooLong(BaseException):
    """Raised in the middle of an input, past every `except Exception`."""


class Judge:
    """Judges the inputs of one border. Use it as a context manager, in the main thread.

    `folder` is the only place that may be written to.
    """

    def __init__(self, border: Border, folder: Path) -> None:
        self._border, self._folder = border, folder
        self._stack = contextlib.ExitStack()
        self._reader: Reader | None = None

    def __enter__(self) -> "Judge":
        self._stack.enter_context(_temporary_files_in(self._folder))
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self._reader = self._stack.enter_context(self._border.reader(self._folder))

    def passes(self, given: bytes) -> bool:
        """Returns whether an input passes the first check."""
        assert self._reader is not None
        return self._reader.passes_first_check(given)

    def judge(self, given: bytes) -> Verdict:
        passed = self.passes(given)
        with _watched_writes(self._folder) as strays:
            verdict = self._verdict(given, passed=passed)
        if strays and not verdict.defect:
            where = ", ".join(sorted(strays)[:3])
            return Verdict(passed_first_check=passed, defect="a stray file", details=where)
        return verdict

    def _verdict(self, given: bytes, *, passed: bool) -> Verdict:
        assert self._reader is not None
        try:
            with _time_limit(), _failing_threads() as failures:
                texts = list(self._reader.read(given))
            if failures:
                raise failures[0]
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except self._border.errors as error:
            return _rejection(error, passed=passed)
        except BaseException as error:
            return Verdict(
                passed_first_check=passed, defect=_signature(error), details=_details(error)
            )
        for text in texts:
            for letter in text:
                if _is_active(letter):
                    at = text.index(letter)
                    return Verdict(
                        passed_first_check=passed,
                        defect=f"U+{ord(letter):04X} in what is shown",
                        details=ascii(text[max(0, at - 200) : at + 200]),
                    )
        return Verdict(passed_first_check=passed)


def _rejection(error: Exception, *, passed: bool) -> Verdict:
    """Returns the verdict of a documented error, whose text has to be fit for a terminal."""
    kind, message, hint = type(error).__name__, str(error), ""
    if isinstance(error, AutotuneError):
        message, hint = error.message, error.hint
        printed = [on_one_line(message), on_one_line(hint)]
        if error.exit_code not in (2, 75):
            return Verdict(
                passed_first_check=passed,
                defect=f"{kind} ends with exit code {error.exit_code}",
                details=_details(error),
            )
        if any(_is_active(letter) for text in printed for letter in text):
            return Verdict(
                passed_first_check=passed,
                defect=f"an escape in the message of {kind}",
                details=ascii(f"{message}\n{hint}"),
            )
    if not message.strip():
        return Verdict(
            passed_first_check=passed, defect=f"{kind} without a message", details=_details(error)
        )
    return Verdict(passed_first_check=passed, error=kind, message=ascii(message[:300]))


def _is_active(letter: str) -> bool:
    """Whether a terminal may act on a character: it is of control or of direction, not text."""
    return letter not in "\n\t" and unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _signature(error: BaseException) -> str:
    """Returns the class of an error and the innermost line of autotune that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}autotune{os.sep}" in frame.filename] or frames
    where = "" if not own else f" in {Path(own[-1].filename).name}:{own[-1].name}"
    return f"{type(error).__name__}{where}"


def _details(error: BaseException) -> str:
    lines = traceback.format_exception(error, limit=-6, chain=False)
    return ascii("".join(lines)[-3000:]).replace("\\n", "\n")


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TookTooLong(f"more than {MOST_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _failing_threads() -> Iterator[list[BaseException]]:
    """Collect what ends other threads: it would only be printed."""
    failures: list[BaseException] = []

    def note(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None:
            failures.append(arguments.exc_value)

    before, threading.excepthook = threading.excepthook, note
    try:
        yield failures
    finally:
        threading.excepthook = before


# -- what is written where -------------------------------------------------------------------------

_watch: tuple[str, set[str]] | None = None
"""The allowed folder and the files outside of it; an audit hook cannot be removed."""
_is_hooked = False
_WRITES = {"os.rename", "os.remove", "os.mkdir", "os.link", "os.symlink", "shutil.rmtree"}


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watch is None:
        return
    allowed, strays = _watch
    if event == "open":
        name, mode, flags = arguments
        is_write = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        names = [name] if is_write or (isinstance(mode, str) and set(mode) & set("wax+")) else []
    elif event in _WRITES and any(isinstance(each, int) and each >= 0 for each in arguments[-1:]):
        names = []  # relative to an open folder, whose own name was seen
    elif event in _WRITES:
        names = list(arguments[:2] if event in ("os.rename", "os.link") else arguments[:1])
    else:
        return
    for name in names:
        if isinstance(name, str | bytes):
            path = os.path.abspath(os.fsdecode(name))
            if not path.startswith((allowed, "/dev/")):
                strays.add(path)


@contextlib.contextmanager
def _watched_writes(folder: Path) -> Iterator[set[str]]:
    global _watch, _is_hooked
    if not _is_hooked:
        sys.addaudithook(_audit)
        _is_hooked = True
    strays: set[str] = set()
    _watch = (str(folder.absolute()), strays)
    try:
        yield strays
    finally:
        _watch = None


@contextlib.contextmanager
def quick_folder() -> Iterator[Path]:
    """Yield a new folder in memory where there is one: databases sync each of their writes."""
    memory = Path("/dev/shm")
    where = str(memory) if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="autotune-fuzzing-", dir=where) as name:
        yield Path(name)


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Send all temporary files below `folder`, so that others are noticed."""
    below = folder / "tmp"
    below.mkdir(parents=True, exist_ok=True)
    before, tempfile.tempdir = tempfile.tempdir, str(below)
    try:
        yield
    finally:
        tempfile.tempdir = before
