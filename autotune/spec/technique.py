"""A technique is one declaration: a field of `TrainingConfig`, with all that is asked of it.

The type of the field has its values, a `Literal` or numbers, and is annotated with a `Technique`.
The lists of `spec/config.py` and the options of the command line (`spec/technique_options.py`) are
read from it.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Numbers:
    """The values of a technique that has numbers: whole ones if `least` is one."""

    least: float
    most: float = math.inf

    @property
    def are_whole(self) -> bool:
        return isinstance(self.least, int)

    def __contains__(self, value: object) -> bool:
        kind = int if self.are_whole else int | float
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        return self.least <= value <= self.most

    def __str__(self) -> str:
        """Returns the numbers in words, as a hint names them."""
        kind = "a whole number" if self.are_whole else "a number"
        end = "up" if self.most == math.inf else f"to {self.most}"
        return f"{kind} from {self.least} {end}"


@dataclass(frozen=True, kw_only=True)
class Technique:
    """What is said of a technique, beside its values and their default."""

    help: str
    """Its description on the command line."""
    flag: str = ""
    """Its option on the command line; empty: that of the field's name."""
    metavar: str | None = None
    """How help writes its value; None: the list of values, or their type."""
    shown_default: str = ""
    """How help writes a default that depends on the workload; empty: that of the field."""
    numbers: Numbers | None = None
    """Its values, where these are numbers."""
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
