"""What a model or a script has shown before anything is trained. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.spec.config import OptimizerFusion, Precision
from autotune.spec.limits import Count
from autotune.spec.schema import Schema


@dataclass(frozen=True, kw_only=True)
class Examined(Schema):
    """What a model has shown, or a run of a script up to `autotune.apply`."""

    unavailable: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What it does not support: {technique: {value: reason}}."""
    files: Mapping[str, str] | None = None
    """{path: SHA-256} of the files that a user's code has read."""
    packages: Mapping[str, str] | None = None
    """{package: version} of those that a user's code has imported."""
    own_precision: Precision | None = None
    """The precision that the weights of a script have, and its own autocast."""
    own_fusion: OptimizerFusion | None = None
    """How the optimizers of a script update."""
    own_choices: Mapping[str, Any] = field(default_factory=dict)
    """What the trainer of a script does by itself, before ours turns it off: {technique: value}."""
    global_batch: Count | None = None
    """How many sequences a script trains on in a step; None: it is no script."""
    injected: str = ""
    """What a script without a line of ours gets from us, such as `its Trainer gets ...`."""
    missing_variable: str | None = None
    """The variable of torchrun without which a script cannot run; empty if it needs none."""
