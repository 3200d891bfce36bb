"""How the trials of a search are run; this may differ from one run of a study to the next."""

from dataclasses import dataclass

from autotune.execution.server.limits import TimeLimits, time_limits


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """The settings of a search that concern its trials, by the names of `SearchRequest`."""

    trial_time_limit_seconds: float
    compile_time_limit_seconds: float | None = None
    step_time_limit_seconds: float | None = None
    """None: a share of `trial_time_limit_seconds` (`execution/server/limits.py`)."""
    full_trainings: bool = False
    """Whether every trial is trained to the end, even if another of its numerics class has been."""
    perplexity_seeds: int = 1
    """How often the representative of a numerics class is trained, each time with other initial
    weights and another order of the data."""
    memory_snapshot: bool = False
    """Whether torch's allocation history of the measured steps is stored; CUDA only."""

    def time_limits(self) -> TimeLimits:
        """Returns the limits of a trial's time. Raises InvalidInput for impossible ones."""
        return time_limits(
            self.trial_time_limit_seconds,
            compile_seconds=self.compile_time_limit_seconds,
            step_seconds=self.step_time_limit_seconds,
        )
