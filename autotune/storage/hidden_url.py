"""Takes the URL of a database out of texts that are for others than its owner.

Errors name the database, which helps whoever runs the search. A service shows them to everybody who
has a token, and some even to those who have none.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

from autotune.errors import AutotuneError, DiskFull, StorageUnavailable
from autotune.storage.database import sqlite_file
from autotune.storage.error_translation import redacted_url

DATABASE_OF_SERVER = "the database of the server"

_SERVER_OF_DATABASE = re.compile(r"connection to server at .*? failed: |connection to server at .*")
"""How PostgreSQL names the machine of a database."""


def told_to_others(error: AutotuneError) -> tuple[str, str]:
    """Returns the message and the hint; the same sentence for whatever a database refuses.

    The reason has names of machines, users and files, and is in a log.
    """
    if isinstance(error, StorageUnavailable) and not isinstance(error, DiskFull):
        return (
            f"{DATABASE_OF_SERVER} cannot be used at the moment",
            "try again in a while; whoever runs the server finds the reason in its log",
        )
    return error.message, error.hint


class HiddenUrl:
    """The writings of one database's URL, and a text without them."""

    def __init__(self, url: str) -> None:
        redacted = redacted_url(url)
        writings = {url, redacted}
        file = sqlite_file(url)
        if file is None:
            # A driver's message may have the URL with what the driver has changed of it.
            writings.add(make_url(url).render_as_string(hide_password=True))
        else:
            writings |= {str(file), str(file.absolute()), str(Path(file).resolve())}
        quoted = {shlex.quote(writing) for writing in writings} | {repr(each) for each in writings}
        # The longest first, as some are parts of others.
        self._writings = sorted(writings | quoted, key=len, reverse=True)

    def without(self, text: str) -> str:
        """Returns the text with words for the database in place of its URL and its file."""
        for writing in self._writings:
            text = text.replace(f" --storage {writing}", "").replace(writing, DATABASE_OF_SERVER)
        text = text.replace(f"the server of {DATABASE_OF_SERVER}", DATABASE_OF_SERVER)
        return _SERVER_OF_DATABASE.sub("", text)

    def without_in(self, value: Any) -> Any:
        """Returns what JSON can hold, each text of it as `without`."""
        if isinstance(value, str):
            return self.without(value)
        if isinstance(value, Mapping):
            return {name: self.without_in(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.without_in(inner) for inner in value]
        return value
