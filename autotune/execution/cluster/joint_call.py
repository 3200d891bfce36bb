"""Waits for a training whose ranks run on several nodes, each of which has a part of them.

The first node on which a rank fails says what came of the training, as the first rank does on one
node (`execution/process/ranks.py`); the other parts are then ended.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

from autotune.errors import TrialLost
from autotune.execution.flow import POLL_SECONDS
from autotune.execution.joint_outcome import complains_of_another, together
from autotune.spec.attempt import FinishedTrial
from autotune.spec.parity import NoTrace

SECONDS_FOR_OTHERS = 3.0
"""How long the other nodes may say why, too, once one has failed. Their clocks of a time limit
begin up to a second apart."""
SECONDS_TO_SAY_WHY = 45.0
"""How long it may take until a node is known to be lost, where the others only complain that the
connection broke: longer than `SECONDS_WITHOUT_ANSWER` of its worker."""
_SECONDS_TO_END = 5.0
_COMPLETE = ("ok", "over_cap")
"""Outcomes of a training of which all ranks came to the end."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The ranks of one node."""

    future: Future[Any]
    cancel: Callable[[], None]
    check: Callable[[], None] = lambda: None
    """Called while it is waited for; ends the future of a node that does not answer."""


def joined(parts: Sequence[Part]) -> Future[Any]:
    """Returns the future of what the parts of a training find together.

    Its error is that of the node that failed first, or TrialLost where no node says why.
    """
    future: Future[Any] = Future()

    def settle() -> None:
        try:
            future.set_result(_found(parts))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=settle, name="nodes of a trial", daemon=True).start()
    return future


def _found(parts: Sequence[Part]) -> Any:
    ended = _wait_for(parts)
    failed = [part for part in ended if _has_failed(part)]
    if not failed:
        return _joint_result([part.future.result() for part in parts])
    first = next((part for part in failed if not _complains(part)), None)
    if first is None:
        raise TrialLost(
            f"the connection between the nodes of the trial broke: {_message_of(failed[0])}",
            hint="run the same command again to continue",
        )
    value = first.future.result()
    if isinstance(value, FinishedTrial) and value.measurement.outcome == "timeout":
        said = [_message_of(part) for part in failed if _is_timeout(part)]
        value = replace(value, measurement=replace(value.measurement, message="; ".join(said)))
    return value


def _wait_for(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts in the order in which they ended: all, or all that there was patience for.

    The others have been cancelled.
    """
    ended: list[Part] = []
    running = list(parts)
    failed_at: float | None = None
    while running:
        wait([part.future for part in running], timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        for part in running:
            part.check()
        newly_ended = [part for part in running if part.future.done()]
        ended += newly_ended
        running = [part for part in running if part not in newly_ended]
        failed = [part for part in ended if _has_failed(part)]
        if not failed:
            continue
        now = time.monotonic()
        failed_at = failed_at or now
        is_known_why = not all(map(_complains, failed))
        if now - failed_at > (SECONDS_FOR_OTHERS if is_known_why else SECONDS_TO_SAY_WHY):
            break
    for part in running:
        part.cancel()
    wait([part.future for part in running], timeout=_SECONDS_TO_END)
    return ended


def _joint_result(values: Sequence[Any]) -> Any:
    """Returns the result of all nodes: what was measured, or what the first one found."""
    first = values[0]
    if isinstance(first, FinishedTrial):
        return replace(first, measurement=together([value.measurement for value in values]))
    return first


def _has_failed(part: Part) -> bool:
    if part.future.exception() is not None:
        return True
    value = part.future.result()
    if isinstance(value, FinishedTrial):
        return value.measurement.outcome not in _COMPLETE
    return isinstance(value, NoTrace)


def _is_timeout(part: Part) -> bool:
    value = None if part.future.exception() is not None else part.future.result()
    return isinstance(value, FinishedTrial) and value.measurement.outcome == "timeout"


def _complains(part: Part) -> bool:
    return complains_of_another(_message_of(part))


def _message_of(part: Part) -> str:
    error = part.future.exception()
    if error is not None:
        return str(error)
    value = part.future.result()
    message = value.measurement.message if isinstance(value, FinishedTrial) else value.message
    return message or ""
