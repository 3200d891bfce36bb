"""Measures what oneDNN's kernels of an LSTM allocate, and what they keep for the backward pass.

The forward kernel returns a workspace that only oneDNN reads; the fake kernel of torch returns it
empty. So both kernels are run once on zeros. A long sequence is run at three shorter lengths, in
which all bytes are a line. Source: aten/src/ATen/native/mkldnn/RNN.cpp
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autotune.predictor.measured_kernels import (
    MOST_OPERATIONS,
    NotMeasurable,
    allocations,
    on_real_tensors,
    peak_bytes,
)

_aten = torch.ops.aten
FORWARD = _aten.mkldnn_rnn_layer.default
BACKWARD = _aten.mkldnn_rnn_layer_backward.default

_WORKSPACE = 3
_SHORTEST = 48
"""The longest of the three lengths at which a long sequence is run instead, or more."""
_ROUNDING_BYTES = 16 * 1024


class RecurrentKernels:
    """Measures each combination of layouts once."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[int, int]] = {}

    def workspace_bytes(self, args: Sequence[Any]) -> int:
        """Returns the size of the workspace of FORWARD. Raises NotMeasurable."""
        return self._measured(args, _run_forward)[1]

    def scratch_bytes(self, operator: Any, args: Sequence[Any]) -> int:
        """Returns what FORWARD or BACKWARD allocates besides its results. Raises NotMeasurable."""
        if operator is FORWARD:
            return self._measured(args, _run_forward)[0]
        return self._measured(args, _run_backward)[0]

    def _measured(
        self, args: Sequence[Any], run: Callable[..., tuple[int, int]]
    ) -> tuple[int, int]:
        described = [
            (tuple(arg.shape), tuple(arg.stride()), arg.dtype)
            if isinstance(arg, Tensor)
            else str(arg)
            for arg in args
        ]
        keeps_workspace = torch.is_grad_enabled() or run is _run_backward
        key = (run, keeps_workspace, *described)
        if key not in self._known:
            with on_real_tensors(), torch.set_grad_enabled(keeps_workspace):
                self._known[key] = _at_length(args[0].shape[0], partial(run, args), args)
        return self._known[key]


def _at_length(
    length: int, run: Callable[[int], tuple[int, int]], args: Sequence[Any]
) -> tuple[int, int]:
    """Returns what `run` says of a sequence of `length`, by shorter ones if that one is long.

    oneDNN rounds to pages, so that three lengths are on a line up to some of them.
    """
    operations_a_token = 4 * args[0][0, ..., 0].numel() * sum(one.numel() for one in args[1:3])
    longest = max(_SHORTEST, MOST_OPERATIONS // operations_a_token)
    if length <= longest:
        return run(length)
    step = longest // 3
    first, second, third = (run(count * step) for count in (1, 2, 3))
    found = []
    for one, two, three in zip(first, second, third, strict=True):
        if abs(three - 2 * two + one) > max(0.02 * three, _ROUNDING_BYTES):
            raise NotMeasurable
        found.append(round(three + (three - one) / (2 * step) * (length - 3 * step)))
    return found[0], found[1]


def _run_forward(args: Sequence[Any], length: int) -> tuple[int, int]:
    """Returns the bytes besides the results, and those of the workspace."""
    given = [_zeros(arg, length if position == 0 else None) for position, arg in enumerate(args)]
    with allocations() as sizes:
        results = _called(FORWARD, given)
    kept = [0 if result is None else result.untyped_storage().nbytes() for result in results]
    return max(0, peak_bytes(sizes) - sum(kept)), kept[_WORKSPACE]


def _run_backward(args: Sequence[Any], length: int) -> tuple[int, int]:
    """Returns the bytes besides the results, and 0. A real forward kernel makes the workspace."""
    (x, *weights, hidden, cell, _, _, _) = args[:10]
    gradients = args[10:13]
    (reverse, mode, size, layers, has_biases, train, both_ways, lengths, batch_first) = args[13:22]
    start = [_zeros(x, length), *(_zeros(one) for one in (*weights, hidden, cell))]
    settings = [reverse, lengths, mode, size, layers, has_biases, both_ways, batch_first, train]
    output, last_hidden, last_cell, workspace = _called(FORWARD, [*start, *settings])
    given = [
        *(*start, output, last_hidden, last_cell),
        *(_zeros(gradients[0], length), _zeros(gradients[1]), _zeros(gradients[2])),
        *(reverse, mode, size, layers, has_biases, train, both_ways, lengths, batch_first),
        workspace,
    ]
    with allocations() as sizes:
        results = _called(BACKWARD, given)
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in results}
    return max(0, peak_bytes(sizes) - sum(one.nbytes() for one in storages.values())), 0


def _called(operator: Any, args: Sequence[Any]) -> Any:
    try:
        return operator(*args)
    except Exception as error:  # whatever oneDNN says of a processor or dtype
        raise NotMeasurable from error


def _zeros(arg: Any, length: int | None = None) -> Any:
    """Returns zeros in the layout of a tensor, of another length; any other argument as it is."""
    if not isinstance(arg, Tensor):
        return arg
    shape, strides = list(arg.shape), list(arg.stride())
    if length is not None and arg.dim() > 0 and length != shape[0]:
        strides = [
            stride // shape[0] * length if stride > strides[0] else stride for stride in strides
        ]
        shape[0] = length
    steps = zip(shape, strides, strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return torch.zeros(elements, dtype=arg.dtype).as_strided(shape, strides)
