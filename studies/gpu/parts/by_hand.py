"""Part 6: trials compared with a hand-written loop, in turn, at steps of about 5, 20 and 100 ms."""

import json
import statistics
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from studies.gpu.items import Item, Missing, Part, Place, Settings
from studies.gpu.processes import MORE_THAN_THERE_ARE, program, search, space, trials_of

SCALES = ("short", "middle", "long")
REPEATS = 3
BLOCKS = {False: "10", True: "4"}
"""Steps timed in one way before the next; in a rehearsal, fewer."""
SECONDS = 120.0
WANTED = 0.99
"""Speed of a trial by that of the loop."""


def items(settings: Settings) -> list[Item]:
    """One repeat of every length before the next repeat."""
    return [
        Item(
            name=f"{scale}-{repeat}",
            work=partial(_compared, scale=scale, repeat=repeat),
            least_seconds=60.0,
        )
        for repeat in range(1, (1 if settings.rehearse else REPEATS) + 1)
        for scale in SCALES
    ]


def _compared(place: Place, scale: str, repeat: int) -> Mapping[str, Any]:
    """A search with a trial of each configuration, and after it the loop of each."""
    place.needs_cuda()
    name = f"{scale}-{repeat}"
    words = [
        *space("by_hand", place, scale=scale),
        "--full-trainings",
        "--no-predict",
        "--trials",
        MORE_THAN_THERE_ARE,
    ]
    study = search(name, *words, place=place)
    folder = place.folder / "work" / "results" / name / "prepared"
    if not folder.is_dir():
        raise Missing(f"the study's tokens and weights are not in {folder}")
    compared = []
    for trial in trials_of(study):
        if trial["outcome"] != "ok" or not trial["name"] or trial["name"] == "baseline":
            continue
        words = [
            json.dumps(study["workload"]),
            json.dumps(trial["config"]),
            str(folder),
            place.settings.device,
        ]
        loop = program(
            "by_hand.py",
            *words,
            BLOCKS[place.settings.rehearse],
            place=place,
            log_name=f"loop-{name}",
            seconds=SECONDS,
        )
        wanted = (
            "name",
            "peak_memory_bytes",
            "tokens_per_second",
            "tokens_per_second_spread",
            "final_loss",
        )
        compared.append({"trial": {key: trial[key] for key in wanted}, "by_hand": loop})
    tokens = study["workload"]["global_batch"] * study["workload"]["sequence_length"]
    return {"tokens_per_step": tokens, "compared": compared}


def summary(results: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """For each configuration the ratios of all repeats."""
    found: dict[tuple[str, str], list[tuple[float, dict[str, float], int]]] = {}
    for item, result in results.items():
        for pair in result["compared"]:
            trial, loop = pair["trial"], pair["by_hand"]
            step_ms = 1000 * result["tokens_per_step"] / trial["tokens_per_second"]
            ratios = {
                way: trial["tokens_per_second"] / speed
                for way, speed in loop["tokens_per_second"].items()
            }
            more = trial["peak_memory_bytes"] - loop["peak_memory_bytes"]
            found.setdefault((item.rpartition("-")[0], trial["name"]), []).append(
                (step_ms, ratios, more)
            )
    for (scale, name), repeats in found.items():
        step_ms = statistics.median(step for step, _, _ in repeats)
        for way in repeats[0][1]:
            ratios = [ratios[way] for _, ratios, _ in repeats if way in ratios]
            median = statistics.median(ratios)
            verdict = "" if median >= WANTED else f", BELOW {WANTED}"
            each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            yield (
                f"{scale}, {name}, steps of {step_ms:.1f} ms: trial / {way} {median:.3f} "
                f"({each}){verdict}"
            )
        differences = ", ".join(f"{more:+,}" for _, _, more in repeats)
        yield f"{scale}, {name}: peak of the trial {differences} bytes more"


PART = Part(
    name="loop",
    minutes=9.0,
    about="a hand-written loop compared with trials",
    items=items,
    summary=summary,
)
