"""Few rows in which every two values that go together do so once: most faults need no more than two to meet."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairwise(choices: Mapping[str, Sequence[Any]], is_legal: Callable[[Row], bool]) -> list[Row]:
    """Greedy: each row begins with a pair that no row has, and takes for each field the value with most new pairs.

    `is_legal` judges beginnings of rows, too. Pairs that no legal row has are left out.
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
    longer.sort(key=lambda one: -len(missing.intersection(_pairs(one))))
    return next(filter(None, (_completed(one, choices, is_legal, missing) for one in longer)), None)


def _pairs(row: Row) -> Iterator[frozenset[Any]]:
    return map(frozenset, itertools.combinations(row.items(), 2))
