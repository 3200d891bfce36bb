"""Values of options that typer's completion offers: choices, search spaces and studies.

Where nothing is known the shell offers the names of files.
"""

from collections.abc import Callable, Iterable, Mapping

import typer

from autotune.errors import AutotuneError
from autotune.printable import printable
from autotune.spec.setting import Option
from autotune.spec.space_content import named_spaces
from autotune.spec.study import DEFAULT_STORAGE

Complete = Callable[..., Iterable[str]]


def one_of(choices: Iterable[str]) -> Complete:
    """Returns a function that completes one of these values."""

    def complete() -> Iterable[str]:
        return list(choices)

    return complete


def spaces() -> list[str]:
    return list(named_spaces())


def studies(ctx: typer.Context) -> list[str]:
    """Returns the names of the studies in the database of the command, as far as they can be typed.

    Whatever is wrong with the database, nothing is said of it: it would stand in the user's prompt.
    """
    from autotune.storage.names import study_names  # noqa: PLC0415  # imports SQLAlchemy

    if ctx.params.get("server"):
        return []  # pressing a key sends nothing to a server
    try:
        names = study_names(ctx.params.get("storage") or DEFAULT_STORAGE)
    except AutotuneError:
        return []
    return [name for name in names if printable(name) == name]


def completion_of(option: Option) -> Complete | None:
    """Returns the function that completes the values of a declared option; None for file names."""
    if option.choices:
        return one_of(option.choices)
    return _DYNAMIC.get(option.flag)


_DYNAMIC: Mapping[str, Complete] = {
    "--space": spaces,
    "--name": studies,
    "--study": studies,
    "--studies": studies,
}
