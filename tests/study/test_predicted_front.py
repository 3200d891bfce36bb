"""The front of memory and speed that a space is expected to have."""

from dataclasses import replace

import pytest

from autotune.analysis.expected_step import with_speed
from autotune.spec import search_space
from autotune.spec.data_sheets import DATA_SHEETS
from autotune.spec.prediction import Forecast
from autotune.spec.search_space import bind_space
from autotune.spec.space_file import load_space
from autotune.study.prediction import predicted_front as module
from autotune.study.prediction.predicted_front import predicted_front
from tests.analysis.test_expected_step import H200, PREDICTED, STUDY
from tests.analysis.test_expected_step import expected as expected_of

GIB = 2**30
SPACE = replace(
    load_space("default"),
    techniques={
        "precision": ("fp32", "bf16-mixed", "bf16-true"),
        "checkpointing": ("none", "selective", "every-2", "block"),
        "compile": ("none", "block", "model"),
        "optimizer_fusion": ("foreach", "kernel", "backward"),
        "micro_batch_size": (16, 8, 4, 2, 1),
        "loss": ("full", "chunked"),
    },
)
AT = STUDY.workload.legality_context
BASELINE = SPACE.baseline_config(AT)
LEGAL = bind_space(SPACE, AT, unavailable={})


class Forecaster:
    """Predicts what the roofline says, but for compiled models twice the memory of it."""

    def __init__(self, described=H200):
        self.described = described
        self.workload = STUDY.workload
        self.executor = self
        self.predictions_at_once = 2
        self.made = []

    def forecast_all(self, configs, *, on_each):
        return [self.forecast(config, on_each) for config in configs]

    def forecast(self, config, on_each):
        self.made.append(config)
        step = expected_of()
        peak = round(2.718281828 ** step.logarithm_of_peak(config))
        if config.compile == "model":
            peak *= 2
        counted = replace(
            PREDICTED, peak_memory_bytes=peak, upper_bound_bytes=peak, lower_bound_bytes=peak
        )
        found = with_speed(counted, replace(config), workload=self.workload, device=self.described)
        speed = step.tokens_per_second(config)
        forecast = Forecast(
            config=config, prediction=replace(found, predicted_tokens_per_second=speed)
        )
        on_each(forecast)
        return forecast


def front_of(forecaster=None, *, cap=8 * GIB):
    forecaster = forecaster or Forecaster()
    return predicted_front(forecaster, LEGAL, baseline=BASELINE, cap_bytes=cap)


@pytest.fixture(scope="module")
def found():
    return front_of()


def test_named_configurations_and_the_baseline_are_predicted_first():
    forecaster = Forecaster()
    front_of(forecaster)
    first = {config.fingerprint for config in forecaster.made[: len(LEGAL.named) + 1]}
    assert first == {c.fingerprint for c in (BASELINE, *LEGAL.named.values())}


def test_no_configuration_is_predicted_twice():
    forecaster = Forecaster()
    front_of(forecaster)
    assert len({c.fingerprint for c in forecaster.made}) == len(forecaster.made)


def test_each_on_the_front_is_predicted_under_the_cap_and_beaten_by_none(found):
    by_fingerprint = {one.config.fingerprint: one.prediction for one in found.forecasts}
    front = [by_fingerprint[fingerprint] for fingerprint in found.front]
    peaks = [one.peak_memory_bytes for one in front]
    speeds = [one.predicted_tokens_per_second for one in front]
    assert len(front) > 2
    assert max(peaks) <= 8 * GIB
    assert (peaks, speeds) == (sorted(peaks), sorted(speeds))


def test_a_few_predictions_find_nearly_the_fastest_of_hundreds(found):
    assert found.legal > 500
    assert len(found.forecasts) < 60
    forecaster = Forecaster()
    speeds = [
        one.prediction.predicted_tokens_per_second
        for config in LEGAL.configurations()
        if (one := forecaster.forecast(config, lambda _: None)).prediction.peak_memory_bytes
        < 7.4 * GIB
    ]
    best = max(
        one.prediction.predicted_tokens_per_second
        for one in found.forecasts
        if one.config.fingerprint in found.front
    )
    assert best >= 0.97 * max(speeds)


def test_more_fit_under_a_larger_cap(found):
    assert front_of(cap=16 * GIB).may_fit > found.may_fit > 0


def test_of_a_space_too_large_to_be_listed_a_part_is_estimated(monkeypatch, found):
    monkeypatch.setattr(search_space, "MOST_LISTED", 200)
    front = front_of()
    assert found.is_listed
    assert not front.is_listed
    assert front.legal == found.legal
    assert 0 < front.may_fit < 200


def test_it_says_when_the_time_was_over(monkeypatch):
    monkeypatch.setattr(module, "MOST_SECONDS", 0.0)
    front = front_of()
    assert not front.is_complete
    assert len(front.forecasts) == len(LEGAL.named) + 1


def test_without_the_rates_of_the_device_there_is_no_front():
    assert front_of(Forecaster(described=None)) is None
    unknown = replace(DATA_SHEETS["l4"].device(), matrix_flops_per_second=None)
    assert front_of(Forecaster(described=unknown)) is None
