"""The texts or the tokens in the rows of a data set."""

from collections.abc import Iterator
from typing import Any

import numpy

from autotune.shipped.labels import IGNORED_LABEL
from autotune.shipped.script.written import TEXT_COLUMN


def texts_of_rows(rows: Any) -> Iterator[Any]:
    """Yields the texts of TEXT_COLUMN; without it the tokens or the texts that the rows have.

    Without TEXT_COLUMN and tokens, the column is the one called text or the first one of strings.
    """
    rows = rows.with_format(None)
    string_types = ("string", "large_string", "string_view")
    has_strings: dict[str, bool] = {}
    if rows.features is None:  # streamed: the types are unknown, so look at some values
        for row in rows.take(64):
            for name, value in row.items():
                has_strings[name] = has_strings.get(name, False) or isinstance(value, str)
    else:
        for name, feature in rows.features.items():
            has_strings[name] = getattr(feature, "dtype", "") in string_types
    columns = list(has_strings)
    text_columns = [name for name in columns if has_strings[name]]
    if TEXT_COLUMN is None and "input_ids" in columns and "input_ids" not in text_columns:
        names = ("input_ids", "labels", "attention_mask")
        yield from _samples(rows, [name for name in names if name in columns])
        return
    column = TEXT_COLUMN
    if column is None:
        column = "text" if "text" in text_columns or not text_columns else text_columns[0]
    for row in rows.select_columns([column]):
        if row[column]:
            yield row[column]


def _samples(rows: Any, columns: list[str]) -> Iterator[Any]:
    """Yields the tokens of each row, with -2 - token where a token is not a label.

    Tokens under a mask of 0 and tokens after the last label are dropped.
    """
    for row in rows.select_columns(columns):
        tokens = numpy.asarray(row["input_ids"] or [], dtype=numpy.int64)
        labels = tokens
        if row.get("labels") is not None:
            labels = numpy.asarray(row["labels"], dtype=numpy.int64)
        if row.get("attention_mask") is not None:
            is_visible = numpy.asarray(row["attention_mask"]) != 0
            tokens, labels = tokens[is_visible], labels[is_visible]
        trained_on = labels != IGNORED_LABEL
        end = int(trained_on.nonzero()[0].max(initial=-1)) + 1
        yield numpy.where(trained_on, tokens, -2 - tokens)[:end]
