"""What the replays say: the tables and the sentences of the README, as they stand there.

python studies/search_efficiency/summary.py < studies/search_efficiency/replay.json
"""

import json
import statistics
import sys
from collections import defaultdict
from typing import Any

from autotune.study.running.eta import eta_seconds

SHARES = (0.9, 0.95, 0.99)
Run = dict[str, Any]
Groups = dict[tuple[str, str], list[Run]]
"""Runs by cap and strategy."""


def seconds_to(run: Run, share: float) -> float:
    return next((seconds for seconds, _, reached in run["steps"] if reached >= share), float("inf"))


def trials_to(run: Run, share: float) -> float:
    return next((trials for _, trials, reached in run["steps"] if reached >= share), float("inf"))


def at_cost(run: Run, seconds: float) -> float:
    return max((reached for spent, _, reached in run["steps"] if spent <= seconds), default=0.0)


def at_the_end(run: Run) -> float:
    return run["steps"][-1][2] if run["steps"] else 0.0


def ranked(values: list[float], share: float) -> float:
    """A quantile by rank, so that a run that never got there counts as one."""
    return sorted(values)[round(share * (len(values) - 1))]


def number(value: float) -> str:
    return "never" if value == float("inf") else f"{value:.1f}"


def quartiles(values: list[float]) -> str:
    """Median and quartiles."""
    middle, lower, upper = (number(ranked(values, share)) for share in (0.5, 0.25, 0.75))
    return f"{middle} ({lower} to {upper})"


def over_the_cap(runs: list[Run]) -> float:
    """Percentage of the trainings that turned out to be over the cap."""
    trainings = sum(run["trainings"] for run in runs)
    return 100 * sum(run["over_cap"] for run in runs) / max(1, trainings)


def main() -> None:
    said = json.load(sys.stdin)
    groups: Groups = defaultdict(list)
    for run in said["runs"]:
        groups[run["cap"], run["strategy"]].append(run)
    print(
        f"{said['configurations']} configurations, "
        f"{said['exhaustive_seconds']:,.0f} s to train all\n"
    )
    compared_with_plain_optuna(said, groups)
    for cap in said["caps_bytes"]:
        strategies(said, groups, cap=cap)
    ended_early(said, groups)
    more_caps(said, groups)
    sentences(said, groups)


# -- tables ----------------------------------------------------------------------------------------


def compared_with_plain_optuna(said: dict[str, Any], groups: Groups) -> None:
    """The first table of the README: the default sampler, and the best of plain Optuna's.

    Below it the costs of the default sampler relative to those of the best plain one.
    """
    relative = []
    print(
        "| cap | autotune: 95 % | 99 % | best plain Optuna: 95 % | 99 % "
        "| over the cap: autotune | plain Optuna |"
    )
    print("|---|---|---|---|---|---|---|")
    for cap, cap_bytes in said["caps_bytes"].items():
        plain = {
            name: runs
            for (of, name), runs in groups.items()
            if of == cap and name.startswith("optuna ")
        }
        ours = groups[cap, "ehvi"]
        if not (plain and ours):
            continue
        cells = [number(median_cost(said, ours, share)) for share in (0.95, 0.99)]
        for share in (0.95, 0.99):
            cost = median_cost(said, ours, share)
            costs = {name: median_cost(said, runs, share) for name, runs in plain.items()}
            best = min(costs, key=costs.__getitem__)
            if costs[best] == float("inf"):
                cells.append("not within 300 suggestions")
            else:
                cells.append(f"{costs[best]:.1f} ({best.removeprefix('optuna ')})")
                relative.append(f"{cap} {cost / costs[best]:.2f} at {100 * share:.0f} %")
        over = [over_the_cap(runs) for runs in plain.values()]
        cells.append(f"{over_the_cap(ours):.1f} %")
        cells.append(f"{min(over):.0f} to {max(over):.0f} %" if max(over) else "0 %")
        print(f"| {cap}, {cap_bytes / 2**20:.1f} MiB | {' | '.join(cells)} |")
    print(f"\nCost relative to the best plain Optuna: {', '.join(relative)}.\n")


def strategies(said: dict[str, Any], groups: Groups, *, cap: str) -> None:
    """All strategies under one cap, the cheapest first."""
    whole = said["exhaustive_seconds"]
    print(f"### {cap}: {said['caps_bytes'][cap] / 2**20:.1f} MiB\n")
    print(
        "| strategy | % of cost to 90 % | to 95 % | to 99 % | trials to 99 % | % reached at 10 % "
        "| over the cap |"
    )
    print("|---|---|---|---|---|---|---|")
    rows = [(strategy, runs) for (of, strategy), runs in groups.items() if of == cap]
    rows = [row for row in rows if row[0] not in ("until converged", "300 trials")]

    def order(row: tuple[str, list[Run]]) -> tuple[float, float]:
        _, runs = row
        return median_cost(said, runs, 0.99), -statistics.median(at_the_end(run) for run in runs)

    for strategy, runs in sorted(rows, key=order):
        costs = [
            quartiles([100 * seconds_to(run, share) / whole for run in runs]) for share in SHARES
        ]
        trials = quartiles([trials_to(run, 0.99) for run in runs])
        reached = 100 * statistics.median(at_cost(run, whole / 10) for run in runs)
        print(
            f"| {strategy} | {' | '.join(costs)} | {trials} | {reached:.1f} "
            f"| {over_the_cap(runs):.1f} % |"
        )
    print()


def ended_early(said: dict[str, Any], groups: Groups) -> None:
    """How many trainings ended as dominated, and how many of them wrongly."""
    caps = list(said["caps_bytes"])
    print("Ended as dominated, of all trainings; in brackets those of them that by the table no")
    print("training of the same numerics dominates:\n")
    print(f"| strategy | {' | '.join(caps)} |\n|---|{'---|' * len(caps)}")
    for strategy in dict.fromkeys(strategy for _, strategy in groups):
        if any("ended_early" in run for run in groups[caps[0], strategy]):
            cells = [ended(groups[cap, strategy]) for cap in caps]
            print(f"| {strategy} | {' | '.join(cells)} |")
    print()


def ended(runs: list[Run]) -> str:
    early, wrongly, trainings = (
        sum(run[key] for run in runs) for key in ("ended_early", "ended_wrongly", "trainings")
    )
    return f"{early} of {trainings:,} ({wrongly})"


def more_caps(said: dict[str, Any], groups: Groups) -> None:
    """How many trainings of the default sampler are over the cap, the largest cap first."""
    caps = {**said["caps_bytes"], **said["more_caps_bytes"]}
    print(
        "| cap | configurations that fit | to 99.5 %: trainings | over the cap "
        "| until converged: trainings | over the cap |\n|---|---|---|---|---|---|"
    )
    worst = (0.0, "", "")
    for cap in sorted(caps, key=caps.__getitem__, reverse=True):
        cells = []
        for strategy in ("ehvi", "until converged"):
            runs = groups[cap, strategy]
            cells += [f"{sum(run['trainings'] for run in runs):,}", f"{over_the_cap(runs):.1f} %"]
            worst = max(worst, (over_the_cap(runs), cap, strategy))
        share = said["share_of_configurations"][cap]
        print(f"| {caps[cap] / 2**20:.1f} MiB | {100 * share:.0f} % | {' | '.join(cells)} |")
    share, cap, strategy = worst
    if cap:
        fits = 100 * said["share_of_configurations"][cap]
        print(f"\nOver the cap at most {share:.1f} % of the trainings: {strategy} at the cap that "
              f"{fits:.0f} % of the configurations meet.\n")  # fmt: skip


# -- sentences -------------------------------------------------------------------------------------


def sentences(said: dict[str, Any], groups: Groups) -> None:
    caps = list(said["caps_bytes"])
    ehvi, long, converged = (
        [run for cap in caps for run in groups[cap, strategy]]
        for strategy in ("ehvi", "300 trials", "until converged")
    )
    if ehvi:
        print(
            f"- **Early ends**: {ended(ehvi)} trainings of `ehvi` ended as dominated under the "
            "three caps."
        )
        cost_of_early_ends(said, groups)
        where_the_time_goes(ehvi)
    if converged:
        until_converged(said, {cap: groups[cap, "until converged"] for cap in caps})
        time_left(converged)
    for runs in (ehvi, long):
        if runs:
            shares = [
                100 * run["seconds_in_sampler"] / (run["seconds"] + run["seconds_in_sampler"])
                for run in runs
            ]
            print(
                f"- **Time in the sampler**, up to {max(run['trials'] for run in runs)} trials: "
                f"{statistics.median(shares):.2f} % in the median, {max(shares):.2f} % at most."
            )


def cost_of_early_ends(said: dict[str, Any], groups: Groups) -> None:
    """Compares searches of the same seed with and without early ends: the cost of 99 %."""
    costlier, cheaper = [], []
    for cap in said["caps_bytes"]:
        without = {
            run["seed"]: seconds_to(run, 0.99) for run in groups[cap, "ehvi without early ends"]
        }
        pairs = [
            (seconds_to(run, 0.99), without[run["seed"]])
            for run in groups[cap, "ehvi"]
            if run["seed"] in without
        ]
        costlier.append(str(sum(ours > other for ours, other in pairs)))
        cheaper.append(str(sum(ours < other for ours, other in pairs)))
    print(f"  99 % is costlier with early ends on {_listed(costlier)} seeds, "
          f"cheaper on {_listed(cheaper)}.")  # fmt: skip


def where_the_time_goes(runs: list[Run]) -> None:
    seconds: dict[str, float] = defaultdict(float)
    for run in runs:
        for part, spent in run["seconds_by_part"].items():
            seconds[part] += spent
    whole = sum(seconds.values())
    parts = sorted(seconds, key=seconds.__getitem__, reverse=True)
    shares = ", ".join(f"{part} {100 * seconds[part] / whole:.1f} %" for part in parts)
    print(f"- **Where the time goes**: {shares}.")


def until_converged(said: dict[str, Any], runs_by_cap: dict[str, list[Run]]) -> None:
    whole = said["exhaustive_seconds"]
    trials, reached, costs = [], [], []
    for runs in runs_by_cap.values():
        trials.append(f"{ranked([run['trials'] for run in runs], 0.5):.0f}")
        reached.append(number(ranked([100 * at_the_end(run) for run in runs], 0.5)))
        costs.append(number(ranked([100 * run["seconds"] / whole for run in runs], 0.5)))
    print(f"- **Until converged** (`--until-converged`): ends after {_listed(trials)} trials "
          f"({', '.join(runs_by_cap)}) with {_listed(reached)} % of the hypervolume, "
          f"for {_listed(costs)} % of the cost.")  # fmt: skip


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def time_left(runs: list[Run], *, trials: int = 30) -> None:
    """How far the time left was off, at each trial from a third of a study of 30 on."""
    ratios = []
    for ends in (run["ended_at"] for run in runs if len(run["ended_at"]) > trials):
        for done in range(trials // 3, trials - 1):
            left = eta_seconds(ends[: done + 1], now=ends[done], trials_left=trials - done)
            ratios.append((left or 0.0) / (ends[trials] - ends[done]))
    if ratios:
        within = 100 * sum(0.5 <= ratio <= 2 for ratio in ratios) / len(ratios)
        print(
            f"- **Time left**, as shown over what it was, studies of {trials} trials: "
            f"{quartiles(ratios)}, {within:.0f} % within a factor of two."
        )


def median_cost(said: dict[str, Any], runs: list[Run], share: float) -> float:
    """Percentage of the exhaustive cost until `share` of the hypervolume was reached."""
    return ranked([100 * seconds_to(run, share) / said["exhaustive_seconds"] for run in runs], 0.5)


if __name__ == "__main__":
    main()
