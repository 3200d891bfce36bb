"""One of several devices without the others: a fake process group, and gradients in buckets.

FSDP2 and tensor parallelism run on fake tensors as they are. DistributedDataParallel does not: its
reducer is C++ code that asks for the data of each gradient. `PredictedReplica` allocates what that
reducer does. Source: torch/csrc/distributed/c10d/reducer.cpp
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import _compute_bucket_assignment_by_size  # type: ignore[attr-defined]
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from autotune.shipped import replication
from autotune.spec.config import SHARDED_WEIGHTS, TrainingConfig
from autotune.techniques import Training, sharding

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
"""Defaults of DistributedDataParallel."""


@contextmanager
def as_rank(rank: int, *, of: int) -> Iterator[None]:
    """Make this process rank `rank` of a trial on `of` devices, none of which exist."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=of)
    replaced: dict[str, Any] = {
        "DistributedDataParallel": PredictedReplica,
        "GradientBuckets": PredictedBuckets,
    }
    try:
        with (
            patch.multiple(sharding, **replaced),
            patch.object(replication, "DistributedDataParallel", PredictedReplica),
        ):
            yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def resizes_noted(note: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Have `note` called for each storage that has got another size.

    FSDP2 frees and allocates the memory of gathered weights in this way.
    """
    resize = torch.UntypedStorage.resize_

    def noted(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        note(storage)
        return result

    torch.UntypedStorage.resize_ = noted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def ranks_alike(training: Training, config: TrainingConfig, *, devices: int) -> list[list[int]]:
    """Returns groups of ranks that hold tensors of the same sizes, that of rank 0 first.

    The parts of a weight differ at the ends: the last one may be smaller, or empty. Devices that
    train the same rows have parts of the same sizes.
    """
    groups: dict[Any, list[int]] = {}
    for rank in range(devices):
        sizes = _sizes_of(
            rank // config.tensor_parallel,
            training,
            config,
            devices=devices // config.tensor_parallel,
        )
        groups.setdefault(sizes, []).append(rank)
    return list(groups.values())


def _sizes_of(
    rank: int, training: Training, config: TrainingConfig, *, devices: int
) -> tuple[Any, ...]:
    optimizer = training.updater.optimizer
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        own = optimizer._partition_parameters()[rank]  # type: ignore[attr-defined]
        return tuple(sorted(tuple(p.shape) for group in own for p in group["params"]))
    if config.sharding not in SHARDED_WEIGHTS:
        return ()
    shards = config.sharding_group if config.sharding == "hsdp" else devices
    rows = [parameter.shape[0] for parameter in training.parts.model.parameters()]
    return tuple(_part_of(count, rank % shards, of=shards) for count in rows)


def _part_of(rows: int, part: int, *, of: int) -> int:
    """Returns how many rows a part has where each but the last ones has as many as the first."""
    share = -(-rows // of)
    return max(0, min(share, rows - part * share))


class PredictedReplica(nn.Module):
    """Stands for DistributedDataParallel with gradients as views of buckets."""

    def __init__(self, module: nn.Module, **_settings: Any) -> None:
        super().__init__()
        self.module = module
        self.buffers_of_buckets: list[Tensor] = []
        self.reduced_in: torch.dtype | None = None
        self._adds_up = True
        self._view_of: dict[nn.Parameter, Tensor] = {}
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._missing: list[int] = []
        self._sent: list[Tensor] = []
        self._build([p for p in module.parameters() if p.requires_grad])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._adds_up:
            self._missing = list(self._sizes)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._adds_up = False
        try:
            yield
        finally:
            self._adds_up = True

    def _build(self, parameters: Sequence[nn.Parameter]) -> None:
        """Allocate the buckets. Gradients are expected in the reverse order of the parameters."""
        reversed_parameters = list(reversed(parameters))
        assignment, _ = _compute_bucket_assignment_by_size(
            [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in reversed_parameters],
            [FIRST_BUCKET_BYTES, BUCKET_BYTES],
        )
        for index, members in enumerate(assignment):
            bucket = [reversed_parameters[member] for member in members]
            buffer = torch.zeros(
                sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device
            )
            self.buffers_of_buckets.append(buffer)
            for parameter, view in zip(
                bucket, buffer.split([p.numel() for p in bucket]), strict=True
            ):
                self._view_of[parameter] = view.view(parameter.shape)
                self._bucket_of[parameter] = index
                parameter.register_post_accumulate_grad_hook(self._add)
        self._sizes = [len(members) for members in assignment]

    def _add(self, parameter: nn.Parameter) -> None:
        if not self._adds_up:
            return
        view = self._view_of[parameter]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        index = self._bucket_of[parameter]
        self._missing[index] -= 1
        if self.reduced_in is not None and not self._missing[index]:
            self._sent.append(self.buffers_of_buckets[index].to(self.reduced_in))
        if not any(self._missing):
            self._sent.clear()


class PredictedBuckets:
    """Stands for `replication.GradientBuckets`."""

    def __init__(self, module: PredictedReplica, *, reduced_in: str) -> None:
        self.buffers = module.buffers_of_buckets
        if reduced_in == "bf16":
            module.reduced_in = torch.bfloat16
