"""A model that replaces stored tensors in each call has the peak of its construction."""

import time
from pathlib import Path

import pytest
import torch

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.predictor.predict import predict
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest
from autotune.spec.training_request import TrainingRequest
from autotune.spec.user_code import sha256_of
from autotune.spec.workload import make_workload
from autotune.training.trainer import Trainer

MODEL = '''
import torch
from torch import nn

KEPT = KIND

class Model(nn.Module):
    """Computes logits from one table; stores 4 MiB, which it creates again in each call."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 256)
        if KEPT == "buffer":
            self.register_buffer("memory", torch.zeros(SIZE), persistent=False)
        else:
            self.memory = torch.zeros(SIZE)

    def forward(self, tokens):
        logits = self.table(tokens)
        self.memory = self.memory.clone()
        return logits

def make():
    return Model()
'''
SIZE = 2**20
KEPT_BYTES = 4 * SIZE
WEIGHT_BYTES = 4 * 256 * 256


@pytest.fixture(params=["buffer", "attribute"])
def request_of(request, tmp_path):
    """The request for a trial of the model."""
    file = tmp_path / f"keeps_{request.param}.py"
    file.write_text(MODEL.replace("KIND", repr(request.param)).replace("SIZE", str(SIZE)))
    settings = {
        "model": f"{file}:make",
        "global_batch": 2,
        "sequence_length": 16,
        "steps": 12,
        "evaluation_sequences": 2,
    }
    workload = make_workload("cpu", {**settings, "model_sha256": sha256_of(Path(file))})
    prepare(Prepare(workload=workload, folder=tmp_path / "prepared"))
    return TrainingRequest(
        workload=workload,
        config=TrainingConfig(micro_batch_size=1, optimizer_fusion="kernel"),
        folder=tmp_path / "prepared",
        device="cpu",
        cap_bytes=2**40,
        requested_at=time.monotonic(),
    )


def test_the_measured_peak_is_what_is_alive_at_once(request_of):
    """Weights, two moments, gradients; the stored tensor and its successor; small batches."""
    peak_bytes = Trainer(request_of).run().peak_memory_bytes
    assert 0 < peak_bytes - (4 * WEIGHT_BYTES + 2 * KEPT_BYTES) < 200_000


def test_the_prediction_is_the_measured_peak(request_of):
    trainer = Trainer(request_of)
    batches = trainer.batches()
    for step in range(3):
        trainer.step(step, next(batches))
    with trainer._meter.measuring(trainer._resident_tensors):
        trainer.step(3, next(batches))
    torch._dynamo.reset()
    wanted = PredictionRequest(workload=request_of.workload, config=request_of.config, device="cpu")
    assert predict(wanted).peak_memory_bytes == trainer._meter.reading().peak_memory_bytes
