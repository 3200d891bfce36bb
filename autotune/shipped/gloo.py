"""Communication between processes on a CPU, by gloo: of FSDP2, tensor parallelism and DeepSpeed.

Gloo's own all-gather and reduce-scatter copy what they gather and add up, and its threads hold on
to tensors for a moment after a collective has ended: a peak would depend on how fast they
are. Here nothing is copied, and a collective returns when its tensors are its caller's alone again.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

_MOST_SECONDS = 1.0
"""How long to wait for gloo's threads: long enough on any machine, and no reason to fail."""


def use_gloo(model: torch.nn.Module) -> None:
    """Have the divided parts of `model` communicate in this way."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(GlooAllGather())
            module.set_custom_reduce_scatter(GlooReduceScatter())


def add_up(tensor: Tensor, group: Any) -> Tensor:
    """Returns the sum of the tensors of all ranks of a group, on any device."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    add_up_in_place(total, group)
    return total


def add_up_in_place(tensor: Tensor, group: Any) -> None:
    """Replace a tensor by the sum of the tensors of all ranks of a group, on any device."""
    with _held_by_caller([tensor]):
        torch.distributed.all_reduce(tensor, group=group)


def gather(tensor: Tensor, group: Any) -> list[Tensor]:
    """Returns the tensors of all ranks of a group, which have the same shape, on any device."""
    tensor = tensor.contiguous()
    size = torch.distributed.get_world_size(group)
    gathered = [torch.empty_like(tensor) for _ in range(size)]
    with _held_by_caller([tensor, *gathered]):
        torch.distributed.all_gather(gathered, tensor, group=group)
    return gathered


def released(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an all-reduce of one tensor that has let go of it when it returns."""

    def reduce_and_wait(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        before = _references_to([tensor])
        work = all_reduce(tensor, *arguments, **named)
        if work is None:  # it has waited for the result
            _wait_for_references([tensor], before)
        return work

    return reduce_and_wait


class GlooAllGather(AllGather):
    """Has each rank send its part to the others, which is in its place in the output already."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        parts = output_tensor.chunk(torch.distributed.get_world_size(group))
        own = parts[torch.distributed.get_rank(group)]
        if not _is_same_memory(own, input_tensor):
            own.copy_(input_tensor)
        for rank, part in enumerate(parts):
            with _held_by_caller([part]):
                torch.distributed.broadcast(part, group=group, group_src=rank)


class GlooReduceScatter(ReduceScatter):
    """Adds up the whole input in place, as gloo does with its copy, and takes this rank's part."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        with _held_by_caller([input_tensor]):
            torch.distributed.all_reduce(input_tensor, op=op, group=group)
        size, index = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        output_tensor.copy_(input_tensor.chunk(size)[index])


@contextmanager
def _held_by_caller(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Run a collective, and wait until gloo's threads have no reference to its tensors any more.

    A thread gives up its reference to a tensor first, and then, once it has the interpreter's lock,
    one to the Python object. If that is the last one, the thread frees the tensor, which the
    profiler does not see.
    """
    tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    before = _references_to(tensors)
    yield
    _wait_for_references(tensors, before)


def _wait_for_references(tensors: Sequence[Tensor], before: Sequence[int]) -> None:
    """Wait until there are no more references to tensors than `before`."""
    give_up_at = time.monotonic() + _MOST_SECONDS
    while time.monotonic() < give_up_at:
        now = _references_to(tensors)
        if all(after <= count for after, count in zip(now, before, strict=True)):
            return
        time.sleep(0)


def _references_to(tensors: Sequence[Tensor]) -> list[int]:
    """Returns how many references there are to each tensor and to its Python object."""
    counts: list[int] = []
    for tensor in tensors:
        counts.append(tensor._use_count())  # type: ignore[attr-defined]
        counts.append(sys.getrefcount(tensor))
    return counts


def _is_same_memory(first: Tensor, second: Tensor) -> bool:
    return (
        first.untyped_storage()._cdata == second.untyped_storage()._cdata
        and first.storage_offset() == second.storage_offset()
    )
