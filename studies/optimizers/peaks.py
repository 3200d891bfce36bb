"""Compares predicted and measured peaks of optimizers on the CPU, for a GPT of two layers.

python studies/optimizers/peaks.py adamw adamw-bf16 muon apollo apollo-mini adamw-4bit
"""

import argparse
import itertools
import tempfile
import time
from pathlib import Path

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.predictor.predict import predict
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import Workload, make_workload
from autotune.training.trainer import Trainer

SIZES = {"layers": 2, "width": 32, "heads": 2, "sequence_length": 32, "global_batch": 4}


def measured_bytes(config: TrainingConfig, workload: Workload, folder: Path) -> int:
    """Returns the peak of a step after the warm-up, in bytes."""
    trainer = Trainer(
        TrainingRequest(
            workload=workload,
            config=config,
            folder=folder,
            device="cpu",
            cap_bytes=2**40,
            requested_at=time.monotonic(),
        )
    )
    batches = trainer.batches()
    for step in range(workload.warmup_steps):
        trainer.step(step, next(batches))
    with trainer._meter.measuring(trainer._resident_tensors):
        trainer.step(workload.warmup_steps, next(batches))
    return trainer._meter.reading().peak_memory_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("optimizers", nargs="+")
    optimizers = parser.parse_args().optimizers
    workload = make_workload(
        "cpu", {**SIZES, "steps": 12, "warmup_steps": 3, "evaluation_sequences": 6}
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "prepared"
        prepare(Prepare(workload=workload, folder=folder))
        for optimizer, precision in itertools.product(optimizers, ("fp32", "bf16-true")):
            choices = {"optimizer": optimizer, "precision": precision, "micro_batch_size": 4}
            config = TrainingConfig(**choices)
            request = PredictionRequest(workload=workload, config=config, device="cpu")
            predicted = predict(request).peak_memory_bytes
            measured = measured_bytes(config, workload, folder)
            print(f"{optimizer}, {precision}: {measured:,} measured, {predicted:,} predicted")


if __name__ == "__main__":
    main()
