"""Several devices in the words of other trainers: FSDP2, ZeRO of DeepSpeed, and host memory.

What a trial does is in `autotune/techniques/sharding.py`. For a trainer that lacks a part of it the
closest recipe that it can express is found, and the reasons why it is another one. The global batch
is the trial's in any case, so learning curves stay what they are.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.exporters.export import Unsupported
from autotune.exporters.reasons import Reason, Values, unknown_values, without_plan
from autotune.exporters.recipe import Recipe
from autotune.spec.config import (
    FULL_PRECISIONS,
    KERNELS_OF_16_BITS,
    SHARDED_WEIGHTS,
    TrainingConfig,
)
from autotune.spec.learning_rates import rate_name
from autotune.spec.setting import NO_LIMIT

ZERO_STAGES: Mapping[str, int] = {"none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
"""{sharding: the stage of ZeRO in DeepSpeed}. It has no groups, as `hsdp` has."""

_ZERO_BUCKET = 25 * 2**20 // 4
"""Numbers that ZeRO gathers or adds up at once: as many as DistributedDataParallel does in float32.
DeepSpeed's own 500 million numbers are buffers of 2 GB each, however small the model is."""
_ZERO_WHOLE = 10_000
"""Weights with fewer numbers are on every device in stage 3: biases and those of norms."""


@dataclass
class Closest:
    """The closest recipe that a trainer can express, which is changed step by step."""

    recipe: Recipe
    trainer: str
    """Its name, as the reasons have it."""
    has: Values
    """What is known of it; any other value is not expressed."""
    reasons: dict[str, Reason] = field(default_factory=dict)
    """{setting that differs from the trial's: (what the trainer does instead, why)}."""

    def __post_init__(self) -> None:
        self.trial = self.recipe
        unknown = unknown_values(self.config, self.has, trainer=self.trainer)
        if self.config.activation_budget != NO_LIMIT and not self.recipe.kept:
            unknown |= without_plan("its plan is not known, as the trial has not trained")
        for technique, (instead, why) in unknown.items():
            self.change(technique, instead, why)
        self.unknown = dict(self.reasons)

    @property
    def config(self) -> TrainingConfig:
        return self.recipe.config

    def lacks(self, reasons: Mapping[str, Reason | None]) -> None:
        """Note what the trainer does not express, but for settings that differ already.

        None stands for a setting that it does express. What replaces a value that the trainer has
        no key for may be something that it does not express either.
        """
        for setting, reason in reasons.items():
            if reason is not None and setting in self.unknown:
                self.reasons[setting] = (reason[0], self.unknown[setting][1])
            elif reason is not None:
                self.reasons.setdefault(setting, reason)
        computes_in_full = self.effective()["precision"] in FULL_PRECISIONS
        if computes_in_full and self.config.attention in KERNELS_OF_16_BITS:
            why = "its kernel is for 16-bit numbers, which the files do not compute in"
            self.change("attention", "auto", why)

    def unsupported(self) -> tuple[Unsupported, ...]:
        """Returns where the files differ from the trial."""
        values = self.trial.settings()
        return tuple(
            Unsupported(setting=setting, value=values[setting], instead=instead, why=why)
            for setting, (instead, why) in self.reasons.items()
        )

    def effective(self) -> dict[str, Any]:
        """Returns the settings as the files have them: the trial's value, or what replaces it."""
        replaced = {setting: instead for setting, (instead, _) in self.reasons.items()}
        return {**self.recipe.settings(), **replaced}

    def change(self, setting: str, instead: Any, why: str) -> None:
        """Replace a technique. Does nothing where it has this value already."""
        if getattr(self.config, setting) != instead:
            config = dataclasses.replace(self.config, **{setting: instead})
            self.recipe = dataclasses.replace(self.recipe, config=config)
            self.reasons[setting] = (instead, why)
            if setting in ("optimizer", "adapter"):
                self._compare_optimization()

    def _compare_optimization(self) -> None:
        """Note the numbers of another optimizer that the files have in place of the trial's."""
        used, instead = self.trial.settings(), self.recipe.settings()
        of_trial, here = (
            rate_name(recipe.config.optimizer, recipe.config.adapter)
            for recipe in (self.trial, self.recipe)
        )
        why = f"it belongs to {of_trial}; the files have that of {here}"
        for number in ("learning_rate", "weight_decay"):
            self.reasons.pop(number, None)
            if instead[number] != used[number]:
                self.reasons[number] = (instead[number], why)

    def differs(self, setting: str, instead: str, why: str) -> None:
        """Note what the trainer does instead where no value of the technique says it."""
        if getattr(self.config, setting) != instead:
            self.reasons[setting] = (instead, why)

    def use_devices(self, devices: int, why: str) -> None:
        """Replace the number of devices."""
        if self.recipe.devices != devices:
            workload = self.recipe.workload.on_devices(devices)
            self.recipe = dataclasses.replace(self.recipe, workload=workload)
            self.reasons["devices_per_trial"] = (devices, why)
        if self.config.optimizer_fusion == "backward" and self.recipe.accumulation_steps > 1:
            why = "a device adds up the gradients of several micro batches before its step"
            self.change("optimizer_fusion", "none", why)

    def use_torch(self, why: str) -> None:
        """Leave out DeepSpeed."""
        self.change("engine", "torch", why)

    def use_one_device(self, why: str) -> None:
        """Train on a single device, which accumulates the parts of the others."""
        self.use_devices(1, why)
        self.change("tensor_parallel", 1, why)
        self.change("sharding", "none", why)
        self.change("sharding_group", 1, why)
        self.change("gradient_reduction", "fp32", why)

    def leave_out_tensor_parallel(self, why: str) -> None:
        """Use a device for each part of the global batch, with whole matrices."""
        devices = self.recipe.replicas
        self.change("tensor_parallel", 1, why)
        self.use_devices(devices, "it is tensor_parallel that needs the others")

    def leave_out_groups(self, why: str) -> None:
        """Share out the model among all devices, not within groups."""
        if self.config.sharding == "hsdp":
            self.change("sharding", "zero3", why)
            self.change("sharding_group", 1, "zero3 has one group of all devices")

    def leave_out_zero1(self) -> None:
        """Use FSDP2 instead of ZeroRedundancyOptimizer, where the optimizer can be used with it."""
        if self.config.sharding != "zero1" or self.config.engine == "deepspeed":
            return
        why = f"{self.trainer} has no key for ZeroRedundancyOptimizer: "
        is_divisible = self.recipe.optimizer.updates_parts and self.config.adapter == "none"
        if is_divisible and self.config.precision != "bf16-stochastic":
            why += "FSDP2 shares out weights and gradients as well, in less memory and more time"
            self.change("sharding", "zero2", why)
        else:
            why += "each device has all of the optimizer's state"
            self.change("sharding", "ddp", why)

    def leave_out_offload(self, why: str) -> None:
        """Leave everything on the device."""
        self.change("offload", "none", why)

    def offload_by_fsdp2(self) -> None:
        """Move to the host what FSDP2 can: all that is shared out, or nothing."""
        if self.config.offload == "frozen":
            return  # the trainer has a key for it
        if divides_weights(self.config):
            if self.config.offload == "optimizer":
                why = "FSDP2 moves weights and gradients together with the optimizer's state"
                self.change("offload", "all", why)
        else:
            why = f"{self.trainer} moves what FSDP2 or DeepSpeed shares out, and nothing else"
            self.leave_out_offload(why)


def divides_weights(config: TrainingConfig) -> bool:
    """Returns whether FSDP2 shares out the weights."""
    return config.engine == "torch" and config.sharding in SHARDED_WEIGHTS


def is_resharded(config: TrainingConfig) -> bool:
    """Returns whether FSDP2 frees the weights of a block after its forward pass."""
    return config.sharding != "zero2"


# -- accelerate, which transformers and trl train with ---------------------------------------------


def closest_by_accelerate(
    recipe: Recipe, trainer: str, has: Values, *, has_groups: bool = True
) -> Closest:
    """Returns the closest recipe that accelerate shares out for a trainer that stands on it.

    `trainer` is the trainer's name, and `has` what is known of its keys; `has_groups` says whether
    it has groups of devices.
    """
    closest = Closest(recipe, trainer, has)
    if recipe.device_type == "cpu":
        why = f"accelerate, with which {trainer} trains, starts a single process on a CPU"
        closest.use_torch(why)
        closest.use_one_device(why)
        closest.leave_out_offload(why)
    closest.leave_out_zero1()
    fit_accelerate(closest, has_groups=has_groups)
    if closest.config.engine == "torch" and not divides_weights(closest.config):
        closest.change("gradient_reduction", "fp32", f"{trainer} has no key for it")
    return closest


def fit_accelerate(closest: Closest, *, has_groups: bool) -> None:
    """Change what the trainer cannot have accelerate do. `has_groups`: whether it has `hsdp`."""
    if closest.config.engine == "deepspeed":
        fit_deepspeed(closest)
        return
    closest.leave_out_tensor_parallel(
        f"{closest.trainer} splits only models of transformers that have a plan for it: export to "
        "torchtitan"
    )
    if not has_groups:
        closest.leave_out_groups(f"{closest.trainer} has no key for groups of devices")
    if closest.recipe.device_type == "cpu" and divides_weights(closest.config):
        why = "accelerate shares out weights on GPUs only"
        closest.change("sharding", "ddp", why)
        closest.change("sharding_group", 1, why)
    closest.offload_by_fsdp2()
    if not divides_weights(closest.config):
        return
    precision = closest.config.precision
    if precision in ("bf16-mixed", "fp16-mixed"):
        closest.differs("precision", f"{precision} by FSDP2", _WHY_BY_FSDP2)
    why = "with FSDP2 accelerate adds up gradients in the number format of the computation"
    closest.differs("gradient_reduction", _REDUCED_BY_ACCELERATE.get(precision, "fp32"), why)


_WHY_BY_FSDP2 = (
    "accelerate has FSDP2 round what goes into a block and comes out of it to 16 bits, and so the "
    "residual stream"
)
_REDUCED_BY_ACCELERATE = {
    "bf16-mixed": "bf16",
    "fp8": "bf16",
    "int8-mixed": "bf16",
    "fp16-mixed": "fp16",
    "bf16-true": "bf16",
    "bf16-stochastic": "bf16",
}
"""{precision: number format of the sum}; the others have fp32."""


def fsdp_keys(config: TrainingConfig, *, offload: str) -> dict[str, Any]:
    """Returns the settings of FSDP2, as transformers has them in `fsdp_config`.

    `offload` is the name of the key for weights in host memory. Blocks are found by the list of
    their classes that every model of transformers has.
    """
    return {
        "reshard_after_forward": is_resharded(config),
        offload: config.offload == "all",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "SHARDED_STATE_DICT",
    }


# -- DeepSpeed -------------------------------------------------------------------------------------


def fit_deepspeed(closest: Closest) -> None:
    """Change what ZeRO of DeepSpeed has no stage for."""
    closest.leave_out_tensor_parallel(
        "DeepSpeed splits the matrices of models of transformers alone, in 16 bits"
    )
    closest.leave_out_groups("DeepSpeed shares out among all devices: it has no groups any more")
    config = closest.config
    if config.offload == "all" and config.sharding not in ("none", "zero3"):
        why = "DeepSpeed moves weights to the host with stage 3 of ZeRO only"
        closest.change("offload", "optimizer", why)
    if config.offload != "none" and config.sharding == "ddp":
        why = "DeepSpeed moves the optimizer's state to the host from stage 1 of ZeRO on"
        closest.change("sharding", "zero1", why)


def zero_settings(config: TrainingConfig) -> dict[str, Any]:
    """Returns the sections of DeepSpeed's configuration for `config`, after `fit_deepspeed`."""
    # On one device, which has all parts, it is the stage that offload needs.
    least = {"none": 0, "optimizer": 1, "all": 3}[config.offload]
    stage = max(least, ZERO_STAGES[config.sharding])
    zero: dict[str, Any] = {"stage": stage}
    if stage > 0:
        zero["reduce_bucket_size"] = _ZERO_BUCKET
    if stage in (1, 2):
        zero["allgather_bucket_size"] = _ZERO_BUCKET
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = _ZERO_BUCKET
        zero["stage3_param_persistence_threshold"] = _ZERO_WHOLE
        # Otherwise all weights of a model below a billion stay, once they are gathered.
        zero["stage3_max_reuse_distance"] = 0
    on_host = {"device": "cpu", "pin_memory": True}
    if config.offload != "none":
        zero["offload_optimizer"] = on_host
    if config.offload == "all":
        zero["offload_param"] = on_host
    settings: dict[str, Any] = {"zero_optimization": zero}
    if config.sharding != "none":
        settings["communication_data_type"] = config.gradient_reduction
    return settings
