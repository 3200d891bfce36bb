"""Counts what a training step does: floating-point operations, bytes accessed, operators run.

FLOPs are those of matrix products, convolutions and attention, a multiplication and an addition
each; everything else is a small share of a transformer's. torch has the formulas
(torch/utils/flop_counter.py). Attention is counted here, for all of its kernels alike: two products
forward and four backward, without regard to a causal mask. So it is counted for the model FLOPs
utilization of PaLM (https://arxiv.org/abs/2204.02311, appendix B). The fifth product of flash
kernels, which compute the scores again, is not counted.

Bytes accessed are those of the operands and results of each operator, and of the arguments of each
kernel that inductor generates, as if nothing stayed in a cache between two of them. They are what
XLA's cost analysis and inductor's metrics call by that name.

An operator, or a kernel that inductor generates, is one piece of work for the host; a view is none.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_GROUPED_PRODUCT = _aten._grouped_mm
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_fused_attention_overrideable,
)
"""Their first three arguments are query, key and value."""
_ATTENTION_BACKWARD = (
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward,
    _aten._scaled_dot_product_fused_attention_overrideable_backward,
)
"""Their first argument is the gradient; query, key and value follow."""
_WITHOUT_FORMULA = (
    _aten.mkldnn_rnn_layer,
    _aten.mkldnn_rnn_layer_backward,
    _aten._cudnn_rnn,
    _aten._cudnn_rnn_backward,
    _aten._fft_r2c,
    _aten._fft_c2r,
    _aten._fft_c2c,
)
"""Operators of torch that compute much, and whose FLOPs nobody has written down here."""
_KNOWN_LIBRARIES = (
    "aten",
    "prim",
    "prims",
    "profiler",
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "fsdp",
    "inductor",
    "bitsandbytes",
    "torchao",
)
"""Whose operators compute little, or have their products as operators of torch."""
_TOUCHES_NOTHING = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty)
_STEP = "step"


@dataclass
class Work:
    """What one part of a training computes and moves."""

    flops: int = 0
    bytes_accessed: int = 0
    operators: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkPerToken:
    """What a training computes and moves per token, all of its devices together."""

    flops: float | None = None
    """None where an operator ran whose FLOPs are not known."""
    bytes_accessed: float = 0.0
    operators: float = 0.0

    def extrapolated(self, at_first: "WorkPerToken", *, periods: int) -> "WorkPerToken":
        """Returns that of a deeper model, which has `periods` times as many layers more.

        `self` has as many more layers than `at_first`.
        """
        flops = self.flops
        if flops is not None and at_first.flops is not None:
            flops += periods * (flops - at_first.flops)
        return WorkPerToken(
            flops=flops,
            bytes_accessed=self.bytes_accessed
            + periods * (self.bytes_accessed - at_first.bytes_accessed),
            operators=self.operators + periods * (self.operators - at_first.operators),
        )


class WorkMeter:
    """Adds up the work of each phase of a recorded step."""

    def __init__(self) -> None:
        self._work: dict[str, Work] = defaultdict(Work)
        self._is_complete = True
        """Whether the FLOPs of all operators that may have many are known."""

    def clear(self) -> None:
        self._work.clear()
        self._is_complete = True

    def count(
        self, phase: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Adds an operator. Views, and memory that is allocated and not written, cost nothing."""
        packet = getattr(func, "overloadpacket", func)
        if getattr(func, "is_view", False) or packet in _TOUCHES_NOTHING:
            return
        if is_unknown(func):
            self._is_complete = False
        work = self._work[phase]
        work.flops += flops_of(packet, args, kwargs, result)
        work.bytes_accessed += bytes_of((args, kwargs, result))
        work.operators += 1

    def count_kernel(self, phase: str, args: object) -> None:
        """Adds a kernel that inductor has generated, by its arguments."""
        work = self._work[phase]
        work.bytes_accessed += bytes_of(args)
        work.operators += 1

    def per_token(self, *, tokens_recorded: int, tokens_of_step: int, devices: int) -> WorkPerToken:
        """Returns the work of a training per token.

        `tokens_recorded` are those of the forward and backward passes that were recorded. The
        optimizer's step, whose FLOPs no formula of the model has, is shared by `tokens_of_step`.
        """
        passes = [work for phase, work in self._work.items() if phase != _STEP]
        flops = sum(work.flops for work in passes) / tokens_recorded
        size_bytes = sum(work.bytes_accessed for work in passes) / tokens_recorded
        size_bytes += self._work[_STEP].bytes_accessed / tokens_of_step
        operators = sum(work.operators for work in passes) / tokens_recorded
        operators += self._work[_STEP].operators / tokens_of_step
        return WorkPerToken(
            flops=devices * flops if self._is_complete else None,
            bytes_accessed=devices * size_bytes,
            operators=devices * operators,
        )


def is_unknown(func: Any) -> bool:
    """Returns whether an operator may have many FLOPs that nothing here counts.

    So are recurrent layers, Fourier transforms, and operators of a user or of another library.
    """
    packet = getattr(func, "overloadpacket", func)
    if packet in _WITHOUT_FORMULA:
        return True
    return packet not in flop_registry and func.namespace not in _KNOWN_LIBRARIES


def flops_of(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Returns the floating-point operations of an operator; 0 for one without a formula."""
    if packet in _ATTENTION:
        return attention_flops(*args[:3])
    if packet in _ATTENTION_BACKWARD:
        return 2 * attention_flops(*args[1:4])
    if packet in (_GROUPED_PRODUCT, _aten._int_mm):
        return _product_flops(args[0], args[1])
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    return int(formula(*args, **kwargs, out_val=result))


def attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Returns the FLOPs of the two products of attention forward.

    The tensors are [batch, heads, sequence, head size]; heads of keys may be fewer.
    """
    batch, heads, queries, size = query.shape
    return 2 * batch * heads * queries * key.shape[-2] * (size + value.shape[-1])


def _product_flops(first: Tensor, second: Tensor) -> int:
    """Returns the FLOPs of [m, k] by [k, n], or of [rows, k] by [groups, k, n].

    Each row is in one group; the rows of [m, rows] by [rows, n] may be in groups as well.
    """
    return 2 * first.numel() * second.shape[-1]


def bytes_of(values: object) -> int:
    """Returns the bytes of all distinct tensors within `values`.

    Of an expanded tensor only its memory counts. What is both read and written counts once.
    """
    sizes: dict[tuple[int, int, int], int] = {}
    for tensor in tensors_in(values):
        storage = tensor.untyped_storage()
        size = tensor.numel() * tensor.element_size()
        key = (storage._cdata, int(tensor.storage_offset()), size)
        sizes[key] = min(size, storage.nbytes())
    return sum(sizes.values())


def tensors_in(values: object) -> Iterator[Tensor]:
    """Returns the tensors within lists, tuples and dictionaries."""
    return (value for value in tree_iter(values) if isinstance(value, Tensor))
