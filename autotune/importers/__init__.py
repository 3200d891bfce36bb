"""Reads the files of other trainers: what they train, and with which techniques.

Each trainer is one `Trainer`: the table of its keys (`keys/`, a TOML file a version) and a function
from them to settings of autotune. Nothing in a file is run, and no key is dropped silently: it is
taken over, has no effect on memory and speed, or is named with the reason. A key that the version
does not have is one sentence.
"""

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
    if settings.get("from_file") is None:
        return dict(settings)
    # It reads the tables of all trainers, which most commands do without.
    from autotune.importers.registry import import_file  # noqa: PLC0415

    known = all_options_of(kind)
    imported = import_file(Path(settings["from_file"]))
    told(imported.lines())
    of_file = {name: value for name, value in imported.settings().items() if name in known}
    return {**of_file, **settings}
