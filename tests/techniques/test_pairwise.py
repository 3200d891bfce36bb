"""The chooser of rows: nothing that could be met is left out."""

import itertools

from tests.techniques.pairwise import pairwise

CHOICES = {"a": range(4), "b": range(3), "c": range(3), "d": range(2)}


def pairs_in(rows):
    return {pair for row in rows for pair in itertools.combinations(sorted(row.items()), 2)}


def test_every_two_values_are_combined_in_some_row():
    every_row = [
        dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())
    ]
    rows = pairwise(CHOICES, lambda _: True)
    assert pairs_in(rows) == pairs_in(every_row)
    assert len(rows) <= len(every_row) / 4


def test_every_two_values_of_some_legal_row_are_combined_in_a_legal_row():
    def is_legal(row):
        return row.get("a") != row.get("b") or "a" not in row or "b" not in row

    every_row = [
        dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())
    ]
    rows = pairwise(CHOICES, is_legal)
    assert all(is_legal(row) for row in rows)
    assert pairs_in(rows) == pairs_in(filter(is_legal, every_row))
