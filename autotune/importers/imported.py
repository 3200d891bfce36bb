"""What an importer returns, and what it is declared by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.importers.key_table import KeyTable
from autotune.importers.keys_of_file import KeysOfFile
from autotune.printable import printable
from autotune.spec.schema import Schema


@dataclass(frozen=True, kw_only=True)
class NotTaken(Schema):
    """A key of a file whose value autotune does not take over."""

    key: str
    value: Any
    why: str
    """What autotune does instead, and why; begins with a small letter and has no full stop."""


@dataclass(frozen=True, kw_only=True)
class ImportedTraining(Schema):
    """The training that a trainer's file describes, in our words."""

    trainer: str
    """Trainer and version whose defaults and keys were used, such as `axolotl 0.19`."""
    file: str
    """The file's name."""
    workload: Mapping[str, Any]
    """Settings of `Workload`."""
    config: Mapping[str, Any]
    """Choices of `TrainingConfig`."""
    taken: tuple[str, ...]
    """Keys of the file that were taken over."""
    without_effect: tuple[str, ...]
    """Keys of the file that change neither memory nor speed."""
    not_taken: tuple[NotTaken, ...]
    defaults: Mapping[str, Any]
    """{key that the file leaves out: the trainer's default that was taken instead}."""

    def settings(self) -> dict[str, Any]:
        """Returns the settings of the workload, with the file's configuration as its own."""
        return {**self.workload, "own_config": dict(self.config), "own_file": self.file}

    def lines(self) -> list[str]:
        """Returns what was read, and each key that was not taken over, a sentence each."""
        of_trainer = f"{len(self.defaults)} by the defaults of {self.trainer}"
        counted = f"{len(self.taken)} keys taken over, {of_trainer}"
        if self.without_effect:
            counted += f", {len(self.without_effect)} without effect on memory and speed"
        lines = [f"{self.file} is a training of {self.trainer}: {counted}"]
        lines += [f"{one.key}{_said(one.value)}: {printable(one.why)}" for one in self.not_taken]
        return lines


def _said(value: Any) -> str:
    """Returns a value after its key; nothing for a key that the file does not have."""
    if value in (None, {}):
        return ""
    text = printable(str(value))
    return f": {text}" if len(text) <= 60 else f": {text[:57]}..."


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A trainer whose files are read."""

    table: KeyTable
    signs: frozenset[str]
    """Top-level keys by which its files are told from those of others: each has one of them."""
    suffixes: tuple[str, ...] = (".yaml", ".yml")
    """Endings of its files, for a file that could be of several trainers."""
    read: Callable[[KeysOfFile], ImportedTraining]
    """Raises InvalidInput for values that are none, or that autotune cannot train."""
