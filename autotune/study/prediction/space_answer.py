"""The predictions of a search space: which configurations fit, and which are on the front."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.reporting.trial_text import speed_text
from autotune.spec.cap import CLOSE, FITS, OVER, needed_bytes, verdict_of
from autotune.spec.prediction import Forecast, Prediction, context_bytes_on
from autotune.spec.result import JSON_SCHEMA
from autotune.spec.search_space import MOST_LISTED, SearchSpace, bind_space
from autotune.spec.workload import Workload
from autotune.study.explain.alternatives import unavailable_on
from autotune.study.prediction.predicted_front import PredictedFront, predicted_front
from autotune.study.prediction.predictions import Forecaster
from autotune.units import format_size

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
            "all_were_estimated": front.is_listed,
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
            drawn = "" if front.is_listed else f" of {MOST_LISTED:,} that were drawn"
            others = (
                f", {front.may_fit:,} others{drawn} fit {cap} by the memory model that they give"
            )
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
            "described": forecast.config.describe(),
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


def predict_space(
    forecaster: Forecaster,
    space: SearchSpace,
    *,
    cap_bytes: int | None,
    with_unnamed: bool = False,
    tell: Callable[[int, int | None], None] = lambda made, wanted: None,
) -> SpaceAnswer:
    """Returns predictions of the front and the named configurations of a space.

    Where no speed can be expected, they are those of the named ones, or of all where it names none.
    `with_unnamed` predicts all. `tell` gets how many predictions are made, and of how many, None if
    that is not known.
    """
    at = forecaster.workload.legality_context
    legal = bind_space(space, at, unavailable=unavailable_on(forecaster.device_type, {}))
    names = {config.fingerprint: name for name, config in legal.named.items()}
    configs = {config.fingerprint: config for config in legal.named.values()}
    is_whole_space = with_unnamed or not configs
    front = None
    made, wanted = 0, None

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
            configs.update((config.fingerprint, config) for config in legal.listed())
        wanted = len(configs)
        tell(made, wanted)
        forecasts = forecaster.forecast_all(configs.values(), on_each=on_each)
    forecasts.sort(
        key=lambda forecast: forecast.prediction.peak_memory_bytes if forecast.prediction else 2**63
    )
    return SpaceAnswer(
        workload=forecaster.workload,
        device_type=forecaster.device_type,
        cap_bytes=cap_bytes,
        forecasts=forecasts,
        front=front,
        names=names,
        has_others=not is_whole_space and legal.count() > 0,
        excluded=legal.excluded,
    )
