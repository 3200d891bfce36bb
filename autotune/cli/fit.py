"""`autotune fit`: find the largest model that can be trained under a memory cap."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune import api
from autotune.cli.options import ShownQuietly
from autotune.cli.tables import as_text, is_narrow, make_console
from autotune.reporting.outcomes import OUTCOME_LABELS
from autotune.reporting.trial_text import extrapolation_note
from autotune.spec.setting import RESULTS, setting
from autotune.study.fit.request import FitRequest
from autotune.study.fit.result import FitResult, FitRow, RealTrial
from autotune.system.standard_streams import answer
from autotune.units import format_estimate, format_percent, format_size

if TYPE_CHECKING:
    from autotune.study.fit.fit import FitProgress


_SECONDS_BETWEEN_LINES = 10.0
"""Of progress, where the output is no terminal."""


@dataclass(frozen=True, kw_only=True)
class FitCommand(FitRequest, ShownQuietly):
    """What is to fit, and how the answer is shown."""

    verbose: bool = setting(
        False, "Print each prediction as it is made.", group=RESULTS, synonym="-v"
    )
    no_confirm: bool = setting(False, "The former name of --no-trial.", is_hidden=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.no_confirm:
            object.__setattr__(self, "confirm", False)


def fit(request: FitCommand) -> None:
    """Find the largest model, sequence length or micro batch that fits under a memory cap.

    Works by prediction and shows techniques added one by one. With --precision, --checkpointing,
    --compile, --optimizer-fusion, --memory-budget, --adapter or --base-weights, or of a study, it
    shows that one configuration instead. If the device exists, trains the largest model that fits
    for a few steps to confirm it.
    """
    # These import SQLAlchemy and numpy, 0.5 s that the help of this command does without.
    from autotune.study.fit.fit import fit as run  # noqa: PLC0415

    with _display(quiet=request.quiet, verbose=request.verbose) as listener:
        result = run(api.resolved(request), listener=listener)
    with answer():
        if request.as_json:
            print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
        else:
            print_fit(result, make_console())
    if result.best is None or (result.confirmed is not None and result.confirmed.went_over):
        raise typer.Exit(1)


@contextmanager
def _display(*, quiet: bool, verbose: bool) -> "Iterator[Callable[[FitProgress], None]]":
    """Yield a listener that prints what is found on stderr, and all progress if `verbose`.

    On a terminal, a spinner shows the progress; elsewhere a line does so now and then.
    """
    console = make_console(sys.stderr)
    shown_at = time.monotonic()

    def show_lasting(progress: "FitProgress") -> None:
        if progress.is_lasting or verbose:
            console.print(as_text(progress.what), soft_wrap=True)

    if quiet:
        yield lambda _: None
    elif verbose:
        yield show_lasting
    elif console.is_terminal and not console.is_dumb_terminal:
        with console.status(as_text("starting")) as status:

            def show(progress: "FitProgress") -> None:
                show_lasting(progress)
                if not progress.is_lasting:
                    status.update(as_text(progress.what))

            yield show
    else:

        def show_now_and_then(progress: "FitProgress") -> None:
            nonlocal shown_at
            if progress.is_lasting or time.monotonic() - shown_at >= _SECONDS_BETWEEN_LINES:
                shown_at = time.monotonic()
                console.print(as_text(progress.what), soft_wrap=True)

        yield show_now_and_then


def print_fit(result: FitResult, console: Console) -> None:
    cap = format_size(result.cap_bytes)
    context = ""
    if result.context_bytes:
        context = f", {format_size(result.context_bytes)} of it for the CUDA context"
    superlative = "smallest" if result.varying.wants_fewest else "largest"
    console.print(
        as_text(
            f"The {superlative} {_NAMES[result.varying.vary]} under {cap}{context}, by prediction",
            style="bold",
        ),
        soft_wrap=True,
    )
    console.print(as_text(f"  {_fixed_sizes(result)}"), soft_wrap=True)
    console.print()
    console.print(fit_table(result, narrow=is_narrow(console)))
    console.print()
    if result.best is not None and result.best.value is not None:
        fitting = result.varying.describe(result.best.value)
        console.print(
            Text.assemble(
                (f"The {superlative}: ", "bold"),
                as_text(f"{fitting}, with {result.best.config.describe()}"),
            )
        )
    if result.best is None:
        console.print(as_text(f"Nothing fits under {cap}.", style="bold red"))
        console.print(
            as_text(
                "  Try a larger --max-mem, a shorter --seq-len, a smaller --global-batch "
                "or another model."
            )
        )
    elif result.confirmed is None:
        console.print(as_text(f"Not confirmed by a trial: {result.not_confirmed}."), soft_wrap=True)
    else:
        _print_confirmation(result, result.confirmed, console)
    if result.best is not None and result.best.prediction is not None:
        for note in result.best.prediction.notes:
            console.print(as_text(f"Note: {note}."), soft_wrap=True)
        if extrapolated := extrapolation_note(result.best.prediction):
            console.print(as_text(f"Note: {extrapolated}."), soft_wrap=True)


_NAMES = {
    "layers": "number of layers",
    "width": "width",
    "seq-len": "sequence length",
    "micro-batch": "micro batch",
    "rank": "rank",
    "devices": "number of devices",
}


def _fixed_sizes(result: FitResult) -> str:
    """Returns the model, the sizes that do not vary, and the device, in one line."""
    workload, vary = result.varying.workload, result.varying.vary
    sizes: dict[str, str] = {}
    if workload.layers is not None:
        sizes["layers"] = f"{workload.layers} layers"
    if workload.width is not None:
        sizes["width"] = f"width {workload.width}"
    if workload.heads is not None:
        sizes["heads"] = f"{workload.heads} heads"
    sizes["seq-len"] = f"sequences of {workload.sequence_length} tokens"
    sizes["micro-batch"] = f"global batch {workload.global_batch}"
    if vary == "width":
        _, width, heads = workload.block_sizes
        del sizes["width"]
        sizes["heads"] = f"heads of {width // heads}"
    elif vary not in ("rank", "devices") and (
        vary != "micro-batch" or not result.varying.keeps_global_batch
    ):
        del sizes[vary]
    vocabulary = f"vocabulary {workload.vocab_size}"
    device = result.device_type
    devices = workload.devices_per_trial
    if devices > 1 and vary != "devices":
        device = f"{devices} of {device} for one model, the cap that of each"
    if result.compute_capability is not None:
        device += f" of compute capability {result.compute_capability}"
    return f"{workload.model}: {', '.join([*sizes.values(), vocabulary])}; device {device}"


def fit_table(result: FitResult, *, narrow: bool) -> Table:
    """Returns a table with one row per configuration.

    A `narrow` table has what one more would need below the technique, and does not have what is
    at the peak.
    """
    table = Table(box=None, pad_edge=False)
    beyond = "fewer" if result.varying.wants_fewest else "one more"
    table.add_column(f"technique\n  {beyond}" if narrow else "technique", overflow="fold")
    for column in (result.varying.vary, "parameters", "predicted", "at most"):
        table.add_column(column, justify="right", no_wrap=True)
    has_speeds = any(_speed_of(row) for row in result.rows)
    if has_speeds:
        table.add_column("tokens/s", justify="right", no_wrap=True)
    if not narrow:
        table.add_column("at the peak", overflow="fold")
        table.add_column(beyond, overflow="fold")
    for row in result.rows:
        style = "bold" if row is result.best else ""
        cells = _cells(row, narrow=narrow, has_speeds=has_speeds)
        table.add_row(*map(as_text, cells), style=style)
    return table


def _speed_of(row: FitRow) -> float | None:
    return None if row.prediction is None else row.prediction.predicted_tokens_per_second


def _cells(row: FitRow, *, narrow: bool, has_speeds: bool) -> list[str]:
    prediction = row.prediction
    numbers, at_the_peak = ["-", "-", "-", "-"], "-"
    if prediction is not None:
        numbers = [
            f"{row.value:,}",
            f"{prediction.parameters / 1e6:,.1f} M",
            format_size(prediction.peak_memory_bytes),
            format_size(prediction.upper_bound_bytes),
        ]
        sizes = prediction.bytes_by_category
        largest = max(sizes, key=lambda category: sizes[category])
        share = format_percent(sizes[largest] / max(1, prediction.peak_memory_bytes))
        at_the_peak = f"{prediction.phase}, {largest.replace('_', ' ')} {share} %"
    if has_speeds:
        speed = _speed_of(row)
        numbers.append("-" if speed is None else format_estimate(speed))
    if narrow:
        return [f"{row.technique}\n  {row.message}", *numbers]
    return [row.technique, *numbers, at_the_peak, row.message]


def _print_confirmation(result: FitResult, confirmed: RealTrial, console: Console) -> None:
    row, measured = confirmed.row, confirmed.measurement
    assert row.value is not None
    assert row.prediction is not None
    what = (
        f"{row.technique} with {result.varying.describe(row.value)}, "
        f"a few steps on {confirmed.device.name}"
    )
    cap = format_size(result.cap_bytes)
    if confirmed.stayed_under:
        console.print(
            Text.assemble(("Confirmed under the cap: ", "bold green"), as_text(what)),
            soft_wrap=True,
        )
    else:
        outcome = OUTCOME_LABELS[measured.outcome]
        if measured.message:
            outcome += f", {measured.message}"
        console.print(
            Text.assemble(as_text(f"Not confirmed, {outcome}: ", style="bold red"), as_text(what)),
            soft_wrap=True,
        )
    if measured.peak_memory_bytes is not None:
        predicted = format_size(row.prediction.peak_memory_bytes)
        device = ""
        if result.device_type == "cuda" and measured.device_bytes is not None:
            device = f"; {format_size(measured.device_bytes)} on the device"
        console.print(
            as_text(
                f"  measured peak {format_size(measured.peak_memory_bytes)}, "
                f"predicted {predicted}{device}; cap {cap}"
            ),
            soft_wrap=True,
        )
