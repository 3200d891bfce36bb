"""Picks the configuration with the largest expected hypervolume improvement (EHVI).

    score = P(fits the cap) * P(trains without a failure) * EHVI

Memory is known before training, from its prediction; perplexity belongs to a numerics class and is
measured once. What is not predicted yet is estimated from similar configurations (`surrogate.py`),
so that only promising configurations are ever predicted; speed is estimated in the same way. EHVI
then has a closed form (`ehvi.py`). The time that a trial takes is not part of the score: over a
recorded table (`studies/search_efficiency/`) EHVI per second found the front later than EHVI.

Whether a configuration fits is learned from its prediction, which costs a fraction of a trial. So
one that would bring much if it fitted is worth a look even where that is not likely. Weitzman,
"Optimal search for the best alternative", Econometrica 1979, gives each unopened box a reservation
value z, with which the box of the largest value is opened: cost = P * (EHVI - z), here

    z = EHVI - PREDICTION_COST * (largest score) / P(fits the cap)

A prediction may fail and say nothing, and then the next one probably does, too: after n failures in
a row it costs n + 1 times as much. Where none succeeds, the best by its score is trained.
"""

import itertools
import math
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy
from numpy.typing import NDArray

from autotune.analysis.expected_step import ExpectedStep
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast
from autotune.spec.result import TrialRecord
from autotune.spec.search_space import LegalSpace
from autotune.study.sampler.ehvi import (
    Point,
    expected_hypervolume_improvement,
    hypervolume,
    indices_not_dominated,
    normal_cdf,
    normal_density,
    not_dominated,
)
from autotune.study.sampler.features import Array, Candidates, features_of
from autotune.study.sampler.memory_model import MemoryModel
from autotune.study.sampler.surrogate import MOST_SEEN, Posterior, PosteriorOneByOne, Surrogate
from autotune.study.sampler.training_subset import TrainingSubset
from autotune.study.sampler.trial_seconds import TrialSeconds

MOST_CANDIDATES = 1000
"""How many configurations of a larger space are drawn for each choice, in addition to the
neighbours of the front."""

MANY_TRIALS, MOST_LOOKED_AT = 1000, 3000
"""After `MANY_TRIALS` trials, with those in flight, at most about `MOST_LOOKED_AT` configurations
of a larger space are scored for one choice: a search that has converged would otherwise score all
of it each time. So many are drawn for each choice from a space that is too large to be listed."""

_SPEED_NOISES, _FAILURE_NOISE = (0.02, 0.05, 0.12), 0.1
"""Standard deviations of the measurements: of the logarithm of speed (to choose from, because some
machines are noisy), and of the failure indicator, which is 0 or 1."""
LEAST_PROBABILITY_OF_FEASIBILITY = 0.5
"""Below this probability of feasibility, by its prediction, a configuration is not trained: it is
more likely over the cap than not."""
PREDICTION_COST = 0.3
"""What a prediction costs of a trial: 2 to 4 seconds of 8 to 15 in the recorded tables."""
LEAST_PROBABILITY_TO_PREDICT, ENOUGH_KNOWN_PEAKS = 0.005, 30
"""Below this probability of feasibility a configuration is skipped without a prediction, once so
many peaks are known to estimate it from."""
_LEAST_PROBABILITY = 1e-12
"""Below this no improvement is worth a prediction."""
OPTIMISM = 1.0
"""So many standard deviations above the mean a speed in flight is believed to be."""
VALUE_WHILE_COMPILING = 0.3
"""What a configuration is worth while a trial in flight compiles the same code, relative to later:
it would compile that code again, and a trial whose code is compiled already takes 0.3 to 0.5 of
the time (the quartiles in a recorded table)."""
SURE = 0.99
"""Above this probability of feasibility a configuration is trained without a prediction."""
FIRST_FOR_PICK, EVERY_FOR_PICK = 12, 4
"""Every so many trials the fastest configuration is looked for instead of the front: it is what
will be picked."""
COMPILING_DWARFS = 6.0
"""Where a compiled trial takes so many times as long as an eager one, what counts is the
improvement per second. Over the recorded CPU tables, where it does not, that found the front later.
"""
_OUT_OF_COMPETITION = 4.0
"""Speeds and perplexities this many times worse than the best do not move the reference point."""
CONVERGED_IMPROVEMENT = 0.001
"""A search has converged once no trial is expected to add a thousandth to the hypervolume."""
_NEARLY_AS_GOOD = 0.95
"""Scores of at least this share of the largest count as equal, and the seed decides."""

MOST_BELIEVED = MOST_SEEN
"""How many configurations in flight, the latest, take part in the fit of speed at most. All of them
count for the front."""
_SHORTLIST, _SCORED_ANEW = 256, 32
"""How many candidates further suggestions of one fit are taken from, and how many of them are
scored at a time."""
_RISE_THAT_COUNTS = 0.01
"""Of the logarithm of an expected speed: a hundredth of the speed."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The configuration to try next."""

    config: TrainingConfig
    relative_improvement: float
    """The largest score of any configuration, relative to the hypervolume so far; infinite while no
    trial fits."""
    surely_fits: bool
    """Whether it fits with a probability above `SURE`, so that a prediction would change nothing.
    """


@dataclass(frozen=True, kw_only=True)
class _Space:
    """The legal configurations to choose from, and their features in the same order."""

    all: Candidates

    @classmethod
    def of(cls, configs: Iterable[TrainingConfig], *, expected: ExpectedStep | None) -> "_Space":
        return cls(all=Candidates.of(list(dict.fromkeys(configs)), expected=expected))

    @property
    def configs(self) -> Sequence[TrainingConfig]:
        return self.all.configs

    @cached_property
    def indices(self) -> dict[str, int]:
        """Indices of the configurations by fingerprint."""
        return {config.fingerprint: index for index, config in enumerate(self.configs)}


class EhviSampler:
    """Picks the next configuration of a space that is bound to a workload and a device."""

    def __init__(self, legal: LegalSpace, *, cap_bytes: int) -> None:
        self._legal = legal
        self._cap_bytes = cap_bytes
        self._neighbours: dict[str, list[TrainingConfig]] = {}
        self._expected: ExpectedStep | None = None

    def expect(self, expected: ExpectedStep) -> None:
        """Let what a step is expected to take be the mean of speed and memory."""
        self._expected = expected
        self.__dict__.pop("_all", None)

    @cached_property
    def _all(self) -> _Space:
        return _Space.of(self._legal.configurations(), expected=self._expected)

    def _space(
        self, near: Iterable[TrainingConfig], forecasts: Sequence[Forecast], *, rng: random.Random
    ) -> _Space:
        """Returns the whole space; of one too large to be listed, some drawn for this choice."""
        if self._legal.is_listed:
            return self._all
        latest = [forecast.config for forecast in forecasts[-MOST_CANDIDATES:]]
        predicted = [config for config in latest if config in self._legal]
        drawn = itertools.islice(self._legal.shuffled(rng.getrandbits(64)), MOST_LOOKED_AT)
        return _Space.of([*predicted, *near, *drawn], expected=self._expected)

    def choose(
        self,
        records: Sequence[TrialRecord],
        forecasts: Iterable[Forecast],
        *,
        excluded: Collection[TrainingConfig],
        seed: int,
        predicts: bool = True,
        in_flight: Sequence[TrainingConfig] = (),
    ) -> Choice | None:
        """Returns the first of the `suggestions`, or None."""
        suggestions = self.suggestions(
            records,
            forecasts,
            excluded=excluded,
            seed=seed,
            predicts=predicts,
            in_flight=in_flight,
        )
        return next(suggestions, None)

    def suggestions(
        self,
        records: Sequence[TrialRecord],
        forecasts: Iterable[Forecast],
        *,
        excluded: Collection[TrainingConfig],
        seed: int,
        predicts: bool = True,
        in_flight: Sequence[TrainingConfig] = (),
    ) -> Iterator[Choice]:
        """Yield the configurations to try next, none twice and none that is `excluded`.

        `predicts`: the study predicts the memory of what is chosen before it is trained.

        `in_flight` are configurations that run at this moment. Each suggestion counts as in flight
        for those after it, which cost little: the models are fitted once. Ends where no
        configuration that may fit has an expected improvement.
        """
        forecasts = list(forecasts)
        rng = random.Random(seed)
        suggested: list[TrainingConfig] = []
        while True:
            found = self._find(
                records,
                forecasts,
                excluded=[*excluded, *suggested],
                rng=rng,
                predicts=predicts,
                in_flight=[*in_flight, *suggested],
            )
            if found is None:
                return
            choice, scored = found
            yield choice
            suggested.append(choice.config)
            shortlist = Shortlist(scored, with_=choice.config)
            shortlist.begin(choice.config)
            while (following := shortlist.best()) is not None:
                # Whether the search has converged is said by the first one, for which more of the
                # space was scored.
                yield replace(following, relative_improvement=choice.relative_improvement)
                suggested.append(following.config)
                shortlist.begin(following.config)

    def _find(
        self,
        records: Sequence[TrialRecord],
        forecasts: Sequence[Forecast],
        *,
        excluded: Collection[TrainingConfig],
        rng: random.Random,
        predicts: bool,
        in_flight: Sequence[TrainingConfig],
    ) -> "tuple[Choice, Scored] | None":
        """Returns the configuration to try next, and the candidates that it was chosen from."""
        on_front = front_of(records)
        near: list[TrainingConfig] = []
        for record in on_front:
            near.extend(self._one_change_away(record.config))
        near_fingerprints = {config.fingerprint for config in near}
        near_fingerprints.update(record.config.fingerprint for record in on_front)
        space = self._space(near, forecasts, rng=rng)
        excluded_fingerprints = {config.fingerprint for config in excluded}
        remaining = [
            index
            for fingerprint, index in space.indices.items()
            if fingerprint not in excluded_fingerprints
        ]
        knowledge = Knowledge(
            records,
            forecasts,
            cap_bytes=self._cap_bytes,
            predicts=predicts,
            points=[_point(record) for record in on_front],
            training_subset=TrainingSubset(near=frozenset(near_fingerprints)),
            in_flight=in_flight,
            expected=self._expected,
        )
        best: Choice | None = None
        trials = len(records) + len(in_flight)
        scored = Scored(knowledge=knowledge)
        for indices in _batches(space, remaining, near, forecasts, rng=rng):
            if not indices:
                continue
            assessed = knowledge.assess(space.all.at(indices))
            scores = knowledge.scores(assessed)
            choice = _best_of(assessed.candidates, scores, knowledge, rng=rng)
            if best is None or (choice and choice.relative_improvement > best.relative_improvement):
                best = choice
            scored.add(assessed, scores)
            is_enough = trials > MANY_TRIALS and scored.count >= MOST_LOOKED_AT
            if best is not None and (
                is_enough or best.relative_improvement >= CONVERGED_IMPROVEMENT
            ):
                break
        return None if best is None else (best, scored)

    def _one_change_away(self, config: TrainingConfig) -> list[TrainingConfig]:
        """Returns the legal configurations that differ in one technique."""
        if config.fingerprint not in self._neighbours:
            changed = [
                replace(config, **{field: value})
                for field, values in self._legal.values.items()
                for value in values
            ]
            self._neighbours[config.fingerprint] = [
                other for other in changed if other != config and other in self._legal
            ]
        return self._neighbours[config.fingerprint]


def _batches(
    space: _Space,
    remaining: list[int],
    near: Iterable[TrainingConfig],
    forecasts: Iterable[Forecast],
    *,
    rng: random.Random,
) -> Iterator[list[int]]:
    """Yield batches of indices to score: a small space in one batch.

    The first batch of a large space has the predicted configurations, the neighbours of the front
    and a random sample; the rest follows in random order.
    """
    if len(remaining) <= MOST_CANDIDATES:
        yield remaining
        return
    remaining_set = set(remaining)

    def left(configs: Iterable[TrainingConfig]) -> list[int]:
        indices = [space.indices.get(config.fingerprint, -1) for config in configs]
        return [index for index in indices if index in remaining_set]

    rng.shuffle(remaining)
    first = [
        *left(forecast.config for forecast in forecasts)[-MOST_CANDIDATES:],
        *left(near),
        *remaining[:MOST_CANDIDATES],
    ]
    yield list(dict.fromkeys(first))
    seen = {*first}
    for start in range(MOST_CANDIDATES, len(remaining), MOST_CANDIDATES):
        following = remaining[start : start + MOST_CANDIDATES]
        yield [index for index in following if index not in seen]


def front_of(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Returns the Pareto front without any tolerance, in the order of memory."""
    feasible = [record for record in records if record.feasible]
    memory = numpy.array([float(record.peak_memory_bytes or 0) for record in feasible])
    speed = numpy.array([record.tokens_per_second or 0.0 for record in feasible])
    perplexity = numpy.array([record.perplexity or math.inf for record in feasible])
    return [feasible[index] for index in indices_not_dominated(memory, speed, perplexity)]


def _best_of(
    candidates: Candidates, scores: "Scores", knowledge: "Knowledge", *, rng: random.Random
) -> Choice | None:
    """Returns the candidate with the largest score; among nearly equal ones the seed decides."""
    if not (scores.expected > 0).any():
        return None
    values = scores.reservation_values
    nearly_best = numpy.flatnonzero(values >= _NEARLY_AS_GOOD * values.max())
    config = candidates.configs[int(rng.choice(list(nearly_best)))]
    return Choice(
        config=config,
        relative_improvement=knowledge.relative(float(scores.expected.max())),
        surely_fits=knowledge.probability_of_feasibility(config) > SURE,
    )


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How good the candidates are to try next, each [candidate]."""

    expected: Array
    """P(fits the cap) * P(no failure) * EHVI."""
    reservation_values: Array
    """The same, but for what is not predicted yet: at which expected score of the others it would
    not be worth a prediction. The top of the module has the formula."""


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """What the models say of candidates, except for their speed, each [candidate]."""

    candidates: Candidates
    peak: Array
    """Expected peak in bytes, provided that it fits."""
    fits: Array
    """Probability that it fits the cap."""
    no_failure: Array
    """Probability that it neither crashes nor fails the parity check."""
    probability: Array
    """The product of both; 0 where it is too unlikely to fit."""
    perplexity: Array
    would_be_predicted: NDArray[numpy.bool_]

    def at(self, indices: Sequence[int]) -> "Assessment":
        arrays = {
            name: values[indices] for name, values in vars(self).items() if name != "candidates"
        }
        return Assessment(candidates=self.candidates.at(indices), **arrays)

    @classmethod
    def joined(cls, parts: Sequence["Assessment"]) -> "Assessment":
        if len(parts) == 1:
            return parts[0]
        arrays = {
            name: numpy.concatenate([getattr(part, name) for part in parts])
            for name in vars(parts[0])
            if name != "candidates"
        }
        return cls(candidates=Candidates.joined([part.candidates for part in parts]), **arrays)


@dataclass(kw_only=True)
class Scored:
    """All that was scored for one choice, in batches."""

    knowledge: "Knowledge"
    batches: list[tuple[Assessment, Scores]] = field(default_factory=list)
    count: int = 0

    def add(self, assessed: Assessment, scores: Scores) -> None:
        self.batches.append((assessed, scores))
        self.count += len(assessed.candidates.configs)


class Knowledge:
    """Models of memory, speed, failures and perplexity, fitted to a study's trials."""

    def __init__(
        self,
        records: Sequence[TrialRecord],
        forecasts: Sequence[Forecast],
        *,
        cap_bytes: int,
        points: Sequence[Point],
        training_subset: TrainingSubset,
        predicts: bool,
        in_flight: Sequence[TrainingConfig] = (),
        expected: ExpectedStep | None = None,
    ) -> None:
        self._records = records
        self._expected = expected
        self._predicts = predicts
        self._being_compiled: set[tuple[Any, ...] | None] = {
            config.compiled_class for config in in_flight
        } - {None}
        self._looked_at = {forecast.config.fingerprint for forecast in forecasts}
        """What has a prediction, or could not be predicted."""
        last_failed = itertools.takewhile(lambda one: one.prediction is None, reversed(forecasts))
        self._prediction_cost = PREDICTION_COST * (1 + len(list(last_failed)))
        self.points = points
        """The Pareto front, without any tolerance."""
        self._training_subset = training_subset
        self._memory = MemoryModel(
            records,
            forecasts,
            cap_bytes=cap_bytes,
            training_subset=training_subset,
            expected=expected,
        )
        self._timed = [
            r for r in records if r.tokens_per_second and math.isfinite(r.tokens_per_second)
        ]
        self._perplexities = _perplexity_of_classes(records)
        self._points_expected: Sequence[Point] = points
        """The front, with what the configurations in flight are expected to measure."""
        if in_flight and self.has_speeds:
            self._believe(in_flight)

    def _believe(self, in_flight: Sequence[TrainingConfig]) -> None:
        """Let expected results stand in for those of configurations in flight.

        This is the kriging believer of Ginsbourger, Le Riche and Carraro, "Kriging is well-suited
        to parallelize optimization", 2010: a value counts as measured, so that the next choice
        gains nothing from repeating what is on its way. They believe the mean of the posterior.
        Here it is the mean and `OPTIMISM` standard deviations: a technique that nothing has
        measured yet, as compiling is while the first trials run, has a mean like any other, and
        believing it would turn the next choices to what is known to be ordinary. Where much is
        known the two hardly differ. `studies/many_devices` compares them.
        """
        memory = self._memory.estimate(self._candidates(in_flight))
        # What is only looked at and unlikely to fit will hardly be measured.
        fits = memory.probability_of_feasibility
        likely = [index for index in range(len(in_flight)) if fits[index] > 0.5]
        if not likely:
            return
        configs = [in_flight[index] for index in likely]
        features = self._candidates(configs).for_speed
        posterior = self._speed.predict(features)
        logarithms = posterior.mean + OPTIMISM * posterior.deviation
        expected = [
            Point(
                memory=float(memory.if_it_fits[index]),
                speed=math.exp(logarithm),
                perplexity=self._perplexity(config),
            )
            for index, logarithm, config in zip(likely, logarithms, configs, strict=True)
        ]
        self._points_expected = not_dominated([*self._points_expected, *expected])
        self._speed = self._speed.believing(features[-MOST_BELIEVED:], logarithms[-MOST_BELIEVED:])
        for config in configs:
            self._perplexities.setdefault(config.numerics_class, self._perplexity(config))

    def expect(self, config: TrainingConfig, point: Point) -> None:
        """Let another configuration be in flight, with its expected result on the front."""
        self._points_expected = not_dominated([*self._points_expected, point])
        if config.compiled_class is not None:
            self._being_compiled.add(config.compiled_class)

    @property
    def has_speeds(self) -> bool:
        """Whether there is a speed and a perplexity to expect others by."""
        return bool(self._timed and self._perplexities)

    def assess(self, candidates: Candidates) -> "Assessment":
        """Returns what a score needs of the candidates, except for their speed."""
        memory = self._memory.estimate(candidates)
        least_to_predict = 0.0
        if self._memory.seen >= ENOUGH_KNOWN_PEAKS:
            least_to_predict = LEAST_PROBABILITY_TO_PREDICT
        least = numpy.where(memory.is_predicted, LEAST_PROBABILITY_OF_FEASIBILITY, least_to_predict)
        fits = memory.probability_of_feasibility
        may_fit = fits >= least
        no_failure = self._probability_of_no_failure(candidates)
        perplexity = numpy.ones(len(candidates.configs))
        if self.has_speeds:
            perplexity = numpy.array([self._perplexity(config) for config in candidates.configs])
        is_new = [config.fingerprint not in self._looked_at for config in candidates.configs]
        return Assessment(
            candidates=candidates,
            peak=memory.if_it_fits,
            fits=fits,
            no_failure=no_failure,
            probability=numpy.where(may_fit, fits * no_failure, 0.0),
            perplexity=perplexity,
            would_be_predicted=may_fit & (fits <= SURE) & numpy.array(is_new, dtype=bool),
        )

    def speeds_one_by_one(self, candidates: Candidates) -> PosteriorOneByOne:
        """Returns the posterior of the logarithms of speed, to believe one after the other."""
        return self._speed.one_by_one(candidates.for_speed)

    def scores(
        self, assessed: Assessment, speed: Posterior | None = None, *, largest: float | None = None
    ) -> Scores:
        """Score candidates. Without any measured speed both scores are

            P(fits the cap) * P(no failure) / peak,

        which prefers what surely fits. `speed` is the posterior of the logarithms of their speeds,
        if the caller has it. `largest` is the largest expected score that a prediction is compared
        with; None: of these candidates.
        """
        if not self.has_speeds:
            expected = assessed.probability / assessed.peak
            return Scores(expected=expected, reservation_values=expected)
        if speed is None:
            speed = self._speed.predict(assessed.candidates.for_speed)
        # The logarithm of speed is normally distributed. EHVI takes the mean and the standard
        # deviation of the log-normal distribution of speed:
        # exp(m + s^2 / 2) and mean * sqrt(exp(s^2) - 1).
        mean = numpy.exp(speed.mean + speed.deviation**2 / 2)
        improvements = expected_hypervolume_improvement(
            self._points_expected,
            reference=self.reference,
            memory=assessed.peak,
            perplexity=assessed.perplexity,
            speed_mean=mean,
            speed_deviation=mean * numpy.sqrt(numpy.expm1(speed.deviation**2)),
        )
        costs = self._relative_costs(assessed.candidates)
        count = len(self._timed)
        if costs.max() > 1 and count >= FIRST_FOR_PICK and count % EVERY_FOR_PICK == 0:
            improvements = self._expected_gain(speed)
        improvements = improvements * self._share_of_value_now(assessed.candidates)
        expected = assessed.probability * improvements
        if not self._predicts:
            return Scores(expected=expected, reservation_values=expected / costs)
        improvements = improvements / costs
        if largest is None:
            largest = float((expected / costs).max())
        cost = self._prediction_cost * largest / numpy.maximum(assessed.fits, _LEAST_PROBABILITY)
        if_predicted = numpy.maximum(0.0, assessed.no_failure * improvements - cost)
        return Scores(
            expected=expected,
            reservation_values=numpy.where(
                assessed.would_be_predicted, if_predicted, expected / costs
            ),
        )

    def _expected_gain(self, speed: Posterior) -> Array:
        """Returns the expected improvement of the logarithm of the largest speed, [candidate].

        Jones, Schonlau and Welch, "Efficient global optimization of expensive black-box functions",
        1998, equation 15.
        """
        best = max(self._logarithms_of_speeds)
        z = (speed.mean - best) / numpy.maximum(speed.deviation, 1e-9)
        return speed.deviation * (z * normal_cdf(z) + normal_density(z))

    def _relative_costs(self, candidates: Candidates) -> Array:
        """Returns how many times as long as an eager trial each takes, [candidate].

        They count as equal where compiling does not dwarf the rest of a trial.
        """
        seconds = self._seconds
        costs = numpy.array([seconds.of(config) for config in candidates.configs])
        costs = costs / seconds.without_compiling
        return costs if costs.max() > COMPILING_DWARFS else numpy.ones(len(costs))

    @cached_property
    def _seconds(self) -> TrialSeconds:
        device_type = "cpu" if self._expected is None else self._expected.device.type
        return TrialSeconds(self._records, device_type=device_type)

    def _share_of_value_now(self, candidates: Candidates) -> Array:
        """Returns what each candidate is worth at this moment, relative to later, [candidate]."""
        if not self._being_compiled:
            return numpy.ones(len(candidates.configs))
        is_compiling = [
            config.compiled_class in self._being_compiled for config in candidates.configs
        ]
        return numpy.where(is_compiling, VALUE_WHILE_COMPILING, 1.0)

    def probability_of_feasibility(self, config: TrainingConfig) -> float:
        """Returns the probability that the configuration fits the cap."""
        return float(
            self._memory.estimate(self._candidates([config])).probability_of_feasibility[0]
        )

    def relative(self, score: float) -> float:
        """Returns a score relative to the hypervolume of the front; infinite without a front."""
        return score / self._volume if self._volume > 0 else math.inf

    @cached_property
    def _volume(self) -> float:
        return hypervolume(self.points, reference=self.reference) if self.points else 0.0

    @cached_property
    def reference(self) -> Point:
        """The reference point of the hypervolume.

        Its memory is the largest peak that fits. Its speed and perplexity are a little worse than
        the worst measured, or than `_OUT_OF_COMPETITION` times worse than the best.
        """
        speeds = [record.tokens_per_second or 0.0 for record in self._timed]
        perplexities = self._perplexities.values()
        return Point(
            memory=self._memory.room_bytes,
            speed=0.9 * max(min(speeds), max(speeds) / _OUT_OF_COMPETITION),
            perplexity=1.05 * min(max(perplexities), min(perplexities) * _OUT_OF_COMPETITION),
        )

    @cached_property
    def _speed(self) -> Surrogate:
        """A model of the logarithm of tokens per second."""
        configs = [record.config for record in self._timed]
        indices = self._training_subset.indices(configs)
        values = self._logarithms_of_speeds
        x_train = self._candidates([configs[index] for index in indices]).for_speed
        return Surrogate(x_train, [values[index] for index in indices], noises=_SPEED_NOISES)

    @property
    def _logarithms_of_speeds(self) -> list[float]:
        return [math.log(record.tokens_per_second or 1.0) for record in self._timed]

    def _probability_of_no_failure(self, candidates: Candidates) -> Array:
        """Returns the probability that a candidate neither crashes nor fails the parity check.

        It is estimated from the failures of similar configurations.
        """
        if self._failure is None:
            return numpy.ones(len(candidates.configs))
        failure = self._failure.predict_mean(candidates.features)
        return numpy.asarray(1.0 - numpy.clip(failure, 0.0, 0.99))

    @cached_property
    def _failure(self) -> Surrogate | None:
        """A model of the failure indicator, 1 for a failure and 0 else; None without failures."""
        failed = [float(record.failed) for record in self._records]
        if not any(failed):
            return None
        configs = [record.config for record in self._records]
        indices = self._training_subset.indices(configs)
        x_train = features_of([configs[index] for index in indices])
        return Surrogate(x_train, [failed[index] for index in indices], noises=(_FAILURE_NOISE,))

    def _candidates(self, configs: Sequence[TrainingConfig]) -> Candidates:
        return Candidates.of(configs, expected=self._expected)

    def _perplexity(self, config: TrainingConfig) -> float:
        """Returns the perplexity of its numerics class, or the best guess where that is not known.

        The guess is the best of the classes with the same precision and optimizer, or of all.
        """
        known = self._perplexities
        if config.numerics_class in known:
            return known[config.numerics_class]
        similar = [value for name, value in known.items() if name[:2] == config.numerics_class[:2]]
        return min(similar) if similar else min(known.values())


class Shortlist:
    """The best candidates of a choice, from which further ones begin without another fit.

    What has begun stands in with its expected result, as in `Knowledge._believe`. That lowers
    nearly all scores of the others, so that an earlier score bounds the present one from above: the
    first few are scored anew, until one of them is above the bounds of all others (Minoux,
    "Accelerated greedy algorithms for maximizing submodular set functions", 1978). What is expected
    to be faster since, for `OPTIMISM`, is scored anew at once.
    """

    def __init__(self, scored: Scored, *, with_: TrainingConfig) -> None:
        """Take the best of `scored`, and of them also the configuration `with_`."""
        self._knowledge = scored.knowledge
        values = numpy.concatenate([scores.reservation_values for _, scores in scored.batches])
        expected = numpy.concatenate([scores.expected for _, scores in scored.batches])
        assessed = Assessment.joined([assessed for assessed, _ in scored.batches])
        best = numpy.argsort(-values, kind="stable")[:_SHORTLIST].tolist()
        best = [*dict.fromkeys([assessed.candidates.configs.index(with_), *best])]
        self._assessed = assessed.at(best)
        self._indices = {
            config: index for index, config in enumerate(self._assessed.candidates.configs)
        }
        self._speed: PosteriorOneByOne | None = None
        if self._knowledge.has_speeds:
            self._speed = self._knowledge.speeds_one_by_one(self._assessed.candidates)
        self._expected = expected[best]
        self._bounds = values[best]
        """Scores, each as of when it was computed last; -inf for what has begun."""
        self._largest = float(expected.max())

    def begin(self, config: TrainingConfig) -> None:
        """Let the expected result of a candidate stand in for it."""
        index = self._indices[config]
        self._bounds[index] = -math.inf
        self._expected[index] = 0.0
        # As in `Knowledge._believe`: what is only looked at will hardly be measured.
        if self._speed is None or self._assessed.fits[index] <= 0.5:
            return
        posterior = self._speed.at([index])
        above_mean = OPTIMISM * float(posterior.deviation[0])
        self._knowledge.expect(
            config,
            Point(
                memory=float(self._assessed.peak[index]),
                speed=math.exp(float(posterior.mean[0]) + above_mean),
                perplexity=float(self._assessed.perplexity[index]),
            ),
        )
        rises = self._speed.believe(index, above_mean=above_mean)
        risen = numpy.flatnonzero(rises > _RISE_THAT_COUNTS).tolist()
        self._score_anew(risen)

    def best(self) -> Choice | None:
        """Returns the candidate with the largest score; None where none has an improvement."""
        scored_anew: set[int] = set()
        while True:
            first = numpy.argsort(-self._bounds, kind="stable")[:_SCORED_ANEW].tolist()
            if self._speed is None or first[0] in scored_anew:
                break
            self._score_anew([index for index in first if index not in scored_anew])
            scored_anew.update(first)
        best = first[0]
        if self._bounds[best] <= 0:
            return None
        return Choice(
            config=self._assessed.candidates.configs[best],
            relative_improvement=self._knowledge.relative(float(self._expected[first].max())),
            surely_fits=bool(self._assessed.fits[best] > SURE),
        )

    def _score_anew(self, indices: Sequence[int]) -> None:
        indices = [index for index in indices if self._bounds[index] > 0]
        if self._speed is None or not indices:
            return
        scores = self._knowledge.scores(
            self._assessed.at(indices), self._speed.at(indices), largest=self._largest
        )
        self._bounds[indices] = scores.reservation_values
        self._expected[indices] = scores.expected


def _point(record: TrialRecord) -> Point:
    return Point(
        memory=float(record.peak_memory_bytes or 0),
        speed=record.tokens_per_second or 0.0,
        perplexity=record.perplexity or math.inf,
    )


def _perplexity_of_classes(records: Iterable[TrialRecord]) -> dict[tuple[str, ...], float]:
    """Returns the first finite perplexity of each numerics class."""
    perplexities: dict[tuple[str, ...], float] = {}
    for record in records:
        if record.perplexity is not None and math.isfinite(record.perplexity):
            perplexities.setdefault(record.config.numerics_class, record.perplexity)
    return perplexities
