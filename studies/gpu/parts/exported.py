"""Part 4: exported scripts compared with their trials: peak memory, speed and losses."""

import json
import shlex
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from studies.gpu.items import Item, Missing, Part, Place, Settings, TimeIsUp, kept_of
from studies.gpu.parts import techniques
from studies.gpu.processes import (
    MORE_THAN_THERE_ARE,
    autotune,
    item_name,
    names_in,
    program,
    search,
    space,
    trials_of,
)

STUDY = "exported"
SMALL_STUDY = "every-technique"
REPEATS = 2
SECONDS = 150.0


def items(settings: Settings) -> list[Item]:
    """The default model first, then every technique of part 3 with the small one."""
    larger = [_script(STUDY, name, repeats=REPEATS) for name in names_in("exported")]
    every = [_script(SMALL_STUDY, name, repeats=1) for name in names_in("every_technique")]
    return [Item(name="study", work=_study, least_seconds=60.0), *larger, *every]


def _study(place: Place) -> Mapping[str, Any]:
    words = [
        *space("exported", place),
        "--full-trainings",
        "--no-predict",
        "--trials",
        MORE_THAN_THERE_ARE,
    ]
    return search(STUDY, *words, place=place)


def _script(study: str, configuration: str, *, repeats: int) -> Item:
    return Item(
        name=f"{study}-{item_name(configuration)}",
        work=partial(_compared, study=study, configuration=configuration, repeats=repeats),
        least_seconds=20.0 * repeats,
    )


def _compared(place: Place, *, study: str, configuration: str, repeats: int) -> Mapping[str, Any]:
    place.needs_cuda()
    folder, kept = _study_of(place, study)
    trial = next(
        (trial for trial in trials_of(kept["result"]) if trial["name"] == configuration), None
    )
    if trial is None and kept["state"] == "cut":
        raise TimeIsUp  # its study goes on first
    if trial is None or trial["outcome"] != "ok":
        raise Missing(
            "no trial that ended ok" if trial is None else f"its trial ended as {trial['outcome']}"
        )
    name = item_name(configuration)
    files = place.folder / "scripts" / study / name
    storage = f"sqlite:///{folder / 'results.db'}"
    words = [
        "export",
        study,
        "--to",
        "pytorch",
        "--trial",
        str(trial["number"]),
        "-o",
        str(files),
        "--json",
    ]
    written = autotune(
        *words, "--storage", storage, place=place, log_name=f"export-{name}", seconds=60.0
    )
    export = json.loads(written.output)
    prepared = folder / "work" / "results" / study / "prepared"
    tokens = [str(prepared)] if prepared.is_dir() else []
    variables = dict(
        word.split("=", 1) for word in shlex.split(export["command"]) if word.startswith("PYTORCH_")
    )
    runs = [
        program(
            "exported_script.py",
            *tokens,
            place=place,
            log_name=f"script-{name}",
            folder=files,
            seconds=SECONDS,
            extra=variables,
        )
        for _ in range(repeats)
    ]
    measured = (
        "peak_memory_bytes",
        "tokens_per_second",
        "tokens_per_second_spread",
        "final_loss",
        "perplexity",
    )
    return {
        "configuration": configuration,
        "refusals": export["refusals"],
        "trial": {name: trial[name] for name in measured},
        "script": runs,
    }


def _study_of(place: Place, study: str) -> tuple[Path, Mapping[str, Any]]:
    """The folder with the study's database, and the search's result file. Raises Missing."""
    out = place.settings.out
    part, item = (PART, "study") if study == STUDY else (techniques.PART, SMALL_STUDY)
    kept = kept_of(part, out).read(item)
    if kept is None or not trials_of(kept["result"]):
        raise Missing(f"{part.name}/{item} has no trials yet; run it, and this again with --again")
    return out / part.name, kept


def summary(results: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    compared = [result for item, result in results.items() if item != "study"]
    if compared:
        yield (
            "configuration | bytes more at the peak than the trial | speed, script / trial "
            "| last loss | perplexity"
        )
    for result in compared:
        trial, runs = result["trial"], result["script"]
        more = ", ".join(
            f"{run['peak_memory_bytes'] - trial['peak_memory_bytes']:+,}" for run in runs
        )
        speed = ", ".join(
            f"{run['tokens_per_second'] / trial['tokens_per_second']:.3f}" for run in runs
        )
        loss = ", ".join(f"{run['losses'][-1]:.6g}" for run in runs)
        perplexity = ", ".join(f"{run['perplexity']:.4f}" for run in runs)
        yield (
            f"{result['configuration']} | {more} | {speed} "
            f"| {loss} for {_number(trial['final_loss'])} "
            f"| {perplexity} for {_number(trial['perplexity'])}"
        )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


PART = Part(
    name="export",
    minutes=3.5,
    about="exported scripts compared with their trials",
    items=items,
    summary=summary,
)
