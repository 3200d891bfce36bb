"""Models how memory on a CUDA device differs from what fake tensors on a CPU show, with sources.

The fake tensors are always on the CPU, and no GPU is touched: a fake tensor on a GPU would make
autograd query the driver for the device, which creates a context of some hundred MB there, next to
a trial that is being measured.

The block sizes of the allocator are in `caching_allocator.py`, the choice of an attention kernel in
`attention.py`, the workspaces of cuBLAS in `cublas.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.predictor.attention import OPERATORS, attention, bytes_during
from autotune.predictor.cublas import CublasWorkspaces
from autotune.predictor.gpu import Gpu
from autotune.spec.config import Attention
from autotune.techniques import activation_offload
from autotune.units import format_size


class CudaKernels:
    """Collects the memory that kernels of a recorded step allocate, and the attention kernels."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._attention: set[str] = set()
        self.cublas = CublasWorkspaces(gpu)
        self.cudnn_bytes = 0
        """Largest estimate of the bytes that cuDNN allocates in a backward pass; 0 if unused."""

    def scratch_bytes(self, operator: Any, args: Sequence[Any], _result: Any) -> int:
        """Returns the bytes that `operator` allocates while it runs, besides its result."""
        if operator in OPERATORS:
            self._attention.add(OPERATORS[operator])
        size_bytes = bytes_during(operator, args, gpu=self._gpu)
        if operator is torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default:
            self.cudnn_bytes = max(self.cudnn_bytes, size_bytes)
        return size_bytes + self.cublas.bytes_during(operator, args)

    def assumptions(
        self, *, compiled: bool, autocast: bool, torch_version: str | None
    ) -> Iterator[str]:
        """Yields the assumptions of a prediction for CUDA, as text for its notes."""
        yield "the CUDA context and what the allocator holds in reserve come on top"
        release = f" with torch {torch_version}" if torch_version else ""
        if self._gpu.is_assumed:
            yield (
                f"{self._gpu.name}{release} is assumed; predict, explain and fit take another by "
                "--compute-capability"
            )
        else:
            yield f"for a GPU of {self._gpu.name}{release}"
        kernels = " and ".join(sorted(self._attention))
        if kernels:
            yield f"attention by {kernels} kernels, RMSNorm by CUDA's"
        else:
            yield "RMSNorm by the CUDA kernel"
        workspaces = self.cublas.describe()
        if workspaces:
            yield workspaces
        if self.cudnn_bytes:
            yield (
                "cuDNN's workspace in the backward pass of attention is an estimate, "
                f"{format_size(self.cudnn_bytes)}; the bounds allow for as much again"
            )
        if autocast:
            yield "autocast by the CPU's list of operators"
        if compiled:
            yield "buffers of compiled code as inductor lays them out for a CPU"


FUSED_RMS_NORM_SINCE = (2, 9)
"""The torch release that introduced aten::_fused_rms_norm on CUDA; before, RMSNorm consisted of
several operators there, too."""


@contextmanager
def offloaded_off_device() -> Iterator[None]:
    """Makes offloaded activations leave the recording: only their shape is stored."""
    original = (activation_offload.to_host, activation_offload.to_device)
    activation_offload.to_host = _OffloadedTensor  # type: ignore[assignment]
    activation_offload.to_device = _OffloadedTensor.to_device  # type: ignore[assignment]
    try:
        yield
    finally:
        activation_offload.to_host, activation_offload.to_device = original


class _OffloadedTensor:
    """A tensor in the host's memory, of which only shape, strides, dtype and device are stored."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._dtype = tensor.dtype
        self._device = tensor.device

    def to_device(self) -> Tensor:
        return torch.empty_strided(
            self._shape, self._stride, dtype=self._dtype, device=self._device
        )


@contextmanager
def gpu_kernels(gpu: Gpu, *, backend: Attention = "auto") -> Iterator[None]:
    """Makes attention and RMSNorm on a fake CPU allocate what their kernels on `gpu` would.

    Queries for CUDA's autocast are answered for the CPU's. torchao queries without a device, which
    means CUDA, and casts the inputs of its layers accordingly.
    """
    scaled_dot_product_attention = F.scaled_dot_product_attention
    rms_norm = F.rms_norm
    is_autocast_enabled = torch.is_autocast_enabled
    get_autocast_gpu_dtype = torch.get_autocast_gpu_dtype

    def attention_on_gpu(*args: Any, **kwargs: Any) -> Tensor:
        return attention(*args, gpu=gpu, backend=backend, **kwargs)

    def is_enabled(device_type: str = "cpu") -> bool:
        return is_autocast_enabled(device_type)

    F.scaled_dot_product_attention = attention_on_gpu
    torch.is_autocast_enabled = is_enabled
    torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cpu")
    if gpu.release >= FUSED_RMS_NORM_SINCE:
        F.rms_norm = _rms_norm
    try:
        yield
    finally:
        F.scaled_dot_product_attention = scaled_dot_product_attention
        F.rms_norm = rms_norm
        torch.is_autocast_enabled = is_autocast_enabled
        torch.get_autocast_gpu_dtype = get_autocast_gpu_dtype


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if torch.compiler.is_compiling() or weight is None:
        # Without the kernel; inductor fuses the operators in both cases.
        return torch.rms_norm(input, normalized_shape, weight, eps)
    normed: Tensor = _FusedRMSNorm.apply(input, weight)  # type: ignore[no-untyped-call]
    return normed


class _FusedRMSNorm(torch.autograd.Function):
    """Allocates what aten::_fused_rms_norm does on CUDA: the result and one float per row.

    For torch 2.9 and newer. Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu. On a CPU
    RMSNorm consists of several operators whose results stay allocated.
    """

    @staticmethod
    def forward(context: Any, input: Tensor, weight: Tensor) -> Tensor:
        reciprocal_deviation = input.new_empty(*input.shape[:-1], 1, dtype=torch.float32)
        context.save_for_backward(input, weight, reciprocal_deviation)
        return torch.empty_like(input, dtype=torch.promote_types(input.dtype, weight.dtype))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        input, weight, _ = context.saved_tensors
        return torch.empty_like(input), torch.empty_like(weight)
