"""Chooses few rows in which every pair of values that can be combined occurs.

Most faults need no more than two values.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairwise(choices: Mapping[str, Sequence[Any]], is_legal: Callable[[Row], bool]) -> list[Row]:
    """Greedy: each row begins with a new pair and adds the values with the most new pairs.

    `is_legal` is also called with the beginning of a row. Pairs that no legal row has are left out.
    """
    missing = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(choices, 2)
        for x in choices[a]
        for y in choices[b]
    }
    rows = []
    for pair in sorted(missing, key=lambda pair: sorted(map(str, pair))):
        if pair in missing and (row := _completed(dict(pair), choices, is_legal, missing)):
            rows.append(row)
            missing -= set(_pairs(row))
    return rows


def _completed(
    row: Row,
    choices: Mapping[str, Sequence[Any]],
    is_legal: Callable[[Row], bool],
    missing: set[frozenset[Any]],
) -> Row | None:
    if not is_legal(row):
        return None
    field = next((field for field in choices if field not in row), None)
    if field is None:
        return row
    longer = [{**row, field: value} for value in choices[field]]
    longer.sort(key=lambda candidate: -len(missing.intersection(_pairs(candidate))))
    for candidate in longer:
        completed = _completed(candidate, choices, is_legal, missing)
        if completed:
            return completed
    return None


def _pairs(row: Row) -> Iterator[frozenset[Any]]:
    return map(frozenset, itertools.combinations(row.items(), 2))
