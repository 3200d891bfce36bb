"""Compares ways to choose the trials that the surrogate is fitted to, in a study of many trials.

    python studies/reliability/what_the_surrogate_sees.py [--trials 1000] [--further 40]

A study of random configurations, measured by the formula of `tests/building/made_study.py`,
continues for some trials by expected hypervolume improvement. Prints a JSON line for each way, with
the increase of the front's hypervolume.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from statistics import fmean
from unittest.mock import patch

from autotune.spec.config import TrainingConfig
from autotune.spec.result import TrialRecord
from autotune.study.sampler.ehvi import Point, hypervolume, not_dominated
from autotune.study.sampler.ehvi_sampler import EhviSampler
from autotune.study.sampler.surrogate import MOST_SEEN
from autotune.study.sampler.training_subset import TrainingSubset
from tests.building import made_study

Places = Callable[[TrainingSubset, Sequence[TrainingConfig]], Sequence[int]]


def _first(_: TrainingSubset, seen: Sequence[TrainingConfig]) -> Sequence[int]:
    return range(min(len(seen), MOST_SEEN))


def _latest(_: TrainingSubset, seen: Sequence[TrainingConfig]) -> Sequence[int]:
    return range(max(0, len(seen) - MOST_SEEN), len(seen))


def _spaced(_: TrainingSubset, seen: Sequence[TrainingConfig]) -> Sequence[int]:
    count = min(len(seen), MOST_SEEN)
    return [number * len(seen) // count for number in range(count)]


WAYS: dict[str, Places] = {
    "the first": _first,
    "the latest": _latest,
    "evenly spaced": _spaced,
    "near, latest and spaced": TrainingSubset.indices,
}


def point(record: TrialRecord) -> Point:
    return Point(
        memory=float(record.peak_memory_bytes or 0),
        speed=record.tokens_per_second or 0.0,
        perplexity=record.perplexity or 1e9,
    )


def go_on(way: Places, *, trials: int, further: int, seed: int) -> float:
    """Growth of the hypervolume, as a share."""
    study = made_study.definition("seen")
    made = made_study.make(study, trials=trials)
    records, forecasts = list(made.records), list(made.forecasts)
    reference = Point(memory=made_study.CAP_BYTES, speed=3000.0, perplexity=26.0)
    before = hypervolume(
        not_dominated([point(r) for r in records if r.feasible]), reference=reference
    )
    ranking = EhviSampler(study.legal_space(), cap_bytes=study.cap_bytes)
    with patch.object(TrainingSubset, "indices", way):
        for _ in range(further):
            tried = {record.config for record in records}
            choice = ranking.choose(records, forecasts, excluded=tried, seed=seed + len(records))
            if choice is None:
                break
            records.append(made_study.record(choice.config, number=len(records), trained_for=0))
            forecasts.append(made_study.forecast(choice.config))
    after = hypervolume(
        not_dominated([point(r) for r in records if r.feasible]), reference=reference
    )
    return after / before - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--further", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    for name, way in WAYS.items():
        grown = [
            go_on(way, trials=asked.trials, further=asked.further, seed=1000 * s)
            for s in range(asked.seeds)
        ]
        row = {
            "seen": name,
            "trials": asked.trials,
            "further": asked.further,
            "hypervolume_grew": grown,
        }
        print(json.dumps({**row, "mean": fmean(grown)}), flush=True)


if __name__ == "__main__":
    main()
