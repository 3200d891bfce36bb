"""What a search-space file says, and what it takes over from a space it extends; not yet checked."""

import tomllib
from pathlib import Path
from typing import Any

from autotune.errors import InvalidSpace
from autotune.spec.workload_settings import overridden


def named_spaces() -> dict[str, Path]:
    """The search spaces that come with autotune, by name."""
    # In a checkout the folder stands beside the package; a wheel carries it inside.
    inside = Path(__file__).resolve().parents[1] / "search_spaces"
    folder = inside if inside.is_dir() else inside.parents[1] / "search_spaces"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def content_of(
    name_or_file: str, *, folder: Path = Path(), extended_by: tuple[Path, ...] = ()
) -> tuple[Path, dict[str, Any]]:
    """The file of that name, or at that path seen from `folder`, and its content with all that it extends.

    Raises InvalidSpace for what cannot be read, is no TOML or extends itself.
    """
    file = named_spaces().get(name_or_file, folder / name_or_file)
    content = _read(file, called=name_or_file)
    if "extends" not in content:
        return file, content
    base = content.pop("extends")
    if not isinstance(base, str) or not base:
        raise InvalidSpace(
            f"{file}: extends = {base!r} is no text",
            hint='write extends = "default", or the name of a .toml file',
        )
    if file.resolve() in extended_by:
        raise InvalidSpace(
            f"{file} extends a space that extends it", hint="take one of the extends out"
        )
    _, inherited = content_of(base, folder=file.parent, extended_by=(*extended_by, file.resolve()))
    return file, _merged(inherited, content)


def _merged(inherited: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Keys of tables are added or replaced, a workload's as on the command line; lists go on; else the own is taken."""
    merged = dict(inherited)
    for key, value in own.items():
        before = inherited.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[key] = overridden(before, value) if key == "workload" else {**before, **value}
        elif isinstance(value, list) and isinstance(before, list):
            merged[key] = [*before, *value]
        else:
            merged[key] = value
    return merged


def _read(file: Path, *, called: str) -> dict[str, Any]:
    known = ", ".join(named_spaces())
    try:
        if not file.is_file():
            raise InvalidSpace(
                f"there is no search space {called!r}", hint=f"name a .toml file or one of {known}"
            )
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidSpace(
            f"there is no search space {called!r} that can be read: {error.strerror or error}",
            hint=f"name a .toml file or one of {known}",
        ) from None
    except UnicodeDecodeError as error:
        reason = f"it is no UTF-8 text ({error.reason})"
        raise InvalidSpace(
            f"{file} is not valid TOML: {reason}", hint="save it as UTF-8"
        ) from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # also a number of thousands of digits, and tables in tables in ...
        raise InvalidSpace(
            f"{file} is not valid TOML: {error}", hint="mend the line it names"
        ) from error
