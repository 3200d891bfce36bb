"""`autotune studies check`: whether everything in a studies database can be read and belongs together."""

from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli import options
from autotune.errors import StorageUnavailable

if TYPE_CHECKING:
    from autotune.storage.integrity.findings import Checked


def check(
    context: typer.Context,
    study: Annotated[
        list[str] | None, typer.Argument(metavar="STUDY", help="Studies to look at. [default: all]")
    ] = None,
    storage: options.StorageOption = options.STORAGE,
) -> None:
    """Read all of a database and say what is wrong, one line each, with what to do.

    Changes nothing.
    """
    from autotune.storage.error_translation import shown_url
    from autotune.study.check import check_studies

    storage = options.storage_of(context, storage)
    checked = check_studies(storage, study or ())
    for finding in checked.findings:
        print(f"{finding.where}: {finding.what} - {finding.to_do}")
    if checked.faults:
        faults = "a fault" if checked.faults == 1 else f"{checked.faults} faults"
        raise StorageUnavailable(
            f"the studies database {shown_url(storage)} has {faults} ({_size(checked)})",
            hint="the lines on stdout say of each what to do",
        )
    print(f"{_size(checked)}: whole")


def _size(checked: "Checked") -> str:
    studies, trials = len(checked.studies), checked.trials
    return (
        f"{studies} {'study' if studies == 1 else 'studies'}, {trials} trial{'s' * (trials != 1)}"
    )
