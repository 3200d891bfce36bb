"""Paths given by users: `~` is a home directory, and no name leads to a traceback."""

from pathlib import Path


def expanded(name: str) -> Path:
    """Returns `name` with `~` expanded; unchanged if there is no such home directory."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def path_exists(name: str) -> bool:
    """Whether a file or folder of that name exists; False for names that no file can have."""
    try:
        return bool(name) and expanded(name).exists()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def is_plain_file(file: Path) -> bool:
    """Whether it is a regular file: not a folder, pipe or device."""
    try:
        return file.is_file()
    except (OSError, ValueError):
        return False
