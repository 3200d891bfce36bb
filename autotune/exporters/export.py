"""What an exporter gives: files, how they are used, and what they do not express."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.exporters.recipe import Recipe
from autotune.spec.config import FIELD_ORDER


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A setting that the exported files do not express.

    Never silent: it is printed, and `--strict` refuses it.
    """

    setting: str
    """One of `SETTINGS`."""
    value: Any
    """What the trial used; None where only a script of the user's own knows."""
    instead: Any
    """What the files do by themselves; None where the user's own code decides."""
    why: str
    """One sentence, and the way out where there is one: no capital letter, no full stop."""

    @property
    def is_technique(self) -> bool:
        return self.setting in FIELD_ORDER


@dataclass(frozen=True, kw_only=True)
class Export:
    """A configuration in the words of one trainer."""

    files: Mapping[str, str]
    """{file name: text}, in the order in which they are worth reading."""
    command: str
    """What uses them, as one would type it in their folder."""
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    """What a user must know, one sentence each: versions, extra packages, what to fill in."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A trainer that a configuration can be exported to."""

    title: str
    """What people call it."""
    versions: tuple[str, ...]
    """Values of `--target-version`, the usual one first; what they mean is the target's own."""
    checked_with: str
    """Package and version that the keys were verified against."""
    write: Callable[[Recipe, str], Export]
    """(recipe, version) -> export. Pure: reads nothing, writes nothing."""
