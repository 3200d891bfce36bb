"""`autotune confirm`: measure the finalists of a study again, or one of its trials."""

from dataclasses import dataclass

from autotune.cli.options import ShownInFull
from autotune.cli.search_run import run_with_display
from autotune.study.confirmation.request import ConfirmRequest


@dataclass(frozen=True, kw_only=True)
class ConfirmCommand(ConfirmRequest, ShownInFull):
    """A confirmation, and how its result is shown."""


def confirm(request: ConfirmCommand) -> None:
    """Measure the finalists of a study again, so that the pick is not the luckiest of many trials.

    Each is trained in turn with the baseline. What is shown of a confirmed trial is the confirmed
    speed, with an interval over further runs.
    """
    run_with_display(request.search, shown=request, confirmation=request.confirmation)
