"""What `autotune predict` does: make predictions, and print them as text, JSON or a page.

One prediction is printed with what holds the memory, a whole search space as one table.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table

from autotune import api
from autotune.analysis.pick import chosen_trial
from autotune.analysis.published_comparison import reference_of
from autotune.cli.lines import print_line
from autotune.cli.published import of_forecasts, print_reference
from autotune.cli.tables import as_text, is_narrow, make_console, narrow_note
from autotune.reporting.output_file import write_file
from autotune.reporting.trial_text import short_description
from autotune.spec.config import TrainingConfig, check_legal
from autotune.spec.prediction import Forecast, Prediction
from autotune.spec.result import JSON_SCHEMA, DeviceInfo, StudyResult, TrialRecord
from autotune.spec.search_space import LegalSpace, SearchSpace, bind_space
from autotune.spec.workload import Workload
from autotune.study.predictions import Forecaster, workload_of
from autotune.units import format_percent, format_size


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A prediction and what it is compared with: a cap and, for a trial, its measurement."""

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
        """The record's GPU if the prediction is for another compute capability, else None."""
        if self.measured_on is None or self.measured_on.compute_capability is None:
            return None
        if self.measured_on.compute_capability == self.forecaster.compute_capability:
            return None
        return self.measured_on

    def to_dict(self) -> dict[str, Any]:
        margin_bytes = None
        if self.cap_bytes is not None:
            margin_bytes = self.cap_bytes - self.prediction.upper_bound_bytes
        measured_bytes = None if self.record is None else self.record.peak_memory_bytes
        return {
            "schema": JSON_SCHEMA,
            "workload": self.forecaster.workload.to_dict(),
            "config": self.config.to_dict(),
            "cap_bytes": self.cap_bytes,
            "margin_bytes": margin_bytes,
            "measured_peak_memory_bytes": measured_bytes,
            **self.prediction.to_dict(),
        }

    def about(self) -> str:
        text = f"{self.forecaster.workload.describe()}, for {self.prediction.device}"
        if self.prediction.fake_device != self.prediction.device:
            text += f", computed on fake {self.prediction.fake_device} tensors"
        return text

    def verdict(self) -> str:
        """Return the peak, where in the step it is, and how it compares with the cap."""
        prediction = self.prediction
        text = (
            f"Peak {format_size(prediction.peak_memory_bytes)}, "
            f"at most {format_size(prediction.upper_bound_bytes)}, in {prediction.phase}"
        )
        if prediction.module:
            text += f", in {prediction.module}"
        if prediction.operator:
            text += f" at {prediction.operator}"
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
        console.print(as_text(line, style=style), soft_wrap=True)

    prediction = answer.prediction
    say(answer.config.describe(), "bold")
    say(answer.about())
    say(f"{answer.verdict()}.")
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
                "refusal": forecast.error,
                **({} if forecast.prediction is None else forecast.prediction.to_dict()),
            }
            for forecast in forecasts
        ],
    }


def space_table(
    forecasts: Sequence[Forecast],
    names: Mapping[str, str],
    *,
    cap_bytes: int | None,
    baseline: TrainingConfig | None = None,
) -> Table:
    """Return a table with one row per configuration.

    With a `baseline`, for narrow terminals, a row has the configuration's name or, in short, what
    differs from the baseline.
    """
    title = f"{len(forecasts)} configurations by predicted peak"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    if baseline is not None:
        table.caption, table.caption_justify = narrow_note(baseline), "left"
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("at most", justify="right", no_wrap=True)
    table.add_column("configuration", ratio=1, overflow="fold")
    table.add_column("peak in", no_wrap=True)
    table.add_column("", overflow="fold")
    for forecast in forecasts:
        name = names.get(forecast.config.fingerprint)
        if baseline is not None:
            description = name or short_description(forecast.config, baseline)
        else:
            description = forecast.config.describe()
            if name:
                description = f"{name}: {description}"
        prediction = forecast.prediction
        if prediction is None:
            table.add_row("-", "-", as_text(description), "-", as_text(forecast.error))
            continue
        remark = ""
        if cap_bytes is not None and prediction.upper_bound_bytes > cap_bytes:
            is_over = prediction.lower_bound_bytes > cap_bytes
            remark = "over the cap" if is_over else "too close to say"
        table.add_row(
            format_size(prediction.peak_memory_bytes),
            format_size(prediction.upper_bound_bytes),
            as_text(description),
            prediction.phase,
            remark,
            style="dim" if remark else "",
        )
    return table


def predict_space(
    forecaster: Forecaster,
    space: SearchSpace,
    *,
    cap_bytes: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    legal = _legal(forecaster, space)
    names = {config.fingerprint: name for name, config in legal.named.items()}
    configs = {c.fingerprint: c for c in [*legal.named.values(), *legal.configurations()]}
    forecasts = _with_progress(forecaster, list(configs.values()), quiet=quiet)
    forecasts.sort(
        key=lambda forecast: forecast.prediction.peak_memory_bytes if forecast.prediction else 2**63
    )
    if as_json:
        print(
            json.dumps(space_to_dict(forecaster, forecasts, names, cap_bytes=cap_bytes), indent=2)
        )
        return
    console = make_console()
    baseline = None
    if is_narrow(console):
        baseline = space.baseline_config(global_batch=forecaster.workload.global_batch)
    console.print(space_table(forecasts, names, cap_bytes=cap_bytes, baseline=baseline))


def predict_reference(
    forecaster: Forecaster, space: SearchSpace, *, as_json: bool, quiet: bool
) -> None:
    rows = reference_of(space, what="what is predicted").rows
    named = {
        name: config for name, config in _legal(forecaster, space).named.items() if name in rows
    }
    configs = {config.fingerprint: config for config in named.values()}
    forecasts = _with_progress(forecaster, list(configs.values()), quiet=quiet)
    about = f"{forecaster.workload.describe()}, for {forecaster.device_type}"
    if forecaster.torch_version is not None:
        about += f" as with torch {forecaster.torch_version}"
    answer = of_forecasts(space, forecaster.workload, forecasts, named, about=about)
    print_reference(answer, form="json" if as_json else "table")


def _legal(forecaster: Forecaster, space: SearchSpace) -> LegalSpace:
    return bind_space(space, forecaster.workload.legality_context, unavailable={})


def _with_progress(
    forecaster: Forecaster, configs: list[TrainingConfig], *, quiet: bool
) -> list[Forecast]:
    with Progress(console=make_console(sys.stderr), transient=True, disable=quiet) as progress:
        task = progress.add_task("predicting", total=len(configs))
        return forecaster.forecast_all(configs, on_each=lambda _: progress.advance(task))


def requested_workload(
    device_type: str,
    settings: Mapping[str, Any],
    configuration: Mapping[str, Any],
    *,
    space: SearchSpace | None,
) -> Workload:
    """Return the workload that the options describe.

    Raises InvalidInput, also where the configuration of the options is not legal for it.
    """
    workload = workload_of(device_type, settings, space=space)
    if space is None:
        config = TrainingConfig(**{"micro_batch_size": workload.global_batch, **configuration})
        check_legal(config, workload.legality_context)
    return workload


def stored_trial(study: str, trial: int, *, storage: str) -> tuple[StudyResult, TrialRecord]:
    """Return a study and one of its trials.

    Raises UnknownStudy, and InvalidInput for an unknown trial.
    """
    result = api.show(study, storage=storage)
    return result, chosen_trial(result, trial)


def write_page(answer: Answer, file: Path) -> None:
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
