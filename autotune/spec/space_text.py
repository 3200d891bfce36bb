"""Write a search space as the text of a TOML file, from which `load_space` reads the same space.

A model that is code or a path cannot be part of a file; it is given on the command line.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import tomlkit
from tomlkit.items import AoT, Item, Table

from autotune.printable import printable
from autotune.spec.search_space import SearchSpace
from autotune.spec.space_file import WORKLOAD_KEYS
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import Workload


def space_text(space: SearchSpace, *, about: str = "") -> str:
    """Returns the space as TOML, below a comment with the text `about`."""
    document = tomlkit.document()
    if about:
        document.add(tomlkit.comment(printable(" ".join(about.split()))))
        document.add(tomlkit.nl())
    if space.description:
        document.add("description", tomlkit.string(space.description))
    if space.workload:
        document.add("workload", _table(space.workload))
    if space.techniques:
        document.add("techniques", _table(space.techniques))
    if space.conditions:
        document.add(
            "conditions",
            _tables({"if": one.when, "then": one.then} for one in space.conditions),
        )
    if space.defaults:
        document.add("defaults", _table(space.defaults))
    if space.configurations:
        document.add("configurations", _tables(space.configurations))
    if space.scales:
        scales = tomlkit.table(is_super_table=True)  # only [scales.tiny], no [scales]
        for scale, settings in space.scales.items():
            scales.add(scale, _table(settings))
        document.add("scales", scales)
    if space.reference is not None:
        table = space.reference.to_table()
        reference = _table({key: value for key, value in table.items() if key != "rows"})
        reference.add("rows", _table(table["rows"]))
        document.add("reference", reference)
    return _escaped(tomlkit.dumps(document))


def workload_table(workload: Workload) -> dict[str, Any]:
    """Returns the settings of `workload` that the [workload] table of a file can have."""
    settings = {}
    for field in dataclasses.fields(workload):
        value = getattr(workload, field.name)
        if field.name in WORKLOAD_KEYS and value is not None:
            settings[field.name] = value
    is_file = workload.script is not None or workload.model_config is not None
    if is_file or is_function_reference(workload.model):
        del settings["model"]
    return settings


def _table(entries: Mapping[str, Any]) -> Table:
    table = tomlkit.table()
    for key, value in entries.items():
        table.add(key, _inline(value))
    return table


def _tables(all_entries: Iterable[Mapping[str, Any]]) -> AoT:
    tables = tomlkit.aot()
    for entries in all_entries:
        tables.append(_table(entries))
    return tables


def _inline(value: Any) -> Item:
    """Returns a value in one line: a table within a table is written in braces."""
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        for key, item in value.items():
            table.add(key, _inline(item))
        return table
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        array.extend(_inline(one) for one in value)
        return array
    written: Item = tomlkit.item(value)
    return written


def _escaped(text: str) -> str:
    """Returns TOML with an escape for each character that a terminal would obey.

    Outside of strings and comments there is none, and in both the escape may stand.
    """
    return "".join(
        letter if letter.isprintable() or letter == "\n" else f"\\U{ord(letter):08X}"
        for letter in text
    )
