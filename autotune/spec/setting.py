"""Settings: each is declared once, at its field, with its type, default, help, group and flag.

`Settings` is the base of frozen dataclasses that users fill in: requests such as `SearchRequest`,
and `Workload` and `Preferences`, whose fields are settings of several requests, as those of
`TrainingConfig` are.
From the declarations come the options of the command line with their help, the user's defaults, the
body and the schema of HTTP, the form of the page, and the commands that are printed to be copied.
pydantic reads and checks the values (`spec/checked.py`), strictly but for text.
"""

import dataclasses
import keyword
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from autotune.errors import InvalidInput, suggestion
from autotune.spec.limits import FINITE, Range
from autotune.spec.schema import Built
from autotune.units import (
    LARGEST_SIZE_BYTES,
    LONGEST_SECONDS,
    exact_duration,
    exact_size,
    parse_duration,
    parse_percent,
    parse_size,
)

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

NO_LIMIT = "none"
"""How a duration without an end is written; its value is an infinite number of seconds."""


# -- how values are written ------------------------------------------------------------------------


def _as_given(given: Any) -> Any:
    return given


@dataclass(frozen=True, kw_only=True)
class Format:
    """How the values of a type are written as text, and what a hint says of them."""

    wanted: str
    """Ends the sentence "use ..."."""
    metavar: str = "<str>"
    read: Callable[[Any], Any] = _as_given
    """Returns the value of what a user gives anywhere, such as 8GiB as text or as a number of
    bytes; what is no value stays as it is."""
    parse: Callable[[Any], Any] | None = None
    """The same where there is only text, as on the command line; None: `read`."""
    write: Callable[[Any], str] = str
    """Returns the text that `parse` returns the value of."""
    range: Range | None = None
    is_repeatable: bool = False
    """Whether a value is written as several texts."""
    other_type: str = ""
    """Of JSON, in which a value may be given beside that of its type: text that has a unit."""

    @property
    def takes_text(self) -> bool:
        """Whether text is a value anywhere, and not only where there is nothing else."""
        return self.other_type == "string"

    def hint(self, value: object) -> str:
        share = parse_percent(value) if isinstance(value, str) else None
        if share is not None and self.metavar != "<int>":
            return f"give a share instead of percent: {share:g}"
        return f"use {self.wanted}"

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        inner = handler(source)
        if self.range is not None:
            inner = self.range.__get_pydantic_core_schema__(source, handler)
        function = {"type": "no-info", "function": self.read}
        return {"type": "function-before", "function": function, "schema": inner}

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        inner = handler(schema)
        return {"anyOf": [inner, {"type": self.other_type}]} if self.other_type else inner


def _parse_whole_number(given: Any) -> Any:
    if isinstance(given, str) and re.fullmatch(r"[+-]?[0-9]{1,15}|[0-9]{1,3}(,[0-9]{3})+", given):
        return int(given.replace(",", ""))
    return given


def _as_float(given: Any) -> Any:
    is_whole = type(given) is int and abs(given) <= FINITE.most
    return float(given) if is_whole else given


_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?:inf|nan)"
"""A decimal number. inf and nan are matched, too: they are outside of every range."""


def _parse_number(given: Any) -> Any:
    is_number = isinstance(given, str) and re.fullmatch(_NUMBER, given)
    return float(given) if is_number else given


def whole_number(least: int, most: int) -> Format:
    """Returns the format of whole numbers in a range, for `Annotated[int, ...]`."""
    return Format(
        wanted=f"a whole number from {least} to {most}",
        metavar="<int>",
        parse=_parse_whole_number,
        range=Range(least, most),
    )


def number(wanted: str, *, least: float = FINITE.least, most: float = FINITE.most) -> Format:
    """Returns the format of numbers in a range, for `Annotated[float, ...]`."""
    return Format(
        wanted=wanted,
        metavar="<float>",
        read=_as_float,
        parse=_parse_number,
        write=repr,
        range=Range(least, most),
    )


def _read_size(given: Any) -> Any:
    return parse_size(given) if isinstance(given, str) else given


def _read_size_or_none(given: Any) -> Any:
    """Returns the one text of a size, which all ways of writing it have in common."""
    is_size = isinstance(given, str | int) and not isinstance(given, bool)
    return exact_size(parse_size(str(given))) if is_size and given != NO_LIMIT else given


def _read_duration(given: Any) -> Any:
    return parse_duration(given) if isinstance(given, str) else _as_float(given)


def _read_duration_or_none(given: Any) -> Any:
    if isinstance(given, str) and given == NO_LIMIT:
        return math.inf
    seconds = _read_duration(given)
    is_too_long = isinstance(seconds, float) and LONGEST_SECONDS < seconds < math.inf
    return None if is_too_long else seconds


def _write_duration_or_none(seconds: float) -> str:
    return NO_LIMIT if seconds == math.inf else exact_duration(seconds)


def _parse_switch(given: Any) -> Any:
    return {"true": True, "false": False}.get(given, given) if isinstance(given, str) else given


SWITCH = Format(wanted="true or false", metavar="", parse=_parse_switch)
TEXT = Format(wanted="a text")

_SHORTEST = 1e-9
"""Seconds; a duration is above zero."""
SIZE = Format(
    wanted="a size with its unit, such as 8GiB",
    metavar="SIZE",
    read=_read_size,
    write=exact_size,
    range=Range(1, LARGEST_SIZE_BYTES),
    other_type="string",
)
Size: TypeAlias = Annotated[int, SIZE]
"""Bytes, written as 8GiB."""
SizeOrNone: TypeAlias = Annotated[
    str,
    Format(
        wanted="a size with its unit, such as 8GiB, or none",
        metavar="SIZE",
        read=_read_size_or_none,
    ),
]
"""A size as text, in the largest unit that represents it exactly, or `none` for no limit."""
Duration: TypeAlias = Annotated[
    float,
    Format(
        wanted="a duration with its unit, such as 30m",
        metavar="TIME",
        read=_read_duration,
        write=exact_duration,
        range=Range(_SHORTEST, LONGEST_SECONDS),
        other_type="string",
    ),
]
"""Seconds, written as 90s or 1h30m."""
DurationOrNone: TypeAlias = Annotated[
    float,
    Format(
        wanted="a duration with its unit, such as 30m, or none",
        metavar="TIME",
        read=_read_duration_or_none,
        write=_write_duration_or_none,
        range=Range(_SHORTEST, math.inf),
        other_type="string",
    ),
]
"""Like Duration, or `none` for no limit: an infinite number of seconds."""
Seed: TypeAlias = Annotated[int, whole_number(0, 2**32 - 1)]


def texts(wanted: str, *, of: Format | None = None, separator: str | None = None) -> Format:
    """Returns the format of several values, each a text of its own, or between a separator."""

    def read(given: Any) -> Any:
        return tuple(given) if isinstance(given, list | tuple) else given

    def parse(given: Any) -> Any:
        if isinstance(given, str) and separator is not None:
            given = given.split(separator)
        read_each = _as_given if of is None or of.parse is None else of.parse
        return tuple(map(read_each, given))

    def write(values: Iterable[object]) -> str:
        return (separator or " ").join(map(str, values))

    return Format(
        wanted=wanted, read=read, parse=parse, write=write, is_repeatable=separator is None
    )


def _read_path(given: Any) -> Any:
    return Path(given) if isinstance(given, str) else given


Texts: TypeAlias = Annotated[tuple[str, ...], texts("a list of texts")]
_TRIAL = whole_number(0, 2**31 - 1)
TrialNumber: TypeAlias = Annotated[int, _TRIAL]
TrialNumbers: TypeAlias = Annotated[tuple[TrialNumber, ...], texts("numbers of trials", of=_TRIAL)]
TrialList: TypeAlias = Annotated[
    tuple[TrialNumber, ...],
    texts("trial numbers separated by commas, for example 0,4,7", of=_TRIAL, separator=","),
]
FilePath: TypeAlias = Annotated[Path, Format(wanted="a path", metavar="FILE", read=_read_path)]


def _read_paths(given: Any) -> Any:
    if isinstance(given, list | tuple):
        return tuple(os.fspath(one) if isinstance(one, os.PathLike) else one for one in given)
    return (os.fspath(given),) if isinstance(given, str | os.PathLike) else given


FilePaths: TypeAlias = Annotated[
    tuple[str, ...], replace(texts("a path, or several"), read=_read_paths)
]
"""A path from Python, too."""


_MOST_NAMED = 8
"""Of the names that a hint lists, the first ones."""


def pairs(names: Sequence[str] | None, *, example: str, metavar: str) -> Format:
    """Returns the format of {name: number}, which is written as `name=0.03`, one text for each.

    Without `names` there may be any.
    """

    def parse(given: Any) -> Any:
        texts = given.split() if isinstance(given, str) else given
        if not isinstance(texts, list | tuple):
            return given
        values: dict[str, float] = {}
        for text in texts:
            name, _, written = str(text).partition("=")
            if names is not None and name not in names:
                otherwise = f"write {example}; valid names are {', '.join(names[:_MOST_NAMED])}"
                raise InvalidInput(repr(text), hint=suggestion(name, names, otherwise=otherwise))
            share = parse_percent(written)
            if share is not None:
                better = f"give a share instead of percent: {name}={share:g}"
                raise InvalidInput(repr(text), hint=better)
            value = _parse_number(written)
            if isinstance(value, str):
                raise InvalidInput(repr(text), hint=f"write {example}")
            if name in values:
                twice = f"{name} is set twice, to {values[name]:g} and to {written}"
                raise InvalidInput(twice, hint="set it once")
            values[name] = value
        return values

    def write(values: Any) -> str:
        shares = values if isinstance(values, Mapping) else vars(values)
        return " ".join(f"{name}={share!r}" for name, share in shares.items())

    return Format(
        wanted=f"a number for each name: {example}",
        metavar=metavar,
        parse=parse,
        write=write,
        is_repeatable=True,
    )


# -- declarations ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Option:
    """A setting, as it is named and described on the command line and elsewhere."""

    help: str = ""
    group: str = ""
    """The heading of `GROUPS` that it is under in the help of a command with many options."""
    name: str = ""
    """That of the field, and so in Python and over HTTP."""
    flag: str = ""
    """Its name on the command line, such as `--seeds`. The flag of a switch that is on by default
    turns it off: `--no-predict`."""
    metavar: str = ""
    """How help writes its value."""
    choices: tuple[str, ...] = ()
    """The values that a shell completes."""
    is_closed: bool = False
    """Whether there are no other values."""
    synonym: str | None = None
    """Another flag that sets the same value."""
    off_flag: str | None = None
    """The flag that turns off a switch that may also be left unspecified."""
    is_argument: bool = False
    """Whether the command line takes it without a flag, such as the name of a study."""
    is_required: bool = False
    is_hidden: bool = False
    """Whether help does not show it."""
    is_typed: bool = True
    """Whether it has a flag at all."""
    is_repeated: bool = True
    """Whether the command that continues a study repeats it. What the study stores need not be
    repeated, and what holds for one run, such as its time budget, must not be."""
    over_http: bool | str = False
    """Whether a request over HTTP may name it; a text is the reason why not."""
    default: Any = None
    """None: not specified."""
    turns_off: bool = False
    """Whether the flag sets False, because the setting is on by default."""
    format: Format = TEXT

    def of_field(self, field: "dataclasses.Field[Any]", hint: Any, *, is_partial: bool) -> Self:
        """Returns the option of the field that it declares."""
        missing = dataclasses.MISSING
        is_required = field.default is missing and field.default_factory is missing
        default = None if is_partial or field.default is missing else field.default
        values, written_as = choices_of(hint), format_of(hint)
        flag = f"--{'no-' if field.default is True else ''}{field.name.replace('_', '-')}"
        return dataclasses.replace(
            self,
            name=field.name,
            flag=self.flag or flag,
            choices=self.choices or values,
            is_closed=bool(values),
            metavar=self.metavar or "|".join(self.choices or values) or written_as.metavar,
            default=default,
            turns_off=written_as is SWITCH and field.default is True,
            is_required=is_required and not is_partial,
            format=written_as,
        )

    @property
    def parameter(self) -> str:
        """Name of the parameter of the command: `seq_len` for `--seq-len`."""
        parameter = self.flag.removeprefix("--").replace("-", "_")
        is_name = parameter.isidentifier() and not keyword.iskeyword(parameter)
        return parameter if is_name else self.name

    @property
    def is_switch(self) -> bool:
        return self.format is SWITCH

    @property
    def is_whole_number(self) -> bool:
        return self.format.parse is _parse_whole_number

    @property
    def is_repeatable(self) -> bool:
        """Whether the command line may have it several times, each with a part of the value."""
        return self.format.is_repeatable

    def hint(self, value: object) -> str:
        """Returns what to give instead of a value that is not possible."""
        if not self.is_closed:
            return self.format.hint(value)
        return suggestion(value, self.choices, otherwise=f"use one of {', '.join(self.choices)}")

    def parse(self, given: Any) -> Any:
        """Returns the value of text, without a check of its range.

        Raises InvalidSetting for text that says what is wrong with it.
        """
        try:
            return (self.format.parse or self.format.read)(given)
        except InvalidInput as error:
            raise InvalidSetting(self, error.message, hint=error.hint) from None

    def arguments(self, value: Any) -> list[str]:
        """Returns the arguments that set `value` on a command line, none for the default."""
        if value == self.default:
            return []
        if self.is_repeatable:
            usual = [] if self.default is None else self.format.write(self.default).split()
            changed = [text for text in self.format.write(value).split() if text not in usual]
            return [word for text in changed for word in (self.flag, text)]
        if not self.is_switch:
            return [self.flag, self.format.write(value)]
        if value or self.turns_off:
            return [self.flag]
        return [] if self.off_flag is None else [self.off_flag]


def setting(default: Any = dataclasses.MISSING, help: str = "", **of_option: Any) -> Any:
    """Returns the field of a dataclass that declares a setting; see `Option` for what it takes.

    A `default` that can be called makes the default.
    """
    metadata = {"option": Option(help=help, **of_option)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def same_setting(kind: type, name: str) -> Any:
    """Returns a field that declares the setting of another request again."""
    field = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return dataclasses.field(default=field.default, metadata=field.metadata)


def part(kind: type, *, only: Sequence[str] = (), **of_field: Any) -> Any:
    """Returns the field of a request whose settings are those of `kind`, or `only` some of them."""
    return dataclasses.field(metadata={"part": kind, "only": only}, **of_field)


@cache
def options_of(kind: type) -> Mapping[str, Option]:
    """Returns the settings that a dataclass declares itself, by their names."""
    options = {field.name: option_of(kind, field.name) for field in dataclasses.fields(kind)}
    return {name: option for name, option in options.items() if option.help}


@cache
def all_options_of(kind: type) -> Mapping[str, Option]:
    """Returns the settings of a request and of its parts, by their names."""
    options = dict(options_of(kind))
    for field in dataclasses.fields(kind):
        if "part" in field.metadata:
            members = options_of(field.metadata["part"])
            only = field.metadata["only"] or members
            options |= {name: members[name] for name in only if name not in options}
    return options


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """Returns the types of the fields of a dataclass, with their annotations."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@cache
def option_of(kind: type, name: str) -> Option:
    """Returns the option of a field, completed by its name, its type and its default.

    It has only name and format where the field declares none.
    """
    field: dataclasses.Field[Any] = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
    hint = hints_of(kind)[name]
    annotations = getattr(hint, "__metadata__", ())
    declared = [note for note in annotations if isinstance(note, Option)]
    option: Option = field.metadata.get("option") or next(iter(declared), Option())
    return option.of_field(field, hint, is_partial=getattr(kind, "is_partial", False))


def _alternatives(hint: Any) -> list[Any]:
    """Returns the alternatives of a type without None, each with its annotations."""
    if get_origin(hint) in (Union, UnionType):
        alternatives = [inner for inner in get_args(hint) if inner is not NoneType]
        return [plain for inner in alternatives for plain in _alternatives(inner)]
    return [hint]


def choices_of(hint: Any) -> tuple[str, ...]:
    """Returns the values of a Literal."""
    for inner in _alternatives(hint):
        plain = getattr(inner, "__origin__", inner) if hasattr(inner, "__metadata__") else inner
        if get_origin(plain) is Literal:
            return get_args(plain)
    return ()


def format_of(hint: Any) -> Format:
    """Returns how values of a type are written."""
    for inner in _alternatives(hint):
        for annotation in getattr(inner, "__metadata__", ()):
            if isinstance(annotation, Format):
                return annotation
        if inner is bool:
            return SWITCH
    return TEXT


# -- settings --------------------------------------------------------------------------------------


class InvalidSetting(InvalidInput):
    """A value that its setting cannot have."""

    def __init__(self, option: Option, problem: str, *, hint: str, named: str = "") -> None:
        """`problem` is the value, or a sentence on it; the setting is `named` other than usual."""
        super().__init__(f"Invalid {named or option.name}: {problem}", hint=hint)
        self.option = option
        self.problem = problem

    def by_flag(self) -> "InvalidSetting":
        """Returns the error with the name that the setting has on the command line."""
        option = self.option
        named = option.metavar if option.is_argument else option.flag
        return InvalidSetting(option, self.problem, hint=self.hint, named=named)


class Settings(Built):
    """Base of frozen dataclasses whose values are read and checked by their types.

    To build one raises InvalidSetting; `dataclasses.replace` checks again.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    is_partial: ClassVar = False
    """Whether what nobody specifies comes from elsewhere, so that its options have no default."""

    def __post_init__(self) -> None:
        # A default is a value already, so that a request of defaults does without pydantic.
        fields = self.__dataclass_fields__
        given = {
            name: value for name, value in vars(self).items() if value is not fields[name].default
        }
        if not given:
            return
        from autotune.spec.checked import checked  # noqa: PLC0415  # imports pydantic, 0.07 s

        for name, value in checked(type(self), given).items():
            object.__setattr__(self, name, value)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        """Returns the schema of an object with these settings."""
        from autotune.spec.checked import schema_of  # noqa: PLC0415  # as above

        names = [field.name for field in dataclasses.fields(cls)]
        properties = {name: schema_of(cls, name) for name in names}
        return {"type": "object", "properties": properties, "additionalProperties": False}

    @classmethod
    def made_of(cls, values: Mapping[str, Any]) -> Self:
        return cls.of(values)

    @classmethod
    def of(cls, given: Mapping[str, Any], *, besides: Sequence[str] = ()) -> Self:
        """Returns the request of settings by name, of which those of its parts may stand beside.

        A hint proposes also the names `besides`. Raises InvalidInput for a name that it does not
        have, and InvalidSetting.
        """
        kind: type = cls
        names = {field.name for field in dataclasses.fields(cls)}
        own = {name: value for name, value in given.items() if name in names}
        others = {name: value for name, value in given.items() if name not in own}
        for field in dataclasses.fields(cls):
            if "part" in field.metadata:
                members = {member.name for member in dataclasses.fields(field.metadata["part"])}
                found = {name: others.pop(name) for name in [*others] if name in members}
                if found:
                    own[field.name] = _with_members(own.get(field.name, {}), found)
        for name in others:
            raise unknown_setting(name, [*(all_options_of(kind) or names), *besides])
        return cls(**own)


def _with_members(part: Any, found: Mapping[str, Any]) -> Any:
    """Returns a part of a request with further settings; what is no part stays for the check."""
    if isinstance(part, Mapping):
        return {**part, **found}
    is_built = dataclasses.is_dataclass(part) and not isinstance(part, type)
    return dataclasses.replace(part, **found) if is_built else part


def specified(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of `kind` that are not None, read and checked.

    Raises InvalidInput for a name that it does not have, and InvalidSetting.
    """
    from autotune.spec.checked import checked  # noqa: PLC0415  # imports pydantic

    return checked(kind, {name: value for name, value in given.items() if value is not None})


def unknown_setting(name: str, known: Iterable[str]) -> InvalidInput:
    """Returns the error for a name that no setting has."""
    name = str(name)[:60]
    return InvalidInput(
        f"there is no setting {name!r}",
        hint=suggestion(name, known, otherwise="see the help of the command for its settings"),
    )
