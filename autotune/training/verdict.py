"""What became of a training that ran to its end: its memory beside the cap, and its rivals."""

from autotune.memory.meter import MemoryReading
from autotune.spec.cap import is_over_cap, need_and_cap
from autotune.spec.early_stopping import PruningBound
from autotune.spec.result import Measurement, Outcome


def judged(
    memory: MemoryReading, *, cap_bytes: int, dominating: PruningBound | None
) -> Measurement:
    """Returns outcome, message and memory of a training; what else was measured is added to it.

    `dominating` is the earlier trial for which the training was ended, if there is one.
    """
    outcome: Outcome = "ok"
    message = ""
    if is_over_cap(memory.device_bytes, cap_bytes):
        outcome = "over_cap"
        message = f"needs {need_and_cap(memory.device_bytes, cap_bytes)}"
    elif dominating is not None:
        outcome = "dominated"
        message = f"trial {dominating.number} trains the same faster in no more memory"
    return Measurement(
        outcome=outcome,
        message=message,
        peak_memory_bytes=memory.peak_memory_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        device_bytes=memory.device_bytes,
        context_bytes=memory.context_bytes,
        alloc_retries=memory.alloc_retries,
        peak_phase=memory.peak_phase or None,
    )
