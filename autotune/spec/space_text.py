"""A search space as the text of a TOML file, which `load_space` reads back to the same space.

What a file cannot hold, as a model that is code or a path, is left to the command line.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from autotune.spec.search_space import Condition, SearchSpace
from autotune.spec.space_file import WORKLOAD_KEYS
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import Workload


def space_text(space: SearchSpace, *, about: str = "") -> str:
    """`about`: what stands above it as a comment."""
    blocks = (
        [["# " + "".join(letter if letter.isprintable() else " " for letter in about)]]
        if about
        else []
    )
    if space.description:
        blocks.append([f"description = {_value(space.description)}"])
    blocks += _table("[workload]", space.workload)
    blocks += _table("[techniques]", space.techniques)
    for condition in space.conditions:
        blocks += [["[[conditions]]", *_condition(condition)]]
    blocks += _table("[defaults]", space.defaults)
    for configuration in space.configurations:
        blocks += _table("[[configurations]]", configuration)
    for scale, settings in space.scales.items():
        blocks += [[f"[scales.{_key(scale)}]", *_entries(settings)]]
    if space.reference is not None:
        table = space.reference.to_table()
        rows = table.pop("rows")
        blocks += _table("[reference]", table) + _table("[reference.rows]", rows)
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def workload_table(workload: Workload) -> dict[str, Any]:
    """Every setting of `workload` that a file's [workload] can hold."""
    settings = {
        field.name: getattr(workload, field.name)
        for field in dataclasses.fields(workload)
        if field.name in WORKLOAD_KEYS and getattr(workload, field.name) is not None
    }
    if (
        workload.script is not None
        or is_function_reference(workload.model)
        or workload.model_config is not None
    ):
        del settings["model"]
    return settings


def _table(head: str, entries: Mapping[str, Any]) -> list[list[str]]:
    return [[head, *_entries(entries)]] if entries else []


def _entries(entries: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in entries.items()]


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _condition(condition: Condition) -> Iterable[str]:
    for key, fields in (("if", condition.when), ("then", condition.then)):
        yield f"{key} = {_value(dict(fields))}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_entries(value)) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return f'"{_printable(str(value))}"'


def _printable(text: str) -> str:
    """Every character that a terminal or TOML could take for something else, as an escape."""
    return "".join(
        "\\" + letter if letter in '\\"' else letter if letter.isprintable() else _escape(letter)
        for letter in text
    )


def _escape(letter: str) -> str:
    return (
        "\\n"
        if letter == "\n"
        else f"\\u{ord(letter):04X}"
        if ord(letter) < 0x10000
        else f"\\U{ord(letter):08X}"
    )
