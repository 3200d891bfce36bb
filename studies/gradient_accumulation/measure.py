"""Adds up gradients of bf16 weights in bf16 and in fp32: peaks on the CPU, errors, perplexity.

    OMP_NUM_THREADS=1 python studies/gradient_accumulation/measure.py [peaks|errors|perplexity]

Prints the tables of README.md. The data, its order and the first weights of a seed are the same for
all.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import exp
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.predictor.predict import predict
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from autotune.training.parity import before_each_update
from autotune.training.trainer import Trainer

SIZES = {"layers": 2, "width": 64, "heads": 2, "sequence_length": 64}
BATCH, STEPS, SEEDS = 8, 300, (0, 1, 2)
SUMS = {"gradient_accumulation_dtype": "fp32"}
WAYS: dict[str, dict[str, Any]] = {
    "bf16-true": {},
    "bf16-true, fp32 sums": SUMS,
    "bf16-true, no micro batches": {"micro_batch_size": BATCH},
    "bf16-stochastic": {"precision": "bf16-stochastic"},
    "bf16-stochastic, fp32 sums": {"precision": "bf16-stochastic", **SUMS},
}
BATCHES = (8, 64, 512)
WIDE = {"layers": 2, "width": 256, "heads": 4, "sequence_length": 64}
SAVING = {"checkpointing": "block", "loss": "chunked"}
"""With these the peak is at the end of the backward pass, where all gradients are."""


@contextmanager
def trainer_of(
    sizes: dict[str, Any], *, seed: int = 0, batch: int = BATCH, **choices: Any
) -> Iterator[Trainer]:
    """Returns a trainer of a GPT in this process."""
    settings = {**sizes, "global_batch": batch, "steps": STEPS, "seed": seed}
    workload = make_workload("cpu", {**settings, "evaluation_sequences": 64})
    config = TrainingConfig(**{"precision": "bf16-true", "micro_batch_size": 1, **choices})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "prepared"
        prepare(Prepare(workload=workload, folder=folder))
        request = TrainingRequest(
            workload=workload,
            config=config,
            folder=folder,
            device="cpu",
            cap_bytes=2**40,
            requested_at=time.monotonic(),
        )
        yield Trainer(request)


def perplexity(seed: int, choices: dict[str, Any]) -> float:
    """Returns the perplexity on held-out text after the last step."""
    with trainer_of(SIZES, seed=seed, **choices) as trainer:
        batches = trainer.batches()
        for step in range(STEPS):
            trainer.take_step(step, next(batches))
        loss = trainer._evaluate()
        assert loss is not None
        return exp(loss)


def peaks(**choices: Any) -> tuple[int, int]:
    """Returns the measured and the predicted peak of a step in bytes."""
    with trainer_of(WIDE, **choices) as trainer:
        batches = trainer.batches()
        for step in range(3):
            trainer.step(step, next(batches))
        with trainer._meter.measuring(trainer._resident_tensors):
            trainer.step(3, next(batches))
        request = PredictionRequest(
            workload=trainer._workload, config=trainer._config, device="cpu"
        )
        measured = trainer._meter.reading().peak_memory_bytes
        return measured, predict(request).peak_memory_bytes


def first_gradient(batch: int, choices: dict[str, Any]) -> Tensor:
    """Returns the gradient of the first global batch as backward leaves it: [parameters]."""
    found: list[Tensor] = []

    def note(optimizer: torch.optim.Optimizer) -> None:
        [group] = optimizer.param_groups
        found.append(torch.cat([weight.grad.double().flatten() for weight in group["params"]]))

    with trainer_of(SIZES, batch=batch, **choices) as trainer:
        handle = before_each_update(note)
        trainer.step(0, next(trainer.batches()))
        handle.remove()
    return found[0]


def print_errors() -> None:
    print("| micro batches | relative error of their sum in bf16 |\n|---|---|")
    for batch in BATCHES:
        exact = first_gradient(batch, SUMS)
        error = (first_gradient(batch, {}) - exact).norm() / exact.norm()
        print(f"| {batch} | {error.item():.2%} |", flush=True)


def print_peaks() -> None:
    print("| techniques | sums | measured, bytes | predicted |\n|---|---|---|---|")
    for techniques in ({}, SAVING, {**SAVING, "precision": "bf16-stochastic"}):
        for name, sums in (("weights", {}), ("fp32", SUMS)):
            measured, predicted = peaks(**techniques, **sums)
            words = ", ".join({"precision": "bf16-true", **techniques}.values())
            print(f"| {words} | {name} | {measured:,} | {predicted:,} |", flush=True)


def print_perplexities() -> None:
    print("| training | perplexity after 300 steps, by seed | mean |\n|---|---|---|")
    for name, choices in WAYS.items():
        found = [perplexity(seed, choices) for seed in SEEDS]
        listed = ", ".join(f"{value:.3f}" for value in found)
        print(f"| {name} | {listed} | {statistics.fmean(found):.3f} |", flush=True)


PARTS = {"peaks": print_peaks, "errors": print_errors, "perplexity": print_perplexities}


if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
