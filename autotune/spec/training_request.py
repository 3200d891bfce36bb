"""The request that tells the process of a trial what to train. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from autotune.spec.config import TrainingConfig
from autotune.spec.early_stopping import PruningBound
from autotune.spec.node_ranks import NodeRanks
from autotune.spec.parity import ParityTrace
from autotune.spec.prediction import KeptOfBlock
from autotune.spec.schema import Schema
from autotune.spec.workload import Workload

Stage = Literal["step", "evaluation", "parity", "waiting"]

TIMED_STAGES = ("step", "evaluation")
"""In these a training is timed, and nothing else of a search shall need the host's processors."""


class ReportsStage(Protocol):
    """Callback that gets the stage that starts now.

    `step` for each optimizer step, `evaluation` for each batch of evaluation. Within the first step
    it gets `parity` when gradients are read for the parity check, which is not part of the
    training, and `step` when the step continues; and `waiting` when a training stands still because
    another one has the device (`training/turns.py`).
    """

    def __call__(self, stage: Stage, steps_ended: int = 0, steps_wanted: int = 0, /) -> None:
        """Take the stage, and where it is known how many steps have ended of how many."""


def unwatched(stage: Stage, steps_ended: int = 0, steps_wanted: int = 0, /) -> None:
    """Ignore the progress of a training."""


@dataclass(frozen=True, kw_only=True)
class TrainingRequest(Schema):
    """Everything that the process of a trial needs to know.

    `folder` has the prepared files `weights.pt`, `train.npy`, `held_out.npy` and `text.json`.
    """

    workload: Workload
    config: TrainingConfig
    folder: Path
    device: str
    device_uuid: str | None = None
    """UUID of the device in NVML, `GPU-...` or `MIG-...`; None: NVML does not know it."""
    new_context_bytes: int | None = None
    """Device memory of a new CUDA context, as measured by the probe; None: it could not be
    measured."""
    shares_device: bool = False
    """Whether other trials run on the device at the same time, so that its memory in use says
    nothing about this one."""
    cap_bytes: int
    enforce_cap: bool = True
    """False for the baseline, which may exceed the cap if the device has enough memory."""
    is_baseline: bool = False
    """Whether this is the trial of the baseline: what is wrong with it is wrong with all others."""
    reference: ParityTrace | None = None
    """First steps of a plain training of the same numerics class, which this one must reproduce."""
    dequantized: bool = False
    """Whether quantized base weights are replaced by what they stand for: the plain training with
    which the quantized one is compared."""
    kept: tuple[KeptOfBlock, ...] = ()
    """What each block keeps, as is planned for an activation budget before the training starts."""
    planned_for: Workload | None = None
    """The workload that it is planned for, where that is not the trained one but at two blocks."""
    shares_perplexity: bool = False
    """Whether only memory and speed are needed: the training stops when they are measured."""
    evaluates_only: bool = False
    """Whether no step is trained: the perplexity of the weights as they are is wanted."""
    pruning_bounds: Sequence[PruningBound] = ()
    """Trials of the same numerics class; one that dominates this training ends it."""
    snapshot_file: Path | None = None
    """Where to store torch's allocation history of the measured steps; CUDA only."""
    other_devices: Sequence[tuple[str, str | None]] = ()
    """The devices of this node's ranks after the first, as `device` and `device_uuid`. On a CPU all
    ranks share the same one, and this is empty."""
    ranks: NodeRanks | None = None
    """Those that run on this node, where a training has more on others; None: all of them do."""
    requested_at: float = 0.0
    """time.monotonic() at the request; all processes of a machine share this clock. Its process
    sets it to when the trial server was asked."""
