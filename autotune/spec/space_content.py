"""Read the TOML of a search-space file and merge it with the space that it extends, unchecked."""

from pathlib import Path
from typing import Any

from autotune.errors import InvalidSpace, suggestion
from autotune.spec.user_files import read_toml
from autotune.spec.user_paths import is_plain_file, path_exists
from autotune.spec.workload import overridden


def named_spaces() -> dict[str, Path]:
    """Returns the files of the search spaces that come with autotune, by name."""
    # In a checkout the folder is next to the package; in a wheel it is inside the package.
    inside = Path(__file__).resolve().parents[1] / "search_spaces"
    folder = inside if inside.is_dir() else inside.parents[1] / "search_spaces"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def content_of(
    name_or_file: str, *, folder: Path = Path(), extended_by: tuple[Path, ...] = ()
) -> tuple[Path, dict[str, Any]]:
    """Returns the file of a search space and its content, merged with the spaces that it extends.

    The space is given by name, or by a path relative to `folder`. Raises InvalidSpace if it cannot
    be read, is not valid TOML or extends itself.
    """
    file = named_spaces().get(name_or_file, folder / name_or_file)
    content = _read(file, name=name_or_file)
    if "extends" not in content:
        return file, content
    base = content.pop("extends")
    if not isinstance(base, str) or not base:
        raise InvalidSpace(
            f"{file}: extends = {base!r} is not a string",
            hint='write extends = "default", or the name of a .toml file',
        )
    if file.resolve() in extended_by:
        raise InvalidSpace(
            f"{file} extends a space that extends it", hint="remove one of the extends"
        )
    _, inherited = content_of(base, folder=file.parent, extended_by=(*extended_by, file.resolve()))
    return file, _merged(inherited, content)


def _merged(inherited: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """Returns `inherited` with the keys of `content`: tables are merged, lists are appended.

    The table of a workload is overridden as by the command line; other values are replaced.
    """
    merged = dict(inherited)
    for key, value in content.items():
        base = inherited.get(key)
        if isinstance(value, dict) and isinstance(base, dict):
            merged[key] = overridden(base, value) if key == "workload" else {**base, **value}
        elif isinstance(value, list) and isinstance(base, list):
            merged[key] = [*base, *value]
        else:
            merged[key] = value
    return merged


def _read(file: Path, *, name: str) -> dict[str, Any]:
    known = named_spaces()
    how = f"name a .toml file or one of {', '.join(known)}"
    if not is_plain_file(file):
        reason = ""
        if path_exists(str(file)):
            reason = ": that is not a regular file"
            how = f"save it as a .toml file, or name one of {', '.join(known)}"
        raise InvalidSpace(
            f"there is no search space {name!r}{reason}",
            hint=suggestion(name, known, otherwise=how),
        )
    return read_toml(file, kind=InvalidSpace)
