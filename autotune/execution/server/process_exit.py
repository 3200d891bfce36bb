"""Determines why a trial failed, from how its process ended without a result.

The fork server calls this, and is itself without torch until it has prepared its process;
`process/failures.py`, which does it from an exception inside a trial, needs torch's exceptions.
"""

import signal
from pathlib import Path

from autotune.execution.server.infrastructure import machine_failure_by_signal, signal_name
from autotune.spec.result import Measurement

OUT_OF_HOST_MEMORY = "the host ran out of memory"
_OPENMP_OUT_OF_MEMORY = "libgomp: Thread creation failed: Resource temporarily unavailable"
_LOG_TAIL_BYTES = 4000


def measurement_of_exit(
    exit_status: int, *, log_file: Path, host_killed_for_memory: bool
) -> Measurement:
    """Returns the outcome for a process that ended without a result.

    `exit_status` is negative for a signal. Raises TrialLost for a process that was killed from
    outside.
    """
    if exit_status == -signal.SIGKILL and host_killed_for_memory:
        return Measurement(outcome="out_of_memory", message=OUT_OF_HOST_MEMORY)
    if exit_status < 0:
        loss = machine_failure_by_signal(-exit_status)
        if loss:
            raise loss
        how = f"was killed by {signal_name(-exit_status)}"
    elif _OPENMP_OUT_OF_MEMORY in _tail(log_file):
        return Measurement(outcome="out_of_memory", message=OUT_OF_HOST_MEMORY)
    else:
        how = f"ended with exit code {exit_status}"
    return Measurement(outcome="crashed", message=f"the trial's process {how}; see {log_file}")


def _tail(log_file: Path) -> str:
    """Returns the end of the log, which may be very large."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(0, log_file.stat().st_size - _LOG_TAIL_BYTES))
            return log.read(_LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
