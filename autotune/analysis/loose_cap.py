"""Whether a memory cap is so large that it decides nothing, and a smaller one that would."""

import math
from collections.abc import Iterable

from autotune.spec.result import TrialRecord
from autotune.units import exact_size, format_size

LOOSE = 2
"""A cap of more than this factor times what plain training needs is loose: hardly a configuration
can be over it, so that what techniques save in memory cannot make one of them the pick."""


def loose_cap_sentence(
    baseline: TrialRecord | None, *, cap_bytes: int, records: Iterable[TrialRecord] = ()
) -> str:
    """Returns what a loose cap means and a cap that binds; empty for a cap that is not loose.

    `baseline` is the trial of plain training, None while there is none. One of `records`, the
    trials so far, fits the suggested cap.
    """
    if baseline is None or not baseline.device_bytes or not baseline.peak_memory_bytes:
        return ""
    if cap_bytes <= LOOSE * baseline.device_bytes:
        return ""
    return (
        f"the cap of {format_size(cap_bytes)} rules nothing out, because the baseline needs only "
        f"{format_size(baseline.device_bytes)}: the pick is just the fastest; for a search in "
        f"which memory counts, give a cap such as --max-mem {_binding_cap(baseline, records)}, "
        "or a larger model"
    )


def _binding_cap(baseline: TrialRecord, records: Iterable[TrialRecord]) -> str:
    """Returns a cap of about half the peak of plain training, with few binary digits.

    What the device needs beyond the peak, such as a CUDA context, is added: no technique saves it.
    The cap is larger where no trial fits it.
    """
    assert baseline.device_bytes is not None
    assert baseline.peak_memory_bytes is not None
    overhead = max(0, baseline.device_bytes - baseline.peak_memory_bytes)
    wanted = baseline.peak_memory_bytes / 2 + overhead
    measured = [
        record.device_bytes for record in records if record.feasible and record.device_bytes
    ]
    wanted = max(wanted, min(measured, default=0))
    unit = 1 << max(0, math.floor(math.log2(wanted)) - 3)
    return exact_size(math.ceil(wanted / unit) * unit)
