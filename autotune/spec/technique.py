"""A technique is one declaration: a field of `TrainingConfig`, with all that is asked of it.

The type of the field has its values, a `Literal` or numbers, and is annotated with a `Technique`.
The lists of `spec/config.py` and the options of the command line are read from it.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from autotune.spec.setting import TECHNIQUES, Option


@dataclass(frozen=True, kw_only=True)
class Technique(Option):
    """What is said of a technique, beside its values and their default."""

    group: str = TECHNIQUES
    over_http: bool | str = True
    shown_default: str = ""
    """How help writes a default that depends on the workload; empty: that of the field."""
    is_chosen_first: bool = False
    """Whether a configuration is built from its value before those of the others."""
    is_added_later: bool = False
    """Whether the first studies did not have it. At its default it is left out of a fingerprint, so
    that the fingerprints of old records stay valid."""
    refines: str = ""
    """The technique that it refines: where that is `none`, this one is at its default."""
    needs_devices: bool = False
    """Whether only a trial on several devices can use it."""
    of_scripts: tuple[str, ...] = ()
    """Values that only a script has, by bringing them: no search chooses these."""
    held_by_the_host: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What a CPU cannot do: {value: reason}."""
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """{value: the package that it needs and autotune does not install by itself}."""

    def of_field(self, field: "dataclasses.Field[Any]", hint: Any, *, is_partial: bool) -> Self:
        """Returns the option of a field, without the values that only a script has."""
        option = super().of_field(field, hint, is_partial=is_partial)
        searched = tuple(value for value in option.choices if value not in self.of_scripts)
        return dataclasses.replace(
            option,
            choices=searched,
            metavar=self.metavar or "|".join(searched) or option.metavar,
            help=f"{self.help} [default: {self.shown_default or field.default}]",
        )
