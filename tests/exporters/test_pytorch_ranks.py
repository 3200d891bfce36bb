"""The exported script on two processes trains as the trial did, with the peak of each rank."""

import dataclasses
import gc
import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.exporters import TARGETS
from autotune.spec.config import TrainingConfig
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from tests.building.gloo_ranks import on_ranks
from tests.exporters.readers.pytorch_script import loaded
from tests.exporters.recipes import recipe

RANKS, STEPS, GLOBAL_BATCH = 2, 6, 8
SCALAR_BYTES = 8
"""Gloo's threads may hold on to a sum of losses for a moment longer."""
# Neither the width nor the vocabulary can be divided by two without a rest in every weight.
SETTINGS = {
    "layers": 3,
    "width": 60,
    "heads": 3,
    "vocab_size": 257,
    "tokenizer": "bytes",
    "sequence_length": 32,
    "global_batch": GLOBAL_BATCH,
    "steps": 10,
    "warmup_steps": 2,
    "evaluation_sequences": 6,
}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": "ddp"},
    "ddp, accumulated": {"sharding": "ddp", "micro_batch_size": 2},
    "ddp, added up in bf16": {"sharding": "ddp", "gradient_reduction": "bf16"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "zero3": {"sharding": "zero3"},
    "zero3, accumulated and checkpointed": {
        "sharding": "zero3",
        "micro_batch_size": 2,
        "checkpointing": "block",
    },
    "zero3, every second block, in backward": {
        "sharding": "zero3",
        "checkpointing": "every-2",
        "optimizer_fusion": "backward",
    },
    "zero3, bf16": {"sharding": "zero3", "precision": "bf16-mixed"},
    "zero3, DoRA beside bf16": {
        "sharding": "zero3",
        "precision": "bf16-mixed",
        "adapter": "dora",
        "base_weights": "bf16",
    },
}


def workload():
    return make_workload("cpu", {**SETTINGS, "devices_per_trial": RANKS})


def exported(case, *, peaks=()):
    config = TrainingConfig(**{"micro_batch_size": GLOBAL_BATCH // RANKS, **CASES[case]})
    asked = dataclasses.replace(
        recipe(config, device_type="cpu"),
        workload=workload(),
        peak_memory_bytes_by_rank=peaks,
    )
    return config, TARGETS["pytorch"].write(asked, "2")


def trial(config, folder):
    """Returns the losses of the steps, and the peak of the last two."""
    from autotune.training.trainer import Trainer

    request = TrainingRequest(
        workload=workload(),
        config=config,
        folder=folder,
        device="cpu",
        cap_bytes=2**40,
        requested_at=time.monotonic(),
    )
    trainer = Trainer(request)
    batches = trainer.batches()
    return measured(
        lambda number: trainer.take_step(number, next(batches)), trainer._resident_tensors
    )


def by_script(export, rank, folder):
    """Returns the same of the exported script."""
    with loaded(export) as script:
        train, _ = script.read_text(str(folder), script.TEXT)
        training = script.Training(script.Rank(index=rank, size=RANKS))
        order = script.training_order(
            sequences=len(train), global_batch=GLOBAL_BATCH, seed=script.SEED
        )

        def step(number):
            rate = script.learning_rate(number, steps=script.STEPS)
            return script.train_step(training, train.batch(next(order)), rate=rate)

        return measured(step, lambda: script.resident_tensors(training))


def measured(step, resident):
    from autotune.memory.cpu import CpuMeter

    meter = CpuMeter()
    losses = [step(number) for number in range(STEPS - 2)]
    with meter.measuring(resident):
        losses += [step(number) for number in range(STEPS - 2, STEPS)]
    return losses, meter.reading().peak_memory_bytes


def measure(rank, folder):
    """Returns {case: (of the trial, of the script)} of one rank."""
    found = {}
    for case in CASES:
        config, export = exported(case)
        gc.collect()  # what is left of the training before must not be freed in this one
        of_trial = trial(config, folder)
        gc.collect()
        found[case] = (of_trial, by_script(export, rank, folder))
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "prepared"
    prepare(Prepare(workload=workload(), folder=folder))
    return folder


@pytest.fixture(scope="module")
def ranks(prepared):
    return on_ranks(RANKS, measure, prepared)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_on_two_processes_are_those_of_the_trial(case, ranks):
    for of_trial, of_script in (rank[case] for rank in ranks):
        assert of_script[0] == of_trial[0]


@pytest.mark.slow
# Gloo's threads hold compressed gradients for a time of their own: that peak varies.
@pytest.mark.parametrize("case", sorted(set(CASES) - {"ddp, added up in bf16"}))
def test_the_peak_of_each_process_is_that_of_the_trial(case, ranks):
    for of_trial, of_script in (rank[case] for rank in ranks):
        assert abs(of_script[1] - of_trial[1]) <= SCALAR_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ddp", "zero1", "zero2", "zero3"])
def test_the_command_starts_a_process_for_each_rank_and_prints_the_promised_peaks(
    case, ranks, prepared, tmp_path
):
    peaks = tuple(rank[case][0][1] for rank in ranks)
    _, export = exported(case, peaks=peaks)
    for name, text in export.files.items():
        (tmp_path / name).write_text(text)
    program, *arguments = export.command.split()
    assert program == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    done = subprocess.run(
        [*command, "--tokens", str(prepared), "--steps", str(STEPS), "--save", "weights.pt"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = dict(re.findall(r"^(peak memory|promised) +(.+) MiB on rank 1", done.stdout, re.M))
    assert lines["peak memory"] == lines["promised"] == f"{peaks[1] / 2**20:,.2f}"
    assert done.stdout.count("perplexity") == 1
    assert (tmp_path / "weights.pt").exists()


def test_a_script_for_several_devices_says_how_it_is_started(monkeypatch):
    _, export = exported("zero3")
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.delenv("RANK", raising=False)
    with loaded(export) as script, pytest.raises(SystemExit, match=f"{export.command}$"):
        script.main()
