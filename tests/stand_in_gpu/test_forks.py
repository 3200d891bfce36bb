"""The server that trials are forked from has not touched CUDA, with and without NVML."""

import pytest

FIRST_INSTANCE, SECOND_INSTANCE = (
    f"MIG-57a2d14e-603f-4c81-9b05-e72230bc{instance:02x}00" for instance in (1, 2)
)
SECOND_GPU = "GPU-57a2d14e-603f-4c81-9b05-e72230bc0001"
CONTEXT_BYTES = 480 * 1024**2

MACHINES = {
    "with NVML": {},
    "without NVML": {"no_nvml": 1},
    "a GPU by its UUID": {"gpus": 2, "visible": SECOND_GPU},
    "MIG": {"mig": 2},
    "MIG, named by ordinal": {"mig": 2, "visible": "0"},
    "MIG, an instance by its UUID": {"mig": 2, "visible": SECOND_INSTANCE},
    "MIG without NVML": {"mig": 2, "no_nvml": 1, "visible": FIRST_INSTANCE},
}


@pytest.mark.parametrize("settings", MACHINES.values(), ids=MACHINES)
def test_trials_use_a_device_that_the_server_has_not_touched(machine, settings):
    trial = machine.trials(**settings)[0]
    assert machine.logged("forked after cuInit") == []
    assert (trial["outcome"], trial["context_bytes"]) == ("ok", CONTEXT_BYTES), trial


def test_where_no_device_is_visible_the_search_uses_the_processor(machine):
    result = machine.search("--space", machine.space(), "--trials", "1", "--no-predict", visible="")
    assert result["device"]["device"] == "cpu"


def test_the_report_names_what_is_unknown_without_nvml(machine):
    done = machine.autotune("doctor", "--device", "cuda:0", no_nvml=1)
    assert "NVML" in done.stdout
