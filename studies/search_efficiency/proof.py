"""Judges searches on a noisy machine over the table that nobody tuned on, by its true speeds.

    OMP_NUM_THREADS=1 python studies/search_efficiency/proof.py      # llama/proof.json.xz
    python studies/search_efficiency/proof.py --summary

Ten caps; every draw has its own noise in every speed that is measured, and its own seed of the
sampler. Of autotune, a search that goes on until it has tried nearly the whole front, and one of
the default length with its confirmation, of which the announced front and pick are judged. Beside
it plain Optuna as a competent user would write it: multivariate TPE that begins with the same
configurations, the cap as a constraint, and repeated suggestions answered from memory.
"""

import argparse
import os
import random
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import optuna

from autotune.study.request import VARIANTS_SHARE
from studies.compressed import read_json, write_json
from studies.confirmation.simulate import ALL, NOISE_ALONE, Simulation
from studies.search_efficiency.replay import (
    MOST_SUGGESTIONS,
    PLAIN,
    costs,
    rounded,
    run_ours,
    run_plain,
    the_table,
)
from studies.search_efficiency.summary import at_the_end, number, ranked, seconds_to
from studies.search_efficiency.table import TABLES, TableFiles

CAPS = (1.0, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05)
"""The cap fits this share of the table's configurations."""
DEFAULT_TRIALS, CONFIRM_SHARE = 30, 0.2
DRAWS = {"search": 20, "announced": 20, "plain": 10}
BEST_PLAIN = "optuna TPE multivariate group"
GOALS = {0.95: 6.0, 0.99: 12.0}
"""Percent of the exhaustive cost, in the median over caps and draws, for shares of the front."""

Row = dict[str, Any]
Job = tuple[str, str, float, int]
"""Table, what to run, cap and draw."""


def search(table_name: str, cap: float, draw: int) -> Row:
    """A search of ours until it has tried 99.5 % of the front, with what it cost on its way."""
    table = the_table(table_name)
    return costs(
        run_ours(
            table.cap_bytes(cap),
            table=table,
            sampler="ehvi",
            seed=draw,
            noise=NOISE_ALONE,
            repeats_baseline=True,
        )
    )


def announced(table_name: str, cap: float, draw: int) -> Row:
    """A search of ours of the default length, confirmed, with what it then says."""
    table = the_table(table_name)
    cap_bytes = table.cap_bytes(cap)
    found = run_ours(
        cap_bytes,
        table=table,
        sampler="ehvi",
        seed=draw,
        most=DEFAULT_TRIALS,
        enough=ALL,
        noise=NOISE_ALONE,
        repeats_baseline=True,
    )
    simulation = Simulation(table, cap_bytes=cap_bytes)
    confirmations = list(found["confirmations"])
    allowed = CONFIRM_SHARE / (1.0 - CONFIRM_SHARE) * found["seconds"] / (1.0 - VARIANTS_SHARE)
    spent = simulation.confirm(
        found["records"], confirmations, seconds=allowed, draw=random.Random(13 * draw + 5)
    )
    return {
        "seconds": found["seconds"],
        "confirming": spent,
        **simulation.claims(found["records"], confirmations),
    }


def plain(table_name: str, cap: float, draw: int) -> Row:
    """The best of plain Optuna's samplers, given what a competent user would give it."""
    table = the_table(table_name)
    return run_plain(
        table.cap_bytes(cap),
        table=table,
        make_sampler=PLAIN[BEST_PLAIN],
        seed=draw,
        most=MOST_SUGGESTIONS,
        is_fixed=False,
        noise=NOISE_ALONE,
        begins_as_ours=True,
    )


KINDS: dict[str, Callable[[str, float, int], Row]] = {
    "search": search,
    "announced": announced,
    "plain": plain,
}


def run(job: Job) -> Row:
    table_name, kind, cap, draw = job
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    return {"kind": kind, "cap": cap, "draw": draw, **KINDS[kind](table_name, cap, draw)}


# -- what the runs say -----------------------------------------------------------------------------


def summary(said: Row) -> Iterator[str]:
    """Yields the tables and sentences of the README."""
    groups: dict[tuple[str, float], list[Row]] = defaultdict(list)
    for row in said["runs"]:
        groups[row["kind"], row["cap"]].append(row)
    whole = said["exhaustive_seconds"]
    yield f"{said['configurations']} configurations, {whole:,.0f} s to train all\n"
    yield from _cost_by_cap(said, groups)
    yield ""
    yield from _announced_by_cap(said, groups)
    yield ""
    yield from _goals(said, groups)


Groups = dict[tuple[str, float], list[Row]]


def _cost_by_cap(said: Row, groups: Groups) -> Iterator[str]:
    yield (
        "| cap | fit | autotune: 95 % | 99 % | plain Optuna: 95 % | 99 % | "
        "over the cap: autotune | plain |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for cap in CAPS:
        cells = [_size(said, cap), f"{100 * cap:.0f} %"]
        for kind in ("search", "plain"):
            cells += [_median_and_tenths(_costs(said, groups[kind, cap], share)) for share in GOALS]
        cells += [f"{_over_the_cap(groups[kind, cap]):.1f} %" for kind in ("search", "plain")]
        yield f"| {' | '.join(cells)} |"


def _announced_by_cap(said: Row, groups: Groups) -> Iterator[str]:
    yield (
        "| cap | tried | front as announced | of all, as announced | the pick's speed / best | "
        "claimed ratio / true | intervals that cover | cost |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for cap in CAPS:
        rows = groups["announced", cap]
        cost = [100 * (row["seconds"] + row["confirming"]) for row in rows]
        covered = [one for row in rows for one in row.get("covered", ())]
        cells = [
            _size(said, cap),
            *(
                f"{statistics.median(row[name] for row in rows):.3f}"
                for name in ("tried", "front", "exhaustive_front")
            ),
            _median_and_lowest_tenth([row["pick"] for row in rows]),
            _median_and_90th([row["claimed_ratio"] for row in rows if "claimed_ratio" in row]),
            f"{100 * statistics.fmean(covered):.0f} %" if covered else "-",
            f"{statistics.median(cost) / said['exhaustive_seconds']:.1f} %",
        ]
        yield f"| {' | '.join(cells)} |"


def _goals(said: Row, groups: Groups) -> Iterator[str]:
    of_kind = {
        kind: [row for cap in CAPS for row in groups[kind, cap]] for kind in ("search", "plain")
    }
    for share, goal in GOALS.items():
        ours = _costs(said, of_kind["search"], share)
        others = _costs(said, of_kind["plain"], share)
        yield (
            f"- {100 * share:.0f} %, median over caps and draws: {_median_and_tenths(ours)} % of "
            f"the cost (goal {goal:.0f} %); plain Optuna {_median_and_tenths(others)} %"
        )
        medians = {
            kind: [ranked(_costs(said, groups[kind, cap], share), 0.5) for cap in CAPS]
            for kind in of_kind
        }
        by_cap = {kind: number(statistics.median(values)) for kind, values in medians.items()}
        yield (
            f"- {100 * share:.0f} %, median over caps of the median of each: {by_cap['search']} %; "
            f"plain Optuna {by_cap['plain']} %"
        )
        ratios = []
        for own, other in zip(medians["search"], medians["plain"], strict=True):
            ratios.append("0" if other == float("inf") else f"{own / other:.2f}")
        yield f"- {100 * share:.0f} %, cost beside plain Optuna's, by cap: {', '.join(ratios)}"
    worst = {cap: ranked(_costs(said, groups["search", cap], 0.99), 0.5) for cap in CAPS}
    cap = max(worst, key=worst.__getitem__)
    yield f"- 99 %, median of draws, at the worst cap: {number(worst[cap])} % (fit {cap:.0%})"
    over = {cap: _over_the_cap(groups["search", cap]) for cap in CAPS}
    yield f"- over the cap: at most {max(over.values()):.1f} % of the trainings"
    claims = [row for cap in CAPS for row in groups["announced", cap]]
    ratios_of_all = [row["claimed_ratio"] for row in claims if "claimed_ratio" in row]
    covered = [one for row in claims for one in row.get("covered", ())]
    yield (
        f"- ratio of the pick / true: {_median_and_90th(ratios_of_all)}; claimed speed / true "
        f"{_median_and_90th([row['claimed'] for row in claims])}; intervals cover "
        f"{100 * statistics.fmean(covered):.1f} %"
    )
    ended = [at_the_end(row) for row in of_kind["plain"]]
    yield f"- plain Optuna ends at {100 * statistics.median(ended):.1f} % of the hypervolume"


def _size(said: Row, cap: float) -> str:
    return f"{said['caps_bytes'][str(cap)] / 2**20:.1f} MiB"


def _costs(said: Row, rows: Sequence[Row], share: float) -> list[float]:
    """Returns for each run the percentage of the exhaustive cost until it had tried `share`."""
    return [100 * seconds_to(row, share) / said["exhaustive_seconds"] for row in rows]


def _over_the_cap(rows: Sequence[Row]) -> float:
    trainings = sum(row["trainings"] for row in rows)
    return 100 * sum(row["over_cap"] for row in rows) / max(1, trainings)


def _median_and_tenths(values: list[float]) -> str:
    """Returns the median, and where the middle 80 % are."""
    middle, lower, upper = (number(ranked(values, share)) for share in (0.5, 0.1, 0.9))
    return f"{middle} ({lower} to {upper})"


def _median_and_90th(values: list[float]) -> str:
    return f"{ranked(values, 0.5):.3f}, {ranked(values, 0.9):.3f}" if values else "-"


def _median_and_lowest_tenth(values: list[float]) -> str:
    return f"{ranked(values, 0.5):.3f}, {ranked(values, 0.1):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=TABLES, default="llama")
    parser.add_argument("--draws", type=int, help="fewer than usual, for a quick trial")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--summary", action="store_true", help="print the tables of the last run")
    arguments = parser.parse_args()
    file = TableFiles(arguments.table).folder / "proof.json.xz"
    if arguments.summary:
        print("\n".join(summary(read_json(file))))
        return
    jobs = [
        (arguments.table, kind, cap, draw)
        for kind, draws in DRAWS.items()
        for cap in CAPS
        for draw in range(min(draws, arguments.draws or draws))
    ]
    random.Random(0).shuffle(jobs)
    with ProcessPoolExecutor(arguments.processes) as pool:
        runs = list(pool.map(run, jobs))
    table = the_table(arguments.table)
    said = {
        "configurations": len(table.trainings),
        "exhaustive_seconds": table.exhaustive_seconds(),
        "caps_bytes": {str(cap): table.cap_bytes(cap) for cap in CAPS},
        "runs": sorted(runs, key=lambda row: (row["kind"], row["cap"], row["draw"])),
    }
    write_json(file, rounded(said))
    print("\n".join(summary(said)))


if __name__ == "__main__":
    main()
