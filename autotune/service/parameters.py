"""Parameters that many routes take, checked before anything else sees them.

Numbers are bounded by what a database stores, and texts have no NUL character, which PostgreSQL
rejects.
"""

from typing import Annotated

from fastapi import Depends, Path, Query

from autotune.analysis.pick import Preference, Preferences
from autotune.analysis.tolerance import (
    DEFAULT_PERPLEXITY_TOLERANCE,
    DEFAULT_SPEED_TOLERANCE,
    Tolerance,
)

LARGEST_NUMBER = 2**31 - 1
LARGEST_PAGE = 1000
WITHOUT_NUL = r"^[^\x00]*$"

StudyName = Annotated[
    str,
    Path(
        description="The name of a study.",
        min_length=1,
        max_length=100,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$",
        examples=["quick"],
    ),
]
TrialNumber = Annotated[int, Path(ge=0, le=LARGEST_NUMBER, description="The number of a trial.")]
Limit = Annotated[int, Query(ge=0, le=LARGEST_PAGE, description="The most entries to return.")]
Offset = Annotated[int, Query(ge=0, le=LARGEST_NUMBER, description="How many to leave out before.")]


def _preferences(
    prefer: Annotated[Preference, Query(description="Which trial of the front to pick.")] = (
        "fastest"
    ),
    max_perplexity_increase: Annotated[
        float,
        Query(
            ge=0,
            lt=100,
            allow_inf_nan=False,
            description="How far the perplexity of the pick may be above the best, as a share.",
        ),
    ] = 0.01,
    speed_tolerance: Annotated[
        float,
        Query(
            ge=0,
            lt=1,
            allow_inf_nan=False,
            description="Relative differences in speed that count as equal.",
        ),
    ] = DEFAULT_SPEED_TOLERANCE,
    perplexity_tolerance: Annotated[
        float,
        Query(
            ge=0,
            lt=1,
            allow_inf_nan=False,
            description="Relative differences in perplexity that count as equal.",
        ),
    ] = DEFAULT_PERPLEXITY_TOLERANCE,
) -> Preferences:
    return Preferences(
        prefer=prefer,
        max_perplexity_increase=max_perplexity_increase,
        tolerance=Tolerance(speed=speed_tolerance, perplexity=perplexity_tolerance),
    )


PreferencesOfRequest = Annotated[Preferences, Depends(_preferences)]
