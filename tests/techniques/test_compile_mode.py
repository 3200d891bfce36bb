"""Modes of torch.compile as settings of a trial's process, which a prediction does not make."""

import pytest
import torch

from autotune.memory import cuda
from autotune.spec.config import CHOICES, TrainingConfig
from autotune.techniques import before_the_device, find_unavailable
from autotune.techniques.compilation import set_mode


@pytest.fixture(autouse=True)
def default_mode():
    yield
    set_mode("default")


@pytest.mark.parametrize("mode", CHOICES["compile_mode"])
def test_a_trial_compiles_as_torch_does_in_that_mode(mode):
    before_the_device(TrainingConfig(compile="model", compile_mode=mode))
    settings = torch._inductor.config
    made = {
        "max_autotune": settings.max_autotune,
        "coordinate_descent_tuning": settings.coordinate_descent_tuning,
        "triton.cudagraphs": settings.triton.cudagraphs,
    }
    of_torch = torch._inductor.list_mode_options(mode)
    assert {name: value for name, value in made.items() if value} == of_torch


def test_a_cpu_has_the_mode_without_cuda_graphs_alone():
    modes = {"compile_mode": CHOICES["compile_mode"]}
    found = find_unavailable(modes, device=torch.device("cpu"))["compile_mode"]
    assert set(found) == {"reduce-overhead", "max-autotune"}
    assert set(found.values()) == {"CUDA graphs need a GPU: use max-autotune-no-cudagraphs"}


def test_what_is_reserved_is_the_peak_where_graphs_allocate_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 300)
    meter = object.__new__(cuda.CudaMeter)
    meter._device, meter._peak_bytes = "cuda", 0
    meter._record_peak("forward")
    assert meter._peak_bytes == 100
    set_mode("reduce-overhead")
    meter._record_peak("forward")
    assert meter._peak_bytes == 300


@pytest.mark.slow  # kernels are tried for each product
def test_kernels_chosen_by_trying_give_the_gradients_of_eager_code():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16)]
    model, inputs = torch.nn.Sequential(*layers), torch.randn(8, 16)

    def gradients():
        model.zero_grad()
        model(inputs).square().mean().backward()
        return [one.grad.clone() for one in model.parameters()]

    eager = gradients()
    set_mode("max-autotune-no-cudagraphs")
    model.compile(dynamic=False)
    torch.testing.assert_close(gradients(), eager)
