"""Paths as people name them on a command line or in a file: `~` is a home, and no name ends in a traceback."""

from pathlib import Path


def expanded(name: str) -> Path:
    """`name` with `~` as the home; as it is where nobody has that home."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def is_there(name: str) -> bool:
    """Whether there is a file or folder of that name; one that no file can have is not there."""
    try:
        return bool(name) and expanded(name).exists()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def is_plain_file(file: Path) -> bool:
    """Whether it is a file that ends: no folder, no pipe, no device."""
    try:
        return file.is_file()
    except (OSError, ValueError):
        return False
