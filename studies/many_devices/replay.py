"""Replays searches on the recorded table with 1, 8 and 32 devices, in virtual time.

    OMP_NUM_THREADS=1 python studies/many_devices/replay.py \\
        | xz > studies/many_devices/replay.json.xz
    python studies/many_devices/replay.py --summary

The search is the real one; its devices are those of `virtual_places.py`. Prints a JSON object: for
each cap, number of devices and seed the trials and the seconds until the search had found 99 % of
the hypervolume of the whole table.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import optuna

from autotune.errors import Stopped
from autotune.execution.trial_options import TrialOptions
from autotune.storage.store import StudyStore
from autotune.study.events import Event, TrialBegan, TrialEnded
from autotune.study.prediction.prediction_cache import PredictionCache
from autotune.study.running.loop import StudySession
from autotune.study.running.running_study import RunningStudy
from autotune.study.workers.coordinator import Coordinator
from studies.compressed import read_json
from studies.many_devices.virtual_places import recorded_devices
from studies.search_efficiency.replay import CAPS, Progress, rounded, the_table
from studies.search_efficiency.table import TABLES

RESULTS = Path(__file__).with_name("replay.json.xz")
ENOUGH = 0.99
MOST_TRIALS = 200
SEEDS = {1: 8, 8: 8, 32: 4}
"""How many seeds by the number of devices: each of 32 takes long to choose for."""
FIRST_SEED = 20
"""The sampler's constants for several devices were chosen with smaller seeds (`variants.py`)."""


def run(
    cap: str,
    *,
    devices: int,
    seed: int,
    sampler: str = "ehvi",
    table_name: str = "gpt",
    usable: Callable[[int], int] | None = None,
    beside: int = 0,
) -> dict[str, Any]:
    """Searches until 99 % of the hypervolume are found, or MOST_TRIALS trials have begun.

    `usable` returns how many of the devices may begin trials once so many trials have ended, and
    `beside` predictions run at a time beside each trial.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    table = the_table(table_name)
    cap_bytes = table.cap_bytes(CAPS[cap])
    definition = table.definition(cap_bytes=cap_bytes, sampler=sampler, seed=seed)
    progress = Progress(table=table, cap_bytes=cap_bytes)
    begun, ended = 0, 0
    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder, ExitStack() as stack:
        virtual = recorded_devices(table, count=devices, seed=seed, predictions_beside=beside)

        if usable is not None:
            virtual.usable = usable(0)

        def listen(event: Event) -> None:
            nonlocal begun, ended
            begun += isinstance(event, TrialBegan)
            if isinstance(event, TrialEnded):
                ended += 1
                if usable is not None:
                    virtual.usable = usable(ended)
                if event.record.outcome == "ok":
                    progress.note(event.record.config, seconds=virtual.seconds, trials=ended)

        store = StudyStore(f"sqlite:///{folder}/replay.db", create=True)
        store.create_study(definition, trials_wanted=MOST_TRIALS)
        shared = stack.enter_context(
            Coordinator(definition, store=store, folder=Path(folder), listener=listen)
        )
        first: Any = virtual.executors[0]
        session = StudySession(
            RunningStudy(
                definition=definition,
                shared=shared,
                prediction_cache=PredictionCache(definition, store=store, predict=first.predict),
                folder=Path(folder),
                listener=listen,
                trial_options=TrialOptions(trial_time_limit_seconds=600.0),
                clock=virtual.clock,
            ),
            executor=first,
            should_stop=lambda: progress.reached >= ENOUGH,
            places=stack.enter_context(virtual.places(definition.device, listener=listen)),
        )
        with suppress(Stopped):
            session.run(trials_wanted=MOST_TRIALS, deadline=None)
        store.close()
    parts = dict.fromkeys(virtual.executors[0].seconds_by_part, 0.0)
    for executor in virtual.executors:
        for part, seconds in executor.seconds_by_part.items():
            parts[part] += seconds
    return {
        "table": table_name,
        "cap": cap,
        "devices": devices,
        "seed": seed,
        "reached": progress.reached,
        "trials": ended,
        "begun": begun,
        "seconds": virtual.seconds,
        "share_at_work": virtual.seconds_at_work / (devices * max(virtual.seconds, 1e-9)),
        "seconds_by_part": parts,
        "seconds_compiling_again": virtual.seconds_compiling_again,
        "seconds_in_sampler": session.seconds_in_sampler,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=max(SEEDS.values()))
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--devices", default=",".join(map(str, SEEDS)))
    parser.add_argument("--caps", default=",".join(CAPS))
    parser.add_argument(
        "--beside", type=int, default=0, help="predictions at a time beside each trial"
    )
    parser.add_argument("--summary", action="store_true", help="print the table of replay.json.xz")
    arguments = parser.parse_args()
    if arguments.summary:
        print(summary(read_json(RESULTS)["runs"]))
        return
    runs = []
    for table, cap, devices in itertools.product(
        arguments.tables.split(","),
        arguments.caps.split(","),
        map(int, arguments.devices.split(",")),
    ):
        for seed in range(min(arguments.seeds, SEEDS[devices])):
            runs.append(
                run(
                    cap,
                    devices=devices,
                    seed=FIRST_SEED + seed,
                    table_name=table,
                    beside=arguments.beside,
                )
            )
    print(json.dumps(rounded({"enough": ENOUGH, "runs": runs})))


def summary(runs: list[dict[str, Any]]) -> str:
    """Returns a table of the means over the seeds, and of their sums over the caps.

    "Never" counts the searches that ended with less than ENOUGH; the means have their ends.
    """
    lines = [
        "| table | cap | devices | trials | relative | seconds | times sooner | at work |"
        " compiled again | choosing, s | never |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for one in runs:
        found[one["table"], one["cap"], one["devices"]].append(one)
    for table in dict.fromkeys(one["table"] for one in runs):
        caps = list(dict.fromkeys(one["cap"] for one in runs if one["table"] == table))
        for devices in dict.fromkeys(one["devices"] for one in runs):
            for these in [[cap] for cap in caps] + [caps]:
                group = [found[table, cap, devices] for cap in these]
                alone = [found[table, cap, 1] for cap in these]
                trials, seconds = _sum(group, "trials"), _sum(group, "seconds")
                at_work = statistics.fmean(_mean(one, "share_at_work") for one in group)
                again = _sum(group, "seconds_compiling_again") / (devices * seconds)
                lines.append(
                    f"| {table} | {these[0] if len(these) == 1 else 'together'} | {devices} | "
                    f"{trials:.1f} | {trials / _sum(alone, 'trials'):.2f} | {seconds:.0f} | "
                    f"{_sum(alone, 'seconds') / seconds:.1f} | {100 * at_work:.0f} % | "
                    f"{100 * again:.0f} % | {_sum(group, 'seconds_in_sampler'):.1f} | "
                    f"{sum(one['reached'] < ENOUGH for runs in group for one in runs)} |"
                )
    return "\n".join(lines)


def _sum(groups: list[list[dict[str, Any]]], key: str) -> float:
    """Returns the sum of the means over the seeds."""
    return sum(_mean(runs, key) for runs in groups)


def _mean(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(run[key] for run in runs)


if __name__ == "__main__":
    main()
