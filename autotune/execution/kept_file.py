"""Keeps answers that take long, in the user's cache folder, by all that they follow from.

What an answer follows from is the key of its file, and stands in it. A file that cannot be read is
as none, and nothing is kept without a cache folder that is safe (`private_folder.py`).
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.execution.private_folder import safe_cache_folder
from autotune.system.files import durable_file

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading a file raises that is not there, or that nobody can read."""


def read_kept(folder: str, key: Mapping[str, Any]) -> Any:
    """Returns what is kept under a key, which is ready for JSON. Raises one of UNREADABLE."""
    stored = json.loads(_file(folder, key).read_text(encoding="utf-8"))
    if _text_of(stored["key"]) != _text_of(key):
        raise LookupError("the file is that of another key")
    return stored["kept"]


def write_kept(folder: str, key: Mapping[str, Any], kept: Any, *, most_files: int) -> None:
    """Keeps an answer, and of more than `most_files` not the oldest; nothing without a folder."""
    content = json.dumps({"key": key, "kept": kept}, indent=2, sort_keys=True)
    try:
        file = _file(folder, key)
        with durable_file(file) as unfinished:
            unfinished.write_text(content, encoding="utf-8")
        files = sorted(file.parent.glob("*.json"), key=lambda one: one.stat().st_mtime_ns)
        for oldest in files[:-most_files]:
            oldest.unlink(missing_ok=True)
    except OSError:
        pass  # the next one works it out again


def _file(folder: str, key: Mapping[str, Any]) -> Path:
    """Returns the file of a key. Raises OSError where no cache folder is safe."""
    digest = hashlib.sha256(_text_of(key).encode()).hexdigest()
    return safe_cache_folder(folder) / f"{digest[:32]}.json"


def _text_of(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
