"""Options that several commands share, and the parser of `NAME=NUMBER` values."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from autotune.analysis.pick import DEFAULT_PREFERENCES, PREFERENCE_OPTIONS, Preferences
from autotune.analysis.tolerance import (
    DEFAULT_PERPLEXITY_TOLERANCE,
    DEFAULT_SPEED_TOLERANCE,
    Tolerance,
)
from autotune.cli.completion import completion_of, one_of, studies
from autotune.errors import InvalidInput
from autotune.spec.data_sheets import DATA_SHEETS
from autotune.spec.option import EVERYDAY, RESULTS, THE_DEVICE, Option
from autotune.spec.search_space import SearchSpace
from autotune.spec.space_file import load_space
from autotune.spec.study import DEFAULT_STORAGE
from autotune.study.request import SEARCH_OPTIONS
from autotune.units import parse_percent


def typer_option(option: Option, *, default: Any = ...) -> Any:
    """Return a declared option as typer's; without `default`, the parameter has it."""
    flags = [option.flag if option.off_flag is None else f"{option.flag}/{option.off_flag}"]
    if option.synonym is not None:
        flags.append(option.synonym)
    return typer.Option(
        default,
        *flags,
        metavar=option.metavar,
        help=option.help,
        rich_help_panel=option.group,
        autocompletion=completion_of(option),
    )


StudyArgument = Annotated[
    str,
    typer.Argument(
        metavar="STUDY", autocompletion=studies, help="Name of a study; see autotune studies."
    ),
]
StorageOption = Annotated[str, typer_option(SEARCH_OPTIONS["storage"])]
JsonOption = Annotated[
    bool,
    typer.Option("--json", rich_help_panel=RESULTS, help="Print one JSON object and nothing else."),
]
QuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", rich_help_panel=RESULTS, help="Print only what is waited for."),
]
SpaceScaleOption = Annotated[str | None, typer_option(SEARCH_OPTIONS["scale"])]
DeviceTypeOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda|GPU",
        autocompletion=one_of(("cpu", "cuda", *DATA_SHEETS)),
        rich_help_panel=EVERYDAY,
        help="Device to predict for; it need not exist. A GPU by its data sheet: h100, l4, "
        "rtx-4090. [default: a GPU if there is one]",
    ),
]
TorchVersionOption = Annotated[
    str | None,
    typer.Option(
        "--torch",
        metavar="RELEASE",
        rich_help_panel=THE_DEVICE,
        help="Predict CUDA memory for this torch version. [default: the installed one]",
    ),
]
ComputeCapabilityOption = Annotated[
    str | None,
    typer.Option(
        "--compute-capability",
        metavar="X.Y",
        rich_help_panel=THE_DEVICE,
        help="Predict for a GPU of this compute capability: 9.0 for an H100. "
        "[default: that of the local GPU, else 8.0]",
    ),
]
ToleranceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tolerance",
        metavar="NAME=SHARE",
        rich_help_panel=RESULTS,
        help="Relative differences below this count as equal on the front. "
        f"[default: speed={DEFAULT_SPEED_TOLERANCE}, perplexity={DEFAULT_PERPLEXITY_TOLERANCE}]",
    ),
]
PreferOption = Annotated[str, typer_option(PREFERENCE_OPTIONS["prefer"])]
PerplexityOption = Annotated[float, typer_option(PREFERENCE_OPTIONS["max_perplexity_increase"])]

_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?:inf|nan)"
"""A decimal number. inf and nan are matched too: later checks reject them with a better message."""

STORAGE = DEFAULT_STORAGE
PREFER = DEFAULT_PREFERENCES.prefer
PERPLEXITY_INCREASE = DEFAULT_PREFERENCES.max_perplexity_increase


def storage_of(context: typer.Context, storage: str) -> str:
    """Return the storage URL of a subcommand of `autotune studies`.

    `--storage` may also stand before the subcommand: `autotune studies --storage URL check`.
    """
    if storage != STORAGE or context.parent is None:
        return storage
    return str(context.parent.params["storage"])


def scaled_space(space: str, scale: str | None) -> SearchSpace:
    """Load a search space and set its scale. Raises InvalidSpace and InvalidInput."""
    return load_space(space).at_scale(scale)


def check_scale(scale: str | None, *, space: str | None) -> None:
    if scale is not None and space is None:
        raise InvalidInput(
            f"--scale {scale} needs a search space",
            hint="add --space peak_memory",
        )


def preferences_of(
    tolerance: Sequence[str] | None, prefer: str, max_perplexity_increase: float
) -> Preferences:
    shares = parse_pairs("--tolerance", tolerance, known=("speed", "perplexity"))
    return Preferences(
        tolerance=Tolerance(**shares),
        prefer=prefer,  # type: ignore[arg-type]  # Preferences rejects unknown values
        max_perplexity_increase=max_perplexity_increase,
    )


def parse_pairs(
    option: str, given: Sequence[str] | None, *, known: Sequence[str]
) -> Mapping[str, float]:
    """Parse `["speed=0.03"]` to {"speed": 0.03}. Raises InvalidInput."""
    pairs: dict[str, float] = {}
    for text in given or ():
        name, _, number = text.partition("=")
        share = parse_percent(number)
        if name in known and share is not None:
            raise InvalidInput(
                f"Invalid value of {option}: {text!r}",
                hint=f"give a share instead of percent: {option} {name}={share:g}",
            )
        if name not in known or not re.fullmatch(_NUMBER, number):
            raise InvalidInput(
                f"Invalid value of {option}: {text!r}",
                hint=f"write {option} {known[0]}=0.01; valid names are {', '.join(known)}",
            )
        if name in pairs:
            raise InvalidInput(
                f"{option} sets {name} twice, to {pairs[name]:g} and to {number}",
                hint="set it once",
            )
        pairs[name] = float(number)
    return pairs
