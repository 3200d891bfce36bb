"""accelerate: the YAML of `accelerate config`, which says how a training is shared out."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.importers import deepspeed_file
from autotune.importers.key_table import load_table
from autotune.importers.keys_of_file import KeysOfFile
from autotune.importers.several_devices import COPY, Plan, Sharing

ACCELERATE = load_table("accelerate")
_DEEPSPEED = load_table("accelerate_deepspeed")
_FSDP = load_table("fsdp")
_PARALLELISM = load_table("parallelism")
_STRATEGIES = {
    "FULL_SHARD": "zero3",
    "1": "zero3",
    "TRUE": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "2": "zero2",
    "FALSE": "zero2",
    "NO_SHARD": "ddp",
    "3": "ddp",
    "HYBRID_SHARD": "zero3",
    "4": "zero3",
    "HYBRID_SHARD_ZERO2": "zero2",
    "5": "zero2",
}
"""{sharding_strategy of FSDP, or reshard_after_forward: sharding}."""


def sharing(keys: KeysOfFile, name: str) -> Sharing:
    """Returns what accelerate's file has devices share out.

    `name` is how notes of the trainer's file call it. Raises InvalidInput.
    """
    mixed = keys.one_of("mixed_precision", ("no", "fp16", "bf16", "fp8"))
    precision = None if mixed == "no" else mixed
    compiles = bool(keys.table_of("dynamo_config").get("dynamo_backend", "NO") not in ("NO", "no"))
    if compiles:
        keys.refuse("dynamo_config", "trials compile as the trainer's own file says")
    kind = str(keys["distributed_type"]).upper()
    if kind == "DEEPSPEED" and keys.says("deepspeed_config"):
        return _by_deepspeed(keys, name, precision)
    if kind == "FSDP" and keys.says("fsdp_config"):
        found = by_fsdp(keys, "fsdp_config", named=name)
        return Sharing(
            plan=in_groups(keys, found.plan),
            precision=precision,
            checkpoints=found.checkpoints,
        )
    return Sharing(plan=in_groups(keys, None), precision=precision)


def in_groups(keys: KeysOfFile, plan: Plan | None) -> Plan | None:
    """Returns a plan of FSDP in groups of devices and beside split matrices, as a table says."""
    key = "parallelism_config"
    if not keys.says(key):
        return plan
    sizes = keys.beside(key, keys.table_of(key), _PARALLELISM, file=keys.file)
    replicate = sizes.whole_number("dp_replicate_size", least=1) or 1
    group = sizes.whole_number("dp_shard_size", least=1) or 1
    split = sizes.whole_number("tp_size", least=1) or 1
    if plan is None and split > 1:
        plan = Plan(key=key)
    if plan is None:
        return None
    if replicate > 1 and group > 1 and plan.engine == "torch":
        plan = replace(plan, sharding="hsdp", sharding_group=group)
    return replace(plan, tensor_parallel=split)


def _by_deepspeed(keys: KeysOfFile, name: str, precision: str | None) -> Sharing:
    settings = keys.beside(
        "deepspeed_config", keys.table_of("deepspeed_config"), _DEEPSPEED, file=keys.file
    )
    if settings.says("deepspeed_config_file"):
        found = deepspeed_file.sharing(settings, "deepspeed_config_file")
        assert found is not None, "the key has a value"
        return Sharing(
            plan=None if found.plan is None else found.plan.called(name),
            precision=found.precision or precision,
        )
    stage = settings.whole_number("zero_stage") or 0
    if stage not in deepspeed_file.SHARDINGS:
        raise settings.invalid("zero_stage", "a stage of ZeRO: 0, 1, 2 or 3")
    on_host = [
        settings[f"offload_{what}_device"] in ("cpu", "nvme") for what in ("param", "optimizer")
    ]
    offload = "all" if on_host[0] else "optimizer" if on_host[1] else "none"
    if precision is not None:
        keys.refuse("mixed_precision", COPY)
    return Sharing(
        plan=deepspeed_file.plan_of_stage(
            name, stage, offload=offload, reduction="bf16" if precision == "bf16" else "fp32"
        ),
        precision=precision,
    )


def by_fsdp(
    keys: KeysOfFile, key: str, *, named: str, strategy: str = "FULL_SHARD", offload: bool = False
) -> Sharing:
    """Returns what FSDP shares out by the table of `key`; the others are what other keys say."""
    settings: Mapping[str, Any] = keys.table_of(key) if keys.says(key) else {}
    fsdp = keys.beside(key, settings, _FSDP, file=keys.file)
    for name in ("reshard_after_forward", "sharding_strategy"):
        if fsdp.says(name):
            strategy = str(fsdp[name])
    if strategy.upper() not in _STRATEGIES:
        raise fsdp.invalid("sharding_strategy", "FULL_SHARD, SHARD_GRAD_OP or NO_SHARD")
    if strategy.upper().startswith("HYBRID"):
        fsdp.refuse(
            "sharding_strategy",
            "trials share out the model among all devices: hsdp by "
            "--sharding and --sharding-group has groups of them",
        )
    offload = fsdp.flag("offload_params") or offload
    plan = Plan(
        key=named,
        sharding=_STRATEGIES[strategy.upper()],
        offload="all" if offload else "none",
    )
    return Sharing(plan=plan, checkpoints=fsdp.flag("activation_checkpointing"))
