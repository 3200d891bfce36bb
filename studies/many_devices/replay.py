"""Replays searches on the recorded table with 1, 8 and 32 devices, in virtual time.

    OMP_NUM_THREADS=1 python studies/many_devices/replay.py > studies/many_devices/replay.json
    python studies/many_devices/replay.py --summary

The search is the real one; its devices are those of `virtual_places.py`. Prints a JSON object: for
each cap, number of devices and seed the trials and the seconds until the search had found 99 % of
the hypervolume of the whole table.
"""

import argparse
import json
import os
import statistics
import tempfile
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import optuna

from autotune.errors import Stopped
from autotune.execution.trial_options import TrialOptions
from autotune.storage.store import StudyStore
from autotune.study.events import Event, TrialBegan, TrialEnded
from autotune.study.loop import StudySession
from autotune.study.prediction_cache import PredictionCache
from autotune.study.workers.coordinator import Coordinator
from studies.many_devices.virtual_places import VirtualPlaces
from studies.search_efficiency.replay import CAPS, Progress, cap_of, rounded, the_table

RESULTS = Path(__file__).with_name("replay.json")
ENOUGH = 0.99
MOST_TRIALS = 200
DEVICES = (1, 8, 32)


def run(cap: str, *, devices: int, seed: int, sampler: str = "ehvi") -> dict[str, Any]:
    """Searches until 99 % of the hypervolume are found, or MOST_TRIALS trials have begun."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    table, cap_bytes = the_table(), cap_of(cap)
    definition = table.definition(cap_bytes=cap_bytes, sampler=sampler, seed=seed)
    progress = Progress(table=table, cap_bytes=cap_bytes)
    begun, ended = 0, 0
    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder, ExitStack() as stack:
        places = VirtualPlaces(table, count=devices, seed=seed, folder=Path(folder))

        def listen(event: Event) -> None:
            nonlocal begun, ended
            begun += isinstance(event, TrialBegan)
            if isinstance(event, TrialEnded):
                ended += 1
                if event.record.outcome == "ok":
                    progress.note(event.record.config, seconds=places.seconds, trials=ended)

        store = StudyStore(f"sqlite:///{folder}/replay.db", create=True)
        store.create_study(definition, trials_wanted=MOST_TRIALS)
        shared = stack.enter_context(
            Coordinator(definition, store=store, folder=Path(folder), listener=listen)
        )
        first: Any = places.executors[0]
        session = StudySession(
            definition,
            shared=shared,
            slots=None,
            executor=first,
            prediction_cache=PredictionCache(definition, store=store, predict=first.forecast),
            study_folder=Path(folder),
            listener=listen,
            should_stop=lambda: progress.reached >= ENOUGH,
            trial_options=TrialOptions(trial_time_limit_seconds=600.0),
            clock=places.clock,
            places=places,
        )
        with suppress(Stopped):
            session.run(trials_wanted=MOST_TRIALS, deadline=None)
        store.close()
    parts = dict.fromkeys(places.executors[0].seconds_by_part, 0.0)
    for executor in places.executors:
        for part, seconds in executor.seconds_by_part.items():
            parts[part] += seconds
    return {
        "cap": cap,
        "devices": devices,
        "seed": seed,
        "reached": progress.reached,
        "trials": ended,
        "begun": begun,
        "seconds": places.seconds,
        "share_at_work": places.seconds_at_work / (devices * max(places.seconds, 1e-9)),
        "seconds_by_part": parts,
        "seconds_in_sampler": session.seconds_in_sampler,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--devices", default=",".join(map(str, DEVICES)))
    parser.add_argument("--caps", default=",".join(CAPS))
    parser.add_argument("--summary", action="store_true", help="print the table of replay.json")
    arguments = parser.parse_args()
    if arguments.summary:
        print(summary(json.loads(RESULTS.read_text())["runs"]))
        return
    runs = []
    for cap in arguments.caps.split(","):
        for devices in map(int, arguments.devices.split(",")):
            for seed in range(arguments.seeds):
                runs.append(run(cap, devices=devices, seed=seed))
    print(json.dumps(rounded({"enough": ENOUGH, "runs": runs})))


def summary(runs: list[dict[str, Any]]) -> str:
    """Returns a table of the means over the seeds."""
    lines = [
        "| cap | devices | trials | relative | seconds | times sooner | at work | choosing, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cap in dict.fromkeys(run["cap"] for run in runs):
        alone = [run for run in runs if run["cap"] == cap and run["devices"] == 1]
        for devices in dict.fromkeys(run["devices"] for run in runs):
            found = [run for run in runs if run["cap"] == cap and run["devices"] == devices]
            trials, seconds = _mean(found, "trials"), _mean(found, "seconds")
            lines.append(
                f"| {cap} | {devices} | {trials:.1f} | {trials / _mean(alone, 'trials'):.2f} | "
                f"{seconds:.0f} | {_mean(alone, 'seconds') / seconds:.1f} | "
                f"{100 * _mean(found, 'share_at_work'):.0f} % | "
                f"{_mean(found, 'seconds_in_sampler'):.1f} |"
            )
    return "\n".join(lines)


def _mean(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(run[key] for run in runs)


if __name__ == "__main__":
    main()
