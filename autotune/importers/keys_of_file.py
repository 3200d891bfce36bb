"""The keys of one file, read with the table of its trainer: what is asked for, and what is left."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput, suggestion
from autotune.importers.key_table import KeyTable

OFF = (None, False, "", 0)
"""Values with which a key that is not taken over asks for nothing."""


def unknown_keys(content: Mapping[str, Any], table: KeyTable) -> list[str]:
    """Returns the keys of a file that its trainer does not have, in the order of the file."""
    return [key for key in content if key not in table.keys]


class KeysOfFile:
    """The values of a file, each the trainer's default where the file leaves it out.

    Raises InvalidInput, when it is made, for a key that the trainer's version does not have.
    """

    def __init__(self, content: Mapping[str, Any], table: KeyTable, *, file: Path) -> None:
        self.file = file
        self.table = table
        self._content = {table.renamed.get(key, key): value for key, value in content.items()}
        self._refused: dict[str, str] = {}
        for key in unknown_keys(content, table):
            raise InvalidInput(
                f"{file} has {str(key)!r:.80}, which is no key of {table.title}",
                hint=suggestion(str(key), table.keys, otherwise="remove it"),
            )

    # -- values ------------------------------------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        """Returns the value of a key; one that is null has the trainer's default."""
        value = self._content.get(key)
        return self.table.defaults[key] if value is None else value

    def says(self, key: str) -> bool:
        """Returns whether the file itself has a value for a key."""
        return self._content.get(key) is not None

    def flag(self, key: str) -> bool:
        """Returns a value that is true or false, or "auto", which is false."""
        value = self[key]
        if value in (None, "auto"):
            return False
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise self.invalid(key, "true or false")
        return value

    def whole_number(self, key: str, *, least: int = 0) -> int | None:
        """Returns a whole number, None for a key without a value or default."""
        value = self._number(key, least=least)
        if value is not None and value != int(value):
            raise self.invalid(key, f"a whole number from {least} up")
        return None if value is None else int(value)

    def number(self, key: str, *, least: float = 0.0) -> float | None:
        """Returns a number, None for a key without a value or default.

        Also of a text such as 1e-5: to the YAML of Python this is no number.
        """
        return self._number(key, least=least)

    def _number(self, key: str, *, least: float) -> float | None:
        value = self[key]
        if value is None:
            return None
        try:
            number = float(value) if isinstance(value, str | int | float) else None
        except (ValueError, OverflowError):
            number = None
        if number is None or isinstance(value, bool) or not least <= number < float("inf"):
            raise self.invalid(key, f"a number from {least:g} up")
        return number

    def text(self, key: str) -> str | None:
        """Returns a text, None for a key without a value or default."""
        value = self[key]
        if value is not None and not isinstance(value, str):
            raise self.invalid(key, "a text")
        return value

    def table_of(self, key: str) -> Mapping[str, Any]:
        """Returns a table, empty for a key without a value."""
        value = self[key]
        if value is not None and not isinstance(value, Mapping):
            raise self.invalid(key, "a table of keys")
        return value or {}

    def list_of(self, key: str) -> list[Any]:
        """Returns a list, empty for a key without a value."""
        value = self[key]
        if value is not None and not isinstance(value, list):
            raise self.invalid(key, "a list")
        return value or []

    def one_of(self, key: str, values: Collection[str]) -> str | None:
        """Returns a text of `values`, None for a key without a value or default."""
        value = self.text(key)
        if value is not None and value not in values:
            near = suggestion(value, values, otherwise=f"use one of {', '.join(values)}")
            raise InvalidInput(f"{self.file} has {key}: {value!r:.60}", hint=near)
        return value

    # -- what is not taken over --------------------------------------------------------------------

    def refuse(self, key: str, why: str) -> None:
        """Note that a value was not taken over, or not as it is, with the reason."""
        self._refused.setdefault(key, why)

    def invalid(self, key: str, wanted: str) -> InvalidInput:
        """Returns the error for a value that the trainer would reject."""
        return InvalidInput(
            f"{self.file} has {key}: {self[key]!r:.60}", hint=f"give {key} as {wanted}"
        )

    def cannot_train(self, key: str, why: str, *, hint: str) -> InvalidInput:
        """Returns the error for a training that autotune has no counterpart of."""
        return InvalidInput(f"{self.file} has {key}: {self[key]!r:.60}: {why}", hint=hint)

    # -- accounts ----------------------------------------------------------------------------------

    def taken(self) -> tuple[str, ...]:
        """Returns the keys of the file that were taken over."""
        return tuple(
            key for key in self._content if key in self.table.defaults and key not in self._refused
        )

    def without_effect(self) -> tuple[str, ...]:
        """Returns the keys of the file that change neither memory nor speed, or ask for nothing."""
        return tuple(
            key
            for key, value in self._content.items()
            if key in self.table.no_effect or (key in self.table.not_taken and _is_off(value))
        )

    def not_taken(self) -> dict[str, tuple[Any, str]]:
        """Returns {key: (value, reason)} of what the file asks for and autotune does not do."""
        reasons = {
            key: self.table.not_taken[key]
            for key, value in self._content.items()
            if key in self.table.not_taken and not _is_off(value)
        }
        return {
            key: (self[key] if key in self.table.defaults else self._content[key], why)
            for key, why in {**self._refused, **reasons}.items()
        }

    def defaults(self) -> dict[str, Any]:
        """Returns {key: default} of what is taken over and the file leaves out."""
        return {
            key: default
            for key, default in self.table.defaults.items()
            if default is not None and self._content.get(key) is None
        }


def _is_off(value: Any) -> bool:
    return value in OFF or (isinstance(value, Mapping | list) and not value)
