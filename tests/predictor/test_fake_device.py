"""The device of the fake tensors in a prediction for CUDA: no build of torch needs a GPU for it."""

from dataclasses import replace

import pytest
import torch
import torch._dynamo

from autotune.config import TrainingConfig
from autotune.predictor import PredictionRequest, predict
from autotune.predictor.cuda import choose_fake_device

GLOBAL_BATCH = 4
A_CUDA_RELEASE = "13.0"

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, fake tensors on cuda work and are used"
)
needs_cuda_build_without_gpu = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(),
    reason="needs a torch built with CUDA on a machine without a GPU",
)


def predict_for_cuda(workload, **choices):
    """The prediction without its seconds, which differ from run to run."""
    torch._dynamo.reset()
    config = TrainingConfig(micro_batch_size=GLOBAL_BATCH, **choices)
    prediction = predict(PredictionRequest(workload=workload, config=config, device="cuda"))
    return replace(prediction, seconds=0.0)


@needs_no_gpu
def test_without_a_gpu_a_torch_built_with_cuda_predicts_as_one_built_without(workload, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    built_without = predict_for_cuda(workload, precision="bf16-mixed")
    monkeypatch.setattr(torch.version, "cuda", A_CUDA_RELEASE)
    assert predict_for_cuda(workload, precision="bf16-mixed") == built_without


@needs_cuda_build_without_gpu
@pytest.mark.parametrize(
    "choices",
    [
        {"checkpointing": "block", "optimizer_fusion": "backward"},
        {"compile": "block"},
        {"attention": "efficient"},
        {"activation_offload": "cpu", "loss": "chunked"},
    ],
    ids=str,
)
def test_an_installed_torch_with_cuda_predicts_without_a_gpu(workload, choices):
    assert predict_for_cuda(workload, **choices).fake_device == "cpu"


@pytest.mark.parametrize(
    ("cuda_release", "sees_a_gpu", "expected"),
    [
        pytest.param(None, False, "cpu", id="CPU build"),
        pytest.param(A_CUDA_RELEASE, False, "cpu", id="CUDA build without a GPU"),
        pytest.param(A_CUDA_RELEASE, True, "cuda", id="CUDA build with a GPU"),
        pytest.param(None, True, "cpu", id="ROCm build with a GPU"),
    ],
)
def test_fake_tensors_are_on_cuda_only_with_a_gpu(monkeypatch, cuda_release, sees_a_gpu, expected):
    monkeypatch.setattr(torch.version, "cuda", cuda_release)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_a_gpu)
    assert choose_fake_device().type == expected
