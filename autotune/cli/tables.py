"""Studies as text for a terminal: the table of trials, the front, the pick and what did not fit."""

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.quantities import format_size
from autotune.recommendation.pick import closest_miss, needed_bytes
from autotune.reporting.outcomes import OUTCOME_WORDS
from autotune.reporting.trial_text import SHARED_MARK_SAYS, is_shared, no_answer, perplexity_words, speed_words
from autotune.result import StudyResult, TrialRecord

_PLAIN_WIDTH = 140


def make_console(file: TextIO | None = None) -> Console:
    """A console on `file`, else on stdout; as wide as our tables where there is no terminal to fit."""
    file = file or sys.stdout
    width = None if file.isatty() or "COLUMNS" in os.environ else _PLAIN_WIDTH
    return Console(file=file, width=width, highlight=False, soft_wrap=False)


def trials_table(
    result: StudyResult, records: Sequence[TrialRecord], *, title: str = "", with_predictions: bool = False
) -> Table:
    """One row a trial: memory, speed, perplexity, and what is particular about it.

    `with_predictions` puts the predicted peak beside the measured, and their ratio.
    """
    predicted = with_predictions and any(record.predicted_peak_memory_bytes for record in records)
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("configuration", ratio=1, overflow="fold")
    table.add_column("peak memory", justify="right", no_wrap=True)
    if predicted:
        table.add_column("predicted", justify="right", no_wrap=True)
        table.add_column("ratio", justify="right", no_wrap=True)
    if result.device.type == "cuda":
        table.add_column("on device", justify="right", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("perplexity", justify="right", no_wrap=True)
    table.add_column("", overflow="fold", max_width=34)
    if any(is_shared(record) for record in records):
        table.caption, table.caption_justify = SHARED_MARK_SAYS, "left"
    for record in records:
        table.add_row(*_row(result, record, predicted=predicted), style="bold" if _is_pick(result, record) else "")
    return table


def _row(result: StudyResult, record: TrialRecord, *, predicted: bool) -> list[Text | str]:
    cells: list[Text | str] = [str(record.number), describe(record), _size(record.peak_memory_bytes)]
    if predicted:
        cells += [_size(record.predicted_peak_memory_bytes), _ratio(record)]
    if result.device.type == "cuda":
        cells.append(_size(record.device_bytes))
    return [*cells, speed(record), perplexity_words(record) or "-", _remark(result, record)]


def describe(record: TrialRecord) -> Text:
    """Name and choices. A Text: names come from files and may look like markup."""
    name = f"{record.name}: " if record.name else ""
    return Text(name + record.config.describe())


def speed(record: TrialRecord) -> str:
    return speed_words(record.tokens_per_second, record.tokens_per_second_spread) or "-"


def _remark(result: StudyResult, record: TrialRecord) -> Text:
    marks = []
    if _is_pick(result, record):
        marks.append("pick")
    if record.number in result.front:
        marks.append("front")
    if record.number == result.baseline and record.name != "baseline":
        marks.append("baseline")
    if record.outcome != "ok":
        marks.append(OUTCOME_WORDS[record.outcome])
    if record.outcome not in ("ok", "over_cap") and record.message:
        marks.append(record.message)
    if record.compile_seconds is not None:
        marks.append(f"compiled in {record.compile_seconds:.0f} s")
    if record.reused_from:
        marks.append(f"from {record.reused_from}")
    return Text(", ".join(marks))


def print_result(result: StudyResult, console: Console) -> None:
    """The answer first: front, pick and its reason; then what did not fit."""
    baseline = next((r for r in result.trials if r.number == result.baseline), None)
    front = [result.trial(number) for number in result.front]
    beside = [] if baseline is None or baseline in front else [baseline]
    cap = format_size(result.cap_bytes)
    if front:
        console.print(trials_table(result, [*front, *beside], title=f"Front under {cap}, and the baseline"))
        console.print()
    print_pick(result, console)
    misses = [record for record in result.trials if record.outcome != "ok" and record is not baseline]
    if misses and result.pick is not None:
        console.print()
        console.print(trials_table(result, misses, title="Not candidates"))


def print_pick(result: StudyResult, console: Console) -> None:
    """The pick and its reason; where nothing fits, the closest miss and what to try."""
    if result.pick is None:
        _print_no_pick(result, console)
        return
    picked = result.trial(result.pick.number)
    console.print(Text.assemble(("Pick: ", "bold green"), f"#{picked.number} ", describe(picked)))
    console.print(Text(f"  {result.pick.reason}."))


def _print_no_pick(result: StudyResult, console: Console) -> None:
    if not any(record.is_finished for record in result.trials):
        console.print(no_answer(result))
        return
    console.print(Text(no_answer(result), style="bold red"))
    closest = closest_miss(result.trials)
    if closest is not None:
        needed = Text.assemble(
            f"  The closest miss needs {format_size(needed_bytes(closest))}: #{closest.number} ", describe(closest)
        )
        console.print(needed)
    console.print(
        "  Try a larger --max-mem, more --trials, a shorter --seq-len, a smaller --global-batch or a smaller model."
    )


def _is_pick(result: StudyResult, record: TrialRecord) -> bool:
    return result.pick is not None and record.number == result.pick.number


def _ratio(record: TrialRecord) -> str:
    """Predicted over measured peak."""
    if not record.peak_memory_bytes or not record.predicted_peak_memory_bytes:
        return "-"
    return f"{record.predicted_peak_memory_bytes / record.peak_memory_bytes:.4f}"


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)
