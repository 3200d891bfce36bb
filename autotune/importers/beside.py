"""A file or table that a key of a trainer's file names: DeepSpeed's, accelerate's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.importers.key_table import KeyTable
from autotune.importers.keys_of_file import KeysOfFile
from autotune.importers.trainer_file import read_trainer_file
from autotune.spec.user_paths import expanded, path_exists


def missing_file(keys: KeysOfFile, key: str, name: str, *, hint: str = "") -> InvalidInput:
    """Returns the error for a file that a key names and that cannot be read."""
    if keys.is_alone:
        return InvalidInput(
            f"{keys.file} has {key}: {name!r:.80}, and of a pasted text no other file is read",
            hint=f"paste what is in that file as the value of {key}",
        )
    return InvalidInput(
        f"{keys.file} has {key}: {name!r:.80}, a file that is not there",
        hint=hint or f"put it beside {keys.file.name}, or remove the key from a copy",
    )


def keys_beside(
    keys: KeysOfFile, key: str, table: KeyTable, *, value: Any = None
) -> KeysOfFile | None:
    """Returns the keys of the table or the file that `key` has, or else of `value`.

    None for a file that is neither beside the trainer's nor in the folder of the command, and for
    any of a text that stands alone. Raises InvalidInput.
    """
    value = keys[key] if value is None else value
    if isinstance(value, Mapping):
        return keys.beside(key, value, table, file=keys.file)
    if not isinstance(value, str):
        raise keys.invalid(key, "the name of a file, or a table")
    name = value
    if keys.is_alone:
        return None
    for file in (expanded(str(keys.file)).parent / name, Path(name)):
        if name and path_exists(str(file)):
            content: dict[str, Any] = read_trainer_file(file)
            return keys.beside(key, content, table, file=file)
    return None
