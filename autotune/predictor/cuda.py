"""Models how memory on a CUDA device differs from what fake tensors on a CPU show, with sources.

The fake tensors are always on the CPU, and no GPU is touched: a fake tensor on a GPU would make
autograd query the driver for the device, which creates a context of some hundred MB there, next to
a trial that is being measured.

The block sizes of the allocator are in `caching_allocator.py`, the choice of an attention kernel in
`attention.py`, the workspaces of cuBLAS in `cublas.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from autotune.predictor.attention import OPERATORS, attention, scratch_of_attention
from autotune.predictor.cublas import CublasWorkspaces
from autotune.predictor.fake_mode import Scratch, StorageWatch
from autotune.predictor.gpu import Gpu
from autotune.predictor.reductions import partial_sums_bytes
from autotune.shipped import activation_offload, frozen_on_host
from autotune.spec.config import Attention, Offload
from autotune.techniques import offload
from autotune.units import format_size


class CudaKernels:
    """Collects the memory that kernels of a recorded step allocate, and the attention kernels."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._attention: set[str] = set()
        self.cublas = CublasWorkspaces(gpu)
        self.cudnn_bytes = 0
        """Largest estimate of the bytes that cuDNN allocates in a backward pass; 0 if unused."""
        self._has_recurrent = False
        self._has_convolution = False

    def scratch(
        self, operator: Any, args: Sequence[Any], _result: Any, _kwargs: Mapping[str, Any]
    ) -> Scratch:
        """Returns what `operator` allocates while it runs, besides its result."""
        if operator in OPERATORS:
            self._attention.add(OPERATORS[operator])
        if operator is torch.ops.aten.mkldnn_rnn_layer.default:
            self._has_recurrent = True
        self._has_convolution |= operator is torch.ops.aten.convolution.default
        scratch = scratch_of_attention(operator, args, gpu=self._gpu) or _scratch_of(
            operator, args, gpu=self._gpu
        )
        if operator is torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default:
            self.cudnn_bytes = max(self.cudnn_bytes, *map(sum, scratch))
        workspace_bytes = self.cublas.bytes_during(operator, args)
        return [*scratch, [workspace_bytes]] if workspace_bytes else scratch

    def assumptions(
        self, *, compiled: bool, autocast: bool, torch_version: str | None
    ) -> Iterator[str]:
        """Yields the assumptions of a prediction for CUDA, as text for its notes."""
        yield "the CUDA context and what the allocator holds in reserve come on top"
        release = f" with torch {torch_version}" if torch_version else ""
        if self._gpu.is_assumed:
            yield (
                f"{self._gpu.name}{release} is assumed; predict, explain and fit take another by "
                "--compute-capability, and all of Python by the name of a GPU, such as l4"
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
        if self._has_recurrent:
            yield (
                "what cuDNN keeps and allocates for an LSTM is not known and left out: the peak is "
                "higher"
            )
        if self._has_convolution:
            yield "what cuDNN allocates while it convolves is not known and left out"
        if autocast:
            yield "autocast by the CPU's list of operators"
        if compiled:
            yield "buffers of compiled code as inductor lays them out for a CPU"


def _scratch_of(operator: Any, args: Sequence[Any], *, gpu: Gpu) -> Scratch:
    """Returns what CUDA's kernels of some other operators allocate, besides their results.

    Source: aten/src/ATen/native/cuda/SoftMax.cu (host_softmax_backward),
    aten/src/ATen/native/transformers/attention.cpp (_safe_softmax), and Embedding.cu and
    EmbeddingBackwardKernel.cu in aten/src/ATen/native/cuda.
    """
    if operator is torch.ops.aten._softmax_backward_data.default:
        gradient = args[0]
        return [[gradient.numel() * gradient.element_size()]]  # the gradient times the result
    if operator is torch.ops.aten._safe_softmax.default:
        elements, rows = args[0].numel(), args[0].numel() // max(1, args[0].shape[-1])
        return [[elements, rows, 1]]  # which elements are masked, which rows are as a whole
    if operator is torch.ops.aten.embedding_dense_backward.default:
        return _scratch_of_embedding(gradient=args[0], tokens=args[1], rows=args[2])
    if partial_sums := partial_sums_bytes(operator, args, gpu=gpu):
        return [[partial_sums]]
    return ()


_FEW_TOKENS = 3072
"""Up to so many tokens, the gradient of an embedding is added up without sorting them."""
_TOKENS_OF_A_PART = 10


def _scratch_of_embedding(*, gradient: Tensor, tokens: Tensor, rows: int) -> Scratch:
    """Returns sorted tokens, the parts of equal ones, and a sum in fp32 for each part."""
    count = tokens.numel()
    if count <= _FEW_TOKENS:
        return ()
    different = min(count, rows)
    parts = count // _TOKENS_OF_A_PART + different
    sums_bytes = parts * gradient.shape[-1] * 4
    index_bytes = tokens.element_size()
    return [[*2 * [count * index_bytes], *2 * [different * index_bytes], parts * 8, sums_bytes]]


FUSED_RMS_NORM_SINCE = (2, 9)
"""The torch release that introduced aten::_fused_rms_norm on CUDA; before, RMSNorm consisted of
several operators there, too."""


@contextmanager
def offloaded_off_device(watch: StorageWatch, *, place: Offload) -> Iterator[None]:
    """Makes what is offloaded leave the recording of `watch`.

    That is: activations, of which only the shape is stored, and what `place` says.
    """
    with ExitStack() as stack:
        stack.enter_context(
            patch.multiple(
                activation_offload,
                to_host=_OffloadedTensor,
                to_device=_OffloadedTensor.to_device,
            )
        )
        stack.enter_context(patch.object(offload, "optimizer_on_host", _OptimizerOnHost))
        if place == "all":
            stack.enter_context(_weights_on_host(watch))
        yield


@contextmanager
def frozen_off_device(watch: StorageWatch) -> Iterator[None]:
    """Makes the host's copies of frozen weights leave the recording of `watch`."""

    def copy_on_host(tensor: Tensor) -> Tensor:
        with watch.on_host():
            return tensor.clone()

    with patch.object(frozen_on_host, "copy_on_host", copy_on_host):
        yield


@contextmanager
def _weights_on_host(watch: StorageWatch) -> Iterator[None]:
    """Makes FSDP2 copy weights to the device and gradients to the host, as its policy does there.

    On a fake CPU both copies are the tensors themselves. Source: torch.distributed.fsdp's
    FSDPParam and foreach_reduce.
    """
    all_gather_inputs = FSDPParam.all_gather_inputs
    to_sharded_dtensor = FSDPParam.to_sharded_dtensor

    def copied_to_device(weight: Any) -> list[Tensor]:
        if weight.sharded_state is not ShardedState.SHARDED:
            inputs: list[Tensor] = all_gather_inputs.fget(weight)  # type: ignore[attr-defined]
            return inputs
        copy = weight._sharded_param_data.clone()
        return [copy if weight.param_dtype is None else copy.to(weight.param_dtype)]

    def copied_to_host(weight: Any, part: Tensor) -> Tensor:
        if hasattr(weight, "sharded_param"):  # a gradient, as there is the weight already
            with watch.on_host():
                part = part.clone()
        return to_sharded_dtensor(weight, part)

    watch.phases_on_host = frozenset({"step"})
    with patch.multiple(
        FSDPParam,
        all_gather_inputs=property(copied_to_device),
        to_sharded_dtensor=copied_to_host,
    ):
        yield


class _OptimizerOnHost:
    """Stands for torchao's CPUOffloadOptimizer: what that has and does on the device."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, make_optimizer: Any, frees_gradients: bool
    ) -> None:
        small = [weight for weight in parameters if weight.numel() < offload.SMALLEST_ELEMENTS]
        self.d_opt = make_optimizer([{"params": small}]) if small else None
        self.param_groups = [] if self.d_opt is None else self.d_opt.param_groups
        self.optim_dict: dict[Tensor, Any] = {}
        self.param_d2h_map: dict[Tensor, Tensor] = {}
        for weight in parameters:
            if frees_gradients and weight.numel() >= offload.SMALLEST_ELEMENTS:
                weight.register_post_accumulate_grad_hook(_free_gradient)

    def step(self) -> None:
        if self.d_opt is not None:
            self.d_opt.step()


def _free_gradient(weight: Tensor) -> None:
    weight.grad = None


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
    """Makes attention, norms and dropout on a fake CPU allocate what their kernels on `gpu` would.

    Queries for CUDA's autocast are answered for the CPU's. torchao queries without a device, which
    means CUDA, and casts the inputs of its layers accordingly.
    """
    scaled_dot_product_attention = F.scaled_dot_product_attention
    rms_norm = F.rms_norm
    dropout = F.dropout
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
    F.dropout = _dropout
    try:
        yield
    finally:
        F.scaled_dot_product_attention = scaled_dot_product_attention
        F.rms_norm = rms_norm
        F.dropout = dropout
        torch.is_autocast_enabled = is_autocast_enabled
        torch.get_autocast_gpu_dtype = get_autocast_gpu_dtype


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Does what F.dropout does on CUDA: it keeps a mask with a byte for each number.

    On a CPU the mask is in the number format of the input. Source: is_fused_kernel_acceptable in
    aten/src/ATen/native/Dropout.cpp.
    """
    if training and 0.0 < p < 1.0 and not inplace and input.numel():
        dropped: Tensor = torch.native_dropout(input, p, training)[0]
        return dropped
    return torch.dropout(input, p, training) if not inplace else torch.dropout_(input, p, training)


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
