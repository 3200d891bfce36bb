"""Workspaces of cuBLAS: by compute capability and release, and compared with a real GPU."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.predictor.cublas import CublasWorkspaces, default_bytes
from autotune.predictor.gpu import gpu_of

MIB = 1024**2
SMALL, LARGE = 8 * MIB + 128 * 1024, 32 * MIB
MM, ADDMM, SCALED = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
)


@pytest.mark.parametrize(
    ("release", "large"),
    [
        ("2.8", {"9.0"}),
        ("2.11", {"9.0"}),
        ("2.12", {"9.0", "10.0", "10.3", "12.0"}),
        ("2.13", {"9.0", "10.0", "10.3", "12.0"}),
        ("2.14", {"9.0", "10.0", "10.3", "11.0", "12.0"}),
        ("2.15", {"9.0", "10.0", "10.3", "11.0", "12.0"}),
    ],
)
def test_which_gpus_get_the_large_workspace_depends_on_the_release(release, large):
    sizes = {
        capability: default_bytes(gpu_of(capability, release))
        for capability in ("7.5", "8.0", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0")
    }
    assert sizes == {capability: LARGE if capability in large else SMALL for capability in sizes}


def after(release, *products, environment=None):
    """Returns the workspaces after these products; those in a list run in a backward pass."""
    workspaces = CublasWorkspaces(gpu_of("8.9", release), environment or {})

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(context, x, operators):
            context.operators = operators
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            for operator in context.operators:
                workspaces.bytes_during(operator, (torch.ones(4),))
            return gradient, None

    with FakeTensorMode():
        for product in products:
            if isinstance(product, list):
                InBackward.apply(torch.ones(4, requires_grad=True), product).sum().backward()
            else:
                workspaces.bytes_during(product, (torch.ones(4),))
    return workspaces


def test_each_thread_has_a_persistent_workspace():
    assert after("2.11", MM, MM, [MM]).persistent == [SMALL, SMALL]


def test_without_a_product_there_is_no_workspace():
    assert after("2.11", torch.ops.aten.add.Tensor).persistent == []


@pytest.mark.parametrize("product", [ADDMM, SCALED])
def test_a_bias_and_fp8_need_a_workspace_of_cublaslt_as_well(product):
    assert after("2.11", MM, product).persistent == [SMALL, MIB]


@pytest.mark.parametrize("product", [ADDMM, SCALED])
def test_from_2_12_on_cublaslt_uses_the_workspace_of_cublas(product):
    assert after("2.12", MM, product).persistent == [SMALL]


def test_a_product_that_adds_a_matrix_is_not_cublaslts():
    workspaces = CublasWorkspaces(gpu_of("8.9", "2.11"), {})
    workspaces.bytes_during(ADDMM, (torch.ones(4, 4),))
    assert workspaces.persistent == [SMALL]


def test_from_2_15_on_a_workspace_exists_only_during_its_product():
    workspaces = CublasWorkspaces(gpu_of("9.0", "2.15"), {})
    during = [workspaces.bytes_during(product, (torch.ones(4),)) for product in (MM, ADDMM)]
    assert (during, workspaces.persistent) == ([LARGE, MIB], [])


@pytest.mark.parametrize(
    ("variable", "value", "kept"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", [LARGE, MIB]),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8", [SMALL, MIB]),
        ("CUBLAS_WORKSPACE_CONFIG", "4096", [SMALL, MIB]),
        ("CUBLASLT_WORKSPACE_SIZE", "4096", [SMALL, 4 * MIB]),
        ("CUBLASLT_WORKSPACE_SIZE", "much", [SMALL, MIB]),
    ],
)
def test_settings_of_the_user_are_respected(variable, value, kept):
    assert after("2.11", MM, ADDMM, environment={variable: value}).persistent == kept


def test_persistent_workspaces_can_be_enabled_by_a_variable():
    assert after(
        "2.15", MM, [MM], environment={"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}
    ).persistent == [
        SMALL,
        SMALL,
    ]


ON_A_GPU = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from autotune.predictor.cublas import CublasWorkspaces
from autotune.predictor.gpu import Gpu

release = tuple(int(part) for part in torch.__version__.split(".")[:2])
expected = CublasWorkspaces(Gpu(capability=torch.cuda.get_device_capability(), release=release))
numbers = torch.zeros(512, 512, device="cuda", requires_grad=True)
bias = torch.zeros(512, device="cuda")

class Noted(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        expected.bytes_during(operator, args)
        return operator(*args, **(kwargs or {}))

before = torch.cuda.memory_allocated()
with Noted():
    product = torch.nn.functional.linear(numbers @ numbers, numbers, bias)
    product.backward(torch.zeros_like(product))
del product
numbers.grad = None
print(torch.cuda.memory_allocated() - before, sum(expected.persistent))
"""


@pytest.mark.gpu
def test_the_allocator_of_this_gpu_holds_as_much():
    """Runs in a new process, in which these are the first products."""
    ended = subprocess.run(
        [sys.executable, "-c", ON_A_GPU], capture_output=True, text=True, check=True
    )
    kept, expected = map(int, ended.stdout.split())
    assert kept == expected
