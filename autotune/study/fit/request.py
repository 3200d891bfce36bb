"""The request of `fit`: a cap, a size that varies, and an ablation, a configuration or a space."""

import dataclasses
from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig, check_legal, configuration_of
from autotune.spec.data_sheets import requested_device
from autotune.spec.prediction import context_bytes_on
from autotune.spec.result import StudyResult, TrialRecord
from autotune.spec.setting import EVERYDAY, THE_DEVICE, Size, TrialNumber, setting
from autotune.spec.workload import Workload, check_adapters
from autotune.study.fit.ablation import FitStep, ablation_steps, sharding_steps
from autotune.study.fit.varying import Vary, Varying
from autotune.study.prediction.predicted_training import PredictedSpace
from autotune.study.request import Cap
from autotune.units import format_size

_BASE = ("optimizer", "micro_batch_size")
"""Choices for the first step of an ablation; any other choice requests a single configuration."""


@dataclass(frozen=True, kw_only=True)
class FitRequest(PredictedSpace):
    """What is to fit, and under which cap."""

    study: str | None = setting(
        None,
        "Vary a size of this study's workload, with the configuration of its pick.",
        metavar="STUDY",
        is_argument=True,
        over_http=True,
    )
    trial: TrialNumber | None = setting(
        None,
        "Take the configuration of this trial of the study. [default: the study's pick]",
        group=EVERYDAY,
        metavar="NUMBER",
        over_http=True,
    )
    max_mem: Cap | None = setting(
        None,
        "Memory cap: 8GiB, 8GB, 8192MiB. [default: that of the study]",
        group=EVERYDAY,
        over_http=True,
    )
    """In bytes."""
    vary: Vary = setting(
        "layers",
        "What to increase until it no longer fits; devices: how few of them are enough.",
        group=EVERYDAY,
        over_http=True,
    )
    space: str | None = setting(
        None,
        "Try the configurations that this search space names instead of adding techniques.",
        group=EVERYDAY,
        metavar="NAME|FILE",
        over_http=True,
    )
    try_all: bool = setting(
        False,
        "Try every legal configuration of the space, which for a large model takes hours.",
        group=EVERYDAY,
        flag="--all",
    )
    context: Size | None = setting(
        None,
        "Device memory that the CUDA context takes (CUDA only). [default: 0.6GiB]",
        group=THE_DEVICE,
        over_http=True,
    )
    """In bytes."""
    confirm: bool = setting(
        True,
        "Only predict; run no real trial at the end.",
        group=EVERYDAY,
        flag="--no-trial",
    )
    """Whether one real trial is run, if this machine has the device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.study is not None:
            if given := self.described("space"):
                raise InvalidInput(
                    f"{', '.join(given)}: the study sets workload, device and configuration",
                    hint="leave these out, or the study",
                )
            return
        if self.trial is not None:
            raise InvalidInput(
                f"trial {self.trial} is of no study", hint="give the study's name, too"
            )
        if self.max_mem is None:
            raise InvalidInput(
                "there is no memory cap", hint="give --max-mem 8GiB, or the name of a study"
            )
        if self.device == "cpu":
            self.context_bytes_on(self.device)
        if self.space is not None and self.configuration:
            raise InvalidInput(
                "a search space and a single configuration cannot be given together",
                hint="leave --space or the configuration's options out",
            )
        if self.try_all and self.space is None:
            raise InvalidInput(
                "--all tries every configuration of a search space, and there is none",
                hint="name one with --space, or leave --all out",
            )
        self._check_nodes()
        if self.vary == "devices":
            self._check_varying_devices()
        # The device, and with it the defaults of the workload, is not known yet. This imports
        # numpy, 0.2 s that the help of the command does without.
        from autotune.study.opening.requested_space import on_some_device  # noqa: PLC0415

        meant = requested_device(self.device, self.compute_capability)
        on_some_device(meant, lambda device_type: self.base(self.varying(device_type)))

    def of_study(self, result: StudyResult, *, trial: TrialRecord | None) -> "FitRequest":
        """Returns the request with what a study says: workload, device, cap and configuration.

        The configuration is that of `trial`. Raises InvalidInput.
        """
        if result.workload.script is not None:
            raise InvalidInput(
                f"study {result.study!r} runs a script, whose steps cannot be predicted",
                hint="describe a model by its settings instead of the study",
            )
        return dataclasses.replace(
            self,
            study=None,
            trial=None,
            device=result.device.type,
            compute_capability=self.compute_capability or result.device.compute_capability,
            workload=result.workload.to_dict(),
            max_mem=self.max_mem or result.cap_bytes,
            configuration={} if trial is None else trial.config.to_dict(),
        )

    def _check_nodes(self) -> None:
        nodes = self.workload.get("nodes_per_trial") or 1
        if nodes > 1 and self.vary == "devices":
            raise InvalidInput(
                f"--vary devices varies those of one node, and --nodes-per-trial is {nodes}",
                hint="leave one of them out",
            )
        if nodes > 1 and self.confirm:
            raise InvalidInput(
                f"the trial at the end runs on this machine, and --nodes-per-trial is {nodes}",
                hint="add --no-trial, or leave --nodes-per-trial out",
            )

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
        """Returns the memory of the context. Raises InvalidInput where it is given for a CPU."""
        if device_type == "cuda":
            return context_bytes_on(device_type) if self.context is None else self.context
        if self.context is not None:
            raise InvalidInput(
                f"a context of {format_size(self.context)} is for a CUDA device, but the "
                f"device is {device_type}",
                hint="leave --context out",
            )
        return 0

    def varying(self, device_type: str) -> Varying:
        """Returns the size that varies, with the workload on a kind of device."""
        from autotune.study.prediction.predictions import workload_of  # noqa: PLC0415  # as above

        workload = workload_of(device_type, self.workload, space=self.search_space)
        keeps = self.workload.get("global_batch") is not None
        space = self.search_space
        if space is not None and space.workload.get("global_batch") is not None:
            keeps = True
        if self.vary == "micro-batch" and not keeps:
            micro_batch_size = self.configuration.get("micro_batch_size", workload.global_batch)
            workload = dataclasses.replace(workload, global_batch=micro_batch_size)
        if self.vary == "devices":
            workload = workload.on_devices(self._first_guess(workload))
        return Varying(vary=self.vary, workload=workload, keeps_global_batch=keeps)

    def base(self, varying: Varying) -> TrainingConfig:
        """Returns a plain fp32 training with the configuration's options."""
        given = dict(self.configuration)
        if self.vary == "devices":  # the least memory, whatever the number of devices
            given.setdefault("micro_batch_size", 1)
        config = configuration_of(given, varying.workload.legality_context)
        check_legal(config, varying.workload.legality_context)
        check_adapters(varying.workload, [config.adapter])
        return config

    def steps(self, varying: Varying) -> list[FitStep]:
        """Returns the steps of the ablation, or the one configuration that the options request."""
        base = self.base(varying)
        if all(name in _BASE for name in self.configuration):
            # Clipping needs all gradients at once, so it excludes the step in backward, too.
            accumulates = (
                varying.accumulates(base) or varying.workload.legality_context.clips_gradients
            )
            if self.vary == "devices":
                return list(sharding_steps(base))
            return list(ablation_steps(base, accumulates=accumulates))
        return [FitStep(name="as given", config=base)]

    def _first_guess(self, workload: Workload) -> int:
        """Returns the number of devices to predict first. Raises InvalidInput if only one works."""
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
