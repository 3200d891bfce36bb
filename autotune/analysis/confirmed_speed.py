"""Speeds that hold between runs: estimated from trials, repeats and measurements in turn.

On a machine that does other work, too, the same training has another speed each time it is run. Two
kinds of noise are told apart, both relative standard deviations between runs: that of a training
that is measured alone, as a trial is, and that of a ratio of two speeds measured in turn, which is
smaller since both are disturbed alike. With log speeds

    y   = log(speed of the configuration / speed of the partner), one for each run in turn
    a   = log(speed of the partner), one for each run in which it was measured, alone or in turn;
          alone only, where being in turn clearly slows it down

the speed of a configuration is exp(mean(a) + mean(y)). Both noises are pooled standard deviations
over all configurations, together with a prior worth a few measurements, as few repeats say little:

    variance = (PRIOR_WEIGHT * prior^2 + sum of squares) / (PRIOR_WEIGHT + degrees of freedom)

which is the scale of the posterior under a scaled inverse chi-squared prior (Gelman et al.,
Bayesian Data Analysis, section 2.6). The standard error of a speed has a part of each noise, e and
f with m and n degrees of freedom; intervals take Student's t with those of their sum (Welch, 1947):

    (e^2 + f^2)^2 / (e^4 / m + f^4 / n)

What disturbs a machine for minutes moves the speeds of a run in turn all alike, so they compare
with each other, but not with the speed of a trial that was measured alone at another time. So a
comparison has one scale (`on_one_scale`): confirmed speeds where both trials were confirmed, and
otherwise those of the two trials themselves.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import Confirmation, PairedSpeed, RepeatedSpeed
from autotune.spec.result import SpeedAlone, TrialRecord

PRIOR_NOISE_ALONE = 0.08
"""Noise of a speed that was measured alone, before there are repeats: a little less than on the
shared machines on which `studies/search_efficiency` was recorded, 9.4 %."""
PRIOR_SHARE_IN_TURN = 0.4
"""Noise of a ratio measured in turn, before there are repeats, as a share of the noise alone.

With noise alone of 8.2 to 18.8 % it was 1.1 to 3.4 % (`studies/confirmation`), with noise alone of
9.4 %, in runs of 8 steps each, 4.0 to 5.3 % (`studies/search_efficiency`).
"""
PRIOR_WEIGHT = 3.0
"""How many measurements the priors are worth."""
SLOWER_DEVIATIONS = 3.0
"""A partner whose speeds in turn and alone differ by so many standard deviations is slowed down by
being in turn. By chance that is rare enough to leave the intervals as they are."""
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class SpeedNoise:
    """Relative standard deviations of a speed between runs."""

    alone: float
    alone_repeats: int
    """Number of measurements alone behind `alone`; below 2 it is the prior."""
    alone_degrees_of_freedom: float
    """Including the weight of the prior."""
    in_turn: float
    in_turn_degrees_of_freedom: float
    """Including the weight of the prior."""

    @property
    def was_measured(self) -> bool:
        """Whether there were repeats, not only priors."""
        return self.alone_repeats > 1


@dataclass(frozen=True, kw_only=True)
class ConfirmedSpeed:
    """The speed of a configuration from all of its measurements."""

    tokens_per_second: float
    interval: tuple[float, float]
    """Tokens per second that hold the true speed with a probability of `CONFIDENCE`."""
    relative_error: float
    """Standard error of its ratio to the partner's speed, for comparisons within the study; where
    it has no partner, of the speed."""
    confirmations: int
    """Number of measurements in turn; 0: it was only repeated alone."""


def speed_noise(
    records: Iterable[TrialRecord], confirmations: Sequence[Confirmation]
) -> SpeedNoise:
    """Returns the noise of a study's speeds."""
    levels = _levels(records, confirmations).values()
    # Apart from each other, as being in turn may slow a training down by itself.
    groups = [group for level in levels for group in (level.alone, level.in_turn)]
    alone_squares, alone_degrees = _pooled(groups)
    alone = math.sqrt(
        (PRIOR_WEIGHT * PRIOR_NOISE_ALONE**2 + alone_squares) / (PRIOR_WEIGHT + alone_degrees)
    )
    ratios: dict[tuple[TrainingConfig, TrainingConfig], list[float]] = defaultdict(list)
    for config, measured in _ratios_by_config(confirmations).items():
        for partner, ratio in measured:
            ratios[config, partner].append(ratio)
    squares, degrees = _pooled(ratios.values())
    prior = PRIOR_SHARE_IN_TURN * alone
    in_turn = math.sqrt((PRIOR_WEIGHT * prior**2 + squares) / (PRIOR_WEIGHT + degrees))
    return SpeedNoise(
        alone=alone,
        alone_repeats=max((len(group) for group in groups), default=0),
        alone_degrees_of_freedom=PRIOR_WEIGHT + alone_degrees,
        in_turn=in_turn,
        in_turn_degrees_of_freedom=PRIOR_WEIGHT + degrees,
    )


def confirmed_speeds(
    records: Sequence[TrialRecord], confirmations: Sequence[Confirmation]
) -> dict[TrainingConfig, ConfirmedSpeed]:
    """Returns the speed of every configuration that was measured again, in turn or alone."""
    noise = speed_noise(records, confirmations)
    level_of = {}
    level_error_of = {}
    for partner, level in _levels(records, confirmations).items():
        values = level.believed(noise.alone)
        level_of[partner] = statistics.fmean(values)
        level_error_of[partner] = noise.alone / math.sqrt(len(values))
    found = {}
    for config, measured in _ratios_by_config(confirmations).items():
        log_speed = statistics.fmean(level_of[partner] + ratio for partner, ratio in measured)
        error = noise.in_turn / math.sqrt(len(measured))
        level_error = statistics.fmean(level_error_of[partner] for partner, _ in measured)
        found[config] = ConfirmedSpeed(
            tokens_per_second=math.exp(log_speed),
            interval=_interval(log_speed, noise, error=error, level_error=level_error),
            relative_error=error,
            confirmations=len(measured),
        )
    partner_speeds = _partner_speeds(confirmations)
    for config, log_speed in level_of.items():
        if config in found:
            continue
        level_error = level_error_of[config]
        error = level_error
        if config in partner_speeds:
            error = 0.0  # its ratio to itself is 1
        found[config] = ConfirmedSpeed(
            tokens_per_second=math.exp(log_speed),
            interval=_interval(log_speed, noise, error=0.0, level_error=level_error),
            relative_error=error,
            confirmations=len(partner_speeds.get(config, ())),
        )
    return found


def with_confirmed_speeds(
    records: Sequence[TrialRecord], confirmations: Sequence[Confirmation]
) -> list[TrialRecord]:
    """Returns the records with confirmed speeds in place of those that were measured once.

    What was measured once has the noise of one measurement as its error, where that is known.
    """
    noise = speed_noise(records, confirmations)
    confirmed = confirmed_speeds(records, confirmations)
    result = []
    for record in records:
        speed = confirmed.get(record.config)
        if record.tokens_per_second is None:
            result.append(record)
        elif speed is not None:
            alone = SpeedAlone(
                tokens_per_second=record.tokens_per_second,
                spread=record.tokens_per_second_spread,
                error=noise.alone,
            )
            result.append(
                replace(
                    record,
                    alone=alone if speed.confirmations else None,
                    tokens_per_second=speed.tokens_per_second,
                    tokens_per_second_spread=(speed.interval[1] - speed.interval[0]) / 2,
                    tokens_per_second_interval=speed.interval,
                    speed_error=speed.relative_error,
                    confirmations=speed.confirmations,
                )
            )
        elif noise.was_measured:
            result.append(replace(record, speed_error=noise.alone))
        else:
            result.append(record)
    return result


def on_one_scale(*records: TrialRecord) -> tuple[TrialRecord, ...]:
    """Returns the records with speeds that compare with each other.

    That is as they are if all or none of them were confirmed in turn; otherwise a confirmed one
    gets the speed of its trial, which trained alone as the others did.
    """
    if all(record.confirmations for record in records):
        return records
    return tuple(measured_alone(record) for record in records)


def measured_alone(record: TrialRecord) -> TrialRecord:
    """Returns the record with the speed of its trial, also if it was confirmed in turn."""
    alone = record.alone
    if alone is None:
        return record
    return replace(
        record,
        tokens_per_second=alone.tokens_per_second,
        tokens_per_second_spread=alone.spread,
        tokens_per_second_interval=None,
        speed_error=alone.error,
        alone=None,
        confirmations=0,
    )


def _ratios_by_config(
    confirmations: Iterable[Confirmation],
) -> dict[TrainingConfig, list[tuple[TrainingConfig, float]]]:
    """Returns (partner, log ratio) of every measurement in turn, by configuration."""
    found = defaultdict(list)
    for one in confirmations:
        if isinstance(one, PairedSpeed) and one.speed_ratio is not None:
            found[one.config].append((one.partner, math.log(one.speed_ratio)))
    return found


def _interval(
    log_speed: float, noise: SpeedNoise, *, error: float, level_error: float
) -> tuple[float, float]:
    """Returns the interval of a speed in tokens per second, given the two parts of its error."""
    error_squared = error**2
    level_squared = level_error**2
    degrees_of_freedom = (error_squared + level_squared) ** 2 / (
        error_squared**2 / noise.in_turn_degrees_of_freedom
        + level_squared**2 / noise.alone_degrees_of_freedom
    )
    half = student_t(degrees_of_freedom) * math.sqrt(error_squared + level_squared)
    return math.exp(log_speed - half), math.exp(log_speed + half)


def _partner_speeds(confirmations: Iterable[Confirmation]) -> dict[TrainingConfig, list[float]]:
    """Returns the speeds of every partner in tokens per second, one for each run in turn.

    The configurations of one run are compared with one and the same measurement of the partner: a
    speed that is stored once for each of three configurations was measured once.
    """
    by_speed: dict[tuple[TrainingConfig, float], Counter[TrainingConfig]] = defaultdict(Counter)
    for one in confirmations:
        if isinstance(one, PairedSpeed) and one.partner_tokens_per_second is not None:
            by_speed[one.partner, one.partner_tokens_per_second][one.config] += 1
    found: dict[TrainingConfig, list[float]] = defaultdict(list)
    for (partner, speed), times in by_speed.items():
        found[partner] += [speed] * max(times.values())
    return found


@dataclass(frozen=True, kw_only=True)
class _Level:
    """Log speeds of a configuration by itself, not as a ratio."""

    alone: list[float] = field(default_factory=list)
    """Of its trial and its repeats."""
    in_turn: list[float] = field(default_factory=list)
    """Of the runs in turn of which it was the partner."""

    def believed(self, noise: float) -> list[float]:
        """Returns all of them, or only those alone where being in turn slows the training down.

        That is so where steps are short: each turn begins with caches that another training filled.
        It shows in a difference of more than SLOWER_DEVIATIONS of its standard deviations.
        """
        if not self.alone or not self.in_turn:
            return [*self.alone, *self.in_turn]
        difference = statistics.fmean(self.alone) - statistics.fmean(self.in_turn)
        error = noise * math.sqrt(1 / len(self.alone) + 1 / len(self.in_turn))
        if abs(difference) > SLOWER_DEVIATIONS * error:
            return self.alone
        return [*self.alone, *self.in_turn]


def _levels(
    records: Iterable[TrialRecord], confirmations: Iterable[Confirmation]
) -> dict[TrainingConfig, _Level]:
    """Returns the log speeds of every configuration that was repeated or was a partner."""
    found: dict[TrainingConfig, _Level] = defaultdict(_Level)
    for one in confirmations:
        if isinstance(one, RepeatedSpeed) and one.tokens_per_second is not None:
            found[one.config].alone.append(math.log(one.tokens_per_second))
    for partner, speeds in _partner_speeds(confirmations).items():
        found[partner].in_turn.extend(math.log(speed) for speed in speeds)
    for record in records:
        is_comparable = record.reused_from is None and record.outcome in ("ok", "over_cap")
        if record.config in found and record.tokens_per_second is not None and is_comparable:
            found[record.config].alone.append(math.log(record.tokens_per_second))
    return found


def _pooled(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Returns the sum of squares around the groups' means, and its degrees of freedom."""
    squares = 0.0
    degrees = 0
    for values in groups:
        if len(values) > 1:
            squares += statistics.variance(values) * (len(values) - 1)
            degrees += len(values) - 1
    return squares, degrees


def student_t(degrees_of_freedom: float, *, confidence: float = CONFIDENCE) -> float:
    """Returns the two-sided quantile of Student's t distribution.

    By the first terms of its expansion in the normal quantile z (Abramowitz and Stegun, 26.7.5),

        z + (z^3 + z) / 4v + (5 z^5 + 16 z^3 + 3 z) / 96 v^2
          + (3 z^7 + 19 z^5 + 17 z^3 - 15 z) / 384 v^3,

    right within 1 % from 3 degrees of freedom on.
    """
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    v = degrees_of_freedom
    first = (z**3 + z) / (4 * v)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    return z + first + second + third
