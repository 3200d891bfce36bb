"""Compares the sampler as it is with variants of it, on noisy replays of a table.

    OMP_NUM_THREADS=1 python studies/search_efficiency/variants.py --table gpt      # 12 minutes
    OMP_NUM_THREADS=1 python studies/search_efficiency/variants.py --table llama

Prints for each variant the geometric mean over caps and draws of the cost to 95 and 99 % of the
front, in percent of the exhaustive cost. A search that never gets there counts NEVER percent.
"""

import argparse
import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy
import optuna

from autotune.spec.config import CHOICES, FIELD_ORDER
from autotune.study.sampler import ehvi_sampler, memory_model
from autotune.study.sampler.ehvi import Point, not_dominated
from autotune.study.sampler.features import BUDGET, Array, features_of
from autotune.study.sampler.surrogate import Posterior, Surrogate
from studies.confirmation.simulate import NOISE_ALONE
from studies.search_efficiency.proof import CAPS
from studies.search_efficiency.replay import run_ours, the_table
from studies.search_efficiency.summary import seconds_to
from studies.search_efficiency.table import TABLES

SHARES = (0.95, 0.99)
NEVER, MOST_TRIALS, ENOUGH = 40.0, 90, 0.991
LESS_CERTAIN = 1.3
"""The model's standard deviations are right if multiplied by 1.25 to 1.4."""
_CHECKPOINTING = FIELD_ORDER.index("checkpointing")
_RECOMPUTED = {"none": 0.0, "attention": 0.1, "selective": 0.1, "every-2": 0.5}
"""Share of the forward FLOPs that a scheme computes again; of all others all of them."""

Scores = ehvi_sampler.Scores
Knowledge = ehvi_sampler.Knowledge


class SpeedModel(Surrogate):
    """The model of speed with a prior mean from recomputed FLOPs, or wider deviations."""

    def __init__(
        self, x_train: Array, y_train: Any, *, prior: float, wider: float, **rest: Any
    ) -> None:
        self._prior, self._wider = prior, wider
        super().__init__(x_train, numpy.array(y_train) - prior * _log_slowdown(x_train), **rest)

    def predict(self, x_test: Array) -> Posterior:
        found = super().predict(x_test)
        return Posterior(
            mean=found.mean + self._prior * _log_slowdown(x_test),
            deviation=found.deviation * self._wider,
        )


def _log_slowdown(features: Array) -> Array:
    """Returns the log speed if a step is one forward, two of backward and what is recomputed."""
    names = CHOICES["checkpointing"]
    recomputed = [_RECOMPUTED.get(str(names[int(row[_CHECKPOINTING])]), 1.0) for row in features]
    share = numpy.maximum(numpy.array(recomputed), 1.0 - features[:, BUDGET])
    return numpy.asarray(-numpy.log(1.0 + share / 3.0))


def _own_scales(has_own_scales: bool) -> Callable[..., Surrogate]:
    def make(x_train: Array, y_train: Any, **options: Any) -> Surrogate:
        return Surrogate(x_train, y_train, **{**options, "has_own_scales": has_own_scales})

    return make


def _expected_only(scores: Callable[..., Scores]) -> Callable[..., Scores]:
    def scored(knowledge: Knowledge, candidates: ehvi_sampler.Candidates) -> Scores:
        found = scores(knowledge, candidates)
        return Scores(expected=found.expected, reservation_values=found.expected)

    return scored


def _with_believed_front(begin: Callable[..., None]) -> Callable[..., None]:
    """Takes the front by the model's mean speeds in place of the measured ones."""

    def init(knowledge: Knowledge, records: Any, *rest: Any, **options: Any) -> None:
        begin(knowledge, records, *rest, **options)
        feasible = [record for record in records if record.feasible]
        if not feasible:
            return
        mean = knowledge._speed.predict_mean(features_of([record.config for record in feasible]))
        points = [
            Point(
                memory=float(record.peak_memory_bytes or 0),
                speed=math.exp(log_speed),
                perplexity=record.perplexity or math.inf,
            )
            for record, log_speed in zip(feasible, mean, strict=True)
        ]
        knowledge.points = knowledge._points_expected = not_dominated(points)

    return init


def _speed_model(*, prior: float = 0.0, wider: float = 1.0) -> Iterator[Any]:
    yield patch.object(ehvi_sampler, "Surrogate", partial(SpeedModel, prior=prior, wider=wider))


def patches(variant: str) -> Iterator[Any]:
    """Yields what turns the sampler into the variant."""
    match variant:
        case "no own scales":
            yield patch.object(memory_model, "Surrogate", _own_scales(False))
        case "own scales for speed, too":
            yield patch.object(ehvi_sampler, "Surrogate", _own_scales(True))
        case "no reservation values":
            yield patch.object(Knowledge, "scores", _expected_only(Knowledge.scores))
        case "neither":
            yield from patches("no own scales")
            yield from patches("no reservation values")
        case "prior from recomputed FLOPs":
            yield from _speed_model(prior=1.0)
        case "less certain speeds":
            yield from _speed_model(wider=LESS_CERTAIN)
        case "believed front":
            yield patch.object(Knowledge, "__init__", _with_believed_front(Knowledge.__init__))


VARIANTS = (
    "as it is",
    "no own scales",
    "no reservation values",
    "neither",
    "own scales for speed, too",
    "prior from recomputed FLOPs",
    "less certain speeds",
    "believed front",
)


def run(job: tuple[str, str, float, int]) -> list[float]:
    """Returns the percentages of the exhaustive cost to each of SHARES."""
    table_name, variant, cap, draw = job
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    table = the_table(table_name)
    with ExitStack() as stack:
        for each in patches(variant):
            stack.enter_context(each)
        found = run_ours(
            table.cap_bytes(cap),
            table=table,
            sampler="ehvi",
            seed=draw,
            most=MOST_TRIALS,
            enough=ENOUGH,
            noise=NOISE_ALONE,
            repeats_baseline=True,
        )
    return [100 * seconds_to(found, share) / table.exhaustive_seconds() for share in SHARES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=TABLES, default="gpt")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    print("| variant | to 95 % | to 99 % | never to 99 % |")
    print("|---|---|---|---|")
    with ProcessPoolExecutor(arguments.processes) as pool:
        for variant in VARIANTS:
            jobs = list(
                itertools.product([arguments.table], [variant], CAPS, range(arguments.draws))
            )
            costs = list(pool.map(run, jobs))
            means = [
                statistics.geometric_mean(min(NEVER, one[index]) for one in costs)
                for index in range(len(SHARES))
            ]
            never = sum(math.isinf(one[-1]) for one in costs)
            cells = [f"{mean:.1f}" for mean in means]
            print(f"| {variant} | {' | '.join(cells)} | {never} of {len(costs)} |", flush=True)


if __name__ == "__main__":
    main()
