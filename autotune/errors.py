"""Errors that a user can act on: each says what is wrong and what to do about it.

    AutotuneError
    ├── InvalidInput            the request cannot be carried out as given (exit 2)
    │   ├── InvalidSize             a byte size or a duration that cannot be parsed
    │   ├── InvalidSpace            a search-space file with a wrong key, value or condition
    │   ├── InvalidDataset          a dataset that is missing, empty or too short
    │   ├── IllegalConfiguration    techniques that cannot be combined
    │   │   └── BudgetTooSmall          an activation budget below the least possible peak
    │   ├── UnknownStudy            the storage has no study of that name
    │   ├── UnknownSearch           the queue of the service has no search of that number
    │   ├── NotAllowed              the service does not accept such a submission
    │   └── StudyMismatch           the study of that name has other settings
    │       └── SearchConflict          the search is in another state than the request needs
    ├── StorageUnavailable      the database or a results folder cannot be used (exit 2)
    │   ├── DiskFull            its disk has no room
    │   └── StorageUnreachable  it is unreachable for now; the search can be resumed (exit 75)
    ├── ServerUnreachable       a server that does not answer; the command can be repeated (exit 75)
    ├── PredictionImpossible    a model that cannot run on fake tensors (exit 2)
    ├── PreparationFailed       the workload could not be built in its own process (exit 70)
    ├── TrialLost               the machine ended a trial (killed, device gone, disk full); the
    │   │                       search can be resumed (exit 75)
    │   ├── TrialServerLost         the process that starts the trials has ended, or is silent
    │   └── DeviceDisturbed         another process started or ended on the device meanwhile
    ├── Stopped                 the user stopped the search; it can be resumed (exit 75)
    └── OutputLost              standard output cannot be written, such as on a full disk (exit 74)

Expected failures of a trial (out of memory, timeout, crash) are not errors but outcomes
(`spec/result.py`). Exit codes 70, 74 and 75 are EX_SOFTWARE, EX_IOERR and EX_TEMPFAIL
of sysexits.h.
"""

import difflib
import re
from collections.abc import Iterable, Iterator

from autotune.printable import printable


class AutotuneError(Exception):
    """Base class of every error that autotune raises on purpose.

    `message` is one sentence on what is wrong with the value that it names; `hint` is one sentence
    on what to do instead.
    """

    exit_code = 70

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            # Python prints it below the message of a traceback.
            self.add_note(printable(f"hint: {hint}", keep_lines=True))

    def __str__(self) -> str:
        """Returns the message as a terminal may show it; `message` has the very text."""
        return printable(self.message, keep_lines=True)


class InvalidInput(AutotuneError):
    exit_code = 2


class InvalidSize(InvalidInput):
    pass


class InvalidSpace(InvalidInput):
    pass


class InvalidDataset(InvalidInput):
    pass


class IllegalConfiguration(InvalidInput):
    pass


class UnknownStudy(InvalidInput):
    pass


class UnknownSearch(InvalidInput):
    pass


class NotAllowed(InvalidInput):
    pass


class NotYours(InvalidInput):
    """What somebody else submitted can be read, and not changed."""


class StudyMismatch(InvalidInput):
    pass


class SearchConflict(StudyMismatch):
    pass


class StorageUnavailable(AutotuneError):
    exit_code = 2


class StorageUpgraded(StorageUnavailable):
    """A later autotune has changed the tables."""


class StorageUnreachable(StorageUnavailable):
    exit_code = 75


class DiskFull(StorageUnavailable):
    """What is to be written does not fit."""


class ServerUnreachable(AutotuneError):
    exit_code = 75


class PredictionImpossible(AutotuneError):
    exit_code = 2


class BudgetTooSmall(IllegalConfiguration, PredictionImpossible):
    """Not even recomputing every block is enough: there is no peak to predict."""


class PreparationFailed(AutotuneError):
    exit_code = 70


class ProcessEnded(PreparationFailed):
    pass


class TrialLost(AutotuneError):
    exit_code = 75


class TrialServerLost(TrialLost):
    pass


class DeviceDisturbed(TrialLost):
    pass


class Stopped(AutotuneError):
    exit_code = 75


class OutputLost(AutotuneError):
    exit_code = 74

    def __init__(self, message: str, *, hint: str = "", reader_has_gone: bool = False) -> None:
        """`reader_has_gone`: nobody reads it any more, as in `| head`; no disk is full."""
        super().__init__(message, hint=hint)
        self.reader_has_gone = reader_has_gone


def error_class(name: str) -> type[AutotuneError] | None:
    """Returns the class of errors of that name; None for any other name of this module."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, AutotuneError):
        return found
    return None


def problem_name(error: type[AutotuneError]) -> str:
    """Returns how a server names a class of errors in its problem details: `unknown-study`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", error.__name__).lower()


def first_line_of(error: BaseException) -> str:
    """Returns the first line of what an error says, or its class where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def class_and_first_line_of(error: BaseException) -> str:
    """Returns the class of an error and its first line: `ValueError: too large`."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it came from, and so on, also where it was raised `from None`."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


MOST_SUGGESTIONS = 3


def near_misses(given: object, known: Iterable[object]) -> list[str]:
    """Returns up to three known names that begin with `given` or, if none does, resemble it."""
    names = {str(name).lower(): str(name) for name in known}
    typed = str(given).lower()
    near = [name for name in names if len(typed) > 1 and name.startswith(typed)]
    if not near:
        near = difflib.get_close_matches(typed, names, n=MOST_SUGGESTIONS)
    return [names[name] for name in near[:MOST_SUGGESTIONS]]


_OTHER_PARALLELISM = re.compile(
    r"(pipeline|context|expert|sequence)[-_ ]?parallel(ism)?|^(pipeline)$", re.IGNORECASE
)


def missing_parallelism(given: object) -> str | None:
    """Returns a hint for a kind of parallelism that autotune lacks; None for other names."""
    found = _OTHER_PARALLELISM.search(str(given))
    if found is None:
        return None
    kind = (found[1] or found[3]).lower()
    return f"{kind} parallelism is not part of autotune; use sharding, tensor_parallel or offload"


def suggestion(given: object, known: Iterable[object], *, otherwise: str) -> str:
    """Returns a hint: `did you mean 'quick'? otherwise ...`, or `otherwise` if no name is near."""
    if missing := missing_parallelism(given):
        return missing
    near = [repr(name) for name in near_misses(given, known)]
    if not near:
        return otherwise
    names = " or ".join(filter(None, [", ".join(near[:-1]), near[-1]]))
    return f"did you mean {names}? otherwise {otherwise}"
