"""Predictions on a machine with GPUs do not use them, and are for the right one."""

import json

import pytest

from tests.stand_in_gpu.machine import SMALL_MODEL

SIZES = (*SMALL_MODEL[:10], "--json", "--quiet")
PREDICT = ("-m", "autotune", "predict", *SIZES)


def contexts(machine):
    return (
        [line for line in machine.log.read_text().splitlines() if "context" in line]
        if machine.log.exists()
        else []
    )


def predicted(machine, *arguments, **settings):
    ended = machine.run(*PREDICT, *arguments, **settings)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_no_prediction_creates_a_context(machine):
    predicted(machine)
    assert contexts(machine) == []


def test_of_a_space_only_the_measurement_of_the_speed_creates_a_context(machine):
    """Several predictions at once, for the device that the command detects."""
    space = machine.folder / "space.toml"
    space.write_text(
        '[techniques]\ncheckpointing = ["none", "block"]\n[defaults]\nmicro_batch_size = 4\n'
    )
    answer = predicted(machine, "--space", str(space))
    assert [prediction["device"] for prediction in answer["predictions"]] == ["cuda", "cuda"]
    assert len(contexts(machine)) == 1


@pytest.mark.parametrize(
    ("cc", "capability", "workspace_mib"), [(89, "8.9", 8.125), (90, "9.0", 32)]
)
def test_a_prediction_is_for_the_present_gpu(machine, cc, capability, workspace_mib):
    answer = predicted(machine, "--torch", "2.11", "--allocator", "expandable", cc=cc)
    assert f"for a GPU of compute capability {capability} with torch 2.11" in answer["notes"]
    assert answer["bytes_by_category"]["workspace"] == 2 * workspace_mib * 1024**2


TRAIN = """
import json, sys, time
from pathlib import Path
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.spec.config import TrainingConfig
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from autotune.training.trainer import train

sizes, choices = map(json.loads, sys.argv[1:])
workload = make_workload(
    "cuda",
    {**sizes, "dataset": "text.txt", "steps": 8, "warmup_steps": 2, "evaluation_sequences": 8},
)
prepare(Prepare(workload=workload, folder=Path("prepared")))
devices = workload.devices_per_trial
if devices > 1:  # rank 0 of them, which sends nothing to anybody
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
request = TrainingRequest(
    workload=workload, config=TrainingConfig(**choices), folder=Path("prepared"), device="cuda:0",
    device_uuid=None, cap_bytes=2**40, requested_at=time.monotonic(),
    shares_perplexity=True,  # that of numbers which nobody has computed may be NaN
)
measured = train(request)
print(json.dumps([measured.peak_memory_bytes, measured.bytes_by_kind]))
"""


@pytest.mark.parametrize(
    "choices",
    [
        {"offload": "optimizer", "optimizer_fusion": "backward"},
        {"offload": "all", "checkpointing": "block"},
        {"offload": "all", "precision": "bf16-mixed", "micro_batch_size": 2},
    ],
)
def test_what_is_on_the_host_is_counted_there_and_predicted_off_the_device(machine, choices):
    sizes = {"layers": 4, "width": 256, "heads": 4, "sequence_length": 64, "global_batch": 4}
    choices = {"micro_batch_size": 4, "loss": "chunked", **choices}
    ended = machine.run("-c", TRAIN, json.dumps(sizes), json.dumps(choices))
    assert ended.returncode == 0, ended.stderr
    peak_bytes, by_kind = json.loads(ended.stdout.splitlines()[-1])
    assert by_kind["optimizer_state_on_host"] > by_kind["pinned_on_host"] / 2
    assert by_kind["optimizer_state"] < by_kind["optimizer_state_on_host"] / 50

    assert predicted_peak(machine, {**sizes, **choices}) == pytest.approx(peak_bytes, rel=0.001)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"precision": "bf16-mixed"},
        {"optimizer_fusion": "kernel", "global_batch": 64},
        {"optimizer": "adafactor", "checkpointing": "block", "precision": "bf16-true"},
    ],
)
def test_a_peak_is_predicted_to_the_byte(machine, choices):
    """Heads of 50 are padded for flash attention, so that its backward pass copies its output."""
    sizes = {"layers": 4, "width": 250, "heads": 5, "sequence_length": 64, "global_batch": 8}
    sizes |= {"global_batch": choices.get("global_batch", 8)}
    choices = {"micro_batch_size": 2, **{k: v for k, v in choices.items() if k not in sizes}}
    ended = machine.run("-c", TRAIN, json.dumps(sizes), json.dumps(choices))
    assert ended.returncode == 0, ended.stderr
    peak_bytes, _ = json.loads(ended.stdout.splitlines()[-1])
    assert predicted_peak(machine, {**sizes, **choices}) == peak_bytes


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"precision": "bf16-mixed", "attention": "flash"},
        {"attention": "math"},
        {"micro_batch_size": 2},
    ],
)
def test_the_pieces_of_large_tensors_are_predicted_to_the_byte(machine, choices):
    """Up to a MiB of each is unused: how much depends on what every step before left free."""
    sizes = {"layers": 4, "width": 512, "heads": 8, "sequence_length": 512, "global_batch": 8}
    choices = {"micro_batch_size": 8, **choices}
    ended = machine.run("-c", TRAIN, json.dumps(sizes), json.dumps(choices), cc=90)
    assert ended.returncode == 0, ended.stderr
    peak_bytes, _ = json.loads(ended.stdout.splitlines()[-1])
    assert predicted_peak(machine, {**sizes, **choices}, cc=90) == peak_bytes


def predicted_peak(machine, values, **settings):
    """Returns the predicted peak of the first device."""
    options = []
    for name, value in values.items():
        flag = {"sequence_length": "seq-len", "micro_batch_size": "micro-batch"}.get(name, name)
        options += [f"--{flag.replace('_', '-')}", str(value)]
    ended = machine.run("-m", "autotune", "predict", "--json", "--quiet", *options, **settings)
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    return (answer["peak_memory_bytes_by_rank"] or [answer["peak_memory_bytes"]])[0]


@pytest.mark.parametrize(
    "choices",
    [
        {"devices_per_trial": 2, "sharding": "zero3"},
        {"devices_per_trial": 4, "sharding": "zero3", "precision": "bf16-mixed"},
        {"devices_per_trial": 4, "sharding": "zero3", "checkpointing": "block", "loss": "chunked"},
        {"devices_per_trial": 2, "sharding": "zero2"},
        {"devices_per_trial": 4, "sharding": "zero2", "gradient_reduction": "bf16"},
        {"devices_per_trial": 4, "sharding": "hsdp", "sharding_group": 2},
    ],
)
def test_the_first_of_several_devices_needs_what_is_predicted(machine, choices):
    """FSDP2's streams have pools of their own in the allocator, and their parts differ in size."""
    sizes = {"layers": 4, "width": 250, "heads": 5, "sequence_length": 64, "global_batch": 8}
    choices = {"micro_batch_size": 2, **choices}
    devices = {"devices_per_trial": choices.pop("devices_per_trial")}
    ended = machine.run("-c", TRAIN, json.dumps({**sizes, **devices}), json.dumps(choices))
    assert ended.returncode == 0, ended.stderr
    peak_bytes, _ = json.loads(ended.stdout.splitlines()[-1])
    predicted_bytes = predicted_peak(machine, {**sizes, **devices, **choices})
    assert predicted_bytes == pytest.approx(peak_bytes, rel=0.0005)
