"""A file or table that a key of a trainer's file names: DeepSpeed's, accelerate's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.importers.key_table import KeyTable
from autotune.importers.keys_of_file import KeysOfFile
from autotune.importers.trainer_file import read_trainer_file
from autotune.spec.user_paths import expanded, path_exists


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
