"""The contract of every technique: it changes memory and speed, but not the losses."""

import functools
import json
import os
import subprocess
import sys

import pytest

from autotune.spec.config import (
    CHOICES,
    SEARCHED,
    LegalityContext,
    rule_violations,
)
from autotune.spec.optimizers import OPTIMIZERS as DECLARED

STEPS = 6
LEARNED_IN = 24
BIT_EQUAL = 0.0
REORDERED_SUMS = 1e-5
"""Relative difference from summing in another order, as measured over six steps of the small model
(below 2e-6)."""
TOLERANCE_BY_PRECISION = {
    "fp32": BIT_EQUAL,
    "tf32": 1e-3,
    "bf16-mixed": 2e-2,
    "bf16-true": 2e-2,
    "fp16-mixed": 5e-3,
    "bf16-stochastic": 2e-2,
    "fp8": 2e-2,
    "int8-mixed": 2e-2,
}


OPTIMIZERS = [value for value, facts in DECLARED.items() if not facts.compiles_update]
"""The others compile their update; `test_torchao.py` has their tests."""


@pytest.fixture(scope="module")
def losses_of(losses_of):
    """Each configuration is trained once: several tests compare with its losses."""
    return functools.cache(losses_of)


@pytest.fixture
def reference(losses_of):
    return losses_of(steps=STEPS)


@pytest.mark.parametrize("value", CHOICES["checkpointing"])
def test_checkpointing_leaves_every_loss_bit_equal(value, losses_of, reference):
    assert losses_of(steps=STEPS, checkpointing=value) == reference


@pytest.mark.parametrize("value", SEARCHED["optimizer_fusion"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_way_to_update_gives_the_same_losses(value, optimizer, losses_of):
    if reasons := rule_violations(
        {"optimizer": optimizer, "optimizer_fusion": value}, LegalityContext(global_batch=1)
    ):
        pytest.skip(f"an illegal configuration: {reasons[0]}")
    plain = losses_of(steps=LEARNED_IN, optimizer=optimizer)
    assert losses_of(steps=STEPS, optimizer=optimizer, optimizer_fusion=value) == pytest.approx(
        plain[:STEPS], rel=REORDERED_SUMS
    )


@pytest.mark.parametrize("value", [1, 2])
def test_accumulation_gives_the_losses_of_the_global_batch(value, losses_of, reference):
    assert losses_of(steps=STEPS, micro_batch_size=value) == pytest.approx(
        reference, rel=REORDERED_SUMS
    )


@pytest.mark.parametrize("value", SEARCHED["precision"])
def test_precision_stays_within_its_documented_tolerance(value, losses_of, reference):
    assert losses_of(steps=STEPS, precision=value) == pytest.approx(
        reference, rel=TOLERANCE_BY_PRECISION[value]
    )


@pytest.mark.parametrize(
    "value", ["bf16-mixed", "bf16-true", "fp16-mixed", "bf16-stochastic", "fp8", "int8-mixed"]
)
def test_sixteen_bit_precision_changes_the_losses(value, losses_of, reference):
    assert losses_of(steps=STEPS, precision=value) != reference


@pytest.mark.parametrize("value", OPTIMIZERS)
def test_every_optimizer_learns(value, losses_of):
    losses = losses_of(steps=LEARNED_IN, optimizer=value)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["block", "model"])
def test_compiled_code_gives_the_losses_of_eager_code(scope, compiler, losses_of, reference):
    train_with_this_compiler = losses_of.__wrapped__
    losses = train_with_this_compiler(steps=STEPS, compile=scope)
    assert losses == pytest.approx(reference, rel=REORDERED_SUMS)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_a_memory_budget_does_not_change_the_losses(budget, losses_of, reference):
    losses = losses_of(steps=STEPS, compile="model", memory_budget=budget)
    assert losses == pytest.approx(reference, rel=REORDERED_SUMS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        # One stands for the rest.
        value if value == "block" else pytest.param(value, marks=pytest.mark.slow)
        for value in CHOICES["checkpointing"]
        if value != "none"
    ],
)
def test_compiled_checkpointing_gives_the_losses_of_eager_code(
    value, compiler, losses_of, reference
):
    train_with_this_compiler = losses_of.__wrapped__
    losses = train_with_this_compiler(steps=STEPS, compile="block", checkpointing=value)
    assert losses == pytest.approx(reference, rel=REORDERED_SUMS)


ON_CUDA = """
import sys, time, torch
from pathlib import Path
from autotune.spec.config import TrainingConfig
from autotune.training.trainer import Trainer
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import Workload
import json
torch.use_deterministic_algorithms(True)
settings, checkpointing, folder = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
workload = Workload(**settings)
config = TrainingConfig(micro_batch_size=workload.global_batch, checkpointing=checkpointing)
request = TrainingRequest(
    workload=workload,
    config=config,
    folder=folder,
    device="cuda:0",
    cap_bytes=2**40,
    enforce_cap=False,
    requested_at=time.monotonic(),
)
trainer = Trainer(request)
batches = trainer.batches()
print(json.dumps([trainer.step(step, next(batches)) for step in range(6)]))
"""
"""Runs in a new process: a CUDA meter must be the first to touch the device."""


@pytest.mark.gpu
@pytest.mark.parametrize("value", [value for value in CHOICES["checkpointing"] if value != "none"])
def test_checkpointing_is_bit_equal_on_cuda_with_deterministic_algorithms(
    value, workload, prepared
):
    def losses(checkpointing):
        ran = subprocess.run(
            [
                sys.executable,
                "-c",
                ON_CUDA,
                json.dumps(workload.to_dict()),
                checkpointing,
                str(prepared),
            ],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        )
        return json.loads(ran.stdout.splitlines()[-1])

    assert losses(value) == losses("none")
