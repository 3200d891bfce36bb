"""How `autotune predict` prints its answers, as text or as a page.

One prediction is printed with what holds the memory, a whole search space as one table.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from autotune.analysis.least_memory import least_memory_bytes
from autotune.cli.lines import print_line
from autotune.cli.tables import as_text, is_narrow, make_console, narrow_note
from autotune.reporting.output_file import write_file
from autotune.reporting.trial_text import (
    extrapolation_note,
    peaks_text,
    short_description,
    speed_text,
)
from autotune.spec.cap import CLOSE, OVER, verdict_of
from autotune.spec.config import TrainingConfig, configuration_of
from autotune.spec.prediction import Prediction, kept_in_words
from autotune.spec.search_space import SearchSpace
from autotune.spec.workload import Workload
from autotune.study.prediction.compared import ComparedPrediction, for_devices
from autotune.study.prediction.space_answer import NO_RATES, SpaceAnswer
from autotune.units import format_amount, format_estimate, format_percent, format_size


def peaks_by_rank(prediction: Prediction) -> str:
    """Returns the peaks of the devices, and how many were predicted; empty for one device."""
    if prediction.devices == 1:
        return ""
    peaks = peaks_text(prediction.peak_memory_bytes_by_rank)
    text = peaks[0].upper() + peaks[1:]
    if prediction.distinct_ranks == prediction.devices:
        return f"{text}. Each rank was predicted."
    if prediction.distinct_ranks == 1:
        return f"{text}. 1 rank was predicted: the others hold as much."
    count = prediction.distinct_ranks
    return f"{text}. {count} ranks were predicted: each other one holds as much as one of them."


def print_answer(answer: ComparedPrediction) -> None:
    console = make_console()

    def say(line: str, style: str = "") -> None:
        console.print(as_text(line, style=style), soft_wrap=True)

    prediction = answer.prediction
    say(answer.config.describe(), "bold")
    say(answer.about())
    say(f"{answer.verdict()}.")
    if by_rank := peaks_by_rank(prediction):
        say(by_rank)
    if prediction.flops_per_token and prediction.bytes_accessed_per_token:
        flops = format_amount(prediction.flops_per_token, "FLOP")
        accessed = format_amount(prediction.bytes_accessed_per_token, "B")
        say(f"A token takes {flops}, and operators read and write {accessed} for it.")
    if speed := speed_text(prediction):
        say(f"{speed[0].upper()}{speed[1:]}.")
        say(f"Rates of the device: {answer.forecaster.rates_from}.")
    else:
        say(f"No speed: {NO_RATES}.")
    if answer.record is not None and answer.record.peak_memory_bytes is not None:
        measured = answer.record.peak_memory_bytes
        if other := answer.measured_on_another_gpu:
            say(
                f"Measured {format_size(measured)} on {other.name}, "
                "a different GPU from the one predicted for."
            )
        else:
            ratio = prediction.peak_memory_bytes / measured
            say(f"Measured {format_size(measured)}; the prediction is {ratio:.4f} times that.")
    shares = Table(
        box=None, pad_edge=False, title="At the peak", title_justify="left", title_style="bold"
    )
    for column in ("", "size", "share"):
        shares.add_column(column, justify="right" if column else "left")
    for category, size_bytes in sorted(
        prediction.bytes_by_category.items(), key=lambda item: -item[1]
    ):
        if size_bytes:
            share = f"{format_percent(size_bytes / prediction.peak_memory_bytes, digits=1)} %"
            shares.add_row(category.replace("_", " "), format_size(size_bytes), share)
    console.print()
    console.print(shares)
    holders = Table(
        box=None, pad_edge=False, title="Largest holders", title_justify="left", title_style="bold"
    )
    for column in ("size", "blocks", "what", "where", "made by"):
        holders.add_column(
            column, justify="right" if column in ("size", "blocks") else "left", overflow="fold"
        )
    for holder in prediction.holders[:8]:
        what = holder.category.replace("_", " ")
        made_by = as_text(holder.operator)
        holders.add_row(
            format_size(holder.size_bytes),
            str(holder.count),
            what,
            as_text(holder.module or "-"),
            made_by,
        )
    console.print()
    console.print(holders)
    for line in kept_in_words(prediction.kept):
        say(f"Plan: {line}.")
    for note in prediction.notes:
        say(f"Note: {note}.")
    if extrapolated := extrapolation_note(prediction):
        say(f"Note: {extrapolated}; --whole-depth predicts all layers.")


def extrapolation_text(prediction: Prediction) -> str:
    """Returns `2 and 3; 4: 0 B off`, or `all`: by which numbers of layers, and how well."""
    if prediction.checked_at is None:
        return "all"
    first, second = prediction.extrapolated_from
    error = format_size(prediction.check_error_bytes or 0)
    return f"{first} and {second}; {prediction.checked_at}: {error} off"


def space_table(answer: SpaceAnswer, *, baseline: TrainingConfig | None = None) -> Table:
    """Returns a table with one row per configuration.

    With a `baseline`, for narrow terminals, a row has the configuration's name or, in short, what
    differs from the baseline.
    """
    table = Table(box=None, pad_edge=False)
    if baseline is not None:
        table.caption, table.caption_justify = narrow_note(baseline), "left"
    has_cap = answer.cap_bytes is not None
    is_extrapolated = any(found.checked_at is not None for _, found in answer.predicted)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("at most", justify="right", no_wrap=True)
    if has_cap:
        table.add_column(f"in {format_size(answer.cap_bytes or 0)}", no_wrap=True)
    if answer.front is not None:
        table.add_column("*")
    if answer.has_speeds:
        table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("configuration", ratio=1, overflow="fold")
    table.add_column("peak in", no_wrap=True)
    if is_extrapolated:
        table.add_column("by layers", overflow="fold")
    for forecast in answer.shown():
        name = answer.names.get(forecast.config.fingerprint)
        if baseline is not None:
            description = name or short_description(forecast.config, baseline)
        else:
            description = forecast.config.describe()
            if name:
                description = f"{name}: {description}"
        prediction = forecast.prediction
        if prediction is None:
            missing = ["-"] * (2 + has_cap + answer.has_speeds + (answer.front is not None))
            cells = [*missing, f"{description}: {forecast.error}", "-"]
            table.add_row(*map(as_text, cells))
            continue
        verdict = verdict_of(prediction, cap_bytes=answer.cap_bytes)
        cells = [
            format_size(prediction.peak_memory_bytes),
            format_size(prediction.upper_bound_bytes),
            *([verdict or ""] if has_cap else []),
            *(["*" if answer.is_on_front(forecast) else ""] if answer.front else []),
            *([_speed(prediction)] if answer.has_speeds else []),
            description,
            prediction.phase,
            *([extrapolation_text(prediction)] if is_extrapolated else []),
        ]
        table.add_row(*map(as_text, cells), style="dim" if verdict in (CLOSE, OVER) else "")
    return table


def _speed(prediction: Prediction) -> str:
    speed = prediction.predicted_tokens_per_second
    return "-" if speed is None else format_estimate(speed)


def print_space(answer: SpaceAnswer, space: SearchSpace) -> None:
    console = make_console()
    baseline = None
    if is_narrow(console):
        baseline = space.baseline_config(answer.workload.legality_context)
    devices = for_devices(answer.workload, answer.device_type)
    about = f"{answer.workload.describe()}, predicted {devices}"
    console.print(as_text(about), soft_wrap=True)
    if answer.picked is None or not answer.has_estimates:
        console.print(as_text(answer.conclusion(), style="bold"), soft_wrap=True)
    for line in answer.lines_about_front():
        console.print(as_text(line), soft_wrap=True)
    console.print()
    console.print(space_table(answer, baseline=baseline))
    console.print()
    for note in answer.notes():
        console.print(as_text(f"Note: {note}."), soft_wrap=True)


def say_least(
    workloads: Sequence[Workload], settings: Mapping[str, Any], cap_bytes: int | None
) -> None:
    """Says on stderr what a training needs at least, by shapes alone, if that is known.

    `workloads` are those of the kinds of devices that it may be for.
    """
    bounds = [
        least_memory_bytes(one, configuration_of(settings, one.legality_context))
        for one in workloads
    ]
    known = [bound for bound in bounds if bound is not None]
    if not known or len(known) < len(bounds):
        return
    least = min(known)
    text = f"At least {format_size(least)}, a bound from the shapes of weights and batches"
    if cap_bytes is not None and least > cap_bytes:
        text += f": it cannot fit {format_size(cap_bytes)}"
    print_line(f"{text}.", to_stderr=True, flush=True)


def write_page(answer: ComparedPrediction, file: Path) -> None:
    # plotly takes 0.1 s to import, and few predictions are drawn.
    from autotune.reporting.figures import memory_timeline  # noqa: PLC0415

    figure = memory_timeline.compute(
        answer.prediction,
        title=answer.config.describe(),
        about=answer.about(),
        answer=f"{answer.verdict()}.",
        cap_bytes=answer.cap_bytes,
    )
    write_file(file, memory_timeline.page(figure), option="--plot")
    print_line(str(file), to_stderr=True)
