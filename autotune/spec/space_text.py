"""Write a search space as the text of a TOML file, from which `load_space` reads the same space.

A model that is code or a path cannot be part of a file; it is given on the command line.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from autotune.printable import printable
from autotune.spec.search_space import Condition, SearchSpace
from autotune.spec.space_file import WORKLOAD_KEYS
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import Workload


def space_text(space: SearchSpace, *, about: str = "") -> str:
    """Return the space as TOML, below a comment with the text `about`."""
    blocks: list[list[str]] = []
    if about:
        blocks.append([f"# {printable(' '.join(about.split()))}"])
    if space.description:
        blocks.append([f"description = {_value(space.description)}"])
    blocks += _table("[workload]", space.workload)
    blocks += _table("[techniques]", space.techniques)
    for condition in space.conditions:
        blocks.append(["[[conditions]]", *_condition(condition)])
    blocks += _table("[defaults]", space.defaults)
    for configuration in space.configurations:
        blocks += _table("[[configurations]]", configuration)
    for scale, settings in space.scales.items():
        blocks.append([f"[scales.{_key(scale)}]", *_entries(settings)])
    if space.reference is not None:
        table = space.reference.to_table()
        rows = table.pop("rows")
        blocks += _table("[reference]", table)
        blocks += _table("[reference.rows]", rows)
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def workload_table(workload: Workload) -> dict[str, Any]:
    """Return the settings of `workload` that the [workload] table of a file can have."""
    settings = {}
    for field in dataclasses.fields(workload):
        value = getattr(workload, field.name)
        if field.name in WORKLOAD_KEYS and value is not None:
            settings[field.name] = value
    is_file = workload.script is not None or workload.model_config is not None
    if is_file or is_function_reference(workload.model):
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
    return f'"{_quoted(str(value))}"'


def _quoted(text: str) -> str:
    """Return `text` with an escape for each character with a meaning in TOML or in a terminal."""
    return "".join(map(_escaped, text))


def _escaped(letter: str) -> str:
    if letter in '\\"':
        return "\\" + letter
    if letter.isprintable():
        return letter
    if letter == "\n":
        return "\\n"
    if ord(letter) < 0x10000:
        return f"\\u{ord(letter):04X}"
    return f"\\U{ord(letter):08X}"
