"""`autotune studies check`: check that a studies database is readable and consistent."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from autotune.cli.lines import print_line
from autotune.cli.options import InStorage, storage_of
from autotune.errors import StorageUnavailable
from autotune.spec.setting import Texts, setting

if TYPE_CHECKING:
    from autotune.storage.check import Checked


@dataclass(frozen=True, kw_only=True)
class CheckCommand(InStorage):
    """Which studies to check."""

    study: Texts = setting(
        (), "Names of the studies to check. [default: all]", metavar="STUDY", is_argument=True
    )


def check(context: typer.Context, request: CheckCommand) -> None:
    """Check a studies database. Print one line per fault, with what to do about it.

    Changes nothing.
    """
    # Both import SQLAlchemy, which takes 0.3 s; the help of this command does without.
    from autotune.storage.error_translation import redacted_url  # noqa: PLC0415
    from autotune.study.check import check_studies  # noqa: PLC0415

    storage = storage_of(context, request.storage)
    checked = check_studies(storage, request.study)
    for finding in checked.findings:
        print_line(f"{finding.where}: {finding.what} - {finding.to_do}")
    if checked.faults:
        faults = "a fault" if checked.faults == 1 else f"{checked.faults} faults"
        raise StorageUnavailable(
            f"the studies database {redacted_url(storage)} has {faults} ({_counted(checked)})",
            hint="the lines on stdout say what to do about each",
        )
    print_line(f"{_counted(checked)}: no faults")


def _counted(checked: "Checked") -> str:
    studies = "1 study" if len(checked.studies) == 1 else f"{len(checked.studies)} studies"
    trials = "1 trial" if checked.trials == 1 else f"{checked.trials} trials"
    return f"{studies}, {trials}"
