"""What to measure again, and for how long."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences
from autotune.errors import InvalidInput
from autotune.spec.confirmation import (
    Confirmation,
    InitialPerplexity,
    RepeatedSpeed,
    VariantMeasurement,
)
from autotune.spec.option import DURATION_OR_NONE
from autotune.study.request import VARIANTS_SHARE, SearchRequest

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


def confirmation_request(
    study: str,
    *,
    trial: int | None,
    time_budget: str | float | None,
    share: float,
    storage: str,
    ray: str | None = None,
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> tuple[SearchRequest, ConfirmationRequest]:
    """Return the requests that confirm a study that exists. Raises InvalidInput.

    Without a time budget, one trial takes as long as it takes, and the finalists their share.
    """
    seconds = None
    if time_budget is not None:
        seconds = DURATION_OR_NONE.read(time_budget)
    if seconds is None and (time_budget is not None or trial is not None):
        seconds = math.inf
    if trial is not None and trial < 0:
        raise InvalidInput(f"there is no trial {trial}", hint=f"see autotune show {study}")
    request = SearchRequest(
        name=study, storage=storage, ray=ray, preferences=preferences, confirm_share=share
    )
    return request, ConfirmationRequest(
        share=share, seconds=seconds, trial=trial, at_least_once=True
    )


def allowed_seconds(
    seconds_of_trials: float,
    confirmations: Sequence[Confirmation],
    *,
    share: float,
) -> tuple[float, float]:
    """Return how many seconds are left for the finalists, and for the variants of the pick.

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
    """Return for how many seconds any trial ran; `times` are when each began and its seconds.

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
    """Return how long a search takes whose confirmation uses all the time that it may."""
    return seconds_of_trials / (1.0 - share - VARIANTS_SHARE)
