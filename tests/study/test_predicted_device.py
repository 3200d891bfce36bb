"""Which device a prediction is for, one that is there or only named, and what is extrapolated."""

from dataclasses import replace

import pytest

from autotune.errors import InvalidInput
from autotune.spec.data_sheets import DATA_SHEETS, requested_device, sheet_of
from autotune.spec.result import DeviceInfo
from autotune.spec.search_space import SearchSpace
from autotune.study.prediction.predicted_device import device_there, predicted_device_of
from autotune.study.prediction.predictions import extrapolates_in
from tests.building.studies import write_study

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


H100 = DeviceInfo(
    device="cuda:0",
    name="NVIDIA H100 80GB HBM3",
    total_memory_bytes=85_017_493_504,
    versions={},
    compute_capability="9.0",
)


class Machine:
    """An executor that only says which devices there are."""

    def __init__(self, devices):
        self._devices = devices

    def run(self, task):
        return self._devices


def found_on(devices, name=None, **options):
    return predicted_device_of(name, executor=Machine(devices), **options)


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
        pytest.param("l4", [CPU], ("cuda", "8.9"), id="a GPU by its data sheet"),
    ],
)
def test_a_prediction_is_for(name, devices, found):
    device = found_on(devices, name)
    assert (device.type, device.compute_capability) == found


def test_a_gpu_that_was_never_probed_has_the_rates_of_its_data_sheet():
    device = found_on([H100, CPU])
    assert device.described == DATA_SHEETS["h100"].device()
    assert "https://www.nvidia.com/" in device.rates_from


def test_a_gpu_without_a_data_sheet_has_no_rates():
    assert found_on(GPUS).described is None


def test_a_device_that_a_study_has_probed_has_those_rates(tmp_path):
    rates = {"matrix_flops_per_second": {"bf16": 7e14}, "bandwidth_bytes_per_second": 2.8e12}
    probed = replace(H100, **rates)
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    write_study(url, [], name="never-probed", device=H100)
    write_study(url, [], name="probed", device=probed)
    write_study(url, [], name="of-another", device=replace(probed, name="a GPU"))
    device = found_on([H100], storage=url)
    assert device.described == probed
    assert "study 'probed'" in device.rates_from


@pytest.mark.parametrize("sheet", DATA_SHEETS.values(), ids=DATA_SHEETS)
def test_each_data_sheet_is_found_by_the_name_that_a_driver_reports_and_has_a_link(sheet):
    for name in sheet.names:
        assert sheet_of(f"NVIDIA {name}") is sheet
    assert sheet.source.startswith("https://")
    assert sheet.device().matrix_flops_per_second["fp32"] > 0


def test_a_database_that_cannot_be_read_does_not_keep_a_prediction_from_being_made(tmp_path):
    (tmp_path / "studies.db").write_text("this is no database")
    device = found_on([H100], storage=f"sqlite:///{tmp_path / 'studies.db'}")
    assert device.described == DATA_SHEETS["h100"].device()


def test_another_gpu_than_that_of_the_data_sheet_is_not_the_one_to_try():
    assert found_on([H100, CPU], "h200").found_in([H100, CPU]) is None
    assert found_on([H100, CPU], "h100").found_in([H100, CPU]) == H100


def test_a_mistyped_gpu_is_rejected_with_the_near_name():
    with pytest.raises(InvalidInput, match="'h10' is not a device") as raised:
        requested_device("h10", None)
    assert "did you mean 'h100'" in raised.value.hint


def test_a_gpu_with_the_compute_capability_of_another_is_rejected():
    assert requested_device("l4", "8.9") == "cuda"
    with pytest.raises(InvalidInput, match=r"9\.0 is not that of l4, which has 8\.9"):
        requested_device("l4", "9.0")


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
