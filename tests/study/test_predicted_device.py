"""Which device a prediction is for, one that is there or only named, and what is extrapolated."""

import pytest

from autotune.spec.result import DeviceInfo
from autotune.spec.search_space import SearchSpace
from autotune.study.predictions import device_there, extrapolates_in, kind_and_capability

CPU = DeviceInfo(device="cpu", name="a CPU", total_memory_bytes=2**30, versions={})
OLDER, NEWER = (
    DeviceInfo(
        device=device,
        name="a GPU",
        total_memory_bytes=2**30,
        versions={},
        compute_capability=capability,
    )
    for device, capability in (("cuda:0", "8.0"), ("cuda:1", "9.0"))
)
GPUS = [OLDER, NEWER, CPU]


@pytest.mark.parametrize(
    ("name", "devices", "found"),
    [
        pytest.param(None, GPUS, ("cuda", "8.0"), id="the first GPU"),
        pytest.param("cuda", GPUS, ("cuda", "8.0"), id="the first of the kind"),
        pytest.param("cuda:1", GPUS, ("cuda", "9.0"), id="the one that is named"),
        pytest.param("cuda:2", GPUS, ("cuda", None), id="a GPU that is not there"),
        pytest.param("cpu", GPUS, ("cpu", None), id="the CPU beside GPUs"),
        pytest.param("cuda", [CPU], ("cuda", None), id="a GPU where there is none"),
        pytest.param(None, [CPU], ("cpu", None), id="the CPU where there is no GPU"),
    ],
)
def test_a_prediction_is_for(name, devices, found):
    assert kind_and_capability(name, devices) == found


def test_a_gpu_that_is_not_there_is_no_device():
    assert device_there("cuda:2", GPUS) is None


@pytest.mark.parametrize(
    ("techniques", "extrapolated"),
    [
        pytest.param({"compile": ("none", "model")}, "compiled", id="no memory budgets"),
        pytest.param(
            {"compile": ("none", "block"), "memory_budget": (1.0, 0.5)},
            "compiled",
            id="memory budgets of blocks",
        ),
        pytest.param(
            {"compile": ("model",), "memory_budget": (1.0, 0.5)},
            "nothing",
            id="memory budgets of the model, whose programs are compared",
        ),
    ],
)
def test_predictions_of_a_search_extrapolate(techniques, extrapolated):
    assert extrapolates_in(SearchSpace(name="a space", techniques=techniques)) == extrapolated
