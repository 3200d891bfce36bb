"""Completion of commands in bash, zsh and fish: options, their values, studies and trials.

The script that `--install-completion` installs calls `autotune` with `_AUTOTUNE_COMPLETE` set each
time the key is pressed; `answer` prints what may come next. Where nothing is known the shell offers
the names of files.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr
from typing import Any, NoReturn

import typer

from autotune.cli.lines import print_line
from autotune.errors import InvalidInput
from autotune.printable import printable
from autotune.spec.option import Option
from autotune.spec.space_content import named_spaces
from autotune.spec.study import DEFAULT_STORAGE

PROGRAM = "autotune"
SHELLS = ("bash", "zsh", "fish")
Complete = Callable[..., Iterable[str]]


def answer(command: Any) -> NoReturn:
    """Print what may come next on the command line that the shell passes, and end the process.

    Whatever goes wrong, nothing but the answer is printed: it would stand in the user's prompt.
    """
    # typer's scripts of the shells, which nothing else needs.
    from typer._completion_classes import completion_init  # noqa: PLC0415

    completion_init()
    _join_at_colons()
    exit_code = 0
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        try:
            command(prog_name=PROGRAM, standalone_mode=False)
        except SystemExit as ended:
            exit_code = ended.code if isinstance(ended.code, int) else 1
        except Exception:
            exit_code = 1
    sys.stdout.flush()
    sys.exit(exit_code)


def _join_at_colons() -> None:
    """Join again what bash has divided at colons, such as the URL of `--storage`."""
    if "COMP_WORDS" not in os.environ:
        return
    words: list[str] = []
    place = int(os.environ["COMP_CWORD"])
    for index, word in enumerate(os.environ["COMP_WORDS"].split("\n")):
        if words and (word == ":" or words[-1].endswith(":")):
            words[-1] += word
            place -= index <= int(os.environ["COMP_CWORD"])
        else:
            words.append(word)
    os.environ["COMP_WORDS"] = "\n".join(words)
    os.environ["COMP_CWORD"] = str(place)


def install(shell: str | None = None) -> None:
    """Install the completion for a shell, by default the user's, and say where.

    Raises InvalidInput.
    """
    from typer._completion_shared import install as install_script  # noqa: PLC0415

    name = _shell("--install-completion", named=shell)
    name, file = install_script(shell=name, prog_name=PROGRAM)
    print_line(f"{name} completion is installed in {file}; it works in new terminals")


def show(shell: str | None = None) -> None:
    """Print the script that completes commands in a shell, by default the user's.

    Raises InvalidInput.
    """
    from typer._completion_shared import get_completion_script  # noqa: PLC0415

    print(
        get_completion_script(
            prog_name=PROGRAM,
            complete_var=f"_{PROGRAM.upper()}_COMPLETE",
            shell=_shell("--show-completion", named=shell),
        )
    )


def _shell(option: str, *, named: str | None) -> str:
    """Return the named shell, else the one that runs this command, else the login shell."""
    import shellingham  # noqa: PLC0415  # only this needs it; typer brings it

    try:
        name = named or shellingham.detect_shell()[0]
    except shellingham.ShellDetectionFailure:
        name = os.path.basename(os.environ.get("SHELL", ""))
    if name not in SHELLS:
        raise InvalidInput(
            f"there is no completion for {f'the shell {name!r}' if name else 'an unknown shell'}",
            hint=f"name one: autotune {option} {', '.join(SHELLS[:-1])} or {SHELLS[-1]}",
        )
    return str(name)


# -- what may come next ----------------------------------------------------------------------------


def one_of(choices: Iterable[str]) -> Complete:
    """Return a function that completes one of these values."""

    def complete() -> Iterable[str]:
        return list(choices)

    return complete


def _typed(names: Iterable[str]) -> list[str]:
    """Return the names that a terminal can show: no others can be typed."""
    return [name for name in names if printable(name) == name]


def spaces() -> list[str]:
    return _typed(named_spaces())


def scales(ctx: typer.Context) -> list[str]:
    """Return the scales of the search space that the command names."""
    from autotune.spec.space_file import load_space  # noqa: PLC0415  # reads and checks the file

    space = ctx.params.get("space")
    return [] if space is None else _typed(load_space(space).scales)


def configurations(ctx: typer.Context) -> list[str]:
    """Return the names of the configurations of the search space that the command names."""
    from autotune.spec.space_file import load_space  # noqa: PLC0415  # reads and checks the file

    space = ctx.params.get("space")
    if space is None:
        return []
    return _typed(each["name"] for each in load_space(space).configurations)


def studies(ctx: typer.Context) -> list[str]:
    """Return the names of the studies in the database of the command."""
    if ctx.params.get("server"):
        return []  # pressing a key sends nothing to a server
    from autotune.storage.names import study_names  # noqa: PLC0415  # imports SQLAlchemy

    return _typed(study_names(_storage(ctx)))


def trials(ctx: typer.Context) -> list[str]:
    """Return the numbers of the trials of the study that the command names."""
    from autotune.storage.names import trial_numbers  # noqa: PLC0415  # imports SQLAlchemy

    study = ctx.params.get("study")
    if ctx.params.get("server"):
        return []
    return [] if study is None else [str(n) for n in trial_numbers(_storage(ctx), study)]


def _storage(ctx: typer.Context) -> str:
    given = [ctx.params.get("storage")]
    if ctx.parent is not None:
        given.append(ctx.parent.params.get("storage"))
    return next((url for url in given if url not in (None, DEFAULT_STORAGE)), DEFAULT_STORAGE)


def completion_of(option: Option) -> Complete | None:
    """Return the function that completes the values of a declared option; None for file names."""
    if option.choices:
        return one_of(option.choices)
    return _DYNAMIC.get(option.flag)


_DYNAMIC: Mapping[str, Complete] = {"--space": spaces, "--scale": scales, "--name": studies}
