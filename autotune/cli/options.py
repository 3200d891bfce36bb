"""Options that several commands share, and small forms such as `speed=0.03`."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.analysis.front import DEFAULT_PERPLEXITY_TOLERANCE, DEFAULT_SPEED_TOLERANCE, Tolerance
from autotune.analysis.pick import MAX_PERPLEXITY_INCREASE, PREFERENCES, Preference, Preferences
from autotune.errors import InvalidInput
from autotune.spec.study import DEFAULT_STORAGE

if TYPE_CHECKING:
    from autotune.spec.search_space import SearchSpace

StudyArgument = Annotated[
    str, typer.Argument(metavar="STUDY", help="Name of a study; see autotune studies.")
]
StorageOption = Annotated[
    str, typer.Option("--storage", metavar="URL", help="Database with the studies.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
SpaceScaleOption = Annotated[
    str | None,
    typer.Option(
        "--scale", metavar="NAME", help="Size of the study, of those the search space has."
    ),
]
TorchVersionOption = Annotated[
    str | None,
    typer.Option(
        "--torch",
        metavar="RELEASE",
        help="Predict for CUDA as with this torch. [default: the one here]",
    ),
]
ComputeCapabilityOption = Annotated[
    str | None,
    typer.Option(
        "--compute-capability",
        metavar="X.Y",
        help="Predict for a GPU of this kind: 9.0 for an H100. [default: the GPU here, else 8.0]",
    ),
]
ToleranceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tolerance",
        metavar="NAME=SHARE",
        help="Differences below it are none on the front: "
        f"speed={DEFAULT_SPEED_TOLERANCE}, perplexity={DEFAULT_PERPLEXITY_TOLERANCE}.",
    ),
]
PreferOption = Annotated[
    str,
    typer.Option("--prefer", metavar="|".join(PREFERENCES), help="What to pick."),
]
PerplexityOption = Annotated[
    float,
    typer.Option(
        "--max-perplexity-increase",
        metavar="SHARE",
        help="How much worse than the best perplexity the pick may be.",
    ),
]

_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?:inf|nan)"
"""As people write one; what is not finite is refused with a better reason elsewhere."""

STORAGE = DEFAULT_STORAGE
PREFER: Preference = "fastest"
PERPLEXITY_INCREASE = MAX_PERPLEXITY_INCREASE


def storage_of(context: typer.Context, storage: str) -> str:
    """Where it is not said after a group's command, what was said before it: `autotune studies --storage URL check`."""
    said = storage != STORAGE or context.parent is None
    return storage if said else str(context.parent.params["storage"])  # type: ignore[union-attr]


def scaled_space(space: str, scale: str | None) -> "SearchSpace":
    """Raises InvalidSpace and InvalidInput."""
    from autotune.spec.space_file import load_space

    return load_space(space).at_scale(scale)


def check_scale(scale: str | None, *, space: str | None) -> None:
    if scale is not None and space is None:
        raise InvalidInput(
            f"--scale {scale} is a size of a search space, and none is named",
            hint="add --space peak_memory",
        )


def preferences_of(
    tolerance: Sequence[str] | None, prefer: str, max_perplexity_increase: float
) -> Preferences:
    shares = parse_pairs("--tolerance", tolerance, known=("speed", "perplexity"))
    return Preferences(
        tolerance=Tolerance(**shares),
        prefer=prefer,  # type: ignore[arg-type]  # Preferences refuses what it does not know
        max_perplexity_increase=max_perplexity_increase,
    )


def parse_pairs(
    option: str, given: Sequence[str] | None, *, known: Sequence[str]
) -> Mapping[str, float]:
    """`["speed=0.03"]` as {"speed": 0.03}. Raises InvalidInput."""
    pairs: dict[str, float] = {}
    for text in given or ():
        name, _, number = text.partition("=")
        if name not in known or not re.fullmatch(_NUMBER, number):
            raise InvalidInput(
                f"{option} {text!r} cannot be read",
                hint=f"write {option} {known[0]}=0.01; known are {', '.join(known)}",
            )
        if name in pairs:
            raise InvalidInput(
                f"{option} says {name} twice, {pairs[name]:g} and {number}", hint="say it once"
            )
        pairs[name] = float(number)
    return pairs
