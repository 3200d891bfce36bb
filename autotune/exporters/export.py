"""Result of an export: the files, the command that uses them, and what they do not express."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.exporters.recipe import Recipe
from autotune.spec.config import FIELD_ORDER
from autotune.spec.schema import Schema


@dataclass(frozen=True, kw_only=True)
class Unsupported(Schema):
    """A setting that the exported files do not express.

    It is always printed, and `--strict` makes it an error.
    """

    setting: str
    """One of `SETTINGS`."""
    value: Any
    """What the trial used; None where only the user's script knows it."""
    instead: Any
    """What the exported files do; None where the user's code decides it."""
    why: str
    """One sentence with the reason, and what to do about it where something can be done.

    Begins with a small letter and has no full stop.
    """

    @property
    def is_technique(self) -> bool:
        """Whether the setting belongs to the configuration, not to the workload."""
        return self.setting in FIELD_ORDER


@dataclass(frozen=True, kw_only=True)
class Export(Schema):
    """A configuration as the files of one trainer."""

    files: Mapping[str, str]
    """{file name: text}, in the order in which a user should read them."""
    command: str
    """Command line that uses the files, to be typed in their folder."""
    is_for_any_folder: bool = False
    """Whether the command works wherever it is typed, because its paths are absolute."""
    same_script: str = ""
    """Command line that trains with the configuration in the user's script as it is, in the folder
    of its search; empty without a script, and where `command` is that."""
    before_use: tuple[str, ...] = ()
    """What a user must change before the command can work, one sentence each."""
    unsupported: tuple[Unsupported, ...] = ()
    """Settings that the files do not express."""
    notes: tuple[str, ...] = ()
    """What a user must know, one sentence each: versions, extra packages, what to fill in."""

    def placeholders(self) -> dict[str, list[str]]:
        """Returns {file: names in it that stand for the user's model or text}, without others."""
        found = {}
        for file, text in self.files.items():
            names = sorted(set(_PLACEHOLDERS.findall(text)))
            if names:
                found[file] = names
        return found


_PLACEHOLDERS = re.compile(r"<(?:MODEL|TEXT FILE|DATASET)>|PUT-YOUR-(?:MODEL|TEXT)-HERE")
"""Where a study has no model or text that the trainer could load."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A trainer that a configuration can be exported to."""

    title: str
    """The trainer's usual name."""
    versions: tuple[str, ...]
    """Accepted values of `--target-version`, the default first. Each target defines what they
    mean."""
    checked_with: str
    """Package and version that the keys were verified against."""
    write: Callable[[Recipe, str], Export]
    """(recipe, version) -> export. A pure function: reads and writes no files."""
