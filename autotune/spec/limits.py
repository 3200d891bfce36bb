"""The legal range of every number that is stored or sent; a type of its own for each kind.

A database can be edited, an export file can be written by hand, and a peer may be of another
release. So whoever reads one of these compares each field with the range in its type
(`spec/schema.py`), before a number becomes a size on a page, a part of a path or a row of another
database. Everything is far wider than what a real training measures, and narrow enough that sums,
ratios and logarithms of two such numbers are finite.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from autotune.units import LARGEST_SIZE_BYTES, LONGEST_SECONDS


@dataclass(frozen=True)
class Range:
    """The smallest and the largest value of a number; NaN is in no range."""

    least: float
    most: float

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "strict": True, "ge": self.least, "le": self.most}


WHOLE = Range(-(2**63), 2**63 - 1)
"""Of an int without another range: what an integer column of any database holds."""
FINITE = Range(-1e100, 1e100)
"""Of a float without another range: its square, and the ratio of two of them, are finite."""

Finite: TypeAlias = Annotated[float, FINITE]
SizeBytes: TypeAlias = Annotated[int, Range(0, LARGEST_SIZE_BYTES)]
NeededBytes: TypeAlias = Annotated[int, Range(1, LARGEST_SIZE_BYTES)]
"""A size that others are divided by."""
Count: TypeAlias = Annotated[int, Range(0, 2**53)]
"""Steps, parameters, retries: exact in the JSON of every language."""
EventNumber: TypeAlias = Annotated[int, Range(-1, 2**53)]
"""The number of an event; -1 is the moment before the first one."""
Number: TypeAlias = Annotated[int, Range(0, 2**31 - 1)]
"""The number of a trial, of an attempt or of a search, as their columns hold it."""
Seed: TypeAlias = Annotated[int, Range(0, 2**63 - 1)]
Seconds: TypeAlias = Annotated[float, Range(0.0, LONGEST_SECONDS)]
Moment: TypeAlias = Annotated[float, Range(0.0, 253_402_300_799.0)]
"""Seconds since 1970, until the end of the year 9999, the last that a date can have."""
Speed: TypeAlias = Annotated[float, Range(1e-9, 1e18)]
"""Tokens per second; above zero, as logarithms are taken of it."""
Spread: TypeAlias = Annotated[float, Range(0.0, 1e18)]
"""How far speeds vary."""
Work: TypeAlias = Annotated[float, Range(0.0, 1e24)]
"""Floating-point operations, or bytes accessed, of a token or in a second."""
Ratio: TypeAlias = Annotated[float, Range(1e-9, 1e9)]
"""Of the speeds of two trainings."""
Share: TypeAlias = Annotated[float, Range(0.0, 1.0)]
"""Of a whole."""
LARGEST_LOSS = 700.0
"""In nats per token. The perplexity of a larger loss, its exponential, overflows a float."""
Perplexity: TypeAlias = Annotated[float, Range(math.exp(-LARGEST_LOSS), math.exp(LARGEST_LOSS))]
"""The loss of a script may be anything, and below zero, too."""
PerplexitySpread: TypeAlias = Annotated[float, Range(0.0, math.exp(LARGEST_LOSS))]
