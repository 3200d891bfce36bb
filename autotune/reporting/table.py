"""A table of texts, as the macro `numbers` of the pages' templates shows it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Table:
    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
