"""Tables of what a trainer does not express: {setting: {value: (what it does instead, why)}}."""

from collections.abc import Mapping
from typing import Any

from autotune.spec.config import CHOICES, TrainingConfig

Reason = tuple[Any, str]
"""What the files do instead (None: the user's code decides it), and why, as `Unsupported` has it.
"""
Table = Mapping[str, Mapping[Any, Reason]]
"""{setting: {value that a trainer does not express: the reason}}."""

RECOMPUTING = tuple(value for value in CHOICES["checkpointing"] if value != "none")
"""The values of `checkpointing` that recompute something."""


def reasons_in(table: Table, config: TrainingConfig, **words: str) -> dict[str, Reason]:
    """Return {setting: reason} of the values of `config` that are in the table.

    A text of the table may have the `words` in braces; other braces are doubled.
    """
    reasons = {}
    for setting, of_values in table.items():
        value = getattr(config, setting)
        if value in of_values:
            instead, why = of_values[value]
            reasons[setting] = (instead, why.format(**words))
    return reasons
