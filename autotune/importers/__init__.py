"""Reads the files of other trainers: what they train, and with which techniques.

Each trainer is one `Trainer`: the table of its keys (`keys/`, a TOML file a version) and a function
from them to settings of autotune. Nothing in a file is run, and no key is dropped silently: it is
taken over, has no effect on memory and speed, or is named with the reason. A key that the version
does not have is one sentence.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.spec.setting import all_options_of

if TYPE_CHECKING:
    from autotune.importers.imported import ImportedTraining


def with_trainer_file(
    settings: Mapping[str, Any],
    kind: type,
    *,
    told: Callable[[Sequence[str]], None] = lambda lines: None,
) -> dict[str, Any]:
    """Returns `settings` of a request of that kind, completed by those of the file in `from_file`.

    What is given beside the file overrides it. `told` gets what was read, a sentence each. Raises
    InvalidInput.
    """
    named = settings.get("from_file")
    if named is None or named in ([], ()):  # an option that can be repeated, and was not given
        return {name: value for name, value in settings.items() if name != "from_file"}
    # It reads the tables of all trainers, which most commands do without.
    from autotune.importers.registry import import_files  # noqa: PLC0415

    files = [named] if isinstance(named, str | os.PathLike) else named
    imported = import_files([Path(file) for file in files], _beside(settings, kind))
    return _completed(settings, kind, imported, told=told)


def with_trainer_text(
    settings: Mapping[str, Any],
    kind: type,
    text: str,
    *,
    told: Callable[[Sequence[str]], None] = lambda lines: None,
) -> dict[str, Any]:
    """Returns the same for the text of a file; nothing on this machine is read for it."""
    from autotune.importers.registry import import_text  # noqa: PLC0415  # as above

    imported = import_text(text, _beside(settings, kind))
    return _completed(settings, kind, imported, told=told)


def _beside(settings: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Returns the settings that are given beside a file."""
    options = {name: value for name, value in settings.items() if value is not None}
    if getattr(kind, "is_predicted", False):
        options.setdefault("engine", "torch")
    return options


def _completed(
    settings: Mapping[str, Any],
    kind: type,
    imported: "ImportedTraining",
    *,
    told: Callable[[Sequence[str]], None],
) -> dict[str, Any]:
    known = {*all_options_of(kind), "model_config"}  # that goes with a model
    told(imported.lines())
    of_file = {name: value for name, value in imported.settings().items() if name in known}
    return {**of_file, **settings}
