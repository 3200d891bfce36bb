"""For every trial of one study, a trial of another of the same workload that is worse on no objective.

Another configuration, where there is one; else the trial's own where it is on the other study's
front: nothing that was found beats it, and it was found.

A trial that the other study has measured too is held against the others as it ran there. For the
rest, speeds of two runs compare only by configurations that both have measured: the median of their
ratios says how much faster one run was as a whole, be it for another load of the machine.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from autotune.analysis.front import Tolerance, TrialIndex
from autotune.errors import InvalidInput
from autotune.spec.result import StudyResult, TrialRecord


@dataclass(frozen=True, kw_only=True)
class Match:
    trial: TrialRecord
    """Of the first study, with all its objectives measured, over that study's cap or not."""
    found: TrialRecord | None
    """The fastest of the other study's feasible trials of another configuration, else its own on
    the front."""
    speed: float | None
    """Speed of what was found over the trial's, both in one run or as in one."""

    @property
    def found_itself(self) -> bool:
        """Whether what was found is the same configuration."""
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
    """One match a measured trial of `first`, in its order.

    Raises InvalidInput where the two trained different workloads, or have no measured configuration
    in common.
    """
    if first.workload.fingerprint != other.workload.fingerprint:
        raise InvalidInput(
            f"the trials of {first.study!r} and {other.study!r} cannot be held against each other: "
            "their workloads differ",
            hint="leave --no-worse out to see in what, or search again with the same workload",
        )
    factor = speed_factor(first, other)
    search = _Search(other, factor=factor, tolerance=tolerance)
    return tuple(search.match(trial) for trial in first.trials if _is_known(trial))


def speed_factor(first: StudyResult, other: StudyResult) -> float:
    """How many times faster the run of `other` was: the median over what both have measured.

    Raises InvalidInput.
    """
    others = {trial.config: trial.tokens_per_second for trial in other.trials}
    ratios = [
        theirs / ours.tokens_per_second
        for ours in first.trials
        if ours.tokens_per_second and (theirs := others.get(ours.config))
    ]
    if not ratios:
        raise InvalidInput(
            f"speeds of {first.study!r} and {other.study!r} do not compare: both have measured no configuration",
            hint="leave --no-worse out, or let both begin with the same configurations: a space can extend another",
        )
    return statistics.median(ratios)


class _Search:
    """The other study, to be asked for each trial."""

    def __init__(self, other: StudyResult, *, factor: float, tolerance: Tolerance) -> None:
        self._factor, self._tolerance = factor, tolerance
        self._pruning_bounds = TrialIndex(other.trials)
        self._there = {one.config: one for one in reversed(other.trials) if one.feasible}
        self._front = frozenset(other.front)

    def match(self, trial: TrialRecord) -> Match:
        there = self._there.get(trial.config)
        compared, factor = (trial, self._factor) if there is None else (there, 1.0)
        best: TrialRecord | None = None
        for one in self._pruning_bounds.no_worse(
            compared, tolerance=self._tolerance, speed_factor=factor
        ):
            if one.config != trial.config:
                best = one
                break
            best = best or (one if one.number in self._front else None)
        speed = (
            None
            if best is None
            else (best.tokens_per_second or 0.0) / factor / (compared.tokens_per_second or 1.0)
        )
        return Match(trial=trial, found=best, speed=speed)


def _is_known(trial: TrialRecord) -> bool:
    return None not in (trial.peak_memory_bytes, trial.tokens_per_second, trial.perplexity)
