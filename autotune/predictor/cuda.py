"""What a CUDA device does to memory that fake tensors on a CPU do not show, each with its source.

The fake tensors are a CPU's whatever the machine has, and no GPU is touched: a fake tensor on a GPU
would make autograd ask the driver for the device, which creates a context there of some hundred MB,
beside a trial that is measured.

What the allocator makes of every request is in `caching_allocator.py`, which kernel answers
attention in `attention.py`, what cuBLAS takes in `cublas.py`.
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
    """What the operators of a recorded step take from the allocator for themselves, and which attention they are."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._attention: set[str] = set()
        self.cublas = CublasWorkspaces(gpu)
        self.cudnn_bytes = 0
        """Largest estimate of what cuDNN takes in a backward pass; 0 where it is not used."""

    def scratch_bytes(self, operator: Any, args: Sequence[Any]) -> int:
        """Bytes that `operator` holds beside its arguments and results while it runs."""
        if operator in OPERATORS:
            self._attention.add(OPERATORS[operator])
        size_bytes = bytes_during(operator, args, gpu=self._gpu)
        if operator is torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default:
            self.cudnn_bytes = max(self.cudnn_bytes, size_bytes)
        return size_bytes + self.cublas.bytes_during(operator, args)

    def assumptions(
        self, *, compiled: bool, autocast: bool, torch_version: str | None
    ) -> Iterator[str]:
        """What a prediction for CUDA takes for granted, in words."""
        yield "the CUDA context and what the allocator holds in reserve come on top"
        release = f" with torch {torch_version}" if torch_version else ""
        if self._gpu.is_assumed:
            yield f"{self._gpu.name}{release} is assumed; predict, explain and fit take another by --compute-capability"
        else:
            yield f"for a GPU of {self._gpu.name}{release}"
        kernels = " and ".join(sorted(self._attention))
        yield (
            f"attention by {kernels} kernels, RMSNorm by CUDA's"
            if kernels
            else "RMSNorm by the CUDA kernel"
        )
        if workspaces := self.cublas.describe():
            yield workspaces
        if self.cudnn_bytes:
            yield (
                f"cuDNN's workspace in the backward pass of attention is an estimate, {format_size(self.cudnn_bytes)}; "
                "the bounds allow for as much again"
            )
        if autocast:
            yield "autocast by the CPU's list of operators"
        if compiled:
            yield "buffers of compiled code as inductor lays them out for a CPU"


FUSED_RMS_NORM_SINCE = (2, 9)
"""torch release that brought aten::_fused_rms_norm to CUDA; before, RMSNorm was several operators
there, too."""


@contextmanager
def memory_of_the_host() -> Iterator[None]:
    """Lets what is offloaded leave the device: its shape is all that waits."""
    before = activation_offload.to_host, activation_offload.to_device
    activation_offload.to_host = _Elsewhere  # type: ignore[assignment]
    activation_offload.to_device = _Elsewhere.back  # type: ignore[assignment]
    try:
        yield
    finally:
        activation_offload.to_host, activation_offload.to_device = before


class _Elsewhere:
    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device

    def back(self) -> Tensor:
        return torch.empty_strided(
            self._shape, self._stride, dtype=self._dtype, device=self._device
        )


@contextmanager
def kernels_of_a_gpu(gpu: Gpu, *, backend: Attention = "auto") -> Iterator[None]:
    """Lets attention and RMSNorm on a fake CPU allocate what the kernels on `gpu` would, and autocast be CUDA's.

    torchao asks without a device whether autocast is on, which means CUDA's, and casts the inputs
    of its layers then.
    """
    before = F.scaled_dot_product_attention, F.rms_norm
    is_autocast_enabled, get_autocast_gpu_dtype = (
        torch.is_autocast_enabled,
        torch.get_autocast_gpu_dtype,
    )

    def chosen(*args: Any, **kwargs: Any) -> Tensor:
        return attention(*args, gpu=gpu, backend=backend, **kwargs)

    def is_enabled(device_type: str = "cpu") -> bool:
        return is_autocast_enabled(device_type)

    F.scaled_dot_product_attention = chosen
    torch.is_autocast_enabled = is_enabled
    torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cpu")
    if gpu.release >= FUSED_RMS_NORM_SINCE:
        F.rms_norm = _rms_norm
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.rms_norm = before
        torch.is_autocast_enabled, torch.get_autocast_gpu_dtype = (
            is_autocast_enabled,
            get_autocast_gpu_dtype,
        )


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if torch.compiler.is_compiling() or weight is None:
        return torch.rms_norm(input, normalized_shape, weight, eps)  # inductor fuses it either way
    normed: Tensor = _FusedRMSNorm.apply(input, weight)  # type: ignore[no-untyped-call]
    return normed


class _FusedRMSNorm(torch.autograd.Function):
    """Allocates what aten::_fused_rms_norm does on CUDA (torch 2.9 and newer): the result and one float a row.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu. On a CPU it is several operators that
    keep their results.
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
