"""Part 10: speeds of twelve configurations, each alone on the device, from a cold compile cache."""

from collections.abc import Iterable, Mapping
from typing import Any

from studies.gpu.items import Item, Part, Place, Settings
from studies.gpu.processes import MORE_THAN_THERE_ARE, search, space, trials_of

STUDY = "speeds"


def items(settings: Settings) -> list[Item]:
    return [Item(name=STUDY, work=_speeds, least_seconds=60.0)]


def _speeds(place: Place) -> Mapping[str, Any]:
    """One trial at a time, whatever the call allows elsewhere: a shared device tells no speed."""
    words = [
        *space("speeds", place),
        "--full-trainings",
        "--no-predict",
        "--trials",
        MORE_THAN_THERE_ARE,
    ]
    return search(STUDY, *words, place=place)


def summary(results: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    trials = trials_of(results.get(STUDY, {}))
    if trials:
        yield "name | outcome | tokens/s | spread | compile s | peak MiB | perplexity"
    for trial in trials:
        numbers = [
            _number(trial["tokens_per_second"]),
            _number(trial["tokens_per_second_spread"]),
            _number(trial["compile_seconds"]),
            _number(trial["peak_memory_bytes"], unit=2**20),
            _number(trial["perplexity"]),
        ]
        yield f"{trial['name']} | {trial['outcome']} | {' | '.join(numbers)} {trial['message']}"


def _number(value: float | None, *, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:,.1f}"


PART = Part(
    name="speeds",
    minutes=5.0,
    about="speeds alone on the device, in 16 bit, fp8 and compiled",
    items=items,
    summary=summary,
)
