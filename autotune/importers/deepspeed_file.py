"""DeepSpeed's JSON, which keys of trainers name: the stage of ZeRO, the host, number formats."""

import re
from collections.abc import Mapping
from typing import Any

from autotune.importers.beside import keys_beside, missing_file
from autotune.importers.key_table import load_table
from autotune.importers.keys_of_file import KeysOfFile
from autotune.importers.several_devices import COPY, Plan, Sharing

DEEPSPEED = load_table("deepspeed")
_ZERO = load_table("deepspeed_zero")
SHARDINGS = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
"""{stage of ZeRO: sharding}."""
_REDUCTIONS = ("fp32", "fp16", "bf16", "bfp16")
_FLOAT32 = ("fp32", "float32", "float", "torch.float32")
_IN_FLOAT32 = "trials with DeepSpeed have weights, and add up gradients, in float32"
_STAGE_IN_NAME = re.compile(r"(?:zero|stage|z)[_-]?([0-3])", re.IGNORECASE)


def sharing(keys: KeysOfFile, key: str) -> Sharing | None:
    """Returns what the value of `key`, a table or the name of a file, shares out; None: nothing.

    Of a file that is not there the stage is that in its name. Raises InvalidInput without one.
    """
    if not keys.says(key):
        return None
    settings = keys_beside(keys, key, DEEPSPEED)
    if settings is None:
        name = str(keys[key])
        stage = _STAGE_IN_NAME.search(name)
        if stage is None:
            raise missing_file(keys, key, name)
        keys.refuse(key, f"no such file here: taken to be stage {stage[1]} of ZeRO by its name")
        offload = "all" if "offload" in name.lower() and stage[1] == "3" else "none"
        return Sharing(plan=plan_of_stage(key, int(stage[1]), offload=offload))
    return read_settings(settings, key)


def plan_of_stage(key: str, stage: int, *, offload: str, reduction: str = "fp32") -> Plan:
    return Plan(
        key=key,
        sharding=SHARDINGS[stage],
        offload=offload,
        engine="deepspeed",
        gradient_reduction=reduction,
    )


def read_settings(settings: KeysOfFile, key: str) -> Sharing:
    """Returns what the keys of a file of DeepSpeed share out, which `key` names."""
    zero = settings.beside(
        "zero_optimization", settings.table_of("zero_optimization"), _ZERO, file=settings.file
    )
    stage = zero.whole_number("stage") or 0
    if stage not in SHARDINGS:
        raise zero.invalid("stage", "a stage of ZeRO: 0, 1, 2 or 3")
    parameters = _is_on_host(zero, "offload_param") or zero.flag("cpu_offload_param")
    states = _is_on_host(zero, "offload_optimizer") or zero.flag("cpu_offload")
    offload = "all" if parameters else "optimizer" if states else "none"
    autocast = settings.table_of("torch_autocast")
    precision = None
    if autocast.get("enabled") is True:
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(str(autocast.get("dtype")))
    for name in ("bf16", "fp16"):
        if settings.table_of(name).get("enabled") is True:
            precision = name
            settings.refuse(name, COPY)
    formats = settings.table_of("data_types")
    if formats and (len(formats) > 1 or formats.get("grad_accum_dtype") not in _FLOAT32):
        settings.refuse("data_types", _IN_FLOAT32)
    reduction = settings.one_of("communication_data_type", _REDUCTIONS)
    if reduction is None:
        exact = precision is None or autocast.get("lower_precision_safe_modules") == []
        reduction = "fp32" if exact else "bf16"
    return Sharing(
        plan=plan_of_stage(
            key,
            stage,
            offload=offload,
            reduction="bf16" if reduction in ("bf16", "bfp16") else "fp32",
        ),
        precision=precision,
    )


def _is_on_host(zero: KeysOfFile, key: str) -> bool:
    table: Mapping[str, Any] = zero.table_of(key)
    device = str(table.get("device", "none"))
    if device == "nvme":
        zero.refuse(key, "trials have it in the host's memory, not on a disk")
    if device in ("cpu", "nvme") and table.get("ratio", 1.0) != 1.0:
        zero.refuse(key, "trials move all of the optimizer's state, not a share of it")
    return device in ("cpu", "nvme")
