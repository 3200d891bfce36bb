"""How the help of a command is written: options under headings, examples, whole sentences.

Typer's own panels need rich's markup, which cuts the names of options and swallows brackets. An
option still carries the heading of its group as typer's `rich_help_panel`; here Click's formatter
writes it.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from autotune.errors import InvalidInput
from autotune.spec.option import GROUPS

MOST_UNGROUPED = 12
"""A command with more options than this has them under the headings of their groups."""
AFTER_SEPARATOR = "after_separator"
"""Key of a context's `meta`: how many arguments stand after `--`, which parsing removes."""
_OTHER = "Other options"
_HYPHEN = "\N{NON-BREAKING HYPHEN}"
"""Stands for each hyphen while lines are wrapped, so that no name of an option is divided."""

EXAMPLES: Mapping[str, Sequence[tuple[str, str]]] = {
    "": (
        ("autotune search --max-mem 8GiB", "what trains fastest under 8 GiB"),
        ("autotune show STUDY", "what it found"),
        ("autotune export STUDY --to pytorch", "the pick, for your trainer"),
    ),
    "search": (
        ("autotune search --max-mem 8GiB", "the built-in model"),
        ("autotune search --max-mem 8GiB --dry-run", "what would be tried"),
        ("autotune search --max-mem 8GiB --space quick", "a first look"),
        ("autotune search --model config.json --dataset text/", "your model and text"),
        ("autotune search --script train.py -- config.py", "your script"),
        ("autotune search --name my-study --trials 60", "continue a study"),
        ("autotune search --max-mem 8GiB --server URL", "on a server"),
    ),
    "predict": (
        ("autotune predict --layers 12 --precision bf16-mixed", "one model"),
        ("autotune predict --space quick --max-mem 8GiB", "a whole space"),
        ("autotune predict --study my-study --trial 3", "a stored trial"),
        ("autotune predict --device cuda --layers 48", "without a GPU"),
        ("autotune predict --world-size 4 --sharding zero3", "a model on four devices"),
    ),
    "show": (
        ("autotune show my-study", "every trial and the pick"),
        ("autotune show my-study --prefer smallest", "pick by memory"),
        ("autotune show my-study --csv > trials.csv", "for a spreadsheet"),
    ),
    "confirm": (
        ("autotune confirm my-study", "what the search left uncertain"),
        ("autotune confirm my-study --time-budget 5m", "for this long"),
        ("autotune confirm my-study --trial 7", "one trial"),
    ),
    "plot": (
        ("autotune plot my-study", "the front, as a page"),
        ("autotune plot my-study ladder --out ladder.png", "an image"),
        ("autotune plot my-study memory --trials 0,4,7", "what fills the memory"),
    ),
    "report": (
        ("autotune report my-study", "a page in studies/"),
        ("autotune report my-study --out page.html", "to another file"),
    ),
    "compare": (
        ("autotune compare on-a100 on-h100", "a table and a figure"),
        ("autotune compare before after --no-worse", "trial by trial"),
    ),
    "export": (
        ("autotune export my-study --to pytorch", "the pick, as a script"),
        ("autotune export my-study --to transformers --trial 7", "another trial"),
        ("autotune export my-study --to deepspeed --strict", "all of it, or nothing"),
    ),
    "explain": (
        ("autotune explain my-study", "the pick of a study"),
        ("autotune explain my-study 7", "its trial 7"),
        ("autotune explain --layers 24 --precision bf16-mixed", "a configuration"),
        ("autotune explain --space peak_memory --name control", "one of a space"),
    ),
    "profile": (
        ("autotune profile my-study", "the pick of a study"),
        ("autotune profile my-study 7 --steps 10", "its trial 7"),
        ("autotune profile my-study 0 7 --compare", "where two trials differ"),
    ),
    "fit": (
        ("autotune fit --max-mem 8GiB", "how many layers"),
        ("autotune fit --max-mem 8GiB --vary seq-len", "how long a sequence"),
        ("autotune fit --max-mem 80GiB --device cuda", "on a GPU that is not here"),
        ("autotune fit my-study --vary seq-len", "from the pick of a study"),
    ),
    "doctor": (
        ("autotune doctor", "every device of this machine"),
        ("autotune doctor --device cuda:1", "one device"),
    ),
    "serve": (
        ("autotune serve", "for this machine"),
        ("autotune serve --host 0.0.0.0 --devices all", "for a team, all GPUs"),
        ("autotune serve --data-root /data --max-time 4h", "with datasets and a limit"),
    ),
    "serve tokens": (
        ("autotune serve tokens add alice", "a token for a colleague"),
        ("autotune serve tokens list", "who has one"),
    ),
    "serve tokens add": (
        ("autotune serve tokens add alice", "to read and write"),
        ("autotune serve tokens add screen --read-only", "to look only"),
    ),
    "serve tokens list": (("autotune serve tokens list", "names and rights"),),
    "serve tokens remove": (("autotune serve tokens remove alice", "lock it out"),),
    "submit": (
        ("autotune submit --max-mem 8GiB --name my-study", "to AUTOTUNE_SERVER"),
        ("autotune submit --server http://gpu-box:8321", "to another server"),
        ("autotune submit --max-mem 8GiB --priority 10", "before others"),
    ),
    "queue": (
        ("autotune queue", "what runs and waits"),
        ("autotune queue --state failed", "what went wrong"),
    ),
    "watch": (
        ("autotune watch 12", "search 12"),
        ("autotune watch my-study", "the latest search of a study"),
    ),
    "cancel": (
        ("autotune cancel 12", "search 12"),
        ("autotune cancel 12 13", "two of them"),
    ),
    "studies": (
        ("autotune studies", "list them"),
        ("autotune studies --server http://gpu-box:8321", "of a server"),
        ("autotune studies export my-study --out study.db", "to send it away"),
    ),
    "studies check": (
        ("autotune studies check", "every study"),
        ("autotune studies check my-study", "one study"),
    ),
    "studies export": (
        ("autotune studies export my-study --out study.db", "one study"),
        ("autotune studies export one two > both.db", "two, through a pipe"),
        ("autotune studies export one --to-optuna sqlite:///o.db", "in Optuna"),
    ),
    "studies import": (
        ("autotune studies import study.db", "under their own names"),
        ("autotune studies import study.db --name theirs", "under another name"),
    ),
    "studies trust": (("autotune studies trust theirs", "after a look at its script"),),
}
"""{command: (a command line, what it is for)}; "" is the program itself."""


class HelpfulCommand(TyperCommand):
    """A command whose help has examples, and its options under headings."""

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        if extra.get("resilient_parsing") and args and self._takes_value(args[-1]):
            # A shell completes the value of the last option. Without the value, parsing would end
            # there, and the arguments before it would not be known.
            args = args[:-1]
        if not extra.get("resilient_parsing"):
            self._check_synonyms(args)
        # Parsing empties the list.
        after_separator = len(args) - args.index("--") - 1 if "--" in args else 0
        context = super().make_context(
            info_name, args, parent, **{**extra, "allow_extra_args": True}
        )
        if context.args and not context.resilient_parsing:
            raise _unexpected_argument(context)
        context.meta[AFTER_SEPARATOR] = after_separator
        return context

    def _check_synonyms(self, args: Sequence[str]) -> None:
        """Raise InvalidInput where two names of one option are given different values.

        Parsing would take the last one.
        """
        given = list(args)
        if "--" in given:
            given = given[: given.index("--")]
        options: list[Any] = [each for each in self.params if each.param_type_name == "option"]
        for option in options:
            names = [name for name in option.opts if name.startswith("--")]
            if option.is_flag or len(names) < 2:
                continue
            values: dict[str, str] = {}
            for position, word in enumerate(given):
                name, equals, value = word.partition("=")
                if name in names and (equals or position + 1 < len(given)):
                    values[name] = value if equals else given[position + 1]
            if len(set(values.values())) > 1:
                listed = " and ".join(f"{name} {value}" for name, value in values.items())
                raise InvalidInput(
                    f"{listed} give one setting two values", hint="give only one of them"
                )

    def _takes_value(self, word: str) -> bool:
        options: list[Any] = [each for each in self.params if each.param_type_name == "option"]
        return any(word in option.opts and not option.is_flag for option in options)

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_HYPHEN, "-")

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        super().format_help_text(ctx, formatter)
        _write_examples(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)


def _unexpected_argument(context: Any) -> InvalidInput:
    """Return the error for an argument that a command does not take, such as a trial's number."""
    argument = str(context.args[0])
    takes_trial = any("--trial" in each.opts for each in context.command.params)
    study = context.params.get("study")
    hint = f"see {context.command_path} --help"
    if argument.isdigit() and takes_trial:
        hint = f"did you mean --trial {argument}? otherwise {hint}"
    elif argument.isdigit() and isinstance(study, str):
        of_trial = shlex.join(["autotune", "explain", study, argument])
        hint = f"of one trial, {of_trial} shows the peak; otherwise {hint}"
    return InvalidInput(f"{context.command_path} takes no argument {argument!r}", hint=hint)


class HelpfulGroup(TyperGroup):
    """A group of commands whose help has examples and the whole sentence of each command."""

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_HYPHEN, "-")

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        super().format_help_text(ctx, formatter)
        _write_examples(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        _write_parameters(self, ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [self.commands[name] for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(command.name, command.help or "") for command in commands])


def _write_examples(ctx: Any, formatter: Any) -> None:
    """Write the examples of a command, each on one line that can be copied whole."""
    examples = EXAMPLES.get(ctx.command_path.partition(" ")[2], ())
    if not examples:
        return
    width = max(len(line) for line, _ in examples)
    with formatter.section("Examples"):
        for line, purpose in examples:
            formatter.write(f"{'':{formatter.current_indent}}{line:{width}}  # {purpose}\n")


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    arguments = []
    options = []
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:  # it is hidden
            continue
        name, text = (part.replace("-", _HYPHEN) for part in record)
        if parameter.param_type_name == "argument":
            arguments.append((name, text))
        else:
            options.append((parameter.rich_help_panel or _OTHER, (name, text)))
    sections = {"Arguments": arguments}
    if len(options) <= MOST_UNGROUPED:
        sections["Options"] = [row for _, row in options]
    else:
        for group in (*GROUPS, _OTHER):
            sections[group] = [row for heading, row in options if heading == group]
    for heading, rows in sections.items():
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)
