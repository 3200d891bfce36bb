"""What `fit` is asked: a cap, what may vary, and a ladder of techniques, one configuration or a space of them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig, check_legal
from autotune.spec.prediction import check_release
from autotune.spec.search_space import SearchSpace
from autotune.study.fit.ablation import AblationStep, ladder
from autotune.study.fit.varying import VARY, Vary, Varying
from autotune.study.predictions import device_meant, on_some_device, workload_of
from autotune.study.request import check_cap, check_device

CUDA_CONTEXT_BYTES = round(0.6 * 1024**3)
"""What a CUDA device holds beside the allocator: contexts were measured from 300 to 600 MiB."""

_BASE = ("optimizer", "micro_batch_size")
"""Choices that a ladder begins with; any other asks for one configuration."""


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """Raises InvalidInput for what can be refused without a device."""

    cap_bytes: int
    vary: Vary = "layers"
    device: str | None = None
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Workload`; None values say nothing."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TrainingConfig` that were said."""
    space: SearchSpace | None = None
    compute_capability: str | None = None
    """Of the GPU that is meant; None: the one here, and where there is none the predictions assume
    one."""
    torch_version: str | None = None
    context_bytes: int = CUDA_CONTEXT_BYTES
    confirms: bool = True
    """Where the device is there."""

    def __post_init__(self) -> None:
        check_cap(self.cap_bytes)
        check_device(self.device)
        check_release(self.torch_version)
        meant = device_meant(self.device, self.compute_capability)
        if self.vary not in VARY:
            raise InvalidInput(f"{self.vary!r} cannot vary", hint=f"use one of {', '.join(VARY)}")
        if self.space is not None and self.configuration:
            raise InvalidInput(
                "a space has configurations of its own",
                hint="leave --space or the configuration's options out",
            )
        # Which device there is, and with it the defaults, is not known yet.
        on_some_device(meant, lambda device_type: self.base(self.varying(device_type)))

    def varying(self, device_type: str) -> Varying:
        workload = workload_of(device_type, self.workload, space=self.space)
        said = [self.workload, {} if self.space is None else self.space.workload]
        keeps = any(settings.get("global_batch") is not None for settings in said)
        if self.vary == "micro-batch" and not keeps:
            micro_batch_size = self.configuration.get("micro_batch_size", workload.global_batch)
            workload = dataclasses.replace(workload, global_batch=micro_batch_size)
        return Varying(vary=self.vary, workload=workload, keeps_global_batch=keeps)

    def base(self, varying: Varying) -> TrainingConfig:
        """What the options say, on a plain fp32 training."""
        config = TrainingConfig(
            **{"micro_batch_size": varying.workload.global_batch, **self.configuration}
        )
        check_legal(config, varying.workload.circumstances)
        return config

    def rungs(self, varying: Varying) -> list[AblationStep]:
        base = self.base(varying)
        if all(name in _BASE for name in self.configuration):
            can_step_in_backward = not (
                varying.accumulates(base) or varying.workload.circumstances.clips_gradients
            )
            return list(ladder(base, accumulates=not can_step_in_backward))
        return [AblationStep(name="as given", config=base)]
