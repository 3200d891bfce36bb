"""Part 3: every technique once, to its end, with parity; then first steps with several seeds."""

import time
from collections.abc import Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

from studies.gpu.items import Item, Part, Place, Settings, TimeIsUp
from studies.gpu.processes import (
    MORE_THAN_THERE_ARE,
    names_in,
    program,
    search,
    side_by_side,
    space,
    trials_of,
)

PRECISIONS = ("tf32", "fp16-mixed", "fp8", "bf16-mixed", "bf16-true", "bf16-stochastic", "fp32")
"""Those first whose tolerances were never measured."""
SEEDS = (0, 1, 2)
MIB = 2**20
LATEST_TRACE_SECONDS = 20.0


def items(settings: Settings) -> list[Item]:
    traces = [
        Item(
            name=f"first-steps-{precision}-seed-{seed}",
            work=partial(_first_steps, seed=seed, precision=precision),
            least_seconds=40.0,
        )
        for seed in (SEEDS[:1] if settings.rehearse else SEEDS)
        for precision in PRECISIONS
    ]
    return [Item(name="every-technique", work=_every_technique, least_seconds=60.0), *traces]


def _every_technique(place: Place) -> Mapping[str, Any]:
    words = [
        *space("every_technique", place),
        "--full-trainings",
        "--no-predict",
        "--trials",
        MORE_THAN_THERE_ARE,
        *side_by_side(place),
    ]
    return search("every-technique", *words, place=place)


def _first_steps(place: Place, seed: int, precision: str) -> Mapping[str, Any]:
    until = time.time() + place.clock.left() - LATEST_TRACE_SECONDS
    words = [place.settings.device, str(seed), precision, str(until)]
    words += ["--small"] if place.settings.rehearse else []
    found = program("traces.py", *words, place=place, log_name=f"first-steps-{precision}")
    if found["open"]:
        raise TimeIsUp(found)
    return found


def summary(results: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    yield from _trials(results.get("every-technique", {}))
    yield from _differences(results)


def _trials(study: Mapping[str, Any]) -> Iterable[str]:
    trials = trials_of(study)
    if not trials:
        return
    outcomes = [trial["outcome"] for trial in trials]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes)))
    yield f"{len(trials)} trials: {counts}"
    tried = {trial["name"] for trial in trials}
    left = [name for name in names_in("every_technique") if name not in tried]
    yield f"not tried, impossible here or without a package: {', '.join(left) or 'none'}"
    yield "name | outcome | peak MiB | context MiB | tokens/s | perplexity | last loss | parity"
    for trial in trials:
        numbers = (
            _number(trial["peak_memory_bytes"], MIB),
            _number(trial["context_bytes"], MIB),
            _number(trial["tokens_per_second"], 1),
            _number(trial["perplexity"], 1, digits=3),
            _number(trial["final_loss"], 1, digits=4),
        )
        message = trial["parity_message"] or trial["message"] or ""
        yield (
            f"{trial['name']} | {trial['outcome']} | {' | '.join(numbers)} | "
            f"{trial['parity']}: {message[:160]}"
        )


def _number(value: float | None, unit: float, *, digits: int = 1) -> str:
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def _differences(results: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """For each precision the largest of all seeds: what its tolerances must allow."""
    for precision in PRECISIONS:
        found = [
            result
            for item, result in results.items()
            if item.startswith(f"first-steps-{precision}-seed-")
        ]
        pairs = [pair for result in found for pair in result["pairs"]]
        against = [pair for pair in pairs if "against" not in pair["what"] and "loss" in pair]
        exact = [pair for pair in pairs if "against" in pair["what"] and "loss" in pair]
        for failed in (pair for pair in pairs if "failure" in pair):
            yield f"first steps, {precision}, {failed['what']}: {failed['failure'][:160]}"
        if against:
            loss, gradient = (max(against, key=itemgetter(of)) for of in ("loss", "gradient"))
            yield (
                f"first steps, {precision}, {len(found)} seeds, {len(against)} comparisons: "
                f"loss {loss['loss']:.1e} ({loss['what']}), "
                f"gradient {gradient['gradient']:.1e} ({gradient['what']})"
            )
        if exact:
            worst_loss = max(pair["loss"] for pair in exact)
            worst_gradient = max(pair["gradient"] for pair in exact)
            yield (
                f"first steps, {precision} plain against fp32: loss {worst_loss:.1e}, "
                f"gradient {worst_gradient:.1e}"
            )


PART = Part(
    name="techniques",
    minutes=8.0,
    about="every technique once, to its end, with parity",
    items=items,
    summary=summary,
)
