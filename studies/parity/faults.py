"""Makes mistakes in the accumulation of gradients, and prints which of them the parity check finds.

OMP_NUM_THREADS=1 python studies/parity/faults.py [MICRO_BATCHES]
"""

import functools
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.spec.config import BF16_WEIGHTS, TrainingConfig
from autotune.spec.parity import PARITY_STEPS, largest_difference
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import Workload, make_workload
from autotune.training.parity import ParityFailed
from autotune.training.trainer import Trainer

SIZES = {"layers": 2, "width": 32, "heads": 2, "sequence_length": 16, "steps": 12}
TRAININGS: tuple[Mapping[str, Any], ...] = (
    {"precision": "fp32"},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-true"},
    {"precision": "bf16-true", "gradient_accumulation_dtype": "fp32"},
)
FACTORS: Mapping[str, Callable[[int, int], float]] = {
    "none": lambda index, count: 1.0,
    "the first is lost": lambda index, count: float(index > 0),
    "the last is lost": lambda index, count: float(index < count - 1),
    "the first counts twice": lambda index, count: 2.0 if index == 0 else 1.0,
    "divided by one more": lambda index, count: count / (count + 1),
}
"""How much of each micro batch's loss is differentiated."""
ROUNDED = "sums are rounded to bf16"


def make_mistake(trainer: Trainer, kind: str, count: int) -> None:
    updater, numbers = trainer.training.updater, itertools.count()
    if kind == ROUNDED:
        for weight in trainer.training.parts.model.parameters():
            weight.register_post_accumulate_grad_hook(round_sum)
        return

    def backward(loss: Tensor, *, plain: Callable[[Tensor], None]) -> None:
        factor = FACTORS[kind](next(numbers) % count, count)
        if factor:
            plain(loss * factor)

    updater.backward = functools.partial(backward, plain=updater.backward)


def round_sum(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.copy_(weight.grad.bfloat16())


def first_steps(trainer: Trainer) -> None:
    batches = trainer.batches()
    for step in range(PARITY_STEPS):
        trainer.take_step(step, next(batches))


def trainer_of(workload: Workload, folder: Path, config: TrainingConfig) -> Trainer:
    request = TrainingRequest(
        workload=workload,
        config=config,
        folder=folder,
        device="cpu",
        cap_bytes=2**40,
        requested_at=time.monotonic(),
    )
    return Trainer(request, is_trace=True)


def main(count: int) -> None:
    workload = make_workload("cpu", {**SIZES, "global_batch": count, "warmup_steps": 3})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "prepared"
        prepare(Prepare(workload=workload, folder=folder))
        for choices in TRAININGS:
            config = TrainingConfig(micro_batch_size=1, **choices)
            sums = "fp32" if config.precision in BF16_WEIGHTS else "weights"
            exact = {**choices, "gradient_accumulation_dtype": sums}
            plain = trainer_of(workload, folder, TrainingConfig(micro_batch_size=1, **exact))
            first_steps(plain)
            for kind in (*FACTORS, ROUNDED):
                trainer = trainer_of(workload, folder, config)
                make_mistake(trainer, kind, count)
                try:
                    first_steps(trainer)
                    found = largest_difference(
                        trainer.parity.trace(), plain.parity.trace(), precision=config.precision
                    )
                    said = f"{'found' if found.is_outside else 'passes'}: {found.message}"
                except ParityFailed as failed:
                    said = f"found: {failed}"
                print(f"{config.describe()}, {kind}: {said}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
