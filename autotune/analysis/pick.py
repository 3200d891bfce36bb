"""Picks the configuration to recommend, and gives reasons that a person can check."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from autotune.analysis.confirmed_perplexity import rounding_warning
from autotune.analysis.confirmed_speed import measured_alone, on_one_scale
from autotune.analysis.counting_perplexity import best_perplexity, has_good_perplexity
from autotune.analysis.feasibility import least_needed_bytes
from autotune.analysis.tolerance import (
    Tolerance,
    is_same_speed,
    perplexity_spread,
    speed_noise_factor,
)
from autotune.errors import InvalidInput
from autotune.spec.result import Pick, StudyResult, TrialRecord
from autotune.spec.setting import RESULTS, Settings, number, pairs, setting
from autotune.spec.workload import Workload
from autotune.units import format_percent, format_size

if TYPE_CHECKING:
    from autotune.analysis.expected_step import ExpectedStep

Preference = Literal["fastest", "smallest", "balanced"]
PREFERENCES = get_args(Preference)

LARGEST_PERPLEXITY = 1e6
"""That of guessing among a million tokens, more than vocabularies have."""
NOISY_SPREAD = 0.2
"""Relative spread of a trial's speed beyond which the pick comes with a warning."""


_TOLERANCES = pairs(("speed", "perplexity"), example="speed=0.03", metavar="NAME=SHARE")


@dataclass(frozen=True, kw_only=True)
class Preferences(Settings):
    """How the front and the pick are chosen from the records; they may differ at each call."""

    tolerance: Annotated[Tolerance, _TOLERANCES] = setting(
        Tolerance(),
        "Relative differences below this count as equal on the front.",
        group=RESULTS,
        over_http=True,
    )
    prefer: Preference = setting(
        "fastest", "Which trial of the front to pick.", group=RESULTS, over_http=True
    )
    max_perplexity_increase: Annotated[
        float,
        number("a share of the best perplexity, for example 0.01 for 1 %", least=0.0, most=99.0),
    ] = setting(
        0.01,
        "How far the perplexity of the pick may be above the best, as a share.",
        group=RESULTS,
        metavar="SHARE",
        over_http=True,
    )

    def parameters(self) -> dict[str, str | float]:
        """Returns the parameters by which a server is asked for the same front and pick."""
        return {
            "prefer": self.prefer,
            "max_perplexity_increase": self.max_perplexity_increase,
            "speed_tolerance": self.tolerance.speed,
            "perplexity_tolerance": self.tolerance.perplexity,
        }


def check_preferences(preferences: object) -> None:
    """Raise InvalidInput for anything but Preferences, such as the name of one."""
    if not isinstance(preferences, Preferences):
        wanted = preferences if preferences in PREFERENCES else "smallest"
        raise InvalidInput(
            f"preferences = {preferences!r} are no preferences",
            hint=f"write preferences=autotune.Preferences(prefer={wanted!r})",
        )
    tolerance: object = preferences.tolerance
    if not isinstance(tolerance, Tolerance):
        raise InvalidInput(
            f"tolerance = {tolerance!r} is no tolerance",
            hint="write tolerance=autotune.Tolerance(speed=0.1)",
        )


DEFAULT_PREFERENCES = Preferences()


def choose(
    records: Sequence[TrialRecord],
    front: Sequence[int],
    *,
    baseline: TrialRecord | None,
    preferences: Preferences,
    workload: Workload | None = None,
    initial_perplexity: float | None = None,
    expected: "ExpectedStep | None" = None,
) -> Pick | None:
    """Returns the preferred trial of the front with a good perplexity; None for an empty front.

    A perplexity is good within `max_perplexity_increase` of the front's best, or within the
    measured spread of perplexity if that is larger. `workload`, whose learning rates the reason
    names, `initial_perplexity`, that before any training, and what is `expected` of a baseline that
    is not measured only change what the reason says.
    """
    candidates = [record for record in records if record.number in front]
    if not candidates:
        return None
    allowed = allowed_perplexity_increase(records, preferences)
    best = best_perplexity(candidates)
    good = [
        record for record in candidates if has_good_perplexity(record, best=best, allowed=allowed)
    ]
    picked = _preferred(good, preferences.prefer)
    descriptions = {
        "fastest": "the fastest",
        "smallest": "the smallest",
        "balanced": "the best balance of speed and memory",
    }
    criterion = f"{descriptions[preferences.prefer]} on the front"
    if best is not None:
        terms = picked.terms
        criterion += (
            f" whose {terms.quality} is within {terms.share(allowed)} of the best, "
            f"{terms.value(best):.4g}"
        )
    doubts = [
        _parity_warning(picked),
        _no_better_warning(picked, workload=workload, initial_perplexity=initial_perplexity),
        _noise_warning(picked, baseline),
        _loss_warning(picked),
    ]
    warnings = [_says_nothing_warning(candidates)]
    if preferences.prefer != "smallest":
        numbers = contenders(picked, candidates, preferences=preferences)
        warnings.append(rounding_warning(records, contenders=numbers))
    return Pick(
        number=picked.number,
        criterion=criterion,
        learning_rates=_learning_rates(records, workload=workload),
        comparison=savings(picked, baseline) or _expected_savings(picked, expected),
        warning="; ".join(filter(None, warnings)),
        doubt="; ".join(filter(None, doubts)),
    )


def _preferred(good: Sequence[TrialRecord], prefer: Preference) -> TrialRecord:
    """Returns the trial of the lowest cost, by speeds of one scale.

    That is the best of the confirmed ones, where there are any, unless another trial is better than
    all of them by more than noise. For that the trials are compared as they ran alone.
    """
    cost = _COST[prefer]

    def best_of(records: Sequence[TrialRecord]) -> TrialRecord:
        return min(records, key=lambda record: (cost(record, records), record.number))

    confirmed = [record for record in good if record.confirmations]
    if prefer == "smallest" or not confirmed:
        return best_of(good)
    best_alone = best_of([measured_alone(record) for record in good])
    if best_alone.number in (record.number for record in confirmed):
        return best_of(confirmed)
    rival = best_of([measured_alone(record) for record in confirmed])
    both = (best_alone, rival)
    if cost(best_alone, both) * speed_noise_factor(best_alone, rival) < cost(rival, both):
        return next(record for record in good if record.number == best_alone.number)
    return best_of(confirmed)


def contenders(
    picked: TrialRecord, front: Sequence[TrialRecord], *, preferences: Preferences
) -> list[int]:
    """Returns the numbers of the trials that would be picked if their perplexity were good.

    That is the pick, and whatever is better than it by what is preferred, or may be better within
    NOISE_DEVIATIONS standard deviations of the difference of their speeds.
    """
    cost = _COST[preferences.prefer]
    found = []
    for record in front:
        both = on_one_scale(record, picked)
        if cost(both[0], both) <= cost(both[1], both) * speed_noise_factor(*both):
            found.append(record.number)
    return found


def allowed_perplexity_increase(records: Sequence[TrialRecord], preferences: Preferences) -> float:
    """Returns by which share of the front's best a perplexity may be larger and still be good."""
    return max(preferences.max_perplexity_increase, perplexity_spread(records))


def is_no_better(record: TrialRecord, initial_perplexity: float | None) -> bool:
    """Returns whether the training has not lowered the perplexity that it began with."""
    if initial_perplexity is None or record.perplexity is None:
        return False
    return record.perplexity >= initial_perplexity


def _no_better_warning(
    picked: TrialRecord, *, workload: Workload | None, initial_perplexity: float | None
) -> str:
    """Returns a warning if the pick is no better than the weights that its training began with."""
    if workload is None or not is_no_better(picked, initial_perplexity):
        return ""
    optimizer = picked.config.optimizer
    rate = workload.learning_rate_of(optimizer, picked.config.adapter)
    return (
        f"training at a learning rate of {rate:g} ({optimizer}) made it worse: its perplexity was "
        f"{initial_perplexity:.4g} before training"
    )


def _parity_warning(picked: TrialRecord) -> str:
    """Returns a warning if the pick was not compared as a whole with a plain training."""
    if picked.parity == "not compared":
        return f"not compared with plain training: {picked.parity_message}"
    if picked.parity == "same at two blocks":
        return f"compared with plain training {picked.parity_message}"
    return ""


def _loss_warning(picked: TrialRecord) -> str:
    """Returns a warning if the loss is larger than that of a mean over tokens can be."""
    if (picked.perplexity or 0.0) <= LARGEST_PERPLEXITY or picked.perplexity_says_nothing:
        return ""
    if picked.counted == "rows":
        return ""  # which loss it is, only the script knows
    assert picked.perplexity is not None
    return (
        f"its loss of {math.log(picked.perplexity):.4g} nats a token is more than that of guessing "
        "among a million tokens: is it a sum? A perplexity needs the mean over the tokens"
    )


def _says_nothing_warning(candidates: Sequence[TrialRecord]) -> str:
    """Returns a warning if adapters over random weights are among the candidates."""
    if not any(record.perplexity_says_nothing for record in candidates):
        return ""
    return (
        "adapters over random weights were compared in memory and speed only, as their perplexity "
        "says nothing (--pretrained has one that does)"
    )


def _learning_rates(records: Sequence[TrialRecord], *, workload: Workload | None) -> str:
    """Returns the learning rates of all kinds of training that were compared by their perplexity.

    For example `full training at adamw 2e-05, lora at adamw 0.0002`. Another rate may change which
    of them is better. Empty where there is only one kind, and for a script, which has its own.
    """
    if workload is None or workload.script is not None:
        return ""
    rates: dict[str, dict[str, float]] = {}
    for record in records:
        config = record.config
        if record.feasible and not record.perplexity_says_nothing:
            rate = workload.learning_rate_of(config.optimizer, config.adapter)
            rates.setdefault(config.kind_of_training, {})[config.optimizer] = rate
    if len(rates) < 2:
        return ""
    parts = []
    for kind in sorted(rates):
        name = "full training" if kind == "full" else kind
        of_kind = " and ".join(f"{optimizer} {rate:g}" for optimizer, rate in rates[kind].items())
        parts.append(f"{name} at {of_kind}")
    return ", ".join(parts)


def _noise_warning(picked: TrialRecord, baseline: TrialRecord | None) -> str:
    """Returns a warning if the speed of the pick, or of what it is compared with, varied much."""
    varied = []
    for record, whose in ((picked, "its"), (baseline, "the baseline's")):
        if record is None or not record.tokens_per_second:
            continue
        if record.tokens_per_second_interval is not None:
            continue  # the spread is an interval over runs, and says so itself
        spread = (record.tokens_per_second_spread or 0.0) / record.tokens_per_second
        if spread > NOISY_SPREAD:
            varied.append(f"{whose} speed varied by ±{100 * spread:.0f} %")
    if not varied:
        return ""
    return f"{' and '.join(varied)}, so something else was using the device: do not trust speeds"


def savings(record: TrialRecord, baseline: TrialRecord | None) -> str:
    """Returns a comparison with the baseline, empty without one.

    For example `against the baseline: 62 % less memory (...), 1.20x the speed`.
    """
    if baseline is None:
        return ""
    if baseline.number == record.number:
        return "it is the baseline"
    # The predicted peak is that of a baseline that no device could hold.
    baseline_peak = baseline.peak_memory_bytes or baseline.predicted_peak_memory_bytes
    if not baseline_peak:
        return ""
    parts = []
    if record.peak_memory_bytes is not None:
        saved = 1 - record.peak_memory_bytes / baseline_peak
        less = "less" if saved >= 0 else "more"
        source = "" if baseline.peak_memory_bytes else " predicted"
        sizes = f"{format_size(record.peak_memory_bytes)} for {format_size(baseline_peak)}{source}"
        parts.append(f"{format_percent(abs(saved))} % {less} memory ({sizes})")
    if record.tokens_per_second and baseline.tokens_per_second:
        parts.append(_speed_ratio(record, baseline))
    says_nothing = record.perplexity_says_nothing or baseline.perplexity_says_nothing
    if record.perplexity and baseline.perplexity and not says_nothing:
        change = record.terms.change(record.perplexity / baseline.perplexity)
        parts.append(change or f"the same {record.terms.quality}")
    return f"against the baseline: {', '.join(parts)}"


def _expected_savings(record: TrialRecord, expected: "ExpectedStep | None") -> str:
    """Returns a comparison with what is expected of a baseline that is not measured.

    For example `against the baseline, which is only predicted: 62 % less memory (...), about 8
    times the speed`.
    """
    if expected is None or not record.peak_memory_bytes or not record.tokens_per_second:
        return ""
    peak_bytes = expected.plain.peak_memory_bytes
    saved = 1 - record.peak_memory_bytes / peak_bytes
    less = "less" if saved >= 0 else "more"
    sizes = f"{format_size(record.peak_memory_bytes)} for {format_size(peak_bytes)}"
    text = f"{format_percent(abs(saved))} % {less} memory ({sizes})"
    speed = expected.tokens_per_second(expected.plain_config)
    if speed is not None:
        text += f", about {record.tokens_per_second / speed:.2g} times the speed"
    return f"against the baseline, which is only predicted: {text}"


def _speed_ratio(record: TrialRecord, baseline: TrialRecord) -> str:
    """Returns `1.20x the speed`, with the interval where both speeds are known to have one."""
    is_one_confirmed = (record.confirmations > 0) != (baseline.confirmations > 0)
    record, baseline = on_one_scale(record, baseline)
    assert record.tokens_per_second is not None
    assert baseline.tokens_per_second is not None
    ratio = record.tokens_per_second / baseline.tokens_per_second
    text = f"{ratio:.2f}x the speed"
    if is_one_confirmed:
        text += ", each measured alone"
    if is_same_speed(record, baseline):
        if record.confirmations:
            return "the same speed within the measured noise"
        # With much noise, even half the speed is no difference, but not the same either.
        return f"{text} (no difference beyond the noise)"
    if not record.confirmations or baseline.speed_error is None or record.speed_error is None:
        return text
    factor = speed_noise_factor(record, baseline)
    return f"{text} ({ratio / factor:.2f} to {ratio * factor:.2f})"


def closest_miss(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Returns the trial over the cap by least, measured or predicted; None if no size is known."""
    over = [record for record in records if record.is_over_cap]
    known = [record for record in over if least_needed_bytes(record)]
    return min(known, key=least_needed_bytes, default=None)


def _seconds_per_token(record: TrialRecord, _good: Sequence[TrialRecord]) -> float:
    assert record.tokens_per_second is not None
    return 1 / record.tokens_per_second


def _memory(record: TrialRecord, _good: Sequence[TrialRecord]) -> float:
    assert record.peak_memory_bytes is not None
    return record.peak_memory_bytes


def _balance(record: TrialRecord, good: Sequence[TrialRecord]) -> float:
    """Returns (memory / least memory) * (time / least time).

    So 10 % of memory is worth 10 % of time.
    """
    least_memory = min(_memory(other, good) for other in good)
    least_seconds = min(_seconds_per_token(other, good) for other in good)
    return _memory(record, good) / least_memory * (_seconds_per_token(record, good) / least_seconds)


_COST: Mapping[Preference, Callable[[TrialRecord, Sequence[TrialRecord]], float]] = {
    "fastest": _seconds_per_token,
    "smallest": _memory,
    "balanced": _balance,
}


def chosen_trial(result: StudyResult, number: int | None) -> TrialRecord:
    """Returns the trial of that number, or the pick for None. Raises InvalidInput."""
    if number is None:
        if result.pick is None:
            raise InvalidInput(
                f"study {result.study!r} has no feasible trial to pick",
                hint=f"name a trial, see autotune show {result.study}",
            )
        return result.trial(result.pick.number)
    return result.trial(number)
