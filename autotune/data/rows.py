"""Read the rows of a dataset: the names of its columns, and the values of some of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autotune.data.hub import reason_of
from autotune.errors import InvalidDataset

_STRING_TYPES = {"string", "large_string", "string_view"}
_VALUES_OF_JSON = "Json"
"""The feature of values that differ in type or keys, such as messages of which some have a weight.

`datasets` decodes these as well, and reads nothing for it.
"""
_SAMPLED_ROWS = 64
"""Rows that are read to find the columns, if a streamed dataset does not declare them."""
_ROWS_PER_READ = 64


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of the columns of a dataset, by what they hold."""

    texts: tuple[str, ...]
    lists: tuple[str, ...]
    others: tuple[str, ...]


def columns_of(rows: Any, *, dataset: str) -> Columns:
    """Returns the columns of strings, of lists and of anything else."""
    kinds: dict[str, str] = {}
    if rows.features is not None:
        for name, feature in rows.features.items():
            kinds[name] = _kind_of_feature(feature)
    else:
        for row in iterated(rows.take(_SAMPLED_ROWS), dataset=dataset):
            for name, value in row.items():
                kind = "others"
                if isinstance(value, str):
                    kind = "texts"
                elif isinstance(value, list):
                    kind = "lists"
                # A row without a value says nothing.
                kinds[name] = kind if kinds.get(name, "others") == "others" else kinds[name]
    by_kind = {
        kind: tuple(name for name, found in kinds.items() if found == kind)
        for kind in ("texts", "lists", "others")
    }
    return Columns(**by_kind)


def _kind_of_feature(feature: Any) -> str:
    if _names_files(feature):
        return "others"
    if getattr(feature, "dtype", "") in _STRING_TYPES:
        return "texts"
    # A list of objects was once declared, and is returned, as an object of lists.
    is_list = isinstance(feature, list | dict) or hasattr(feature, "feature")
    return "lists" if is_list else "others"


def _names_files(feature: Any) -> bool:
    """Whether values of a feature are read from files or URLs that the dataset names: images etc.

    Reading such a column would read those.
    """
    if isinstance(feature, dict):
        return any(map(_names_files, feature.values()))
    if isinstance(feature, list | tuple):
        return any(map(_names_files, feature))
    inner = getattr(feature, "feature", None)
    if inner is not None and _names_files(inner):
        return True
    return hasattr(feature, "decode_example") and type(feature).__name__ != _VALUES_OF_JSON


def values(rows: Any, columns: list[str], *, dataset: str) -> Iterator[tuple[Any, ...]]:
    """Yield the values of `columns` in each row."""
    batches = rows.select_columns(columns).iter(batch_size=_ROWS_PER_READ)
    for batch in iterated(batches, dataset=dataset):
        yield from zip(*(batch[name] for name in columns), strict=True)


def iterated(rows: Any, *, dataset: str) -> Iterator[Any]:
    """Yield from `rows`; an error while reading, as of a streamed dataset, is an InvalidDataset."""
    try:
        yield from rows
    except Exception as error:
        raise unreadable(dataset, error) from error


def unreadable(dataset: str, error: Exception, *, kind: str = "rows of text") -> InvalidDataset:
    """Returns the error for a dataset that cannot be read as `kind`."""
    return InvalidDataset(
        f"dataset {dataset!r} cannot be read as {kind}: {reason_of(error)}",
        hint="check that the file is complete and that its suffix is right",
    )
