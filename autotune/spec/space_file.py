"""Reads a search space from its TOML file; what it cannot be is refused with file, key and what is allowed.

    description = "one line"
    [techniques]                    # values, or a range; a technique that is left out keeps its default
    precision = ["fp32", "bf16-mixed"]
    memory_budget = { from = 0.1, to = 1.0, step = 0.1 }
    micro_batch_size = "divisors"   # all divisors of the global batch
    [[conditions]]                  # where all of `if` hold, each field of `then` keeps to its values
    if = { compile = ["model"] }
    then = { checkpointing = ["none"] }
    [defaults]                      # for what a configuration below leaves out
    optimizer = "adafactor"
    [[configurations]]              # run first, by name
    name = "control"
    [workload]                      # defaults the command line overrides
    steps = 40
    [scales.tiny]                   # the same study at another size: --scale tiny
    layers = 2
    [reference]                     # what others published for the configurations above: show --reference
    source = "https://..."
    measured_on = "one RTX 4090, torch 2.8"
    control = "control"             # the row that savings and speeds are relative to
    [reference.rows]
    control = { peak_memory = "21.165GiB", tokens_per_second = 2765, perplexity = 152.1 }

`extends = "default"`, a name or a file seen from this one, takes over all that another space says
(`space_content.py`).

What is illegal anywhere (`autotune/spec/config.py`) need not be said here.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from autotune.errors import InvalidInput, InvalidSpace
from autotune.spec.config import CHOICES, FIELD_ORDER, check_value
from autotune.spec.published_table import Reference, read_reference
from autotune.spec.search_space import DIVISORS, Condition, SearchSpace
from autotune.spec.space_content import content_of
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import Workload
from autotune.spec.workload_settings import check_setting

Result = TypeVar("Result")

MAX_RANGE_VALUES = 1000
_LARGEST = 2**31 - 1
"""Of the ends of a range."""
TABLES = {
    "description",
    "extends",
    "techniques",
    "conditions",
    "defaults",
    "configurations",
    "workload",
    "scales",
    "reference",
}
WORKLOAD_KEYS = {field.name for field in dataclasses.fields(Workload)} - {
    "text_sha256",
    "model_config",
    "model_sha256",
    "model_source",
    "script",
}


def load_space(name_or_file: str) -> SearchSpace:
    """The space of that name, or in that TOML file.

    Raises InvalidSpace, naming file, key and what is allowed.
    """
    file, content = content_of(name_or_file)
    return _Reader(file).read(content)


class _Reader:
    """Checks one file; every refusal names the file and the key."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self, content: dict[str, Any]) -> SearchSpace:
        self._known(content, TABLES, where="")
        techniques = self._table(content, "techniques")
        defaults = self._table(content, "defaults")
        self._known(techniques, FIELD_ORDER, where="techniques")
        self._known(defaults, FIELD_ORDER, where="defaults")
        for field, value in defaults.items():
            self._check(field, value, where=f"defaults.{field}")
        space = SearchSpace(
            name=self._file.stem,
            description=self._text(content, "description"),
            techniques={
                field: self._values(field, techniques[field])
                for field in FIELD_ORDER
                if field in techniques
            },
            conditions=tuple(
                self._condition(condition, techniques, where=f"conditions[{index}]")
                for index, condition in enumerate(self._tables(content, "conditions"))
            ),
            defaults=defaults,
            configurations=tuple(self._configurations(content)),
            workload=self._workload(self._table(content, "workload"), where="workload"),
            scales={
                scale: self._workload(settings, where=f"scales.{scale}")
                for scale, settings in self._table(content, "scales").items()
            },
        )
        space = dataclasses.replace(space, reference=self._reference(content, space))
        if not space.techniques and not space.configurations:
            raise self._refuse(
                "it has neither techniques nor configurations",
                "list at least one [techniques] value",
            )
        return space

    def _values(self, field: str, given: Any) -> tuple[Any, ...] | str:
        where = f"techniques.{field}"
        if field == "micro_batch_size" and given == DIVISORS:
            return DIVISORS
        if isinstance(given, dict):
            return self._range(field, given, where=where)
        if not isinstance(given, list):
            way_out = (
                f'"{DIVISORS}" or a list such as [4, 2]'
                if field == "micro_batch_size"
                else f"[{given!r}]"
            )
            raise self._refuse(f"{where} = {given!r} is not a list", f"write {where} = {way_out}")
        if not given:
            raise self._refuse(
                f"{where} is an empty list", "list at least one value, or leave the key out"
            )
        for value in given:
            self._check(field, value, where=where)
        values = [float(value) for value in given] if field == "memory_budget" else given
        if len(set(values)) != len(values):
            raise self._refuse(f"{where} = {given!r} names a value twice", "name each value once")
        return self._with_neutral_budget(field, values)

    def _range(self, field: str, given: dict[str, Any], *, where: str) -> tuple[Any, ...]:
        if field in CHOICES:
            raise self._refuse(
                f"{where} = {given!r} is not a list", f"list values of {', '.join(CHOICES[field])}"
            )
        self._known(given, ("from", "to", "step"), where=where)
        numbers: list[Any] = [given.get(key) for key in ("from", "to", "step")]
        if any(
            isinstance(number, bool) or not isinstance(number, int | float) for number in numbers
        ):
            raise self._refuse(
                f"{where} = {given!r} is not a range", "write { from = 0.1, to = 1.0, step = 0.1 }"
            )
        if field == "micro_batch_size" and not all(isinstance(number, int) for number in numbers):
            raise self._refuse(
                f"{where} = {given!r} is not a range of whole numbers", "use whole numbers"
            )
        first, last, step = numbers
        if (
            not all(-_LARGEST <= number <= _LARGEST for number in numbers)
            or step <= 0
            or last < first
        ):
            raise self._refuse(
                f"{where} = {given!r} holds no value", "use finite from <= to and a step above zero"
            )
        if (last - first) / step >= MAX_RANGE_VALUES:
            raise self._refuse(
                f"{where} = {given!r} holds too many values", f"use at most {MAX_RANGE_VALUES}"
            )
        count = int((last - first) / step + 1e-9) + 1
        values = [round(first + index * step, 10) for index in range(count)]
        for value in values:
            self._check(field, value, where=where)
        return self._with_neutral_budget(field, values)

    @staticmethod
    def _with_neutral_budget(field: str, values: list[Any]) -> tuple[Any, ...]:
        """A budget of 1.0 is what everything has that is not compiled, so it is always among the values."""
        return (1.0, *values) if field == "memory_budget" and 1.0 not in values else tuple(values)

    def _condition(self, given: Any, techniques: Mapping[str, Any], *, where: str) -> Condition:
        self._known(given, ("if", "then"), where=where)
        sides = []
        for side in ("if", "then"):
            fields = given.get(side)
            if not isinstance(fields, dict) or not fields:
                raise self._refuse(
                    f"{where}.{side} is missing", 'write for example if = { compile = ["model"] }'
                )
            self._known(fields, FIELD_ORDER, where=f"{where}.{side}")
            sides.append(
                {
                    f: self._condition_values(f, v, techniques, f"{where}.{side}.{f}")
                    for f, v in fields.items()
                }
            )
        return Condition(when=sides[0], then=sides[1])

    def _condition_values(
        self, field: str, given: Any, techniques: Mapping[str, Any], where: str
    ) -> tuple[Any, ...]:
        if field not in techniques:
            raise self._refuse(
                f"{where} speaks of a technique the space does not vary",
                f"add it to [techniques] or drop {where}",
            )
        values = tuple(given) if isinstance(given, list) else (given,)
        if not values:
            raise self._refuse(f"{where} is an empty list", "list at least one value")
        known = self._values(field, techniques[field])
        for value in values:
            self._check(field, value, where=where)
            if known != DIVISORS and value not in known:
                raise self._refuse(
                    f"{where} names {value!r}, which techniques.{field} does not list",
                    f"use one of {', '.join(map(str, known))}",
                )
        return values

    def _configurations(self, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
        seen = set()
        for index, given in enumerate(self._tables(content, "configurations")):
            where = f"configurations[{index}]"
            self._known(given, ("name", *FIELD_ORDER), where=where)
            name = given.get("name")
            if not isinstance(name, str) or not name:
                raise self._refuse(f"{where} has no name", 'add name = "..."')
            if name in seen:
                raise self._refuse(
                    f"two configurations are called {name!r}", "give each its own name"
                )
            seen.add(name)
            for field, value in given.items():
                if field != "name":
                    self._check(field, value, where=f"{where}.{field}")
            yield dict(given)

    def _reference(self, content: dict[str, Any], space: SearchSpace) -> Reference | None:
        table = self._table(content, "reference")
        names = [configuration["name"] for configuration in space.configurations]
        return (
            self._naming("reference", partial(read_reference, names=names), table)
            if table
            else None
        )

    def _workload(self, workload: dict[str, Any], *, where: str) -> dict[str, Any]:
        self._known(workload, WORKLOAD_KEYS, where=where)
        for name, value in workload.items():
            self._naming(f"{where}.{name}", check_setting, name, value)
        if is_function_reference(workload.get("model", "")):
            raise self._refuse(
                f"{where}.model = {workload['model']!r} would run code that the file names",
                "say it on the command line, with --model",
            )
        return workload

    # -- small checks ------------------------------------------------------------------------------

    def _refuse(self, what: str, hint: str) -> InvalidSpace:
        return InvalidSpace(f"{self._file}: {what}", hint=hint)

    def _known(self, given: Any, known: Iterable[str], *, where: str) -> None:
        if not isinstance(given, dict):
            raise self._refuse(
                f"{where} = {given!r} is not a table", f"write [{where}] with keys below it"
            )
        for key in given:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                place = f" in {where}" if where else ""
                raise self._refuse(
                    f"unknown key {key!r}{place}",
                    f"did you mean {close[0]!r}?"
                    if close
                    else f"known are {', '.join(sorted(known))}",
                )

    def _check(self, field: str, value: Any, *, where: str) -> None:
        self._naming(where, check_value, field, value)

    def _naming(self, where: str, check: Callable[..., Result], *given: Any) -> Result:
        """What `check` returns, which may raise InvalidInput; the refusal then names the file and the place in it."""
        try:
            return check(*given)
        except InvalidInput as error:
            raise self._refuse(f"{where}: {error.message}", error.hint) from None

    def _table(self, content: dict[str, Any], key: str) -> dict[str, Any]:
        table = content.get(key, {})
        if not isinstance(table, dict):
            raise self._refuse(
                f"{key} = {table!r} is not a table", f"write [{key}] with keys below it"
            )
        return table

    def _tables(self, content: dict[str, Any], key: str) -> list[dict[str, Any]]:
        tables = content.get(key, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise self._refuse(
                f"{key} is not a list of tables", f"write [[{key}]] with keys below it"
            )
        return tables

    def _text(self, content: dict[str, Any], key: str) -> str:
        text = content.get(key, "")
        if not isinstance(text, str):
            raise self._refuse(f"{key} = {text!r} is not a text", f'write {key} = "..."')
        return text
