"""Named places between two durable steps, where a test may end the process as a power cut would.

`AUTOTUNE_FAILPOINT="result spooled"` kills the process with SIGKILL when it comes there, `"result
spooled:3"` when it comes there the third time. Each is a moment at which a result must be neither
lost nor counted twice.
"""

import os
import signal
from collections import Counter

FAILPOINTS = (
    "schema backed up",
    "schema upgraded, not committed",
    "files prepared",
    "files settled",
    "study created",
    "device taken",
    "trial claimed, not committed",
    "trial claimed",
    "forecast kept",
    "trial measured",
    "result written, not in place",
    "result spooled",
    "result kept, not committed",
    "result kept",
    "result delivered",
    "attempt lost",
    "dead attempt given up",
    "attempt given back",
)

_VARIABLE = "AUTOTUNE_FAILPOINT"
_visits: Counter[str] = Counter()


def failpoint(point: str) -> None:
    """Ends the process here if that was asked for."""
    if _VARIABLE in os.environ:
        _visits[point] += 1
        wanted, _, visit = os.environ[_VARIABLE].partition(":")
        if point == wanted and _visits[point] == int(visit or 1):
            os.kill(os.getpid(), signal.SIGKILL)
