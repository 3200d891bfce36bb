"""The processes of an exported script that trains on several devices.

In trials this is a part of `autotune/techniques/sharding.py`.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, kw_only=True)
class Rank:
    """This process: one of those that torchrun started, each of which has a device."""

    index: int
    size: int

    def part_of(self, rows: Tensor) -> Tensor:
        """Returns this rank's rows of a tensor [sequences of the global batch, ...]."""
        share = rows.shape[0] // self.size
        return rows[self.index * share : (self.index + 1) * share]

    def mean(self, value: Tensor) -> Tensor:
        """Returns the mean over all ranks of a value that each has for its own part."""
        torch.distributed.all_reduce(value)
        value /= self.size
        return value

    def add_up(self, *values: float) -> list[float]:
        """Returns each value summed over the ranks."""
        return [sum(each) for each in zip(*self.gather(values), strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks."""
        gathered: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(gathered, value)
        return gathered

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Lets the first rank make files, such as those of a tokenizer, before the others."""
        if self.index > 0:
            torch.distributed.barrier()
        yield
        if self.index == 0:
            torch.distributed.barrier()

    def say(self, text: str) -> None:
        """Prints a line, once."""
        if self.index == 0:
            print(text, flush=True)


def join(device: str, *, command: str) -> Rank:
    """Makes this process one of the ranks that torchrun started."""
    if "RANK" not in os.environ:
        raise SystemExit(f"this script trains on several devices: start it with {command}")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    # The others wait while the first one makes a tokenizer.
    torch.distributed.init_process_group(backend, timeout=timedelta(hours=1))
    return Rank(index=torch.distributed.get_rank(), size=torch.distributed.get_world_size())


def without_reduction(module: nn.Module, *, is_last: bool) -> AbstractContextManager[object]:
    """Returns the context of a micro batch: gradients are added up after the last one only."""
    if isinstance(module, DistributedDataParallel) and not is_last:
        return module.no_sync()
    return nullcontext()
