"""Reads the files of other trainers: what they train, and with which techniques.

Each trainer is one `Trainer`: the table of its keys (`keys/`, a TOML file a version) and a function
from them to settings of autotune. Nothing in a file is run, and no key is dropped silently: it is
taken over, has no effect on memory and speed, or is named with the reason. A key that the version
does not have is one sentence.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.spec.setting import all_options_of


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

    known = {*all_options_of(kind), "model_config"}  # that goes with a model
    files = [named] if isinstance(named, str | os.PathLike) else named
    options = {name: value for name, value in settings.items() if value is not None}
    if getattr(kind, "is_predicted", False):
        options.setdefault("engine", "torch")
    imported = import_files([Path(file) for file in files], options)
    told(imported.lines())
    of_file = {name: value for name, value in imported.settings().items() if name in known}
    return {**of_file, **settings}
