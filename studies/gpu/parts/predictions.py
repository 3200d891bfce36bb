"""Part 5: predicted peaks compared with measured ones, at 114 M and 1.6 B parameters."""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from studies.gpu.items import Item, Part, Place, Settings
from studies.gpu.processes import (
    MORE_THAN_THERE_ARE,
    autotune,
    search,
    side_by_side,
    space,
    trials_of,
)

SIZES = ("114m", "1600m")
MIB = 2**20


def items(settings: Settings) -> list[Item]:
    measured = [
        Item(name=f"measured-{size}", work=partial(_measured, size=size), least_seconds=60.0)
        for size in SIZES
    ]
    predicted = [
        Item(name=f"predicted-{size}", work=partial(_predicted, size=size), least_seconds=45.0)
        for size in SIZES
    ]
    return measured + predicted  # the GPU is needed for the first half only


def _measured(place: Place, size: str) -> Mapping[str, Any]:
    words = [
        *space(f"predicted_{size}", place),
        "--full-trainings",
        "--no-predict",
        "--trials",
        MORE_THAN_THERE_ARE,
        *side_by_side(place),
    ]
    return search(f"measured-{size}", *words, place=place)


def _predicted(place: Place, size: str) -> Mapping[str, Any]:
    kind = "cuda" if place.settings.is_cuda else "cpu"
    words = ["predict", *space(f"predicted_{size}", place), "--device", kind, "--json", "--quiet"]
    found = json.loads(autotune(*words, place=place, log_name=f"predict-{size}").output)
    wanted = (
        "name",
        "config",
        "refusal",
        "peak_memory_bytes",
        "phase",
        "notes",
        "bytes_by_category",
    )
    return {"predictions": [{key: one.get(key) for key in wanted} for one in found["predictions"]]}


def pairs(results: Mapping[str, Mapping[str, Any]], size: str) -> Iterator[dict[str, Any]]:
    """Predicted and measured peak of each configuration that has both."""
    predictions = {
        json.dumps(one["config"], sort_keys=True): one["peak_memory_bytes"]
        for one in results.get(f"predicted-{size}", {}).get("predictions", ())
    }
    for trial in trials_of(results.get(f"measured-{size}", {})):
        predicted = predictions.get(json.dumps(trial["config"], sort_keys=True))
        if predicted and trial["peak_memory_bytes"]:
            ratio = predicted / trial["peak_memory_bytes"]
            yield {
                "trial": trial,
                "predicted": predicted,
                "measured": trial["peak_memory_bytes"],
                "ratio": ratio,
            }


def group_of(config: Mapping[str, Any]) -> str:
    """As the bounds of predictions are stated."""
    bits = "32 bit" if config["precision"] in ("fp32", "tf32") else "16 bit"
    return f"{'eager' if config['compile'] == 'none' else 'compiled'} {bits}"


def summary(results: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for size in SIZES:
        found = list(pairs(results, size))
        yield from _groups(size, found)
        for pair in sorted(found, key=lambda pair: -abs(pair["ratio"] - 1)):
            trial, more = pair["trial"], (pair["predicted"] - pair["measured"]) / MIB
            yield (
                f"{size} | {trial['name']} | predicted {pair['predicted'] / MIB:,.1f} MiB "
                f"| measured {pair['measured'] / MIB:,.1f} MiB in {trial['peak_phase']} "
                f"| {pair['ratio']:.4f} | {more:+.1f} MiB"
            )
        for trial in trials_of(results.get(f"measured-{size}", {})):
            if trial["outcome"] != "ok":
                yield f"{size} | {trial['name']} | {trial['outcome']}: {trial['message'][:160]}"
        for prediction in results.get(f"predicted-{size}", {}).get("predictions", ()):
            if prediction["refusal"]:
                reason = prediction["refusal"][:160]
                yield f"{size} | {prediction['name']} | not predicted: {reason}"


def _groups(size: str, found: list[dict[str, Any]]) -> Iterator[str]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for pair in found:
        groups.setdefault(group_of(pair["trial"]["config"]), []).append(pair)
    for group, its in sorted(groups.items()):
        ratios = [pair["ratio"] for pair in its]
        worst = max(abs(pair["predicted"] - pair["measured"]) for pair in its) / MIB
        yield (
            f"{size}, {group}: {len(its)} pairs, predicted / measured {min(ratios):.4f} to "
            f"{max(ratios):.4f}, median {statistics.median(ratios):.4f}, at most {worst:.1f} MiB "
            "apart"
        )


PART = Part(
    name="predictions",
    minutes=5.5,
    about="predicted peaks at 114 M and 1.6 B parameters",
    items=items,
    summary=summary,
)
