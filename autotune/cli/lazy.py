"""Commands that are imported when they are used, so that `autotune --help` stays fast."""

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from autotune.cli.help import HelpfulCommand, HelpfulGroup


class LazyCommand(TyperCommand):
    """Stands for a command in its group, which needs only the name and one line of help.

    Parsing arguments, or asking for the help of the command, imports it.
    """

    def __init__(self, name: str, source: str, help: str) -> None:
        """`source` is `module:name` of a function or, for a group, of a `typer.Typer`."""
        super().__init__(name, help=help, short_help=help)
        self._source = source

    def load(self) -> TyperCommand | TyperGroup:
        """Import the command and return it with its options."""
        module, _, name = self._source.partition(":")
        assert self.name is not None
        return _command_of(getattr(import_module(module), name), self.name)

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Returns the context of the imported command: it is then run instead of this one.

        Options that are not given have the user's defaults (`defaults.py`).
        """
        command = self.load()
        if extra.get("resilient_parsing"):
            return command.make_context(info_name, args, parent, **extra)
        # This imports the declared options, which the list of commands does without.
        from autotune.cli.defaults import defaults_for, print_defaults  # noqa: PLC0415

        extra["default_map"] = defaults_for(command, info_name, args, parent)
        context = command.make_context(info_name, args, parent, **extra)
        if context.params.get("log_format") == "json":
            from autotune.cli.serve import write_log  # noqa: PLC0415  # of a server or a worker

            write_log("json")
        print_defaults(context)
        return context


@functools.cache
def _command_of(found: Callable[..., Any], name: str) -> TyperCommand | TyperGroup:
    """Returns the command of a function or of a `typer.Typer`, once for each.

    To build one takes as long as to parse a command line with it.
    """
    if not isinstance(found, typer.Typer):
        # This imports the settings, which the list of commands does without.
        from autotune.cli.requests import takes_request  # noqa: PLC0415

        found = takes_request(found)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name, cls=HelpfulCommand)(found)
        found = alone
    command = get_command(found)
    assert isinstance(command, TyperCommand | TyperGroup)
    return command


class LazyGroup(HelpfulGroup):
    """A group of `LazyCommand`, in the order of its help."""

    lazy_commands: ClassVar[Sequence[LazyCommand]] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in self.lazy_commands:
            self.add_command(command)
