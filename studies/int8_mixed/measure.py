"""Trains small models in int8-mixed and in bf16-mixed: perplexity, parity and CPU time.

    OMP_NUM_THREADS=1 python studies/int8_mixed/measure.py

Prints the tables of README.md. The data, its order and the first weights of a seed are the same for
all.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import exp
from pathlib import Path
from typing import Any

import torch

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.spec.config import Precision, TrainingConfig
from autotune.spec.parity import PARITY_STEPS, TOLERANCES, ParityTrace, largest_difference
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from autotune.training.parity import ParityWatch
from autotune.training.trainer import Trainer

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16-mixed", "int8-mixed")
SMALL = {"layers": 2, "width": 64, "heads": 2, "sequence_length": 64}
WIDE = {"layers": 2, "width": 512, "heads": 8, "sequence_length": 256}
BATCH, STEPS, SEEDS, ROUNDS = 8, 300, (0, 1), 2
TECHNIQUES: tuple[dict[str, Any], ...] = (
    {"micro_batch_size": 1},
    {"checkpointing": "block"},
    {"loss": "chunked"},
)


@contextmanager
def trainer_of(
    sizes: dict[str, Any], *, batch: int = BATCH, seed: int = 0, **choices: Any
) -> Iterator[Trainer]:
    """Returns a trainer of a GPT in this process."""
    settings = {
        **sizes,
        "global_batch": batch,
        "steps": STEPS,
        "seed": seed,
        "evaluation_sequences": 64,
    }
    workload = make_workload("cpu", settings)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "prepared"
        prepare(Prepare(workload=workload, folder=folder))
        request = TrainingRequest(
            workload=workload,
            config=TrainingConfig(**{"micro_batch_size": batch, **choices}),
            folder=folder,
            device="cpu",
            cap_bytes=2**40,
            requested_at=time.monotonic(),
        )
        yield Trainer(request)


def perplexity(precision: Precision, seed: int) -> float:
    """Returns the perplexity on held-out text after the last step."""
    with trainer_of(SMALL, seed=seed, precision=precision) as trainer:
        batches = trainer.batches()
        for step in range(STEPS):
            trainer.take_step(step, next(batches))
        loss = trainer._evaluate()
        assert loss is not None
        return exp(loss)


def trace(**choices: Any) -> ParityTrace:
    """Returns what the first steps compute."""
    with trainer_of(SMALL, precision="int8-mixed", **choices) as trainer:
        trainer.parity = ParityWatch(
            trainer.training.parameters_by_block,
            device=torch.device("cpu"),
            precision="int8-mixed",
            reference=None,
            is_trace=True,
        )
        batches = trainer.batches()
        for step in range(PARITY_STEPS):
            trainer.take_step(step, next(batches))
        return trainer.parity.trace()


def step_seconds() -> dict[str, float]:
    """Returns the least CPU seconds of a step by precision, measured in turn."""
    least: dict[str, float] = {}
    for _ in range(ROUNDS):
        for precision in PRECISIONS:
            with trainer_of(WIDE, batch=4, precision=precision) as trainer:
                batches = trainer.batches()
                trainer.take_step(0, next(batches))
                batch = next(batches)
                began = time.process_time()
                trainer.take_step(1, batch)
                seconds = time.process_time() - began
                least[precision] = min(seconds, least.get(precision, seconds))
    return least


def main() -> None:
    print("| precision | perplexity after 300 steps, by seed |\n|---|---|")
    for precision in PRECISIONS:
        found = [f"{perplexity(precision, seed):.3f}" for seed in SEEDS]
        print(f"| {precision} | {', '.join(found)} |", flush=True)
    plain = trace()
    print(f"\nAllowed: {TOLERANCES['int8-mixed']}\n")
    print("| technique | largest difference, as a multiple of what is allowed |\n|---|---|")
    for choices in TECHNIQUES:
        difference = largest_difference(trace(**choices), plain, precision="int8-mixed")
        words = ", ".join(f"{name} {value}" for name, value in choices.items())
        print(f"| {words} | {difference.multiple:.3f}: {difference.message} |", flush=True)
    seconds = step_seconds()
    print("\n| precision | CPU seconds of a step |\n|---|---|")
    for precision, value in seconds.items():
        print(f"| {precision} | {value:.3f} |")


if __name__ == "__main__":
    main()
