"""Options: each setting of a command is declared once, with its names, its help and its default.

The command line (`cli/option_groups.py`), the Python interface (`api.py`) and the commands that are
printed for a user to copy all read the declaration. To add a setting to the search, give
`SearchRequest` (`study/request.py`) a field with an `Option` in one of the groups below, and
`autotune.search` a parameter; tests compare the two. Help, completion (`cli/completion.py`) and a
user's defaults (`cli/defaults.py`) then have it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.units import exact_duration, exact_size, parse_duration, parse_size


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How the values of an option are written: as what type on the command line, and as text."""

    typed: Any
    """Type of the command line: str, int, float, list[str], or bool for a switch without a value.
    """
    read: Callable[[Any], Any] = _unchanged
    """Returns the value of what a user gives: typed text, or in Python also a number."""
    write: Callable[[Any], str] = str
    """Returns the text that `read` returns the value of."""


def _read_size(given: str | int) -> int:
    return parse_size(given) if isinstance(given, str) else given


def _read_duration(given: str | float) -> float:
    return parse_duration(str(given))


TEXT = Kind(typed=str)
TEXTS = Kind(typed=list[str])
"""For an option that can be repeated."""
COUNT = Kind(typed=int)
NUMBER = Kind(typed=float, write=repr)
SWITCH = Kind(typed=bool)
SIZE = Kind(typed=str, read=_read_size, write=exact_size)
"""Bytes, written as 8GiB; in Python also a number."""
DURATION = Kind(typed=str, read=_read_duration, write=exact_duration)
"""Seconds, written as 90s or 1h30m; in Python also a number."""

NO_LIMIT = "none"
"""How a duration without an end is written; its value is an infinite number of seconds."""


def _read_duration_or_none(given: str | float) -> float:
    if given in (NO_LIMIT, math.inf):
        return math.inf
    return _read_duration(given)


def _write_duration_or_none(seconds: float) -> str:
    return NO_LIMIT if seconds == math.inf else exact_duration(seconds)


DURATION_OR_NONE = Kind(typed=str, read=_read_duration_or_none, write=_write_duration_or_none)
"""Like DURATION, or `none` for no limit."""


EVERYDAY = "Everyday options"
THE_MODEL = "What to train: the model"
THE_DATA = "What to train: the data"
THE_STEPS = "What to train: the steps"
TECHNIQUES = "Techniques"
THE_DEVICE = "Memory and device"
THE_SEARCH = "The search"
WHO_GETS_IN = "Who gets in"
LIMITS = "Limits"
THE_FIGURE = "The figure"
RESULTS = "Results"
GROUPS = (
    EVERYDAY,
    THE_MODEL,
    THE_DATA,
    THE_STEPS,
    TECHNIQUES,
    THE_DEVICE,
    THE_SEARCH,
    WHO_GETS_IN,
    LIMITS,
    THE_FIGURE,
    RESULTS,
)
"""Headings of options in the help of a command, in its order (`cli/help.py`)."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A setting, as it is named and described on the command line and in Python."""

    flag: str
    """Its name on the command line, such as `--seeds`. The flag of a switch that is on by default
    turns it off: `--no-predict`."""
    help: str
    group: str = ""
    """The heading of `GROUPS` that it is under in the help of a command with many options."""
    kind: Kind = TEXT
    choices: tuple[str, ...] = ()
    """The values that a shell completes. With a `metavar` there are others, too."""
    metavar: str | None = None
    """How help writes its value; None: the choices, or the type."""
    default: Any = None
    """The default as a user would write it, such as "10m"; None: not specified."""
    keyword: str = ""
    """Its name in Python; empty: that of the flag."""
    synonym: str | None = None
    """Another flag that sets the same value."""
    off_flag: str | None = None
    """The flag that turns off a switch that may also be left unspecified."""
    is_repeated: bool = True
    """Whether the command that continues a study repeats it. What the study stores need not be
    repeated, and what holds for one run, such as its time budget, must not be."""

    def __post_init__(self) -> None:
        if not self.keyword:
            object.__setattr__(self, "keyword", self.parameter)
        if self.choices and self.metavar is None:
            object.__setattr__(self, "metavar", "|".join(self.choices))

    @property
    def parameter(self) -> str:
        """Name of the parameter of the command: `seq_len` for `--seq-len`."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def turns_off(self) -> bool:
        """Whether the flag sets False, because the setting is on by default."""
        return self.kind is SWITCH and self.default is True

    def read(self, given: Any) -> Any:
        """Return the value that a user gives. Raises InvalidSize for an invalid size or duration.

        None is a value only where it is the default: not specified.
        """
        if given is None and self.default is None:
            return None
        return self.kind.read(given)

    def arguments(self, value: Any) -> list[str]:
        """Return the arguments that set `value` on a command line, none for the default."""
        if value == self.read(self.default):
            return []
        if self.kind is not SWITCH:
            return [self.flag, self.kind.write(value)]
        if value or self.turns_off:
            return [self.flag]
        return [] if self.off_flag is None else [self.off_flag]


def setting(option: Option) -> Any:
    """Return the field of a dataclass that the option sets."""
    return dataclasses.field(default=option.read(option.default), metadata={"option": option})


def options_of(settings: type) -> Mapping[str, Option]:
    """Return the options that a dataclass declares, in their order, as {name of the field: option}.

    Fields without an option are left out.
    """
    return {
        field.name: field.metadata["option"]
        for field in dataclasses.fields(settings)
        if "option" in field.metadata
    }
