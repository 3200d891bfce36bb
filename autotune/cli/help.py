"""How the help of a command is written: options under headings, examples, whole sentences.

An option carries its heading as typer's `rich_help_panel`. typer's own panels cut names of options
at 80 columns, so that Click's plain formatter writes them here.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from autotune.errors import InvalidInput
from autotune.spec.setting import GROUPS

MOST_UNGROUPED = 12
"""A command with more options than this has them under the headings of their groups."""
AFTER_SEPARATOR = "after_separator"
"""Key of a context's `meta`: how many arguments stand after `--`, which parsing removes."""
SOURCES_OF_DEFAULTS = "autotune:sources_of_defaults"
"""The key of a context's `meta` for {parameter: the file of its default, or the environment}."""
_OTHER = "Options"
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
    "worker": (
        ("autotune worker --storage postgresql+psycopg://db/autotune", "all GPUs"),
        ("autotune worker --devices cuda:0 --time-limit 4h", "for four hours"),
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
        # Parsing empties the list.
        after_separator = len(args) - args.index("--") - 1 if "--" in args else 0
        context = super().make_context(
            info_name, args, parent, **{**extra, "allow_extra_args": True}
        )
        if context.args and not context.resilient_parsing:
            raise _unexpected_argument(context)
        context.meta[AFTER_SEPARATOR] = after_separator
        return context

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_HYPHEN, "-")

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        super().format_help_text(ctx, formatter)
        _write_examples(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)


def _unexpected_argument(context: Any) -> InvalidInput:
    """Returns the error for an argument that a command does not take, such as a trial's number."""
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


def _write_examples(ctx: Any, formatter: Any) -> None:
    """Write the examples of a command, each on one line that can be copied whole."""
    examples = EXAMPLES[ctx.command_path.partition(" ")[2]]
    width = max(len(line) for line, _ in examples)
    with formatter.section("Examples"):
        for line, purpose in examples:
            formatter.write(f"{'':{formatter.current_indent}}{line:{width}}  # {purpose}\n")


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    parameters = command.get_params(ctx)
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        heading = _OTHER
        if parameter.param_type_name == "argument":
            heading = "Arguments"
        elif parameter.rich_help_panel and len(parameters) > MOST_UNGROUPED:
            heading = parameter.rich_help_panel
        if record is not None:  # it is not hidden
            name, text = (part.replace("-", _HYPHEN) for part in record)
            sections.setdefault(heading, []).append((name, text))
    for heading in ("Arguments", *GROUPS, _OTHER):
        if heading in sections:
            with formatter.section(heading):
                formatter.write_dl(sections[heading])
