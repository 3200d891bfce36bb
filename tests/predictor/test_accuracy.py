"""Predicted peaks are compared with those of a real training, from the allocator's events."""

import dataclasses
import time
from pathlib import Path

import pytest
import torch._dynamo

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.predictor.predict import predict
from autotune.spec.config import CHOICES, SEARCHED, TrainingConfig
from autotune.spec.optimizers import OPTIMIZERS
from autotune.spec.prediction import PredictionRequest
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import Workload
from autotune.training.trainer import Trainer, train
from tests.building.results import ON_CUDA_IN_THIS_PROCESS
from tests.building.small_blocks import with_small_blocks

GLOBAL_BATCH = 4
TOLERANCE = 0.001
SCRATCH_BYTES = 128 * 1024
"""Of a 16-bit product in oneDNN or of an attention kernel, which no fake tensor shows."""

SUMS_IN_FP32 = {
    "gradient_accumulation_dtype": "fp32",
    "micro_batch_size": 1,
    "precision": "bf16-true",
}
EAGER = [
    {},
    *({"checkpointing": value} for value in CHOICES["checkpointing"] if value != "none"),
    *({"precision": value} for value in ("bf16-mixed", "bf16-true", "fp16-mixed", "int8-mixed")),
    *(
        pytest.param({"optimizer": value}, marks=[pytest.mark.slow] * facts.compiles_update)
        for value, facts in OPTIMIZERS.items()
        if value != "adamw"
    ),
    *({"optimizer_fusion": value} for value in SEARCHED["optimizer_fusion"] if value != "none"),
    pytest.param({"checkpointing": "block", "optimizer_fusion": "foreach"}, marks=pytest.mark.slow),
    {"checkpointing": "block", "optimizer_fusion": "backward"},
    pytest.param(
        {"checkpointing": "block", "optimizer": "adafactor", "optimizer_fusion": "backward"},
        marks=pytest.mark.slow,
    ),
    {"checkpointing": "sqrt", "precision": "bf16-true", "micro_batch_size": 2},
    {"micro_batch_size": 1, "optimizer_fusion": "foreach"},
    SUMS_IN_FP32,
    pytest.param({**SUMS_IN_FP32, "precision": "bf16-stochastic"}, marks=pytest.mark.slow),
    {"micro_batch_size": 2, "precision": "fp16-mixed", "optimizer_fusion": "kernel"},
]
COMPILED = [
    pytest.param({"compile": "block"}, marks=pytest.mark.slow),  # small blocks stand for it
    pytest.param({"compile": "model", "memory_budget": 0.3}, marks=pytest.mark.slow),
    pytest.param({"compile": "block", "checkpointing": "block"}, marks=pytest.mark.slow),
    pytest.param(
        {"compile": "model", "checkpointing": "sqrt", "micro_batch_size": 2}, marks=pytest.mark.slow
    ),
    pytest.param(
        {"compile": "block", "precision": "bf16-mixed", "micro_batch_size": 2},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        {"compile": "model", "precision": "bf16-true", "memory_budget": 0.5}, marks=pytest.mark.slow
    ),
]


NEED_FOUR_BLOCKS = ("every-4", "sqrt")
"""Values of checkpointing; two blocks show all else."""


@pytest.fixture(scope="module")
def two_blocks(workload, tmp_path_factory):
    """The workload with fewer blocks, and its folder."""
    shallow = dataclasses.replace(workload, layers=2)
    folder = tmp_path_factory.mktemp("two_blocks") / "prepared"
    prepare(Prepare(workload=shallow, folder=folder))
    return shallow, folder


def trainer_of(workload: Workload, folder: Path, choices: dict) -> Trainer:
    return Trainer(
        TrainingRequest(
            workload=workload,
            config=TrainingConfig(**{"micro_batch_size": GLOBAL_BATCH, **choices}),
            folder=folder,
            device="cpu",
            cap_bytes=2**40,
            requested_at=time.monotonic(),
        )
    )


def predicted_bytes(workload: Workload, choices: dict) -> int:
    torch._dynamo.reset()
    config = TrainingConfig(**{"micro_batch_size": GLOBAL_BATCH, **choices})
    return predict(
        PredictionRequest(workload=workload, config=config, device="cpu")
    ).peak_memory_bytes


def measured_bytes(trainer: Trainer, workload: Workload) -> int:
    batches = trainer.batches()
    for step in range(workload.warmup_steps):
        trainer.step(step, next(batches))
    with trainer._meter.measuring(trainer._resident_tensors):
        trainer.step(workload.warmup_steps, next(batches))
    return trainer._meter.reading().peak_memory_bytes


def allowed_bytes(choices: dict) -> int:
    """Memory inside kernels: oneDNN, and attention in compiled code, which has its peak there."""
    return (
        0
        if choices.get("precision", "fp32") == "fp32" and "compile" not in choices
        else SCRATCH_BYTES
    )


@pytest.mark.parametrize("choices", EAGER, ids=str)
def test_an_eager_peak_is_predicted(workload, prepared, two_blocks, choices):
    if choices.get("checkpointing") in NEED_FOUR_BLOCKS:
        trained, folder = workload, prepared
    else:
        trained, folder = two_blocks
    measured = measured_bytes(trainer_of(trained, folder, choices), trained)
    assert predicted_bytes(trained, choices) == pytest.approx(
        measured, rel=TOLERANCE, abs=allowed_bytes(choices)
    )


@pytest.mark.parametrize("choices", COMPILED, ids=str)
def test_a_compiled_peak_is_predicted(workload, make_trainer, choices):
    torch._dynamo.reset()
    measured = measured_bytes(make_trainer(**choices), workload)
    assert predicted_bytes(workload, choices) == pytest.approx(
        measured, rel=TOLERANCE, abs=allowed_bytes(choices)
    )


@pytest.mark.slow
def test_a_compiled_peak_of_small_blocks_is_predicted(workload, tmp_path):
    small = with_small_blocks(workload, tmp_path)
    choices = {"compile": "block"}
    torch._dynamo.reset()
    measured = measured_bytes(trainer_of(small, tmp_path / "prepared", choices), small)
    assert predicted_bytes(small, choices) == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("choices", [*EAGER, {"compile": "block"}, {"compile": "model"}], ids=str)
def test_a_peak_on_cuda_is_within_its_bounds(workload, prepared, choices):
    config = TrainingConfig(**{"micro_batch_size": GLOBAL_BATCH, **choices})
    request = TrainingRequest(
        workload=workload,
        config=config,
        folder=prepared,
        **ON_CUDA_IN_THIS_PROCESS,
        cap_bytes=2**40,
        enforce_cap=False,
        requested_at=time.monotonic(),
    )
    measured = train(request).peak_memory_bytes
    prediction = predict(PredictionRequest(workload=workload, config=config, device="cuda"))
    assert prediction.lower_bound_bytes <= measured <= prediction.upper_bound_bytes
