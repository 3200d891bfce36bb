"""Part 11: the perplexity of every precision after 30, 60 and 120 steps, with two seeds."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from studies.gpu.items import Item, Part, Place, Settings
from studies.gpu.processes import MORE_THAN_THERE_ARE, search, side_by_side, space, trials_of

STEPS = (30, 60, 120)
SEEDS = 2


def items(settings: Settings) -> list[Item]:
    lengths = (10,) if settings.rehearse else STEPS
    return [
        Item(name=f"{steps}-steps", work=partial(_perplexities, steps=steps), least_seconds=45.0)
        for steps in lengths
    ]


def _perplexities(place: Place, steps: int) -> Mapping[str, Any]:
    words = [
        *space("precisions", place),
        "--steps",
        str(steps),
        "--seeds",
        str(SEEDS),
        "--full-trainings",
        "--no-predict",
        "--trials",
        MORE_THAN_THERE_ARE,
        *side_by_side(place),
    ]
    return search(f"precisions-{steps}", *words, place=place)


def summary(results: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for item, study in results.items():
        yield f"{item}: name | outcome | perplexity, mean of {SEEDS} seeds | spread"
        for trial in trials_of(study):
            perplexity = trial["perplexity"]
            spread = trial["perplexity_spread"]
            shown = "-" if perplexity is None else f"{perplexity:.3f}"
            shown_spread = "-" if spread is None else f"{spread:.3f}"
            yield f"  {trial['name']} | {trial['outcome']} | {shown} | {shown_spread}"


PART = Part(
    name="precisions",
    minutes=4.0,
    about="perplexities of every precision after 30, 60 and 120 steps",
    items=items,
    summary=summary,
)
