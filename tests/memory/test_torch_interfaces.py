"""The private interfaces of torch exist, and a missing one is named in the message."""

import pytest
import torch

from autotune.errors import AutotuneError, PredictionImpossible
from autotune.execution.process.answers import predict, probe
from autotune.execution.tasks import Predict, Probe
from autotune.memory import torch_interfaces
from autotune.memory.cpu import CpuMeter
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest

CHECKS = {
    torch_interfaces.check_predictions: torch_interfaces.OF_PREDICTIONS,
    torch_interfaces.check_cpu_meter: torch_interfaces.OF_THE_CPU_METER,
    torch_interfaces.check_snapshots: torch_interfaces.OF_SNAPSHOTS,
    torch_interfaces.check_trials: torch_interfaces.OF_TRIALS,
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_installed_torch_has_them_all(check):
    check()


def test_a_prediction_names_what_torch_no_longer_has(workload, monkeypatch):
    monkeypatch.delattr(torch._inductor.graph.GraphLowering, "_compile_to_module_lines")
    message = (
        f"torch {torch.__version__} has no "
        "torch._inductor.graph.GraphLowering._compile_to_module_lines, which a prediction needs: "
        "tested with torch 2.11 to 2.15"
    )
    request = PredictionRequest(workload=workload, config=TrainingConfig(), device="cpu")
    with pytest.raises(PredictionImpossible) as raised:
        predict(Predict(request=request))
    assert raised.value.message == message


def test_a_missing_module_is_named_as_well(monkeypatch):
    monkeypatch.setattr(torch_interfaces, "OF_PREDICTIONS", ("torch._gone.for_good:Mode",))
    with pytest.raises(PredictionImpossible, match=r"has no torch\._gone\.for_good\.Mode, which"):
        torch_interfaces.check_predictions()


def test_the_cpu_meter_names_what_torch_no_longer_has(monkeypatch):
    monkeypatch.delattr(torch._C._profiler, "_EventType")
    with pytest.raises(
        AutotuneError,
        match=r"has no torch\._C\._profiler\._EventType\.Allocation, which the measurement",
    ):
        CpuMeter()


def test_a_probe_ends_where_no_trial_could_run(monkeypatch):
    monkeypatch.setattr(torch_interfaces, "OF_TRIALS", ("torch._dynamo.callback:gone",))
    with pytest.raises(
        AutotuneError, match=r"has no torch\._dynamo\.callback\.gone, which a trial needs"
    ):
        probe(Probe(device="cpu", choices={}, with_context=False))
