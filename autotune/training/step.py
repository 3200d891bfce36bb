"""One optimizer step and one forward pass, as a trial runs them and as a prediction does.

What a technique does to memory is decided here and in `techniques/`, and nowhere a second time: the
predictor runs this very code on fake tensors.
"""

import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from autotune.data.batches import Batch
from autotune.memory.meter import PhaseMarker
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import Workload
from autotune.techniques import Training
from autotune.techniques.activation_offload import offloaded
from autotune.techniques.precision import autocast


class Diverged(Exception):
    """The loss is no longer a number."""


def finite(loss: float, *, step: int) -> float:
    """Returns the loss of the step, counted from 0. Raises Diverged for one that is no number."""
    if not math.isfinite(loss):
        raise Diverged(f"the loss became {loss} at step {step + 1}")
    return loss


class TrainingStep:
    """A training with all techniques applied.

    `marker` is told the phases: forward, backward and step.
    """

    def __init__(
        self,
        training: Training,
        *,
        workload: Workload,
        config: TrainingConfig,
        device: torch.device,
        marker: PhaseMarker,
    ) -> None:
        self.training = training
        self._workload, self._config = workload, config
        self._device = device
        self._marker = marker

    def __call__(self, step: int, batch: Batch) -> float:
        """One optimizer step over the global batch; returns the mean token loss before it.

        Raises Diverged.
        """
        return finite(self.launch(step, batch).item(), step=step)

    def launch(self, step: int, batch: Batch) -> Tensor:
        """The same without waiting for the device: the loss that is returned may still have to be computed there.

        Each micro batch's summed loss is divided by the labels of the *global* batch, so that the
        gradients add up to those of the global batch whatever the micro batch and wherever its
        padding is.
        """
        self.training.updater.set_learning_rate(self.learning_rate(step))
        valid_labels = max(1, batch.valid_labels())
        total = torch.zeros((), device=self._device)
        micro_batches = (
            part.to(self._device, non_blocking=True).split(self._config.micro_batch_size)
            for part in batch
        )
        for tokens, labels in zip(*micro_batches, strict=True):
            with self._marker.phase("forward"):
                loss = self.forward(tokens.contiguous(), labels.contiguous()) / valid_labels
            with self._marker.phase("backward"):
                self.training.updater.scale(loss).backward()
            total += loss.detach()
        with self._marker.phase("step"):
            self.training.updater.step()
        return total

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Summed token loss of a micro batch: tokens and labels [sequences, length]."""
        with autocast(self._config.precision, device=self._device), self._offloaded():
            loss: Tensor = self.training.parts.model(tokens, labels)
        return loss

    def _offloaded(self) -> AbstractContextManager[object]:
        return offloaded(self._config.activation_offload, model=self.training.parts.model)

    def learning_rate(self, step: int) -> float:
        """Linear rise, then constant or a cosine down to a tenth."""
        workload = self._workload
        rate = workload.learning_rate_of(self._config.optimizer)
        if step < workload.learning_rate_warmup_steps:
            return rate * (step + 1) / workload.learning_rate_warmup_steps
        if workload.schedule == "constant":
            return rate
        done = (step - workload.learning_rate_warmup_steps) / max(
            1, workload.steps - workload.learning_rate_warmup_steps
        )
        return rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
