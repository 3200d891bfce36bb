"""The keys of one file, read with the table of its trainer: what is asked for, and what is left."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput, suggestion
from autotune.importers.key_table import KeyTable

OFF = (None, False, "", 0)
"""Values with which a key that is not taken over asks for nothing."""

_NOT_KNOWN = "trials do not have it"
"""Says why a key of a table is left out that its trainer has and this importer does not know."""


def unknown_keys(content: Mapping[str, Any], table: KeyTable) -> list[str]:
    """Returns the keys of a file that its trainer does not have, in the order of the file."""
    return [
        *(key for key, _ in _flattened(content, table) if key not in table.keys),
        *(
            f"{key}.{name}"
            for key, names in table.entries.items()
            if isinstance(content.get(key), list)
            for entry in content[key]
            if isinstance(entry, Mapping)
            for name in entry
            if name not in names
        ),
    ]


def _flattened(
    content: Mapping[str, Any], table: KeyTable, within: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (key, value), the keys of a table that is known with that table: training.seq_len."""
    for name, value in content.items():
        key = f"{within}{name}"
        if key in table.sections and isinstance(value, Mapping):
            yield from _flattened(value, table, f"{key}.")
        elif key in table.keys or key not in table.sections or value is not None:
            yield key, value


class KeysOfFile:
    """The values of a file, each the trainer's default where the file leaves it out.

    `options` are the settings that are given beside the file. Of one that `is_alone` no other file
    is read. Raises InvalidInput, when it is made, for a key that the trainer's version does not
    have.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        table: KeyTable,
        *,
        file: Path,
        options: Mapping[str, Any] | None = None,
        is_alone: bool = False,
    ) -> None:
        self.file = file
        self.is_alone = is_alone
        self.table = table
        self.options = options or {}
        self.launcher: KeysOfFile | None = None
        """accelerate's own file, if it is given beside the trainer's."""
        self._content: dict[str, Any] = {}
        self._refused: dict[str, str] = {}
        self._beside: dict[str, KeysOfFile] = {}
        self.asked: set[str] = set()
        """The keys that were read so far."""
        for key in unknown_keys(content, table):
            if key in table.sections:
                raise InvalidInput(f"{file} has {key} as a value", hint=f"give {key} as a table")
            known = table.keys
            if (listed := key.rpartition(".")[0]) in table.entries:
                known = frozenset(f"{listed}.{name}" for name in table.entries[listed])
            raise InvalidInput(
                f"{file} has {str(key)!r:.80}, which is no key of {table.title}",
                hint=suggestion(str(key), known, otherwise="remove it"),
            )
        for key, value in _flattened(content, table):
            name = table.renamed.get(key, key)
            if value is not None or name not in self._content:
                self._content[name] = value

    def beside(
        self, key: str, content: Mapping[str, Any], table: KeyTable, *, file: Path
    ) -> "KeysOfFile":
        """Returns the keys of what `key` names or holds, whose accounts become part of these."""
        self._beside[key] = KeysOfFile(
            content, table, file=file, options=self.options, is_alone=self.is_alone
        )
        return self._beside[key]

    # -- values ------------------------------------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        """Returns the value of a key; one that is null has the trainer's default."""
        value = self._content.get(key)
        self.asked.add(key)
        return self.table.defaults[key] if value is None else value

    def content(self, key: str) -> Any:
        """Returns the value of any key of the file as it stands, None without one."""
        return self._content.get(key)

    def launched_by(self, launcher: "KeysOfFile") -> None:
        """Take accelerate's own file, whose accounts become part of these."""
        self.launcher = launcher
        self._beside[launcher.file.name] = launcher

    def says(self, key: str) -> bool:
        """Returns whether the file itself has a value for a key, or for one of its table."""
        self.asked.add(key)
        if key in self.table.sections:
            within = f"{key}."
            if any(name.startswith(within) for name in self._content):
                return True
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
        before = self._refused.get(key, "")
        if why not in before:
            self._refused[key] = f"{before}; {why}" if before else why

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
        own = (
            key for key in self._content if key in self.table.defaults and key not in self._refused
        )
        return (*own, *self._of_those_beside(lambda keys: keys.taken()))

    def without_effect(self) -> tuple[str, ...]:
        """Returns the keys of the file that change neither memory nor speed, or ask for nothing."""
        own = (
            key
            for key, value in self._content.items()
            if key in self.table.no_effect or (key in self.table.not_taken and _is_off(value))
        )
        return (*own, *self._of_those_beside(lambda keys: keys.without_effect()))

    def not_taken(self) -> dict[str, tuple[Any, str]]:
        """Returns {key: (value, reason)} of what the file asks for and autotune does not do."""
        reasons = {
            key: self.table.not_taken[key]
            for key, value in self._content.items()
            if key in self.table.not_taken and not _is_off(value)
        }
        own = {key: (self._value_of(key), why) for key, why in {**self._refused, **reasons}.items()}
        own |= self._not_taken_of_tables()
        for within, keys in self._beside.items():
            own |= {f"{within}.{key}": pair for key, pair in keys.not_taken().items()}
        return own

    def _not_taken_of_tables(self) -> dict[str, tuple[Any, str]]:
        """Returns the same of keys within a table that is the value of a key."""
        return {
            f"{key}.{name}": (value, why)
            for key, known in self.table.inner.items()
            if key in self.table.defaults and isinstance(table := self._content.get(key), Mapping)
            for name, value in table.items()
            if not _is_off(value) and (why := known.get(str(name), _NOT_KNOWN))
        }

    def _value_of(self, key: str) -> Any:
        within = f"{key}."
        value = self._content.get(key)
        if value is not None or self.table.defaults.get(key) is not None:
            return self.table.defaults[key] if value is None else value
        if key in self._beside:
            return self._beside[key].file
        return {name: value for name, value in self._content.items() if name.startswith(within)}

    def defaults(self) -> dict[str, Any]:
        """Returns {key: default} of what is taken over and the file leaves out."""
        return {
            key: default
            for key, default in self.table.defaults.items()
            if default is not None and self._content.get(key) is None
        }

    def _of_those_beside(self, account: Callable[["KeysOfFile"], Iterable[str]]) -> Iterator[str]:
        for within, keys in self._beside.items():
            yield from (f"{within}.{key}" for key in account(keys))


def _is_off(value: Any) -> bool:
    return value in OFF or (isinstance(value, Mapping | list) and not value)
