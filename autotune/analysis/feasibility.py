"""Whether a configuration is a solution, and how much memory it needs.

Configurations are rejected for their memory in three ways: `predicted_over_cap` was never trained,
`out_of_memory` ended when an allocation failed, and `over_cap` was measured. What the first two
need is not known, only that it is more than the limit and more than what was seen of it.
"""

from autotune.spec.cap import is_over_cap
from autotune.spec.result import Measurement, TrialRecord

MORE_THAN_KNOWN = 1.01
"""A configuration that was rejected before its memory was measured is assumed to need this factor
times the largest size that is known of it. Each of these sizes is a lower bound: the limit was
exceeded, the training would have gone on after the failed allocation, and a predicted peak is
without what an allocator adds. A sampler has to see it beyond the limit, and nothing says by how
much: in replays in which every training over the cap ran out of memory (the table of
`studies/search_efficiency/`), 1.05 changed the searches by less than another seed does."""


def is_feasible(measurement: Measurement, *, cap_bytes: int) -> bool:
    """Returns whether a trial is a solution: trained, with all objectives, on a device of the cap.

    What the device must have is compared, not the peak of the tensors.
    """
    return (
        measurement.outcome == "ok"
        and measurement.has_all_objectives
        and measurement.device_bytes is not None
        and not is_over_cap(measurement.device_bytes, cap_bytes)
    )


def least_needed_bytes(record: TrialRecord) -> int:
    """Returns what the device must at least have, as far as it is known; 0 if nothing is known.

    That is the measured size; without it the larger of the predicted peak and, for a trial that ran
    out of memory, of what it held and requested when an allocation failed.
    """
    if record.device_bytes is not None:
        return record.device_bytes
    seen_bytes = 0
    if record.outcome == "out_of_memory":
        seen_bytes = (record.peak_memory_bytes or 0) + (record.requested_bytes or 0)
    return max(seen_bytes, record.predicted_peak_memory_bytes or 0)


def needed_bytes(record: TrialRecord, *, limit_bytes: float) -> float:
    """Returns what a sampler is told that a configuration needs, in bytes.

    A measured size is told as it is. For a trial that was rejected before there was one it is

        MORE_THAN_KNOWN * max(limit_bytes, least_needed_bytes(record)),

    which is always over the limit. A trial that ended for a reason other than memory is told at
    `limit_bytes`, which is not over it.
    """
    if record.device_bytes is not None:
        return float(record.device_bytes)
    if record.was_rejected:
        return MORE_THAN_KNOWN * max(limit_bytes, least_needed_bytes(record))
    return float(limit_bytes)
