"""The request of `fit`: a cap, a size that varies, and an ablation, a configuration or a space."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import InvalidInput, suggestion
from autotune.spec.config import TrainingConfig, check_legal, configuration_of
from autotune.spec.prediction import check_release, context_bytes_on
from autotune.spec.search_space import SearchSpace
from autotune.spec.workload import Workload
from autotune.study.fit.ablation import AblationStep, ablation_steps, sharding_steps
from autotune.study.fit.varying import VARY, Vary, Varying
from autotune.study.predicted_device import requested_device
from autotune.study.predictions import workload_of
from autotune.study.request import check_cap
from autotune.study.requested_space import on_some_device
from autotune.units import format_size

_BASE = ("optimizer", "micro_batch_size")
"""Choices for the first step of an ablation; any other choice requests a single configuration."""


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """All options of `fit`. Raises InvalidInput for what is invalid on any device."""

    cap_bytes: int
    vary: Vary = "layers"
    device: str | None = None
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Workload`; a value of None is not specified."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TrainingConfig` that are specified."""
    space: SearchSpace | None = None
    tries_all: bool = False
    """Whether to try every legal configuration of the space, and not only those that it names."""
    compute_capability: str | None = None
    """Compute capability of the GPU to predict for; None: that of this machine's GPU, or an assumed
    one if it has none."""
    torch_version: str | None = None
    context_bytes: int | None = None
    """Memory of the device's context; None: an assumed size on a CUDA device."""
    storage: str | None = None
    """Database whose studies may have probed the device; None: none."""
    confirms: bool = True
    """Whether one real trial is run, if this machine has the device."""

    def __post_init__(self) -> None:
        check_cap(self.cap_bytes)
        check_release(self.torch_version)
        if self.device == "cpu":
            self.context_bytes_on(self.device)
        meant = requested_device(self.device, self.compute_capability)
        if self.vary not in VARY:
            raise InvalidInput(
                f"{self.vary!r} cannot vary",
                hint=suggestion(self.vary, VARY, otherwise=f"use one of {', '.join(VARY)}"),
            )
        if self.space is not None and self.configuration:
            raise InvalidInput(
                "a search space and a single configuration cannot be given together",
                hint="leave --space or the configuration's options out",
            )
        if self.tries_all and self.space is None:
            raise InvalidInput(
                "--all tries every configuration of a search space, and there is none",
                hint="name one with --space, or leave --all out",
            )
        if self.vary == "devices":
            self._check_varying_devices()
        # The device, and with it the defaults of the workload, is not known yet.
        on_some_device(meant, lambda device_type: self.base(self.varying(device_type)))

    def _check_varying_devices(self) -> None:
        if self.workload.get("devices_per_trial") is not None:
            raise InvalidInput(
                "--vary devices finds the number of devices, and --devices-per-trial gives it",
                hint="leave one of them out",
            )
        if self.space is not None:
            raise InvalidInput(
                "--vary devices takes one configuration, and a search space has many",
                hint="leave --space out, or give --devices-per-trial and vary another size",
            )

    def context_bytes_on(self, device_type: str) -> int:
        """Return the memory of the context. Raises InvalidInput where it is given for a CPU."""
        if device_type == "cuda":
            return (
                context_bytes_on(device_type) if self.context_bytes is None else self.context_bytes
            )
        if self.context_bytes is not None:
            raise InvalidInput(
                f"a context of {format_size(self.context_bytes)} is for a CUDA device, but the "
                f"device is {device_type}",
                hint="leave --context out",
            )
        return 0

    def varying(self, device_type: str) -> Varying:
        """Return the size that varies, with the workload on a kind of device."""
        workload = workload_of(device_type, self.workload, space=self.space)
        keeps = self.workload.get("global_batch") is not None
        if self.space is not None and self.space.workload.get("global_batch") is not None:
            keeps = True
        if self.vary == "micro-batch" and not keeps:
            micro_batch_size = self.configuration.get("micro_batch_size", workload.global_batch)
            workload = dataclasses.replace(workload, global_batch=micro_batch_size)
        if self.vary == "devices":
            workload = dataclasses.replace(workload, devices_per_trial=self._first_guess(workload))
        return Varying(vary=self.vary, workload=workload, keeps_global_batch=keeps)

    def base(self, varying: Varying) -> TrainingConfig:
        """Return a plain fp32 training with the configuration's options."""
        given = dict(self.configuration)
        if self.vary == "devices":  # the least memory, whatever the number of devices
            given.setdefault("micro_batch_size", 1)
        config = configuration_of(given, varying.workload.legality_context)
        check_legal(config, varying.workload.legality_context)
        return config

    def steps(self, varying: Varying) -> list[AblationStep]:
        """Return the steps of the ablation, or the one configuration that the options request."""
        base = self.base(varying)
        if all(name in _BASE for name in self.configuration):
            # Clipping needs all gradients at once, so it excludes the step in backward, too.
            accumulates = (
                varying.accumulates(base) or varying.workload.legality_context.clips_gradients
            )
            if self.vary == "devices":
                return list(sharding_steps(base))
            return list(ablation_steps(base, accumulates=accumulates))
        return [AblationStep(name="as given", config=base)]

    def _first_guess(self, workload: Workload) -> int:
        """Return the number of devices to predict first. Raises InvalidInput if only one works."""
        batch = workload.global_batch
        micro_batch_size = int(self.configuration.get("micro_batch_size", 1))
        split = int(self.configuration.get("tensor_parallel", 1))
        if batch == 1:
            raise InvalidInput(
                "a global batch of 1 cannot be divided among devices, so their number cannot vary",
                hint="use a larger --global-batch",
            )
        divisors = [count for count in range(2, batch + 1) if batch % count == 0]
        legal = [
            count
            for count in divisors
            if count % split == 0 and batch % (count // split * micro_batch_size) == 0
        ]
        # Where none is legal, any of them gets the sentence that says why.
        possible = legal or divisors
        return max((n for n in possible if n <= _FIRST_DEVICES), default=possible[0])


_FIRST_DEVICES = 8
"""As many as a machine often has."""
