"""Lets the DataLoader of a script yield micro batches, with the steps that the script has.

Only its batch sampler is replaced: dataset, order, generators, workers and collate_fn stay. The
batches that make one optimizer step of the script are joined and cut into micro batches, so that
a step has the same sequences with each micro batch, also the shorter last one of an epoch.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from autotune.errors import InvalidInput
from autotune.training.script.interface import config_of_run, current_run, learners


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a micro batch is in the training of the script."""

    weight: float
    """By how much its loss counts, where 1 is one of equal parts of a whole step."""
    ends_batch: bool
    """Whether a batch of the script ends with it."""
    ends_step: bool
    is_of_last_batch: bool
    """Whether it has the last batch of the script in its step, or a part of that."""


WHOLE_BATCH = Part(weight=1.0, ends_batch=True, ends_step=True, is_of_last_batch=True)


class MicroBatches(Sampler[list[Any]]):
    """Yields the indices of a batch sampler in micro batches, `accumulation` of them in a step.

    Each step has `accumulated` batches of the script, and an epoch at most `limit` of these.
    """

    def __init__(
        self,
        batches: BatchSampler,
        *,
        accumulated: int,
        micro_batch_size: int,
        limit: int | None = None,
        has_old_length: bool = False,
    ) -> None:
        """With `has_old_length`, the length is the number of the script's batches."""
        self._batches = batches
        self._accumulated = accumulated
        self._size = micro_batch_size
        self._limit = limit
        self._has_old_length = has_old_length
        self.accumulation = batches.batch_size * accumulated // micro_batch_size
        self.sampler, self.batch_size, self.drop_last = (
            batches.sampler,
            batches.batch_size,
            batches.drop_last,
        )
        self.parts: deque[Part] = deque()
        """Of the micro batches that were yielded, until the trainer takes them, in this order."""

    def __len__(self) -> int:
        batches = len(self._batches)
        sequences = batches * self.batch_size
        if not self.drop_last:
            sequences = min(sequences, len(self.sampler))  # type: ignore[arg-type]
        if self._limit is not None and self._limit < batches:
            batches, sequences = self._limit, self._limit * self.batch_size
        if self._has_old_length:
            return batches
        steps, rest = divmod(sequences, self.batch_size * self._accumulated)
        return steps * self.accumulation + math.ceil(rest / self._size)

    def __iter__(self) -> Iterator[list[Any]]:
        self.parts.clear()
        batches = islice(self._batches, self._limit)
        while step := list(islice(batches, self._accumulated)):
            indices = [index for batch in step for index in batch]
            # The script divides the loss of each batch by its sequences, and by `accumulated`.
            weights = [1 / len(batch) / self._accumulated for batch in step for _ in batch]
            ends = {sum(map(len, step[: k + 1])) for k in range(len(step))}
            for start in range(0, len(indices), self._size):
                end = min(start + self._size, len(indices))
                self.parts.append(
                    Part(
                        weight=round(sum(weights[start:end]) * self.accumulation, 12),
                        ends_batch=any(start < one <= end for one in ends),
                        ends_step=end == len(indices),
                        is_of_last_batch=end > len(indices) - len(step[-1]),
                    )
                )
                yield indices[start:end]


def split_batches(
    loader: Any, *, accumulated: int, set_by: str, **options: Any
) -> MicroBatches | None:
    """Lets `loader` yield micro batches of the configuration; returns how, None for as it was.

    A step of the script has `accumulated` batches of it; `set_by` says what decides that. The
    search learns the sequences of a step here and, where the loader stays as it was, why.

    Raises InvalidInput if nobody can say how many sequences a step has.
    """
    reason = _why_not_split(loader)
    size = getattr(loader, "batch_size", None) if reason else loader.batch_sampler.batch_size
    global_batch = size * accumulated if isinstance(size, int) else None
    if global_batch is None:
        for learner in learners():
            learner.note_unknown_global_batch(reason)
    config = config_of_run(global_batch, set_by=f"batch_size {size} of its DataLoader, {set_by}")
    if reason:
        for learner in learners():
            learner.note_whole_batches(reason)
        run = current_run()
        if run is not None and config.micro_batch_size != run.workload.global_batch:
            raise InvalidInput(
                f"a micro batch of {config.micro_batch_size} cannot be had: {reason}",
                hint=f"use micro_batch_size {run.workload.global_batch}",
            )
        return None
    for learner in learners():
        learner.note_own_choices(micro_batch_size=size)
    micro_batches = MicroBatches(
        loader.batch_sampler,
        accumulated=accumulated,
        micro_batch_size=config.micro_batch_size,
        **options,
    )
    # A DataLoader forbids to set it, because its other arguments would have to change with it.
    vars(loader)["batch_sampler"] = micro_batches
    loader._iterator = None  # of workers that persist, with the old batch sampler
    return micro_batches


def _why_not_split(loader: Any) -> str:
    """Returns why the batches of `loader` cannot be cut into micro batches; empty if they can."""
    where = "the micro batch is that of the script, since "
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset):
        return f"{where}its training data are {_kind(dataset)}, an IterableDataset"
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return f"{where}its training data come from {_kind(loader)}, not from torch's DataLoader"
    if loader.batch_sampler is None:
        return f"{where}its DataLoader has no batch_size"
    if type(loader.batch_sampler) is not BatchSampler:
        return (
            f"{where}its DataLoader has a batch_sampler of its own, {_kind(loader.batch_sampler)}"
        )
    return ""


def _kind(of: Any) -> str:
    return f"a {type(of).__name__}"
