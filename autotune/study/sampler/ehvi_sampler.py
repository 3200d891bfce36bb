"""Which configuration to try next: the one whose expected gain in hypervolume is largest.

Memory is known before training, from the prediction; perplexity belongs to a numerics class and is
measured once. What is not predicted yet is expected from its like (`surrogate.py`), so that only
promising configurations are ever predicted; speed is expected in the same way. The gain has a
closed form (`ehvi.py`). What a trial will take is left out: over a recorded table
(`studies/search_efficiency/`) gain for time found the front later than gain alone.
"""

import math
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy

from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast
from autotune.spec.result import TrialRecord
from autotune.spec.search_space import LegalSpace
from autotune.study.sampler.ehvi import (
    Point,
    expected_hypervolume_improvement,
    hypervolume,
    places_not_dominated,
)
from autotune.study.sampler.features import Array, features_of
from autotune.study.sampler.memory_model import MemoryModel
from autotune.study.sampler.surrogate import Surrogate
from autotune.study.sampler.training_subset import TrainingSubset

MOST_CANDIDATES = 1000
"""Of a larger space so many are drawn anew for each choice, beside the neighbours of the best."""

MANY_TRIALS, MOST_LOOKED_AT = 1000, 3000
"""After so many trials no more than so many of a larger space are looked at for one choice, beside
the neighbours of the best: a search that has converged would look at all of it each time."""

_SPEED_NOISES, _FAILURE_NOISE = (0.02, 0.05, 0.12), 0.1
"""Standard deviations of what was measured: of the logarithm, and of 1 for a failure. Some machines
are noisy."""
LEAST_PROBABILITY_OF_FEASIBILITY = 0.05
"""What fits the cap with a smaller probability, by its prediction, is not trained."""
LEAST_CHANCE_OF_ITS_LIKE, ENOUGH_OF_ITS_LIKE = 0.005, 30
"""What fits the cap with a smaller probability, by so many of its like, is not even predicted."""
SURE = 0.99
"""What fits with a larger probability, by its like, is trained without a prediction."""
_OUT_OF_COMPETITION = 4.0
"""What is so many times worse than the best does not stretch the scale on which the others are
compared."""
CONVERGED_IMPROVEMENT = 0.001
"""A search has converged once no trial is expected to add a thousandth to the hypervolume."""
_NEARLY_AS_GOOD = 0.95
"""Gains this close to the largest are equal for what is known of them: the seed decides."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    config: TrainingConfig
    relative_gain: float
    """Expected growth of the hypervolume, relative to the hypervolume; infinite while nothing fits.
    """
    surely_fits: bool
    """Whether its like leave no doubt that it fits: a prediction would change nothing."""


@dataclass(frozen=True, kw_only=True)
class _Space:
    """Every legal configuration in its order, and their traits in the same."""

    configs: Sequence[TrainingConfig]
    features: Array

    @cached_property
    def places(self) -> dict[str, int]:
        """By fingerprint."""
        return {config.fingerprint: place for place, config in enumerate(self.configs)}


@dataclass(frozen=True, kw_only=True)
class Candidates:
    configs: Sequence[TrainingConfig]
    features: Array


class Ranking:
    """Chooses among the configurations of a space that is bound to a workload and a device."""

    def __init__(self, legal: LegalSpace, *, cap_bytes: int) -> None:
        self._legal = legal
        self._cap_bytes = cap_bytes
        self._neighbours: dict[str, list[int]] = {}

    @cached_property
    def _all(self) -> _Space:
        configs = list(dict.fromkeys(self._legal.configurations()))
        return _Space(configs=configs, features=features_of(configs))

    def choose(
        self,
        records: Sequence[TrialRecord],
        forecasts: Iterable[Forecast],
        *,
        excluded: Collection[TrainingConfig],
        seed: int,
    ) -> Choice | None:
        """The most promising configuration that is not `excluded`; None when none is left that may fit and gain."""
        draw = random.Random(seed)
        beyond = {config.fingerprint for config in excluded}
        left = [
            place for fingerprint, place in self._all.places.items() if fingerprint not in beyond
        ]
        forecasts = list(forecasts)
        on_front = front_of(records)
        near = [place for record in on_front for place in self._one_change_away(record.config)]
        fingerprints = {self._all.configs[place].fingerprint for place in near}
        training_subset = TrainingSubset(
            near=frozenset(fingerprints.union(record.config.fingerprint for record in on_front))
        )
        knowledge = Knowledge(
            records,
            forecasts,
            cap_bytes=self._cap_bytes,
            points=[*map(_point, on_front)],
            training_subset=training_subset,
        )
        best, looked_at = None, 0
        for places in self._batches(left, near, forecasts, draw=draw):
            choice = _best_of(self._candidates(places), knowledge, draw=draw)
            best = max(
                filter(None, (best, choice)), key=lambda one: one.relative_gain, default=None
            )
            looked_at += len(places)
            is_enough = len(records) > MANY_TRIALS and looked_at >= MOST_LOOKED_AT
            if best is not None and (is_enough or best.relative_gain >= CONVERGED_IMPROVEMENT):
                return best
        return best

    def _batches(
        self,
        left: list[int],
        near: Iterable[int],
        forecasts: Sequence[Forecast],
        *,
        draw: random.Random,
    ) -> Iterator[list[int]]:
        """All of a small space at once.

        Of a large one first what is known best, with a sample; then the others.
        """
        if len(left) <= MOST_CANDIDATES:
            yield left
            return
        among = set(left)
        predicted = (
            self._all.places.get(forecast.config.fingerprint, -1) for forecast in forecasts
        )
        known = [place for place in predicted if place in among]
        draw.shuffle(left)
        first = [
            *known[-MOST_CANDIDATES:],
            *(place for place in near if place in among),
            *left[:MOST_CANDIDATES],
        ]
        yield list(dict.fromkeys(first))
        for start in range(MOST_CANDIDATES, len(left), MOST_CANDIDATES):
            yield left[start : start + MOST_CANDIDATES]

    def _candidates(self, places: Sequence[int]) -> Candidates:
        return Candidates(
            configs=[self._all.configs[place] for place in places],
            features=self._all.features[places],
        )

    def _one_change_away(self, config: TrainingConfig) -> list[int]:
        """Places of the legal ones."""
        if config.fingerprint not in self._neighbours:
            changed = (
                replace(config, **{f: value})
                for f, values in self._legal.values.items()
                for value in values
            )
            places = (
                self._all.places.get(other.fingerprint) for other in changed if other != config
            )
            self._neighbours[config.fingerprint] = [place for place in places if place is not None]
        return self._neighbours[config.fingerprint]


def front_of(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Without any tolerance; in the order of their memory."""
    feasible = [record for record in records if record.feasible]
    memory = numpy.array([float(record.peak_memory_bytes or 0) for record in feasible])
    speed = numpy.array([record.tokens_per_second or 0.0 for record in feasible])
    perplexity = numpy.array([record.perplexity or math.inf for record in feasible])
    return [feasible[place] for place in places_not_dominated(memory, speed, perplexity)]


def _best_of(
    candidates: Candidates, knowledge: "Knowledge", *, draw: random.Random
) -> Choice | None:
    """By expected gain; among near-equals the seed decides."""
    gains = knowledge.gains(candidates) if candidates.configs else numpy.zeros(0)
    if not (gains > 0).any():
        return None
    chosen = int(draw.choice(list(numpy.flatnonzero(gains >= _NEARLY_AS_GOOD * gains.max()))))
    config = candidates.configs[chosen]
    return Choice(
        config=config,
        relative_gain=knowledge.relative(float(gains.max())),
        surely_fits=knowledge.probability_of_feasibility(config) > SURE,
    )


class Knowledge:
    """What the trials and predictions of a study say of any configuration."""

    def __init__(
        self,
        records: Sequence[TrialRecord],
        forecasts: Sequence[Forecast],
        *,
        cap_bytes: int,
        points: Sequence[Point],
        training_subset: TrainingSubset,
    ) -> None:
        self._records = records
        self.points = points
        """The front, without any tolerance."""
        self._training_subset = training_subset
        self._memory = MemoryModel(
            records, forecasts, cap_bytes=cap_bytes, training_subset=training_subset
        )
        self._timed = [
            r for r in records if r.tokens_per_second and math.isfinite(r.tokens_per_second)
        ]
        self._perplexities = _perplexity_of_classes(records)

    def gains(self, candidates: Candidates) -> Array:
        """Expected growth of the hypervolume by each candidate, [candidate]."""
        memory = self._memory.of(candidates.configs, features=candidates.features)
        like = LEAST_CHANCE_OF_ITS_LIKE if self._memory.seen >= ENOUGH_OF_ITS_LIKE else 0.0
        least = numpy.where(memory.is_predicted, LEAST_PROBABILITY_OF_FEASIBILITY, like)
        fits = numpy.where(
            memory.probability_of_feasibility < least,
            0.0,
            memory.probability_of_feasibility * self._works(candidates),
        )
        if not self._timed or not self._perplexities:
            return (
                fits / memory.if_it_fits
            )  # nothing is known of speed: what surely fits comes first
        speed = self._speed.of(candidates.features)
        mean = numpy.exp(speed.mean + speed.deviation**2 / 2)
        gains = expected_hypervolume_improvement(
            self.points,
            reference=self.reference,
            memory=memory.if_it_fits,
            perplexity=numpy.array([self._perplexity(config) for config in candidates.configs]),
            speed_mean=mean,
            speed_deviation=mean * numpy.sqrt(numpy.expm1(speed.deviation**2)),
        )
        return fits * gains

    def probability_of_feasibility(self, config: TrainingConfig) -> float:
        """That it fits."""
        return float(self._memory.of([config]).probability_of_feasibility[0])

    def relative(self, gain: float) -> float:
        return gain / self._volume if self._volume > 0 else math.inf

    @cached_property
    def _volume(self) -> float:
        return hypervolume(self.points, reference=self.reference) if self.points else 0.0

    @cached_property
    def reference(self) -> Point:
        """The largest peak that fits, and a little worse than the worst speed and perplexity that still compete."""
        speeds = [record.tokens_per_second or 0.0 for record in self._timed]
        perplexities = self._perplexities.values()
        return Point(
            memory=self._memory.room_bytes,
            speed=0.9 * max(min(speeds), max(speeds) / _OUT_OF_COMPETITION),
            perplexity=1.05 * min(max(perplexities), min(perplexities) * _OUT_OF_COMPETITION),
        )

    @cached_property
    def _speed(self) -> Surrogate:
        """Of the logarithm of tokens per second."""
        return self._fitted(
            self._timed, [math.log(r.tokens_per_second or 1.0) for r in self._timed], _SPEED_NOISES
        )

    def _works(self, candidates: Candidates) -> Array:
        """Probability that a candidate trains at all, judged by its like that crashed or computed something else."""
        if self._failure is None:
            return numpy.ones(len(candidates.configs))
        return numpy.asarray(
            1.0 - numpy.clip(self._failure.mean_of(candidates.features), 0.0, 0.99)
        )

    @cached_property
    def _failure(self) -> Surrogate | None:
        """Of 1 for a failure and 0 else; None where nothing has failed."""
        failed = [
            float(r.outcome in ("crashed", "timeout", "diverged", "parity_failed"))
            for r in self._records
        ]
        return self._fitted(self._records, failed, (_FAILURE_NOISE,)) if any(failed) else None

    def _fitted(
        self, records: Sequence[TrialRecord], values: Sequence[float], noises: Sequence[float]
    ) -> Surrogate:
        places = self._training_subset.places([record.config for record in records])
        seen = features_of([records[place].config for place in places])
        return Surrogate(seen, [values[place] for place in places], noises=noises)

    def _perplexity(self, config: TrainingConfig) -> float:
        """Of its numerics class, else of a class of the same precision and optimizer, else the best that was seen."""
        known = self._perplexities
        if config.numerics_class in known:
            return known[config.numerics_class]
        alike = [value for name, value in known.items() if name[:2] == config.numerics_class[:2]]
        return min(alike or known.values())


def _point(record: TrialRecord) -> Point:
    return Point(
        memory=float(record.peak_memory_bytes or 0),
        speed=record.tokens_per_second or 0.0,
        perplexity=record.perplexity or math.inf,
    )


def _perplexity_of_classes(records: Iterable[TrialRecord]) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for record in records:
        if record.perplexity is not None and math.isfinite(record.perplexity):
            found.setdefault(record.config.numerics_class, record.perplexity)
    return found
