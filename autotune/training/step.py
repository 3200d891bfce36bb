"""Runs one optimizer step or one forward pass, in a trial and in a prediction.

A step goes over the global batch in micro batches and adds up their gradients, then updates:

    gradient = sum over micro batches of d(summed token loss / labels of the global batch)

so that it does not depend on the micro batch size. A term of a model's own loss that is no sum over
tokens, such as one that balances experts, counts in each micro batch by its share of the labels.

The effect of a technique on memory is decided here and in `techniques/`, and only once: the
predictor runs this same code on fake tensors. Timing, memory and parity are not here: whoever runs
a step wraps it (`trainer.py`, `predictor/predict.py`).
"""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from autotune.data.batches import Batch
from autotune.memory.meter import PhaseMarker
from autotune.shipped.activation_offload import offloaded
from autotune.shipped.schedule import scheduled_rate
from autotune.shipped.token_loss import learned_labels
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import Workload
from autotune.techniques import Training
from autotune.techniques.precision import autocast


class Diverged(Exception):
    """The loss became infinite or NaN, or too large to continue."""


def check_finite(loss: float, *, step: int) -> float:
    """Returns the loss of the step, counted from 0. Raises Diverged if it is infinite or NaN."""
    if not math.isfinite(loss):
        raise Diverged(f"the loss became {loss} at step {step + 1}")
    return loss


class TrainingStep:
    """Runs the optimizer steps of a training to which all techniques have been applied.

    `marker` is told when the phases forward, backward and step begin and end.
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
        """Takes one optimizer step over the global batch; returns the mean token loss before it.

        Waits for the device. Raises Diverged if the loss is infinite or NaN.
        """
        return check_finite(self.launch(step, batch).item(), step=step)

    def launch(self, step: int, batch: Batch) -> Tensor:
        """Takes one optimizer step without waiting for the device to finish it.

        The returned loss, a scalar on the device, may not have been computed yet.

        Each micro batch's summed loss is divided by the labels of the *global* batch, so that the
        gradients add up to those of the global batch, independent of the micro batch size and of
        where the padding is.
        """
        self.training.updater.set_learning_rate(self.learning_rate(step))
        devices = self.training.devices
        # Devices take the mean of their losses and gradients, which are parts of a sum.
        learned = learned_labels(self.training.parts.model, batch.labels)
        labels_per_device = max(1, learned) / devices.size
        total = torch.zeros((), device=self._device)
        micro_batches = [
            devices.part_of(rows)
            .to(self._device, non_blocking=True)
            .split(self._config.micro_batch_size)
            for rows in batch
        ]
        last = len(micro_batches[0]) - 1
        for index, (tokens, labels) in enumerate(zip(*micro_batches, strict=True)):
            with devices.micro_batch(is_last=index == last):
                with self._marker.phase("forward"):
                    # In one expression, so that the sum is not kept beside the mean.
                    loss = (
                        self.forward(tokens.contiguous(), labels.contiguous()) / labels_per_device
                    )
                with self._marker.phase("backward"):
                    self.training.updater.backward(loss)
            total += loss.detach()
        with self._marker.phase("step"):
            self.training.updater.step()
        return devices.mean(total)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Returns the summed loss of a micro batch; tokens and labels are [sequences, length]."""
        with autocast(self._config.precision, device=self._device), self._offload_activations():
            loss: Tensor = self.training.devices.module(tokens, labels)
        return loss

    def _offload_activations(self) -> AbstractContextManager[object]:
        if self._config.activation_offload == "none":
            return nullcontext()
        return offloaded(self.training.parts.model)

    def learning_rate(self, step: int) -> float:
        """Returns the rate of a step: linear warm-up, then constant or a cosine down to a tenth."""
        workload = self._workload
        return scheduled_rate(
            step,
            rate=workload.learning_rate_of(self._config.optimizer, self._config.adapter),
            steps=workload.steps,
            warmup_steps=workload.learning_rate_warmup_steps,
            schedule=workload.schedule,
        )
