"""Whether a user's training fits under a cap, and what would make it fit, each by prediction."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from autotune.analysis.largest import find_largest, find_smallest
from autotune.errors import AutotuneError, IllegalConfiguration, InvalidInput
from autotune.memory import nvml
from autotune.predictor.gpu import Gpu, gpu_of
from autotune.predictor.user_training import (
    Change,
    FakeUserTraining,
    UserTraining,
    blocks_of,
    blocks_to_recompute,
    optimizers_in,
)
from autotune.shipped.checkpointing import recompute
from autotune.spec.cap import need_and_cap, needed_bytes
from autotune.spec.data_sheets import DATA_SHEETS, requested_device
from autotune.spec.memory_fit import MemoryFit, MemoryFitRequest, WayToFit
from autotune.spec.optimizers import OPTIMIZERS, Optimizer
from autotune.spec.prediction import Prediction
from autotune.units import LARGEST_SIZE_BYTES, format_duration

_SECONDS_FOR_WAYS = 20.0
"""After so long no further prediction is begun to find what would make a training fit."""

Say = Callable[[str], None]
"""Is told what is predicted next."""


class _OutOfTimeError(Exception):
    """Ends the search for what would make a training fit."""


def fitting(training: UserTraining, request: MemoryFitRequest, *, say: Say) -> "Fitting":
    """Returns how a training fits the device of a request, which need not be there.

    Raises InvalidInput where the cap is not given and the memory of the device is not known.
    """
    gpu, memory_bytes = gpu_and_memory(request.device)
    cap_bytes = request.max_mem or memory_bytes
    if cap_bytes is None:
        raise InvalidInput(
            "there is no memory cap, and no GPU here whose memory it could be",
            hint='give max_mem="24GiB", or a GPU: device="rtx-4090"',
        )
    return Fitting(training=training, cap_bytes=cap_bytes, gpu=gpu, say=say)


def gpu_and_memory(device: str) -> tuple[Gpu | None, int | None]:
    """Returns the GPU of a request, None for a CPU, and its memory in bytes, where it is known."""
    sheet = DATA_SHEETS.get(device)
    if sheet is not None:
        return gpu_of(sheet.compute_capability, None), sheet.device().total_memory_bytes
    if requested_device(device, None) == "cpu":
        return None, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Not by torch, which would create a context in the user's process.
    devices = nvml.all_devices()
    gpu = gpu_of(nvml.compute_capability(devices[0]) if devices else None, None)
    return gpu, nvml.total_bytes(devices[0]) if devices else None


@dataclass(kw_only=True)
class Fitting:
    """Predicts a training as it is, and as it would be after changes."""

    training: UserTraining
    cap_bytes: int
    gpu: Gpu | None
    """None for this machine's CPU."""
    say: Say = lambda _: None
    rows: int | None = None
    """The first dimension of the batch's tensors, known after the first prediction."""
    _blocks: list[nn.Module] = field(default_factory=list)
    """The blocks that are not recomputed."""
    _recomputed: int = 0
    """How many others are."""
    _known: dict[Change, Prediction] = field(default_factory=dict)
    _until: float | None = None

    def __post_init__(self) -> None:
        models = self.training.models.values()
        self._blocks = blocks_to_recompute(models)
        self._recomputed = len(blocks_of(models)) - len(self._blocks)

    def answer(self) -> MemoryFit:
        """Returns whether the training fits, and what would make it fit.

        Raises InvalidInput and PredictionImpossible.
        """
        found = self._fit(Change())
        if found:
            return found
        self._until = time.monotonic() + _SECONDS_FOR_WAYS
        ways, notes = [], []
        try:
            for way in self._ways():
                ways.append(way)
        except _OutOfTimeError:
            notes.append(
                f"what would make it fit was looked for during "
                f"{format_duration(_SECONDS_FOR_WAYS)}, and there may be more"
            )
        ways.sort(key=lambda way: not way.fits)
        return replace(found, ways=tuple(ways), notes=tuple(notes))

    def apply(self) -> MemoryFit:
        """Makes as few blocks as surely fit recompute their activations, and returns the answer.

        Raises IllegalConfiguration where that is not enough, and changes nothing then.
        """
        if found := self._fit(Change()):
            return found
        if not self._blocks:
            raise IllegalConfiguration(
                f"{self._need(Change())}, and the model has no list of alike blocks to recompute",
                hint="will_it_fit says what else would make it fit",
            )
        best = self._fewest_blocks()
        if best is None:
            everything = Change(recomputed=len(self._blocks))
            raise IllegalConfiguration(
                f"{self._need(everything)} with every block recomputed",
                hint="will_it_fit says what else would make it fit, such as fewer rows",
            )
        for block in self._blocks[: best.recomputed]:
            recompute(block)
        return self._fit(best)

    # -- ways --------------------------------------------------------------------------------------

    def _ways(self) -> Iterator[WayToFit]:
        """Yields changes that are enough, and the largest of those that are not."""
        everything = Change(recomputed=len(self._blocks))
        if self._blocks and self._saves(everything):
            yield self._way(self._fewest_blocks() or everything)
        if most := self._most_rows(Change()):
            yield self._way(most)
        least = self._least_state()
        if least is not None and self._saves(Change(optimizer=least)):
            yield self._way(Change(optimizer=least))
        if self._blocks and not self._is_enough(everything) and self._saves(everything):
            most = self._most_rows(everything)
            if most is not None:
                yield self._way(most)

    def _fewest_blocks(self) -> Change | None:
        """Returns the fewest blocks to recompute that are enough; None where all are not."""
        numbers = range(1, len(self._blocks) + 1)
        found = find_smallest(
            lambda number: self._needed(Change(recomputed=number)),
            cap=self.cap_bytes,
            values=numbers,
            start=numbers[-1],
        )
        return None if found.value is None else Change(recomputed=found.value)

    def _most_rows(self, besides: Change) -> Change | None:
        """Returns the largest batch that fits; None where none does, or a batch has no rows."""
        if self.rows is None or self.rows < 2:
            return None
        found = find_largest(
            lambda rows: self._needed(replace(besides, rows=rows)),
            cap=self.cap_bytes,
            values=range(1, self.rows),
            start=max(1, self.rows // 2),
        )
        return None if found.value is None else replace(besides, rows=found.value)

    def _least_state(self) -> Optimizer | None:
        """Returns the optimizer with the least state that everyone has, if it has less."""
        given = self.training.optimizer
        if optimizers_in(given) != [given]:
            return None
        names = [name for name, facts in OPTIMIZERS.items() if facts.package is None]
        least = min(names, key=lambda name: OPTIMIZERS[name].state)
        name = given if isinstance(given, str) else type(given).__name__.lower()
        own = OPTIMIZERS[name].state if name in OPTIMIZERS else 2.0
        return least if OPTIMIZERS[least].state < own else None  # type: ignore[return-value]

    # -- predictions -------------------------------------------------------------------------------

    def _predicted(self, change: Change) -> Prediction:
        if change not in self._known:
            if self._until is not None and time.monotonic() > self._until:
                raise _OutOfTimeError
            self.say(f"predicting {self._in_words(change) or 'a training step'}")
            fake = FakeUserTraining(self.training, change, gpu=self.gpu)
            self._known[change] = fake.predict()
            if change == Change():
                self.rows = fake.rows
        return self._known[change]

    def _saves(self, change: Change) -> bool:
        """Returns whether the training works and needs less after a change."""
        return self._needed(change) < self._needed(Change())

    def _needed(self, change: Change) -> int:
        """Returns the bytes that a device must have; far too many where the change fails."""
        try:
            return needed_bytes(self._predicted(change))
        except AutotuneError:  # a step that counts on its number of rows, for example
            return LARGEST_SIZE_BYTES

    def _is_enough(self, change: Change) -> bool:
        return self._needed(change) <= self.cap_bytes

    def _need(self, change: Change) -> str:
        return f"the training needs up to {need_and_cap(self._needed(change), self.cap_bytes)}"

    # -- answers -----------------------------------------------------------------------------------

    def _fit(self, change: Change) -> MemoryFit:
        return MemoryFit(
            cap_bytes=self.cap_bytes,
            prediction=self._predicted(change),
            rows=self.rows,
            blocks=self._recomputed + len(self._blocks),
            recomputed_blocks=self._recomputed + change.recomputed,
        )

    def _way(self, change: Change) -> WayToFit:
        prediction = self._predicted(change)
        return WayToFit(
            change=self._in_words(change),
            peak_memory_bytes=prediction.peak_memory_bytes,
            needed_bytes=needed_bytes(prediction),
            fits=self._is_enough(change),
            rows=change.rows,
            recomputed_blocks=change.recomputed,
            optimizer=change.optimizer,
        )

    def _in_words(self, change: Change) -> str:
        parts = []
        if change.recomputed:
            others = "other " if self._recomputed else ""
            total = f"{len(self._blocks)} {others}blocks"
            parts.append(f"recompute {change.recomputed} of {total} (autotune.fit_to)")
        if change.rows is not None:
            parts.append(f"{change.rows} rows instead of {self.rows}")
        if change.optimizer is not None:
            parts.append(f"optimizer {change.optimizer}")
        return ", and ".join(parts)
