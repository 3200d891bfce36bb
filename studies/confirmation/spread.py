"""Measures one pair of configurations in turn, again and again: how much does the ratio differ?

    OMP_NUM_THREADS=1 python studies/confirmation/spread.py           # adds runs to blocks.jsonl.xz
    python studies/confirmation/spread.py --summary                   # what they say

Each run times the baseline of the default workload in turn with another configuration, as a
confirmation does, and keeps the seconds of every block. The summary compares ways to make one
ratio of them, by the standard deviation of its logarithm between runs.
"""

import argparse
import dataclasses
import itertools
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autotune.execution.in_turn import TrainingInTurn
from autotune.execution.local import LocalExecutor
from autotune.execution.trial_options import TrialOptions
from autotune.study.opening.new_study import new_definition
from autotune.study.opening.requested_space import space_of
from autotune.study.request import SearchRequest
from studies.compressed import append_row, read_rows

BLOCKS = Path(__file__).parent / "blocks.jsonl.xz"
CHANGES: dict[str, dict[str, Any]] = {
    "compiled": {"compile": "block"},
    "eager": {"optimizer_fusion": "foreach", "micro_batch_size": 4},
}
"""What differs from the baseline."""
FEWEST_ROUNDS = 12
"""Longer runs count as several of so many rounds, too."""

Estimator = Callable[[Sequence[float], Sequence[float]], float]


def hodges_lehmann(values: Sequence[float]) -> float:
    pairs = itertools.combinations_with_replacement(values, 2)
    return statistics.median((one + other) / 2 for one, other in pairs)


def faster_half(seconds: Sequence[float]) -> float:
    return statistics.fmean(sorted(seconds)[: (len(seconds) + 1) // 2])


def log_ratios(partner: Sequence[float], subject: Sequence[float]) -> list[float]:
    return [math.log(one / other) for one, other in zip(partner, subject, strict=True)]


ESTIMATORS: dict[str, Estimator] = {
    "the partner's median alone": lambda partner, subject: math.log(statistics.median(partner)),
    "ratio of the faster halves": lambda partner, subject: math.log(
        faster_half(partner) / faster_half(subject)
    ),
    "ratio of medians": lambda partner, subject: math.log(
        statistics.median(partner) / statistics.median(subject)
    ),
    "mean of the rounds' log ratios": lambda *both: statistics.fmean(log_ratios(*both)),
    "median of the rounds' log ratios": lambda *both: statistics.median(log_ratios(*both)),
    "Hodges-Lehmann of the rounds' log ratios": lambda *both: hodges_lehmann(log_ratios(*both)),
}


def record(*, runs: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder, LocalExecutor(Path(folder)) as executor:
        work = Path(folder)
        request = SearchRequest(name="spread", storage=f"sqlite:///{folder}/studies.db")
        new = new_definition(
            request,
            space=space_of(request),
            executor=executor,
            work=work,
            listener=lambda event: None,
        )
        study_folder = work / "study"
        new.settle(study_folder)
        definition = new.definition
        baseline = definition.baseline_config()
        for name, changes in CHANGES.items():
            configs = (baseline, dataclasses.replace(baseline, **changes))
            for run in range(runs):
                began = time.monotonic()
                with executor.slot_on(definition.device):
                    timed = executor.time_in_turn(
                        definition,
                        [TrainingInTurn(config=config, device_bytes=2**28) for config in configs],
                        study_folder=study_folder,
                        log_name="spread",
                        trial_options=TrialOptions(trial_time_limit_seconds=600.0),
                        rounds=rounds,
                        seed=run,
                    )
                row = {
                    "name": name,
                    "run": run,
                    "seconds": time.monotonic() - began,
                    "blocks": [
                        [block.seconds for block in result.blocks] for result in timed.results
                    ],
                    "machine": platform.processor() or platform.machine(),
                    "torch": version("torch"),
                    "date": datetime.now(UTC).date().isoformat(),
                }
                append_row(BLOCKS, row)
                print(json.dumps({key: row[key] for key in ("name", "run", "seconds")}), flush=True)


def summarize() -> None:
    """Prints a table; the first run of each pair, which compiles, is left out."""
    rows = [row for row in read_rows(BLOCKS) if row["run"] > 0]
    for name in CHANGES:
        runs = [row["blocks"] for row in rows if row["name"] == name]
        longest = max(len(partner) for partner, _ in runs)
        short = []
        for partner, subject in runs:
            for first in range(0, len(partner) - FEWEST_ROUNDS + 1, FEWEST_ROUNDS):
                part = slice(first, first + FEWEST_ROUNDS)
                short.append((partner[part], subject[part]))
        long = [run for run in runs if len(run[0]) == longest]
        print(f"{name}: {len(short)} of {FEWEST_ROUNDS} rounds, {len(long)} of {longest}")
        for label, estimate in ESTIMATORS.items():
            of_short = statistics.stdev(estimate(*run) for run in short)
            of_long = statistics.stdev(estimate(*run) for run in long)
            print(f"  {label:42} {100 * of_short:5.1f} %  {100 * of_long:5.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--summary", action="store_true")
    arguments = parser.parse_args()
    if arguments.summary:
        summarize()
    else:
        record(runs=arguments.runs, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
