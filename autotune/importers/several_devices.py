"""What the devices of a trainer share out, as techniques of trials that rules allow together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune.importers.keys_of_file import KeysOfFile
from autotune.spec.config import LegalityContext, rule_violations

_WEAKER: Mapping[str, tuple[str, ...]] = {
    "zero3": ("zero2", "zero1", "ddp"),
    "zero2": ("zero1", "ddp"),
    "zero1": ("ddp",),
    "hsdp": ("zero3", "zero1", "ddp"),
    "all": ("optimizer", "none"),
    "optimizer": ("none",),
    "deepspeed": ("torch",),
}
"""{what a file asks for: what is nearest, where rules exclude it}."""
COPY = "DeepSpeed has 16-bit weights and a float32 copy: trials have float32 ones under autocast"
_NOT_BY_DEEPSPEED = ("bf16-true", "fp16-mixed", "fp8")
"""Precisions to which bf16-mixed is nearest with DeepSpeed: it keeps a float32 copy of weights."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a file has devices share a training out."""

    key: str
    """The key of the file that asks for it."""
    sharding: str = "ddp"
    sharding_group: int = 1
    tensor_parallel: int = 1
    offload: str = "none"
    engine: str = "torch"
    gradient_reduction: str = "fp32"

    def called(self, key: str) -> "Plan":
        """Returns the plan as that of another key."""
        return replace(self, key=key)


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What a file of DeepSpeed or accelerate says beside the trainer's own."""

    plan: Plan | None
    """None: each device has the whole training."""
    precision: str | None = None
    """bf16, fp16 or fp8 where it turns that on; None: as the trainer's file says."""
    checkpoints: bool = False
    """Whether it has blocks recomputed."""


def device_choices(
    keys: KeysOfFile, plan: Plan | None, config: Mapping[str, Any], at: LegalityContext
) -> dict[str, Any]:
    """Returns the techniques of a plan, and the precision that goes with them.

    What trials do not do with the rest of `config` is replaced by what is nearest, which is noted.
    """
    if plan is None:
        return {"sharding": "ddp"} if at.devices > 1 else {}
    if at.devices == 1 and plan != Plan(key=plan.key):
        keys.refuse(
            plan.key,
            "one device has nothing to share out: give the number of devices by "
            "--devices-per-trial",
        )
    if at.devices == 1 and plan.offload == "none":
        if plan.engine == "torch" or config["precision"] != "bf16-true":
            return {}
        keys.refuse(plan.key, COPY)
        return {"precision": "bf16-mixed"}
    if plan.engine == "deepspeed" and keys.options.get("engine") == "torch":
        plan = replace(plan, engine="torch")
        keys.refuse(plan.key, "shared out by torch instead of DeepSpeed, whose buffers differ")
    first_violation = ""
    for choices in _candidates(plan, config, devices=at.devices):
        broken = rule_violations({**config, **choices}, at)
        if not broken:
            if first_violation:
                reason = first_violation.partition(": ")[0]
                keys.refuse(plan.key, f"trials have {_described(choices)}: {reason}")
            if choices["engine"] == "deepspeed" and "precision" in choices:
                keys.refuse(plan.key, COPY)
            return choices
        first_violation = first_violation or broken[0]
    return dict(next(_candidates(plan, config, devices=at.devices)))


def _candidates(plan: Plan, config: Mapping[str, Any], *, devices: int) -> Iterator[dict[str, Any]]:
    """Yield the choices of a plan, and then weaker ones: the sharing out is given up last."""
    in_bf16 = {"precision": "bf16-mixed"}
    if config["base_weights"] == "fp16":
        in_bf16["base_weights"] = "bf16"
    shardings: tuple[str, ...] = ("none",)
    if devices > plan.tensor_parallel:
        shardings = (plan.sharding, *_WEAKER.get(plan.sharding, ()))
    for sharding in shardings:
        for offload in (plan.offload, *_WEAKER.get(plan.offload, ())):
            for engine in (plan.engine, *_WEAKER.get(plan.engine, ())):
                base: dict[str, Any] = {
                    "sharding": sharding,
                    "sharding_group": plan.sharding_group if sharding == "hsdp" else 1,
                    "tensor_parallel": plan.tensor_parallel,
                    "offload": offload,
                    "engine": engine,
                    "gradient_reduction": "fp32",
                }
                if sharding == plan.sharding:
                    base["gradient_reduction"] = plan.gradient_reduction
                if engine == "deepspeed" and config["precision"] in _NOT_BY_DEEPSPEED:
                    base |= in_bf16
                yield base
                if engine == "torch" and config["precision"] in ("fp8", "fp16-mixed"):
                    yield {**base, **in_bf16}


def _described(choices: Mapping[str, Any]) -> str:
    names = ("engine", "sharding", "offload", "precision")
    return ", ".join(f"{name} {choices[name]}" for name in names if name in choices)
