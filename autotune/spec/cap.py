"""The cap: the one rule by which a trial is over it, whether trained, predicted or taken over.

What a device must have is compared: allocated or reserved memory and, on a GPU, its context. Of a
prediction that is the lower bound, so that nothing is left out that might fit.
"""

from typing import Literal

from autotune.spec.prediction import Prediction, context_bytes_on
from autotune.units import different_sizes


def is_over_cap(bytes_needed: float, cap_bytes: int) -> bool:
    """Returns whether a device that has `cap_bytes` has too little."""
    return bytes_needed > cap_bytes


def need_and_cap(bytes_needed: int, cap_bytes: int) -> str:
    """Returns both in words that differ where they do: `26.12 MiB of 24 MiB`."""
    needed, cap = different_sizes(bytes_needed, cap_bytes)
    return f"{needed} of {cap}"


Verdict = Literal["fits", "too close to say", "over the cap"]
FITS: Verdict = "fits"
CLOSE: Verdict = "too close to say"
OVER: Verdict = "over the cap"


def needed_bytes(prediction: Prediction) -> int:
    """Returns what a device must have for the largest peak within the prediction's bounds."""
    return prediction.upper_bound_bytes + context_bytes_on(prediction.device)


def verdict_of(prediction: Prediction, *, cap_bytes: int | None) -> Verdict | None:
    """Returns whether all peaks, some or none within the prediction's bounds are under the cap.

    What is said to fit does so together with the device's context. Returns None without a cap.
    """
    if cap_bytes is None:
        return None
    if needed_bytes(prediction) <= cap_bytes:
        return FITS
    return OVER if prediction.lower_bound_bytes > cap_bytes else CLOSE
