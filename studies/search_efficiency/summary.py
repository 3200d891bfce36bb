"""What the replays say, as tables.

python studies/search_efficiency/summary.py < studies/search_efficiency/replay.json
"""

import json
import statistics
import sys
from collections import defaultdict
from typing import Any

from autotune.study.pace import seconds_left

SHARES = (0.9, 0.95, 0.99)


def seconds_to(run: dict[str, Any], share: float) -> float:
    return next((seconds for seconds, _, reached in run["steps"] if reached >= share), float("inf"))


def trials_to(run: dict[str, Any], share: float) -> float:
    return next((trials for _, trials, reached in run["steps"] if reached >= share), float("inf"))


def at_cost(run: dict[str, Any], seconds: float) -> float:
    return max((reached for spent, _, reached in run["steps"] if spent <= seconds), default=0.0)


def quartiles(values: list[float]) -> str:
    """Median and quartiles, by rank, so that a run that never got there counts as one."""
    ranked = sorted(values)
    picked = [ranked[round(share * (len(ranked) - 1))] for share in (0.5, 0.25, 0.75)]
    words = ["never" if value == float("inf") else f"{value:.1f}" for value in picked]
    return f"{words[0]} ({words[1]} to {words[2]})"


def main() -> None:
    said = json.load(sys.stdin)
    whole = said["exhaustive_seconds"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in said["runs"]:
        groups[run["cap"], run["strategy"]].append(run)
    print(f"{said['configurations']} configurations, {whole:.0f} s to train all\n")
    for cap in said["caps_bytes"]:
        print(f"### {cap}: {said['caps_bytes'][cap] / 2**20:.1f} MiB\n")
        print(
            "| strategy | % of cost to 90 % | to 95 % | to 99 % | trials to 99 % | % reached at 10 % | over the cap |"
        )
        print("|---|---|---|---|---|---|---|")
        rows = [(strategy, runs) for (name, strategy), runs in groups.items() if name == cap]
        for strategy, runs in sorted(rows, key=lambda row: median_cost(row[1])):
            costs = [quartiles([100 * seconds_to(run, share) / whole for run in runs]) for share in SHARES]
            trials = quartiles([trials_to(run, 0.99) for run in runs])
            reached = 100 * statistics.median(at_cost(run, whole / 10) for run in runs)
            over = 100 * sum(run["over_cap"] for run in runs) / max(1, sum(run["trainings"] for run in runs))
            print(f"| {strategy} | {' | '.join(costs)} | {trials} | {reached:.1f} | {over:.1f} % |")
        print()
    whole_studies(said)


def whole_studies(said: dict[str, Any]) -> None:
    runs = said["runs"]
    for strategy in ("ehvi", "300 trials"):
        found = [run for run in runs if run["strategy"] == strategy]
        share = [100 * run["seconds_in_sampler"] / (run["seconds"] + run["seconds_in_sampler"]) for run in found]
        if share:
            most = max(run["trials"] for run in found)
            print(f"time in the sampler, {strategy} (up to {most} trials): median {statistics.median(share):.2f} %, "
                  f"most {max(share):.2f} %")  # fmt: skip
    ehvi = [run for run in runs if run["strategy"] == "ehvi"]
    early, wrong = (sum(run[key] for run in ehvi) for key in ("ended_early", "ended_wrongly"))
    trainings = sum(run["trainings"] for run in ehvi)
    print(f"ehvi: {early} of {trainings} trainings ended as dominated, {wrong} of them wrongly")
    parts: dict[str, float] = defaultdict(float)
    for run in ehvi:
        for part, seconds in run["seconds_by_part"].items():
            parts[part] += 100 * seconds / sum(one["seconds"] for one in ehvi)
    print("ehvi, share of the time: " + ", ".join(f"{part} {share:.1f} %" for part, share in parts.items()))
    until_converged([run for run in runs if run["strategy"] == "until converged"], whole=said["exhaustive_seconds"])
    time_left([run for run in runs if run["strategy"] == "until converged"])


def until_converged(runs: list[dict[str, Any]], *, whole: float) -> None:
    for cap in dict.fromkeys(run["cap"] for run in runs):
        of_cap = [run for run in runs if run["cap"] == cap]
        reached = [100 * (run["steps"][-1][2] if run["steps"] else 0.0) for run in of_cap]
        print(f"until converged, {cap}: {quartiles([run['trials'] for run in of_cap])} trials, "
              f"{quartiles([100 * run['seconds'] / whole for run in of_cap])} % of the cost, "
              f"{quartiles(reached)} % of the hypervolume")  # fmt: skip


def time_left(runs: list[dict[str, Any]], *, trials: int = 30) -> None:
    """How far the time left was off, at each trial from a third of a study of 30 on."""
    ratios = []
    for ends in (run["ended_at"] for run in runs if len(run["ended_at"]) > trials):
        for done in range(trials // 3, trials - 1):
            said = seconds_left(ends[: done + 1], now=ends[done], trials_left=trials - done)
            ratios.append((said or 0.0) / (ends[trials] - ends[done]))
    if ratios:
        within = 100 * sum(0.5 <= ratio <= 2 for ratio in ratios) / len(ratios)
        print(f"time left shown over time left, studies of {trials} trials: {quartiles(ratios)}, "
              f"{within:.0f} % within a factor of two")  # fmt: skip


def median_cost(runs: list[dict[str, Any]]) -> tuple[float, float]:
    ranked = sorted(seconds_to(run, 0.99) for run in runs)
    return ranked[round((len(ranked) - 1) / 2)], -statistics.median(
        run["steps"][-1][2] if run["steps"] else 0 for run in runs
    )


if __name__ == "__main__":
    main()
