"""For every trial of one study, a trial of another of the same workload that is worse on no objective.

Another configuration, where there is one; else the trial's own where it is on the other study's front: nothing that
was found beats it, and it was found.

Speeds of two runs compare only as ratios to a configuration that both have measured: the baseline.
"""

from dataclasses import dataclass
from typing import Any

from autotune.errors import InvalidInput
from autotune.recommendation.front import Tolerance, no_worse
from autotune.result import StudyResult, TrialRecord


@dataclass(frozen=True, kw_only=True)
class Match:
    trial: TrialRecord
    """Of the first study, with all its objectives measured, over that study's cap or not."""
    speed: float
    """Tokens a second over the baseline's of its study."""
    found: TrialRecord | None
    """The fastest of the other study's feasible trials of another configuration, else its own on the front."""
    found_speed: float | None

    @property
    def found_itself(self) -> bool:
        """Whether what was found is the same configuration."""
        return self.found is not None and self.found.config == self.trial.config

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "trial": self.trial.number,
            "name": self.trial.name,
            "speed": self.speed,
            "found": None if self.found is None else self.found.number,
            "found_itself": self.found_itself,
            "found_speed": self.found_speed,
        }


def find_matches(first: StudyResult, other: StudyResult, *, tolerance: Tolerance) -> tuple[Match, ...]:
    """One match a measured trial of `first`, in its order.

    Raises InvalidInput where the two trained different workloads, one has no measured baseline, or the two baselines
    are different configurations.
    """
    if first.workload.fingerprint != other.workload.fingerprint:
        raise InvalidInput(
            f"the trials of {first.study!r} and {other.study!r} cannot be held against each other: "
            "their workloads differ",
            hint="leave --no-worse out to see in what, or search again with the same workload",
        )
    own_baseline, others_baseline = _baseline_speed(first), _baseline_speed(other)
    _check_same_baseline(first, other)
    found = []
    for trial in first.trials:
        if trial.peak_memory_bytes is None or trial.tokens_per_second is None or trial.perplexity is None:
            continue
        fitting = no_worse(trial, other.trials, tolerance=tolerance, speed_factor=others_baseline / own_baseline)
        others = [one for one in fitting if one.config != trial.config]
        best = next(iter(others or [one for one in fitting if one.number in other.front]), None)
        found.append(
            Match(
                trial=trial,
                speed=trial.tokens_per_second / own_baseline,
                found=best,
                found_speed=None if best is None else (best.tokens_per_second or 0.0) / others_baseline,
            )
        )
    return tuple(found)


def _baseline_speed(result: StudyResult) -> float:
    speed = None if result.baseline is None else result.trial(result.baseline).tokens_per_second
    if not speed:
        raise InvalidInput(
            f"study {result.study!r} has no measured baseline, and speeds of two runs compare only beside one",
            hint="leave --no-worse out, or measure both on a device that can hold the baseline",
        )
    return speed


def _check_same_baseline(first: StudyResult, other: StudyResult) -> None:
    """Both have one: the fp32 training with the first optimizer of their search space, which may differ."""
    configs = [result.trial(result.baseline).config for result in (first, other) if result.baseline is not None]
    if configs[0] != configs[1]:
        raise InvalidInput(
            f"speeds of {first.study!r} and {other.study!r} do not compare: the baseline of the one is "
            f"{configs[0].describe()}, of the other {configs[1].describe()}",
            hint="leave --no-worse out, or search both spaces with the same optimizer first",
        )
