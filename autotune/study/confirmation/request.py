"""What to measure again, and for how long."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences
from autotune.spec.confirmation import (
    Confirmation,
    InitialPerplexity,
    RepeatedSpeed,
    VariantMeasurement,
)
from autotune.spec.setting import (
    EVERYDAY,
    DurationOrNone,
    Settings,
    TrialNumber,
    part,
    same_setting,
    setting,
)
from autotune.study.request import VARIANTS_SHARE, ConfirmShare, SearchRequest

_OVERLAP_OF_DATES = 1.0
"""Seconds by which trials that ran one after the other may seem to overlap: SQLite stores the date
on which one began in whole seconds."""


@dataclass(frozen=True, kw_only=True)
class ConfirmationRequest:
    """A request for a confirmation, after a search or by itself."""

    share: float
    """Largest share of the search's time for the finalists."""
    seconds: float | None = None
    """For how long; None: what the share leaves after earlier confirmations."""
    trial: int | None = None
    """Measure only the trial of this number."""
    at_least_once: bool = False
    """Measure once more however short the time is, also where that was done before."""


@dataclass(frozen=True, kw_only=True)
class ConfirmRequest(Settings):
    """A request to measure the finalists of a study again, or one of its trials."""

    study: str = setting(
        help="Name of a study; see autotune studies.", metavar="STUDY", is_argument=True
    )
    trial: TrialNumber | None = setting(
        None,
        "Measure only this trial. [default: the pick, the front, and what may be as good]",
        group=EVERYDAY,
        metavar="N",
    )
    time_budget: DurationOrNone | None = setting(
        None,
        "Begin no measurement after this time: 5m, or none for no limit. "
        "[default: what --confirm-share leaves]",
        group=EVERYDAY,
    )
    confirm_share: ConfirmShare = same_setting(SearchRequest, "confirm_share")
    ray: str | None = same_setting(SearchRequest, "ray")
    storage: str = same_setting(SearchRequest, "storage")
    preferences: Preferences = part(Preferences, default=DEFAULT_PREFERENCES)

    @property
    def search(self) -> SearchRequest:
        """The search of the study, which tries nothing."""
        return SearchRequest(
            name=self.study,
            storage=self.storage,
            ray=self.ray,
            preferences=self.preferences,
            confirm_share=self.confirm_share,
        )

    @property
    def confirmation(self) -> ConfirmationRequest:
        """What to measure: without a time budget, one trial takes as long as it takes."""
        seconds = self.time_budget
        if seconds is None and self.trial is not None:
            seconds = math.inf
        return ConfirmationRequest(
            share=self.confirm_share, seconds=seconds, trial=self.trial, at_least_once=True
        )


def allowed_seconds(
    seconds_of_trials: float,
    confirmations: Sequence[Confirmation],
    *,
    share: float,
) -> tuple[float, float]:
    """Returns how many seconds are left for the finalists, and for the variants of the pick.

    Each is its share of the whole search, trials and all, less what was spent already:

        share / (1 - share - VARIANTS_SHARE) * seconds of the trials - seconds spent
    """
    whole = seconds_of_search(seconds_of_trials, share=share)
    of_variants = {one.config for one in confirmations if isinstance(one, VariantMeasurement)}
    spent_on_variants = 0.0
    spent_on_finalists = 0.0
    for one in confirmations:
        if isinstance(one, InitialPerplexity):
            continue  # it was measured before the trials
        if one.config in of_variants:
            spent_on_variants += one.seconds
        elif not isinstance(one, RepeatedSpeed):
            spent_on_finalists += one.seconds
    return (
        max(0.0, share * whole - spent_on_finalists),
        max(0.0, VARIANTS_SHARE * whole - spent_on_variants),
    )


def seconds_of_trials(times: Iterable[tuple[float, float]]) -> float:
    """Returns for how many seconds any trial ran; `times` are when each began and its seconds.

    A time in which several ran at once, on several devices or machines, counts once: what is
    confirmed is measured on one device.
    """
    total = 0.0
    until = -math.inf
    for began, seconds in sorted(times):
        ended = began + seconds
        overlap = min(until, ended) - began
        total += seconds - overlap if overlap > _OVERLAP_OF_DATES else seconds
        until = max(until, ended)
    return total


def seconds_of_search(seconds_of_trials: float, *, share: float) -> float:
    """Returns how long a search takes whose confirmation uses all the time that it may."""
    return seconds_of_trials / (1.0 - share - VARIANTS_SHARE)
