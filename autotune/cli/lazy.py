"""Commands that are imported when they are used, so that `autotune --help` stays fast."""

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from autotune.cli.help import HelpfulCommand, HelpfulGroup
from autotune.errors import InvalidInput, StudyMismatch, near_misses


class LazyCommand(TyperCommand):
    """Stands for a command in its group, which needs only the name and one line of help.

    Parsing arguments, or asking for the help of the command, imports it.
    """

    def __init__(self, name: str, source: str, help: str) -> None:
        """`source` is `module:name` of a function or, for a group, of a `typer.Typer`."""
        super().__init__(name, help=help)
        self._source = source

    def load(self) -> TyperCommand | TyperGroup:
        """Import the command and return it with its options."""
        module, _, name = self._source.partition(":")
        assert self.name is not None
        return _command_of(getattr(import_module(module), name), self.name)

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Return the context of the imported command: it is then run instead of this one.

        Options that are not given have the user's defaults (`defaults.py`).
        """
        command = self.load()
        if not extra.get("resilient_parsing"):
            # This imports the declared options, which the list of commands does without.
            from autotune.cli.defaults import defaults_for  # noqa: PLC0415

            extra["default_map"] = defaults_for(command, info_name, args, parent)
        return command.make_context(info_name, args, parent, **extra)


@functools.cache
def _command_of(found: Callable[..., Any], name: str) -> TyperCommand | TyperGroup:
    """Return the command of a function or of a `typer.Typer`, once for each.

    To build one takes as long as to parse a command line with it.
    """
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name, cls=HelpfulCommand)(found)
        found = alone
    command = get_command(found)
    assert isinstance(command, TyperCommand | TyperGroup)
    return command


class LazyGroup(HelpfulGroup):
    """A group of `LazyCommand`, in the order of its help."""

    lazy_commands: ClassVar[Sequence[LazyCommand]] = ()
    meant_by: ClassVar[Mapping[str, str]] = {}
    """{a name that people try: the command that does it, with the name of the program}"""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in self.lazy_commands:
            self.add_command(command)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; say it where a study may differ only by the user's defaults."""
        try:
            return super().invoke(ctx)
        except StudyMismatch as error:
            from autotune.cli.defaults import APPLIED, WITHOUT  # noqa: PLC0415  # as above

            if not ctx.meta.get(APPLIED):
                raise
            raise StudyMismatch(error.message, hint=f"{error.hint}; or {WITHOUT}") from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, command and its arguments. Raises InvalidInput for an unknown command."""
        name = args[0]
        is_unknown = name not in self.commands and not name.startswith("-")
        if is_unknown and not ctx.resilient_parsing:
            raise InvalidInput(f"there is no command {name!r}", hint=self._hint(name, ctx))
        return super().resolve_command(ctx, args)

    def _hint(self, name: str, ctx: Any) -> str:
        otherwise = f"see {ctx.command_path} --help"
        near = [f"{ctx.command_path} {command}" for command in near_misses(name, self.commands)]
        if name in self.meant_by:
            near = [self.meant_by[name]]
        return f"did you mean {' or '.join(near)}? otherwise {otherwise}" if near else otherwise
