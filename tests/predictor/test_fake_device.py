"""A prediction for CUDA needs no GPU, is the same with a GPU, and does not touch it."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch._dynamo

from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import Predict
from autotune.predictor.predict import predict
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest
from autotune.spec.user_code import sha256_of
from autotune.spec.workload import make_workload

GLOBAL_BATCH = 4
A_CUDA_RELEASE = "13.0"
CHOICES = [
    {"precision": "bf16-mixed"},
    {"checkpointing": "block", "optimizer_fusion": "backward"},
    {"compile": "block"},
    {"attention": "efficient"},
    {"activation_offload": "cpu", "loss": "chunked"},
]


def predict_for_cuda(workload, **choices):
    """The prediction without its seconds, which differ from run to run."""
    torch._dynamo.reset()
    config = TrainingConfig(micro_batch_size=GLOBAL_BATCH, **choices)
    prediction = predict(
        PredictionRequest(workload=workload, config=config, device="cuda", compute_capability="9.0")
    )
    return replace(prediction, seconds=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("sees_a_gpu", [False, True])
def test_a_torch_built_with_cuda_predicts_as_one_built_without(workload, monkeypatch, sees_a_gpu):
    monkeypatch.setattr(torch.version, "cuda", None)
    built_without = predict_for_cuda(workload, precision="bf16-mixed")
    monkeypatch.setattr(torch.version, "cuda", A_CUDA_RELEASE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_a_gpu)
    assert predict_for_cuda(workload, precision="bf16-mixed") == built_without


MODEL = """
import os
import torch
from pathlib import Path

def make():
    Path(__file__).with_suffix(".seen").write_text(repr(os.environ.get("CUDA_VISIBLE_DEVICES")))
    return torch.nn.Embedding(256, 256)
"""


def test_the_process_of_a_prediction_sees_no_gpu(tmp_path, monkeypatch, one_trial_server):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    file = tmp_path / "sees.py"
    file.write_text(MODEL)
    workload = make_workload(
        "cpu", {"model": f"{file}:make", "sequence_length": 16, "model_sha256": sha256_of(file)}
    )
    with LocalExecutor(tmp_path / "work") as executor:
        request = PredictionRequest(workload=workload, config=TrainingConfig(), device="cuda")
        executor.run(Predict(request=request))
    assert file.with_suffix(".seen").read_text() == "''"


PREDICT = """
import dataclasses, json, sys
from autotune.spec.config import TrainingConfig
from autotune.predictor.predict import predict
from autotune.spec.prediction import PredictionRequest
from autotune.spec.workload import Workload
workload, choices = map(json.loads, sys.argv[1:])
request = PredictionRequest(
    workload=Workload(**workload),
    config=TrainingConfig(**choices),
    device="cuda",
    compute_capability="9.0",
)
print(json.dumps(dataclasses.replace(predict(request), seconds=0.0).to_dict()))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_the_prediction_is_the_same_with_and_without_a_gpu(workload, choices):
    command = [
        *(sys.executable, "-c", PREDICT, json.dumps(workload.to_dict())),
        json.dumps({"micro_batch_size": GLOBAL_BATCH, **choices}),
    ]
    ended = subprocess.run(
        command,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    with_gpu = json.dumps(predict_for_cuda(workload, **choices).to_dict())
    assert json.loads(with_gpu) == json.loads(ended.stdout.splitlines()[-1])
