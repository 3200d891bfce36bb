"""What is measured beside the trials: speeds in turn, repeats of the baseline, more seeds.

A speed that was measured once may have been lucky, and the fastest of many trials is the luckiest.
So a study keeps further measurements beside its trials. They are not trials: numbers and `--trials`
do not count them. `analysis/confirmed_speed.py` makes speeds with intervals of them. With
pretrained weights, the perplexity before any training is one of these measurements, too.
"""

import dataclasses
import itertools
import math
import statistics
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from autotune.spec.config import TrainingConfig
from autotune.spec.limits import Count, Perplexity, Ratio, Seconds, Seed, Speed
from autotune.spec.result import Measurement, Outcome
from autotune.spec.schema import Schema

Schedule = Literal["in turn", "in blocks"]
"""How the trainings of a run in turn share the device: `in turn`, all are there at once and step
one after the other, or `in blocks`, one is there at a time, and short trainings alternate."""


@dataclass(frozen=True, kw_only=True)
class TimedBlock(Schema):
    """Consecutive steps of one training, while the others of the run stood still."""

    seconds: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class TurnResult(Schema):
    """What one training of a run in turn measured."""

    config: TrainingConfig
    outcome: Outcome
    """`ok`, or why it has no speed."""
    message: str = ""
    blocks: tuple[TimedBlock, ...] = ()
    """In the order of the rounds: block i of all trainings of a run were timed next to each
    other."""


@dataclass(frozen=True, kw_only=True)
class PairedSpeed(Schema):
    """The speed of a configuration and that of a partner, measured in turn in one run."""

    kind: ClassVar[str] = "paired_speed"
    config: TrainingConfig
    partner: TrainingConfig
    schedule: Schedule
    rounds: Count
    """Number of blocks of each."""
    speed_ratio: Ratio | None
    """The speed of the configuration divided by that of the partner; None if either failed."""
    partner_tokens_per_second: Speed | None
    """Median over the blocks, as for a trial over its steps."""
    failure: str = ""
    """Why there is no speed; empty where there is one."""
    seconds: Seconds
    """Wall-clock time of the run, as a share of a run of several configurations."""


@dataclass(frozen=True, kw_only=True)
class RepeatedSpeed(Schema):
    """The speed of a configuration that was trained again, alone, as a trial is."""

    kind: ClassVar[str] = "repeated_speed"
    config: TrainingConfig
    tokens_per_second: Speed | None
    failure: str = ""
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class SeedPerplexity(Schema):
    """The perplexity of a configuration that was trained to the end with another seed."""

    kind: ClassVar[str] = "seed_perplexity"
    config: TrainingConfig
    seed: Seed
    perplexity: Perplexity | None
    failure: str = ""
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class VariantMeasurement(Schema):
    """The pick without one of its techniques, where no trial has measured that configuration."""

    kind: ClassVar[str] = "variant"
    config: TrainingConfig
    measurement: Measurement
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class InitialPerplexity(Schema):
    """The perplexity of the pretrained weights on the held-out text, before any training."""

    kind: ClassVar[str] = "initial_perplexity"
    config: TrainingConfig
    """Whose precision the weights were evaluated in, with its micro batch."""
    perplexity: Perplexity | None
    failure: str = ""
    seconds: Seconds


Confirmation: TypeAlias = (
    PairedSpeed | RepeatedSpeed | SeedPerplexity | VariantMeasurement | InitialPerplexity
)

CONFIRMATION_KINDS: Mapping[str, type[Confirmation]] = {
    kind.kind: kind
    for kind in (
        PairedSpeed,
        RepeatedSpeed,
        SeedPerplexity,
        VariantMeasurement,
        InitialPerplexity,
    )
}


def new_confirmation_id() -> str:
    """Returns an id by which a store recognizes a confirmation that it was given before."""
    return uuid.uuid4().hex


def confirmation_to_dict(confirmation: Confirmation) -> dict[str, Any]:
    """Returns the fields and the kind, for JSON."""
    return {"kind": confirmation.kind, **dataclasses.asdict(confirmation)}


def initial_perplexity_of(confirmations: Iterable[Confirmation]) -> InitialPerplexity | None:
    """Returns the measurement before any training; where there are several, one with a perplexity.

    There may be several where one has failed, or where two processes began a study together.
    """
    found = [one for one in confirmations if isinstance(one, InitialPerplexity)]
    measured = (one for one in found if one.perplexity is not None)
    return next(measured, found[-1] if found else None)


def paired_speeds(
    results: Sequence[TurnResult], *, schedule: Schedule, seconds: float
) -> list[PairedSpeed]:
    """Returns the speed of every training of a run relative to the first one, their partner.

    The blocks of one round were timed next to each other, so that the same disturbance met them.
    The ratio is the Hodges-Lehmann estimate (1963) of the ratio of a round: the exponential of the
    median, over all pairs of rounds, of the mean of their two log ratios. It varied less between
    runs than the median, the mean and ratios of medians did (`studies/confirmation`).
    """
    partner, *others = results
    paired = []
    for result in others:
        failed = next((one for one in (partner, result) if not _has_speed(one)), None)
        ratio = None
        partner_speed = None
        failure = ""
        if failed is None:
            ratio = _hodges_lehmann_ratio(_speeds(result), _speeds(partner))
            partner_speed = statistics.median(_speeds(partner))
        elif failed.message:
            failure = f"{failed.outcome}: {failed.message}"
        else:
            failure = failed.outcome
        paired.append(
            PairedSpeed(
                config=result.config,
                partner=partner.config,
                schedule=schedule,
                rounds=len(result.blocks),
                speed_ratio=ratio,
                partner_tokens_per_second=partner_speed,
                failure=failure,
                seconds=seconds / len(others),
            )
        )
    return paired


def _has_speed(result: TurnResult) -> bool:
    return result.outcome == "ok" and bool(result.blocks)


def _speeds(result: TurnResult) -> list[float]:
    return [block.tokens / block.seconds for block in result.blocks]


def _hodges_lehmann_ratio(speeds: Sequence[float], partner_speeds: Sequence[float]) -> float:
    ratios = [math.log(speed / other) for speed, other in zip(speeds, partner_speeds, strict=True)]
    means = [(one + other) / 2 for one, other in itertools.combinations_with_replacement(ratios, 2)]
    return math.exp(statistics.median(means))
