"""Finds, for each trial of one study, a trial of another study that is worse on no objective.

The match is another configuration if there is one. Otherwise it is the same configuration, if that
is on the other study's front: then nothing found there is better.

A trial that the other study has measured, too, is compared as it ran there. For the rest, speeds of
two runs are comparable only through configurations that both have measured: the median of their
speed ratios is how much faster one run was as a whole, for example under another load.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from autotune.analysis.confirmed_speed import on_one_scale
from autotune.analysis.front import TrialIndex
from autotune.analysis.tolerance import Tolerance
from autotune.errors import InvalidInput
from autotune.spec.result import StudyResult, TrialRecord


@dataclass(frozen=True, kw_only=True)
class Match:
    """A trial of the first study and its match in the other."""

    trial: TrialRecord
    """A trial with all objectives measured, over the cap or not."""
    found: TrialRecord | None
    """The fastest matching trial of another configuration, else that of the same configuration."""
    speed: float | None
    """Speed of `found` over that of `trial`, in one run or corrected to one."""

    @property
    def found_itself(self) -> bool:
        """Whether the match is of the same configuration."""
        return self.found is not None and self.found.config == self.trial.config

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "trial": self.trial.number,
            "name": self.trial.name,
            "found": None if self.found is None else self.found.number,
            "found_itself": self.found_itself,
            "speed": self.speed,
        }


def find_matches(
    first: StudyResult, other: StudyResult, *, tolerance: Tolerance
) -> tuple[Match, ...]:
    """Returns one match for each measured trial of `first`, in its order.

    Raises InvalidInput if the studies trained different workloads or have no measured configuration
    in common.
    """
    if first.workload.fingerprint != other.workload.fingerprint:
        raise InvalidInput(
            f"the trials of {first.study!r} and {other.study!r} cannot be compared: "
            "their workloads differ",
            hint="leave --no-worse out to see in what, or search again with the same workload",
        )
    factor = speed_factor(first, other)
    search = _Search(other, factor=factor, tolerance=tolerance)
    return tuple(search.match(trial) for trial in first.trials if _is_known(trial))


def speed_factor(first: StudyResult, other: StudyResult) -> float:
    """Returns how many times faster the run of `other` was.

    It is the median ratio of speeds over the configurations that both have measured. Raises
    InvalidInput if there is none.
    """
    others = {trial.config: trial for trial in other.trials}
    ratios = []
    for trial in first.trials:
        if trial.config not in others:
            continue
        ours, theirs = on_one_scale(trial, others[trial.config])
        if ours.tokens_per_second and theirs.tokens_per_second:
            ratios.append(theirs.tokens_per_second / ours.tokens_per_second)
    if not ratios:
        raise InvalidInput(
            f"the speeds of {first.study!r} and {other.study!r} cannot be compared: no "
            "configuration was measured in both",
            hint="leave --no-worse out, or let both begin with the same configurations: a space "
            "can extend another",
        )
    return statistics.median(ratios)


class _Search:
    """Finds matches in the other study."""

    def __init__(self, other: StudyResult, *, factor: float, tolerance: Tolerance) -> None:
        self._factor = factor
        self._tolerance = tolerance
        self._index = TrialIndex(other.trials)
        self._by_config = {
            trial.config: trial for trial in reversed(other.trials) if trial.feasible
        }
        self._front = frozenset(other.front)

    def match(self, trial: TrialRecord) -> Match:
        compared = self._by_config.get(trial.config)
        factor = 1.0
        if compared is None:
            compared = trial
            factor = self._factor
        best: TrialRecord | None = None
        for candidate in self._index.no_worse(
            compared, tolerance=self._tolerance, speed_factor=factor
        ):
            if candidate.config != trial.config:
                best = candidate
                break
            if best is None and candidate.number in self._front:
                best = candidate
        if best is None:
            return Match(trial=trial, found=None, speed=None)
        fast, slow = on_one_scale(best, compared)
        speed = (fast.tokens_per_second or 0.0) / factor / (slow.tokens_per_second or 1.0)
        return Match(trial=trial, found=best, speed=speed)


def _is_known(trial: TrialRecord) -> bool:
    return None not in (trial.peak_memory_bytes, trial.tokens_per_second, trial.perplexity)
