"""Predictions as text and as JSON: one with who holds the memory, or those of a whole space."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from autotune.cli.tables import make_console
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast, Prediction
from autotune.spec.result import JSON_SCHEMA, DeviceInfo, TrialRecord
from autotune.study.predictions import Forecaster
from autotune.units import format_size


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A prediction and what it is held against."""

    forecaster: Forecaster
    config: TrainingConfig
    prediction: Prediction
    cap_bytes: int | None
    record: TrialRecord | None = None
    measured_on: DeviceInfo | None = None
    """The device of the record's study; the prediction may be for another GPU."""

    @property
    def is_too_large(self) -> bool:
        return self.cap_bytes is not None and self.prediction.lower_bound_bytes > self.cap_bytes

    @property
    def measured_on_another_gpu(self) -> DeviceInfo | None:
        """Returns the record's GPU where the prediction is for another compute capability; None where it is not."""
        known = None if self.measured_on is None else self.measured_on.compute_capability
        return self.measured_on if known not in (None, self.forecaster.compute_capability) else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": JSON_SCHEMA,
            "workload": self.forecaster.workload.to_dict(),
            "config": self.config.to_dict(),
            "cap_bytes": self.cap_bytes,
            "margin_bytes": None
            if self.cap_bytes is None
            else self.cap_bytes - self.prediction.upper_bound_bytes,
            "measured_peak_memory_bytes": None
            if self.record is None
            else self.record.peak_memory_bytes,
            **self.prediction.to_dict(),
        }

    def about(self) -> str:
        workload = self.forecaster.workload
        where = self.prediction.device
        fake = self.prediction.fake_device
        return f"{workload.describe()}, for {where}" + (
            "" if where == fake else f", worked out on fake {fake} tensors"
        )

    def verdict(self) -> str:
        """Where the peak is, and how it stands to the cap."""
        prediction = self.prediction
        text = (
            f"Peak {format_size(prediction.peak_memory_bytes)}, at most {format_size(prediction.upper_bound_bytes)}, "
            f"in {prediction.phase}" + (f", in {prediction.module}" if prediction.module else "")
        )
        text += f" at {prediction.operator}" if prediction.operator else ""
        if self.cap_bytes is None:
            return text
        cap = format_size(self.cap_bytes)
        if self.is_too_large:
            excess = format_size(prediction.peak_memory_bytes - self.cap_bytes)
            return f"{text}: {excess} more than {cap}"
        if prediction.upper_bound_bytes > self.cap_bytes:
            return f"{text}: too close to {cap} to say"
        return f"{text}: {format_size(self.cap_bytes - prediction.upper_bound_bytes)} below {cap}"


def print_answer(answer: Answer) -> None:
    console = make_console()

    def say(line: str, style: str = "") -> None:
        console.print(Text(line, style=style), soft_wrap=True)

    prediction = answer.prediction
    say(answer.config.describe(), "bold")
    say(answer.about())
    say(f"{answer.verdict()}.")
    if answer.record is not None and answer.record.peak_memory_bytes is not None:
        measured = answer.record.peak_memory_bytes
        if other := answer.measured_on_another_gpu:
            say(
                f"Measured {format_size(measured)} on {other.name}, another GPU than the one predicted for."
            )
        else:
            ratio = prediction.peak_memory_bytes / measured
            say(f"Measured {format_size(measured)}: {ratio:.4f} times that is predicted.")
    shares = Table(
        box=None, pad_edge=False, title="At the peak", title_justify="left", title_style="bold"
    )
    for column in ("", "size", "share"):
        shares.add_column(column, justify="right" if column else "left")
    for category, size_bytes in sorted(
        prediction.bytes_by_category.items(), key=lambda item: -item[1]
    ):
        if size_bytes:
            share = f"{100 * size_bytes / prediction.peak_memory_bytes:.1f} %"
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
        made_by = Text(holder.operator)
        holders.add_row(
            format_size(holder.size_bytes),
            str(holder.count),
            what,
            Text(holder.module or "-"),
            made_by,
        )
    console.print()
    console.print(holders)
    for note in prediction.notes:
        say(f"Note: {note}.")


def space_to_dict(
    forecaster: Forecaster,
    forecasts: Sequence[Forecast],
    names: Mapping[str, str],
    *,
    cap_bytes: int | None,
) -> dict[str, Any]:
    return {
        "schema": JSON_SCHEMA,
        "workload": forecaster.workload.to_dict(),
        "cap_bytes": cap_bytes,
        "predictions": [
            {
                "name": names.get(forecast.config.fingerprint),
                "config": forecast.config.to_dict(),
                "refusal": forecast.refusal,
                **({} if forecast.prediction is None else forecast.prediction.to_dict()),
            }
            for forecast in forecasts
        ],
    }


def space_table(
    forecasts: Sequence[Forecast], names: Mapping[str, str], *, cap_bytes: int | None
) -> Table:
    title = f"{len(forecasts)} configurations by predicted peak"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("at most", justify="right", no_wrap=True)
    table.add_column("configuration", ratio=1, overflow="fold")
    table.add_column("peak in", no_wrap=True)
    table.add_column("", overflow="fold")
    for forecast in forecasts:
        name = names.get(forecast.config.fingerprint)
        words = Text((f"{name}: " if name else "") + forecast.config.describe())
        prediction = forecast.prediction
        if prediction is None:
            table.add_row("-", "-", words, "-", Text(forecast.refusal))
            continue
        fits = cap_bytes is None or prediction.upper_bound_bytes <= cap_bytes
        table.add_row(
            format_size(prediction.peak_memory_bytes),
            format_size(prediction.upper_bound_bytes),
            words,
            prediction.phase,
            ""
            if fits
            else "over the cap"
            if prediction.lower_bound_bytes > (cap_bytes or 0)
            else "too close to say",
            style="" if fits else "dim",
        )
    return table
