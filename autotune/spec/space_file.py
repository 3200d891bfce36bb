"""Read and check a search space from a TOML file; errors name file, key and the allowed values.

    description = "one line"
    [techniques]                    # values, or a range; other techniques stay at their defaults
    precision = ["fp32", "bf16-mixed"]
    memory_budget = { from = 0.1, to = 1.0, step = 0.1 }
    micro_batch_size = "divisors"   # all divisors of the global batch
    [[conditions]]                  # if all of `if` hold, all of `then` must hold
    if = { compile = ["model"] }
    then = { checkpointing = ["none"] }
    [defaults]                      # for techniques that a configuration below omits
    optimizer = "adafactor"
    [[configurations]]              # these run first, under their names
    name = "control"
    [workload]                      # defaults that the command line overrides
    steps = 40
    [scales.tiny]                   # the same study at another size: --scale tiny
    layers = 2
    [reference]                     # published results for these names: show --reference
    source = "https://..."
    measured_on = "one RTX 4090, torch 2.8"
    control = "control"             # the row that savings and speeds are relative to
    [reference.rows]
    control = { peak_memory = "21.165GiB", tokens_per_second = 2765, perplexity = 152.1 }

`extends = "default"` inherits from another space, given by name or by a path relative to this file
(`space_content.py`). Combinations that are illegal everywhere (`autotune/spec/config.py`) need no
condition.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from autotune.errors import InvalidInput, InvalidSpace, suggestion
from autotune.spec.checked import checked_setting
from autotune.spec.config import CHOICES, FIELD_ORDER, WHOLE_NUMBERS, check_value
from autotune.spec.published_table import Reference, read_reference
from autotune.spec.search_space import DIVISORS, Condition, SearchSpace
from autotune.spec.space_content import content_of
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import Workload

Result = TypeVar("Result")

MAX_RANGE_VALUES = 1000
_LARGEST_RANGE_END = 2**31 - 1
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
    "chat_column",
    "model_config",
    "model_sha256",
    "model_source",
    "script",
    "script_arguments",
    "script_files",
    "script_files_after_apply",
    "packages",
    "one_rank",
    "is_injected",
    "callback",
    "own_precision",
    "own_fusion",
}


def load_space(name_or_file: str) -> SearchSpace:
    """Returns the space of that name, or in that TOML file.

    Raises InvalidSpace with the file, the key and the allowed values.
    """
    file, content = content_of(name_or_file)
    return _Reader(file).read(content)


class _Reader:
    """Checks the content of one file; every error names the file and the key."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self, content: dict[str, Any]) -> SearchSpace:
        self._check_keys(content, TABLES, where="")
        techniques = self._table(content, "techniques")
        defaults = self._table(content, "defaults")
        self._check_keys(techniques, FIELD_ORDER, where="techniques")
        self._check_keys(defaults, FIELD_ORDER, where="defaults")
        defaults = {
            field: self._technique(field, value, where=f"defaults.{field}")
            for field, value in defaults.items()
        }
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
            raise self._error(
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
            if field == "micro_batch_size":
                example = f'"{DIVISORS}" or a list such as [4, 2]'
            else:
                example = f"[{given!r}]"
            raise self._error(f"{where} = {given!r} is not a list", f"write {where} = {example}")
        if not given:
            raise self._error(
                f"{where} is an empty list", "list at least one value, or remove the key"
            )
        values = [self._technique(field, value, where=where) for value in given]
        if len(set(values)) != len(values):
            raise self._error(f"{where} = {given!r} has a value twice", "list each value once")
        return self._with_default_budget(field, values)

    def _range(self, field: str, given: dict[str, Any], *, where: str) -> tuple[Any, ...]:
        if field in CHOICES or field == "activation_budget":
            listed = ", ".join(CHOICES.get(field, ("none", "8GiB")))
            raise self._error(f"{where} = {given!r} is not a list", f"list values of {listed}")
        self._check_keys(given, ("from", "to", "step"), where=where)
        numbers: list[Any] = [given.get(key) for key in ("from", "to", "step")]
        if any(
            isinstance(number, bool) or not isinstance(number, int | float) for number in numbers
        ):
            raise self._error(
                f"{where} = {given!r} is not a range", "write { from = 0.1, to = 1.0, step = 0.1 }"
            )
        in_whole_numbers = field in WHOLE_NUMBERS
        if in_whole_numbers and not all(isinstance(number, int) for number in numbers):
            raise self._error(
                f"{where} = {given!r} is not a range of whole numbers", "use whole numbers"
            )
        first, last, step = numbers
        if (
            not all(abs(number) <= _LARGEST_RANGE_END for number in numbers)
            or step <= 0
            or last < first
        ):
            raise self._error(
                f"{where} = {given!r} holds no value", "use finite from <= to and a step above zero"
            )
        if (last - first) / step >= MAX_RANGE_VALUES:
            raise self._error(
                f"{where} = {given!r} holds too many values", f"use at most {MAX_RANGE_VALUES}"
            )
        count = int((last - first) / step + 1e-9) + 1
        values = [round(first + index * step, 10) for index in range(count)]
        for value in values:
            self._technique(field, value, where=where)
        return self._with_default_budget(field, values)

    @staticmethod
    def _with_default_budget(field: str, values: list[Any]) -> tuple[Any, ...]:
        """Returns `values`; for memory_budget with 1.0, which is required without compilation."""
        if field == "memory_budget" and 1.0 not in values:
            return (1.0, *values)
        return tuple(values)

    def _condition(self, given: Any, techniques: Mapping[str, Any], *, where: str) -> Condition:
        self._check_keys(given, ("if", "then"), where=where)
        sides = []
        for side in ("if", "then"):
            fields = given.get(side)
            if not isinstance(fields, dict) or not fields:
                raise self._error(
                    f"{where}.{side} is missing", 'write for example if = { compile = ["model"] }'
                )
            self._check_keys(fields, FIELD_ORDER, where=f"{where}.{side}")
            values_by_field = {}
            for field, values in fields.items():
                values_by_field[field] = self._condition_values(
                    field, values, techniques, f"{where}.{side}.{field}"
                )
            sides.append(values_by_field)
        return Condition(when=sides[0], then=sides[1])

    def _condition_values(
        self, field: str, given: Any, techniques: Mapping[str, Any], where: str
    ) -> tuple[Any, ...]:
        if field not in techniques:
            raise self._error(
                f"{where} is about a technique that the space does not vary",
                f"add it to [techniques] or remove {where}",
            )
        listed = given if isinstance(given, list) else [given]
        if not listed:
            raise self._error(f"{where} is an empty list", "list at least one value")
        known = self._values(field, techniques[field])
        values = tuple(self._technique(field, value, where=where) for value in listed)
        for value in values:
            if known != DIVISORS and value not in known:
                raise self._error(
                    f"{where} names {value!r}, which techniques.{field} does not list",
                    f"use one of {', '.join(map(str, known))}",
                )
        return values

    def _configurations(self, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
        seen = set()
        for index, given in enumerate(self._tables(content, "configurations")):
            where = f"configurations[{index}]"
            self._check_keys(given, ("name", *FIELD_ORDER), where=where)
            name = given.get("name")
            if not isinstance(name, str) or not name:
                raise self._error(f"{where} has no name", 'add name = "..."')
            if name in seen:
                raise self._error(
                    f"two configurations have the name {name!r}", "give each another name"
                )
            seen.add(name)
            yield {
                field: value
                if field == "name"
                else self._technique(field, value, where=f"{where}.{field}")
                for field, value in given.items()
            }

    def _reference(self, content: dict[str, Any], space: SearchSpace) -> Reference | None:
        table = self._table(content, "reference")
        if not table:
            return None
        names = [configuration["name"] for configuration in space.configurations]
        return self._with_location("reference", partial(read_reference, names=names), table)

    def _workload(self, workload: dict[str, Any], *, where: str) -> dict[str, Any]:
        self._check_keys(workload, WORKLOAD_KEYS, where=where)
        workload = {
            name: self._with_location(f"{where}.{name}", checked_setting, Workload, name, value)
            for name, value in workload.items()
        }
        if is_function_reference(workload.get("model", "")):
            raise self._error(
                f"{where}.model = {workload['model']!r} would run code, "
                "which a search-space file may not choose",
                "give it on the command line, with --model",
            )
        return workload

    # -- small checks ------------------------------------------------------------------------------

    def _error(self, message: str, hint: str) -> InvalidSpace:
        return InvalidSpace(f"{self._file}: {message}", hint=hint)

    def _check_keys(self, given: Any, known: Iterable[str], *, where: str) -> None:
        if not isinstance(given, dict):
            raise self._error(
                f"{where} = {given!r} is not a table", f"write [{where}] with keys below it"
            )
        for key in given:
            if key not in known:
                hint = suggestion(key, known, otherwise=f"the keys are {', '.join(sorted(known))}")
                table = f" in {where}" if where else ""
                raise self._error(f"unknown key {key!r}{table}", hint)

    def _technique(self, field: str, value: Any, *, where: str) -> Any:
        """Returns a value of a technique as configurations have it."""
        return self._with_location(where, check_value, field, value)

    def _with_location(self, where: str, check: Callable[..., Result], *given: Any) -> Result:
        """Returns the result of `check`; an InvalidInput that it raises gets file and key."""
        try:
            return check(*given)
        except InvalidInput as error:
            raise self._error(f"{where}: {error.message}", error.hint) from None

    def _table(self, content: dict[str, Any], key: str) -> dict[str, Any]:
        table = content.get(key, {})
        if not isinstance(table, dict):
            raise self._error(
                f"{key} = {table!r} is not a table", f"write [{key}] with keys below it"
            )
        return table

    def _tables(self, content: dict[str, Any], key: str) -> list[dict[str, Any]]:
        tables = content.get(key, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise self._error(
                f"{key} is not a list of tables", f"write [[{key}]] with keys below it"
            )
        return tables

    def _text(self, content: dict[str, Any], key: str) -> str:
        text = content.get(key, "")
        if not isinstance(text, str):
            raise self._error(f"{key} = {text!r} is not a string", f'write {key} = "..."')
        return text
