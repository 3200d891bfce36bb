"""What to measure again, and for how long."""

import math
from dataclasses import dataclass

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences
from autotune.errors import InvalidInput
from autotune.spec.option import DURATION_OR_NONE
from autotune.study.request import SearchRequest


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
        name=study, storage=storage, preferences=preferences, confirm_share=share
    )
    return request, ConfirmationRequest(
        share=share, seconds=seconds, trial=trial, at_least_once=True
    )
