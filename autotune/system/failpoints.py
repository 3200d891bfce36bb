"""Named points between two durable steps at which a test can kill the process, like a power cut.

`AUTOTUNE_FAILPOINT="result spooled"` kills the process with SIGKILL when it reaches that point,
`"result spooled:3"` when it reaches it the third time. At each point a result must be neither lost
nor counted twice.
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
    "confirmation measured",
    "confirmation stored",
)

_VARIABLE = "AUTOTUNE_FAILPOINT"
_visits: Counter[str] = Counter()


def failpoint(point: str) -> None:
    """Kill this process with SIGKILL if the environment requests it for `point`."""
    if _VARIABLE in os.environ:
        _visits[point] += 1
        requested, _, visit = os.environ[_VARIABLE].partition(":")
        if point == requested and _visits[point] == int(visit or 1):
            os.kill(os.getpid(), signal.SIGKILL)
