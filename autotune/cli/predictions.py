"""What `autotune predict` does: make predictions, and print them as text, JSON or a page.

One prediction is printed with what holds the memory, a whole search space as one table.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from autotune.analysis.least_memory import least_memory_bytes
from autotune.cli.lines import print_line
from autotune.cli.predicting import predicting
from autotune.cli.tables import as_text, is_narrow, make_console, narrow_note
from autotune.reporting.output_file import write_file
from autotune.reporting.trial_text import (
    extrapolation_note,
    peaks_text,
    short_description,
    speed_text,
)
from autotune.spec.cap import CLOSE, FITS, OVER, needed_bytes, verdict_of
from autotune.spec.config import TrainingConfig, check_legal, configuration_of
from autotune.spec.prediction import Forecast, Prediction, context_bytes_on
from autotune.spec.result import JSON_SCHEMA, DeviceInfo, TrialRecord
from autotune.spec.search_space import SearchSpace, bind_space
from autotune.spec.workload import Workload, check_adapters
from autotune.study.explain.alternatives import unavailable_on
from autotune.study.explain.smallest_change import SmallestChange, smallest_change
from autotune.study.prediction.predicted_front import PredictedFront, predicted_front
from autotune.study.prediction.predictions import Forecaster, workload_of
from autotune.units import format_amount, format_estimate, format_percent, format_size


@dataclass(frozen=True, kw_only=True)
class ComparedPrediction:
    """A prediction and what it is compared with: a cap and, for a trial, its measurement."""

    forecaster: Forecaster
    config: TrainingConfig
    prediction: Prediction
    cap_bytes: int | None
    record: TrialRecord | None = None
    measured_on: DeviceInfo | None = None
    """The device of the record's study; the prediction may be for another GPU."""
    change: SmallestChange | None = None
    """What makes the training of a trainer's file fit, where it does not surely."""

    @property
    def is_too_large(self) -> bool:
        return verdict_of(self.prediction, cap_bytes=self.cap_bytes) == OVER

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
            margin_bytes = self.cap_bytes - needed_bytes(self.prediction)
        measured_bytes = None if self.record is None else self.record.peak_memory_bytes
        return {
            "schema": JSON_SCHEMA,
            "workload": self.forecaster.workload.to_dict(),
            "config": self.config.to_dict(),
            "cap_bytes": self.cap_bytes,
            "margin_bytes": margin_bytes,
            "measured_peak_memory_bytes": measured_bytes,
            **self._change_to_dict(),
            **self.prediction.to_dict(),
        }

    def with_change(self, *, quiet: bool) -> "ComparedPrediction":
        """Returns the answer with the smallest change that makes it fit; itself if it fits.

        Says on stderr what is predicted next, also where that is no terminal.
        """
        if verdict_of(self.prediction, cap_bytes=self.cap_bytes) in (None, FITS):
            return self

        def say(what: str) -> None:
            if not quiet:
                print_line(f"Predicting it with {what} ...", to_stderr=True, flush=True)

        change = smallest_change(
            self.forecaster,
            self.config,
            fits=lambda changed: verdict_of(changed, cap_bytes=self.cap_bytes) == FITS,
            progress=say,
        )
        return replace(self, change=change)

    def _change_to_dict(self) -> dict[str, Any]:
        if self.change is None:
            return {}
        change = {
            "techniques": dict(self.change.changes),
            "fits": self.change.fits,
            "peak_memory_bytes": self.change.prediction.peak_memory_bytes,
            "needed_bytes": needed_bytes(self.change.prediction),
        }
        return {"smallest_change": change}

    def change_line(self) -> str:
        """Returns what makes it fit, or how far that goes; empty where it was not looked for."""
        if self.change is None or self.cap_bytes is None:
            return ""
        peak = format_size(self.change.prediction.peak_memory_bytes)
        most = format_size(self.change.prediction.upper_bound_bytes)
        what = f"{self.change.describe()}: peak {peak}, at most {most}"
        if self.change.fits:
            return f"The smallest change that makes it fit: {what}."
        return f"No change that was tried makes it surely fit. The nearest: {what}."

    def about(self) -> str:
        workload = self.forecaster.workload
        text = f"{workload.describe()}, {_for_devices(workload, self.prediction.device)}"
        if self.prediction.fake_device != self.prediction.device:
            text += f", computed on fake {self.prediction.fake_device} tensors"
        return text

    def verdict(self) -> str:
        """Returns the peak, where in the step it is, and how it compares with the cap."""
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
        if prediction.devices > 1:
            cap += " of each device"
        if self.is_too_large:
            excess = format_size(prediction.peak_memory_bytes - self.cap_bytes)
            return f"{text}: {excess} more than {cap}"
        if context := context_bytes_on(prediction.device):
            cap += f" with {format_size(context)} for the CUDA context"
        needed = needed_bytes(prediction)
        if needed > self.cap_bytes:
            return f"{text}: too close to {cap} to say"
        return f"{text}: {format_size(self.cap_bytes - needed)} below {cap}"


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


def _for_devices(workload: Workload, device_type: str) -> str:
    """Returns the devices of a trial as text: `for cuda`, or `for each of 4 cuda devices`."""
    if workload.devices_per_trial == 1:
        return f"for {device_type}"
    return f"for each of {workload.devices_per_trial} {device_type} devices"


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
    for note in prediction.notes:
        say(f"Note: {note}.")
    if extrapolated := extrapolation_note(prediction):
        say(f"Note: {extrapolated}; --whole-depth predicts all layers.")


NO_RATES = (
    "the rates of this device are not known; a search on it probes them, and --device takes a GPU "
    "whose data sheet is known, such as h100"
)


@dataclass(frozen=True, kw_only=True)
class SpaceAnswer:
    """The predictions of a search space, those of least memory first."""

    workload: Workload
    device_type: str
    cap_bytes: int | None
    forecasts: Sequence[Forecast]
    front: PredictedFront | None = None
    """Where speeds are predicted, unless all configurations were asked for."""
    names: Mapping[str, str]
    """Names of the space's configurations, by fingerprint."""
    has_others: bool
    """Whether the space has legal configurations that were not asked for."""
    excluded: Sequence[str]
    """Named configurations and values of the space that are not legal here, with the reason."""

    @property
    def predicted(self) -> list[tuple[Forecast, Prediction]]:
        return [(one, one.prediction) for one in self.forecasts if one.prediction is not None]

    @property
    def has_speeds(self) -> bool:
        """Whether the speed of any configuration is predicted."""
        return any(found.predicted_tokens_per_second for _, found in self.predicted)

    @property
    def has_estimates(self) -> bool:
        """Whether configurations were estimated by those that are predicted."""
        return self.front is not None and len(self.forecasts) < self.front.legal

    @property
    def nothing_fits(self) -> bool:
        """Whether every configuration that can be predicted is surely over the cap."""
        verdicts = {verdict_of(found, cap_bytes=self.cap_bytes) for _, found in self.predicted}
        return verdicts == {OVER}

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": JSON_SCHEMA,
            "workload": self.workload.to_dict(),
            "device": self.device_type,
            "cap_bytes": self.cap_bytes,
            "is_whole_space": not self.has_others,
            "front": None if self.front is None else self._front_to_dict(self.front),
            "predictions": [self._row_to_dict(forecast) for forecast in self.forecasts],
        }

    def _front_to_dict(self, front: PredictedFront) -> dict[str, Any]:
        picked = self.picked
        return {
            "legal_configurations": front.legal,
            "predicted_configurations": len(self.forecasts),
            "estimated_to_fit": front.may_fit,
            "is_complete": front.is_complete,
            "pick": None if picked is None else picked[0].config.to_dict(),
        }

    @property
    def picked(self) -> tuple[Forecast, Prediction] | None:
        """The fastest on the front that surely fits; without a cap, the fastest."""
        if self.front is None:
            return None
        fitting = [
            one
            for one in self.predicted
            if one[0].config.fingerprint in self.front.front
            and verdict_of(one[1], cap_bytes=self.cap_bytes) in (FITS, None)
        ]
        return max(fitting, key=lambda one: one[1].predicted_tokens_per_second or 0, default=None)

    def lines_about_front(self) -> Iterator[str]:
        """Yield how the front was found, the pick, and what a search would add."""
        if self.front is None:
            return
        front = self.front
        made = f"{len(self.forecasts)} of {front.legal:,} legal configurations were predicted whole"
        others = ""
        if self.has_estimates and self.cap_bytes is None:
            others = ", and memory and speed of the others estimated by them"
        elif self.has_estimates:
            cap = format_size(self.cap_bytes or 0)
            others = f", {front.may_fit:,} others fit {cap} by the memory model that they give"
        whole = "" if front.is_complete else "; the front may have more, --all predicts everything"
        yield f"{made}{others}. On the front, marked *: {len(front.front)}{whole}."
        if self.picked is None:
            return
        forecast, prediction = self.picked
        name = self.names.get(forecast.config.fingerprint)
        words = forecast.config.describe()
        yield (
            f"Fastest that fits: {f'{name}: ' if name else ''}{words}, "
            f"{format_size(prediction.peak_memory_bytes)}, {speed_text(prediction)}."
        )
        yield (
            "A search would add what this cannot say: the perplexity of each, how long they "
            "compile, and speeds that are measured."
        )

    def _row_to_dict(self, forecast: Forecast) -> dict[str, Any]:
        row: dict[str, Any] = {
            "name": self.names.get(forecast.config.fingerprint),
            "config": forecast.config.to_dict(),
            "refusal": forecast.error,
            "verdict": None,
            "needed_bytes": None,
            "is_on_front": self.is_on_front(forecast),
        }
        if forecast.prediction is not None:
            row["needed_bytes"] = needed_bytes(forecast.prediction)
            row["verdict"] = verdict_of(forecast.prediction, cap_bytes=self.cap_bytes)
            row.update(forecast.prediction.to_dict())
        return row

    def is_on_front(self, forecast: Forecast) -> bool | None:
        """Returns whether nothing predicted beats it in memory and speed; None without speeds."""
        return None if self.front is None else forecast.config.fingerprint in self.front.front

    def shown(self) -> list[Forecast]:
        """Returns the rows of the table: with a front, its and the named ones."""
        if self.front is None:
            return list(self.forecasts)
        return [
            one
            for one in self.forecasts
            if self.is_on_front(one) or one.config.fingerprint in self.names
        ]

    def conclusion(self) -> str:
        """Returns one line: how many configurations fit, and what the smallest one needs."""
        predicted = self.predicted
        if not predicted:
            return "No configuration can be predicted."
        forecast, least = predicted[0]
        name = self.names.get(forecast.config.fingerprint) or forecast.config.describe()
        need = f"{format_size(least.peak_memory_bytes)}"
        if self.cap_bytes is None:
            return f"The least memory is {need}, by {name}."
        cap = format_size(self.cap_bytes)
        verdicts = [verdict_of(found, cap_bytes=self.cap_bytes) for _, found in predicted]
        fitting, close = verdicts.count(FITS), verdicts.count(CLOSE)
        least_text = f"the least memory is {need}, by {name}"
        if self.nothing_fits:
            return f"None of {len(predicted)} configurations fits {cap}: {least_text}."
        text = f"{fitting} of {len(predicted)} configurations fit {cap}"
        if close:
            text += f", {close} {'is' if close == 1 else 'are'} too close to say"
        return f"{text}: {least_text}."

    def notes(self) -> Iterator[str]:
        """Yield what the rows have in common, and what is special about some of them."""
        predicted = self.predicted
        yield from self._about_extrapolation()
        if self.workload.devices_per_trial > 1:
            yield "the peak of a row is that of the rank that needs most; --json has all ranks"
        if self.cap_bytes is not None and (context := context_bytes_on(self.device_type)):
            yield (
                f"a configuration fits {format_size(self.cap_bytes)} if what it needs at most and "
                f"a CUDA context of {format_size(context)} do"
            )
        by_note: dict[str, list[Forecast]] = {}
        for forecast, prediction in predicted:
            for note in prediction.notes:
                by_note.setdefault(note, []).append(forecast)
        for note, forecasts in by_note.items():
            if len(forecasts) == len(predicted):
                yield note
            elif len(forecasts) == 1:
                config = forecasts[0].config
                name = self.names.get(config.fingerprint) or config.describe()
                yield f"{name}: {note}"
            else:
                yield f"{len(forecasts)} of {len(predicted)} rows: {note}"
        if not self.has_speeds:
            yield f"no speeds: {NO_RATES}"
        yield from self.excluded
        smallest = min(forecast.config.micro_batch_size for forecast in self.forecasts)
        if self.nothing_fits and smallest > 1:
            yield (
                f"every row has a micro-batch of {smallest} or more sequences; --global-batch 1 "
                "shows what is the least"
            )
        if self.has_others and self.front is None:
            yield (
                "only the configurations that the space names are predicted; --all predicts every "
                "legal one"
            )

    def _about_extrapolation(self) -> Iterator[str]:
        checked = [found for _, found in self.predicted if found.checked_at is not None]
        if not checked:
            return
        worst = max(found.check_error_bytes or 0 for found in checked)
        rows = "every row" if len(checked) == len(self.predicted) else f"{len(checked)} rows"
        yield (
            f"{rows} extrapolated to {self.workload.layers} layers from predictions of fewer, as "
            "the last column says, and compared with a prediction of a third depth, where it was "
            f"at most {format_size(worst)} off; --whole-depth predicts all layers"
        )


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


def predict_space(
    forecaster: Forecaster,
    space: SearchSpace,
    *,
    cap_bytes: int | None,
    with_unnamed: bool,
    as_json: bool,
    quiet: bool,
) -> SpaceAnswer:
    """Predict and print the named configurations of a space, or all where it names none.

    `with_unnamed` also predicts the others.
    """
    at = forecaster.workload.legality_context
    legal = bind_space(space, at, unavailable=unavailable_on(forecaster.device_type, {}))
    names = {config.fingerprint: name for name, config in legal.named.items()}
    configs = {config.fingerprint: config for config in legal.named.values()}
    is_whole_space = with_unnamed or not configs
    front = None
    made, wanted = 0, None
    with predicting(quiet=quiet) as tell:

        def on_each(_: Forecast) -> None:
            nonlocal made
            made += 1
            tell(made, wanted)

        if not with_unnamed and legal.values:
            front = predicted_front(
                forecaster,
                legal,
                baseline=space.baseline_config(at),
                cap_bytes=cap_bytes,
                on_each=on_each,
            )
        if front is not None:
            forecasts, is_whole_space = list(front.forecasts), False
        else:
            if is_whole_space:
                configs.update((config.fingerprint, config) for config in legal.configurations())
            wanted = len(configs)
            tell(made, wanted)
            forecasts = forecaster.forecast_all(configs.values(), on_each=on_each)
    forecasts.sort(
        key=lambda forecast: forecast.prediction.peak_memory_bytes if forecast.prediction else 2**63
    )
    answer = SpaceAnswer(
        workload=forecaster.workload,
        device_type=forecaster.device_type,
        cap_bytes=cap_bytes,
        forecasts=forecasts,
        front=front,
        names=names,
        has_others=not is_whole_space and next(legal.configurations(), None) is not None,
        excluded=legal.excluded,
    )
    if as_json:
        print(json.dumps(answer.to_dict(), indent=2))
        return answer
    console = make_console()
    baseline = None
    if is_narrow(console):
        baseline = space.baseline_config(forecaster.workload.legality_context)
    for_devices = _for_devices(forecaster.workload, forecaster.device_type)
    about = f"{forecaster.workload.describe()}, predicted {for_devices}"
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
    return answer


def requested_workload(
    device_type: str,
    settings: Mapping[str, Any],
    configuration: Mapping[str, Any],
    *,
    space: SearchSpace | None,
) -> Workload:
    """Returns the workload that the options describe.

    Raises InvalidInput, also where the configuration of the options is not legal for it.
    """
    workload = workload_of(device_type, settings, space=space)
    if space is None:
        config = configuration_of(configuration, workload.legality_context)
        check_legal(config, workload.legality_context)
    check_adapters(workload, [config.adapter] if space is None else space.choices()["adapter"])
    return workload


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
