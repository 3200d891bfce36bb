"""What a trial's process is asked to train. Loads no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.spec.config import TrainingConfig
from autotune.spec.early_stopping import PruningBound
from autotune.spec.parity import ParityTrace
from autotune.spec.workload import Workload

Stage = Literal["step", "evaluation", "parity"]
Progress = Callable[[Stage], None]
"""Told what begins now: the first step, and after each step or batch of evaluation the next; within
the first step also that gradients are read for the comparison of parity, which is no part of the
training, and that the step goes on."""


def unwatched(_: Stage) -> None:
    """The progress of a training that nobody waits for."""


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """One trial's work order.

    `folder` holds `weights.pt`, `train.npy`, `held_out.npy` and `text.json`, as prepared.
    """

    workload: Workload
    config: TrainingConfig
    folder: Path
    device: str
    device_uuid: str | None = None
    """What NVML calls the device, `GPU-...` or `MIG-...`; None: NVML does not know it."""
    new_context_bytes: int | None = None
    """What a new CUDA context takes of the device, as the probe found it; None: it could not be
    found."""
    shares_device: bool = False
    """Whether other trials run on the device at the same time, so that nothing can be told from
    what it has in use."""
    cap_bytes: int
    enforce_cap: bool = True
    """False for the baseline, which is measured beyond the cap where the device can hold it."""
    reference: ParityTrace | None = None
    """The beginning of a plain training of the same numerics, which this one must repeat."""
    shares_perplexity: bool = False
    """Whether only memory and speed are wanted: the training stops when they are measured."""
    pruning_bounds: Sequence[PruningBound] = ()
    """Trials of the same numerics; one that is better in memory and speed ends this training."""
    snapshot_file: Path | None = None
    """Where torch's allocation history of the measured steps is kept; CUDA only."""
    requested_at: float
    """time.monotonic() of the request, which all processes of a machine share."""
