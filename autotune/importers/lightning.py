"""Lightning: the YAML file of LightningCLI.

Model and data are the user's own classes, which are never run: the model is named by --model. The
batch and the length are those of the data's arguments, where they have one of the usual names.
"""

from collections.abc import Mapping
from typing import Any

from autotune.errors import InvalidInput
from autotune.importers.beside import keys_beside
from autotune.importers.deepspeed_file import DEEPSPEED, SHARDINGS, plan_of_stage, read_settings
from autotune.importers.finished import devices_of, finished
from autotune.importers.imported import ImportedTraining, Trainer
from autotune.importers.key_table import load_table
from autotune.importers.keys_of_file import KeysOfFile
from autotune.importers.several_devices import Plan
from autotune.spec.optimizers import OPTIMIZERS

_PRECISIONS = {
    "32-true": "fp32",
    "32": "fp32",
    "64-true": "fp32",
    "64": "fp32",
    "16-mixed": "fp16-mixed",
    "16": "fp16-mixed",
    "16-true": "bf16-true",
    "bf16-mixed": "bf16-mixed",
    "bf16": "bf16-mixed",
    "bf16-true": "bf16-true",
    "transformer-engine": "fp8",
    "transformer-engine-float16": "fp8",
    "half": "fp16-mixed",
    "float": "fp32",
    "double": "fp32",
}
"""{precision: ours}. Source: lightning/fabric/connector.py, _PRECISION_INPUT."""
_INEXACT = {
    "64-true": "trials have at most 32 bits",
    "64": "trials have at most 32 bits",
    "double": "trials have at most 32 bits",
    "16-true": "trials have 16-bit weights in bfloat16",
    "transformer-engine": "trials have torchao's fp8",
    "transformer-engine-float16": "trials have torchao's fp8",
}
BATCHES = ("batch_size", "train_batch_size", "micro_batch_size", "per_device_train_batch_size")
_LENGTHS = (
    "max_seq_length",
    "max_length",
    "sequence_length",
    "seq_len",
    "seq_length",
    "block_size",
)
_OPTIMIZERS = {
    **{facts.class_name: name for name, facts in OPTIMIZERS.items()},
    "Adam": "adamw",
    "PagedAdamW32bit": "paged-adamw",
}
_EXPORTED_CALLBACK = "autotune_callback.AutotuneCallback"
_STRATEGIES = {
    "ddp": "ddp",
    "fsdp": "zero3",
    "fsdp_cpu_offload": "zero3",
    "deepspeed": "zero2",
    "deepspeed_stage_1": "zero1",
    "deepspeed_stage_2": "zero2",
    "deepspeed_stage_3": "zero3",
}
_CLASSES = {
    "DDPStrategy": "ddp",
    "FSDPStrategy": "fsdp",
    "DeepSpeedStrategy": "deepspeed",
    "ModelParallelStrategy": "fsdp",
    "SingleDeviceStrategy": "auto",
}
_FSDP_STRATEGIES = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "zero3",
    "_HYBRID_SHARD_ZERO2": "zero2",
}


def read(keys: KeysOfFile) -> ImportedTraining:
    """Returns the training. Raises InvalidInput."""
    callback = _exported_callback(keys)
    optimizer = _optimizer(keys)
    devices = devices_of(keys, _stated_devices(keys))
    data = _arguments(keys, "data")
    accumulation = keys["trainer.accumulate_grad_batches"]
    if isinstance(accumulation, Mapping):
        raise keys.cannot_train(
            "trainer.accumulate_grad_batches",
            "the batch changes within the training",
            hint="save a copy with one number",
        )
    accumulation = keys.whole_number("trainer.accumulate_grad_batches", least=1) or 1
    batch = _size_of(keys, data, BATCHES, option="global_batch")
    if batch is None:
        batch = _batch_by_option(keys, accumulation, devices)
    config: dict[str, Any] = {
        "precision": _precision(keys, callback),
        **optimizer,
        "micro_batch_size": batch,
        **{
            name: callback[name]
            for name in ("checkpointing", "compile", "memory_budget", "attention")
            if name in callback
        },
    }
    workload: dict[str, Any] = {
        "global_batch": batch * accumulation * devices,
        "sequence_length": _size_of(keys, data, _LENGTHS, option="sequence_length"),
        "gradient_clipping": _clipping(keys, callback),
        "seed": _seed(keys),
    }
    if devices > 1:
        workload["devices_per_trial"] = devices
        workload["nodes_per_trial"] = keys.whole_number("trainer.num_nodes", least=1)
    rate = _rate(keys, callback)
    if rate is not None:
        workload["learning_rates"] = {optimizer["optimizer"]: rate}
    if "schedule" in callback:
        workload["schedule"] = callback["schedule"]
    if any(_strategy_arguments(keys).get(name) for name in _RECOMPUTING):
        config.setdefault("checkpointing", "block")
    if keys.says("model"):
        keys.refuse("model", "a class of yours, which is not run: --model names what it trains")
    return finished(keys, workload=workload, config=config, plan=_plan(keys))


def _size_of(
    keys: KeysOfFile, data: Mapping[str, Any], names: tuple[str, ...], *, option: str
) -> int | None:
    """Returns the size by the first of `names` that the arguments of data have; None without one.

    What is none is left to the option, if that is given. Raises InvalidInput if it is not.
    """
    name = next((name for name in names if data.get(name) is not None), None)
    if name is None:
        return None
    value = data[name]
    if type(value) is int and value >= 1:
        return value
    if keys.options.get(option) is not None:
        return None
    raise InvalidInput(
        f"{keys.file} has {name}: {value!r:.60} among the arguments of data",
        hint=f"give {name} as a whole number from 1 up",
    )


def _arguments(keys: KeysOfFile, key: str) -> Mapping[str, Any]:
    """Returns the arguments of a class, which stand in `init_args` or beside nothing."""
    table = keys.table_of(key)
    arguments = table.get("init_args", table if "class_path" not in table else {})
    return arguments if isinstance(arguments, Mapping) else {}


def _exported_callback(keys: KeysOfFile) -> Mapping[str, Any]:
    """Returns the arguments of the callback that autotune's own export writes, if it is there."""
    callbacks = keys.content("trainer.callbacks")
    for one in callbacks if isinstance(callbacks, list) else []:
        if isinstance(one, Mapping) and one.get("class_path") == _EXPORTED_CALLBACK:
            arguments = one.get("init_args")
            return arguments if isinstance(arguments, Mapping) else {}
    return {}


def _batch_by_option(keys: KeysOfFile, accumulation: int, devices: int) -> int:
    """Returns the batch of a device by --global-batch, as the data's class says none."""
    told = keys.options.get("global_batch")
    if told is None:
        raise InvalidInput(
            f"{keys.file} has no batch_size among the arguments of data, whose class is not run",
            hint="give the batch of a step by --global-batch",
        )
    if told % (accumulation * devices) != 0:
        raise InvalidInput(
            f"{keys.file} adds up {accumulation} batches on {devices} devices, into which a "
            f"global batch of {told} cannot be divided",
            hint=f"give a multiple of {accumulation * devices} by --global-batch",
        )
    return int(told) // (accumulation * devices)


def _stated_devices(keys: KeysOfFile) -> int | None:
    devices = keys["trainer.devices"]
    nodes = keys.whole_number("trainer.num_nodes", least=1) or 1
    if isinstance(devices, list):
        return max(1, len(devices)) * nodes
    if isinstance(devices, str) and not devices.lstrip("-").isdigit():
        if devices == "auto":
            return None
        numbers = [part.strip() for part in devices.split(",") if part.strip()]
        if not numbers or not all(map(str.isdigit, numbers)):
            raise keys.invalid("trainer.devices", "a number, a list of numbers, or auto")
        return len(numbers) * nodes
    if devices in (-1, "-1"):
        return None
    return (keys.whole_number("trainer.devices", least=1) or 1) * nodes


def _precision(keys: KeysOfFile, callback: Mapping[str, Any]) -> str:
    value = keys["trainer.precision"]
    name = "32-true" if value is None else str(value)
    if name not in _PRECISIONS:
        raise keys.invalid("trainer.precision", "32-true, 16-mixed, bf16-mixed or bf16-true")
    if name in _INEXACT:
        keys.refuse("trainer.precision", _INEXACT[name])
    for key, of_products in (("fp8", "fp8"), ("int8", "int8-mixed")):
        if callback.get(key) is True:
            return of_products
    precision = _PRECISIONS[name]
    if precision == "fp32" and callback.get("float32_matmul_precision") == "high":
        return "tf32"
    return precision


def _optimizer(keys: KeysOfFile) -> dict[str, Any]:
    """Returns the optimizer of the file, or AdamW where the user's module makes it."""
    path = str(keys.table_of("optimizer").get("class_path", ""))
    arguments: Any = _arguments(keys, "optimizer")
    if path.endswith("ZeroRedundancyOptimizer"):
        path = str(arguments.get("optimizer_class", path))
        arguments = keys.table_of("optimizer").get("dict_kwargs") or {}
    name = path.rpartition(".")[2]
    if not name:
        return {"optimizer": "adamw", "optimizer_fusion": "foreach"}
    if name not in _OPTIMIZERS:
        raise keys.cannot_train(
            "optimizer",
            "autotune has no such optimizer, and its state decides the memory",
            hint=f"save a copy of the file with one of {', '.join(_OPTIMIZERS)}",
        )
    fusion = "none"
    if OPTIMIZERS[_OPTIMIZERS[name]].has_fusion("foreach"):
        # On CUDA torch batches by itself unless it is told not to.
        fusion = "none" if arguments.get("foreach") is False else "foreach"
    if arguments.get("fused") is True:
        fusion = "kernel"
    if arguments.get("amsgrad") is True:
        keys.refuse("optimizer", "amsgrad has a third number of state for each weight, trials two")
    return {"optimizer": _OPTIMIZERS[name], "optimizer_fusion": fusion}


def _rate(keys: KeysOfFile, callback: Mapping[str, Any]) -> float | None:
    arguments: Any = keys.table_of("optimizer").get("dict_kwargs") or _arguments(keys, "optimizer")
    rate = callback.get("learning_rate", arguments.get("lr"))
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def _clipping(keys: KeysOfFile, callback: Mapping[str, Any]) -> float | None:
    if keys["trainer.gradient_clip_algorithm"] == "value" and keys["trainer.gradient_clip_val"]:
        keys.refuse("trainer.gradient_clip_algorithm", "trials clip the norm of the gradients")
    return keys.number("trainer.gradient_clip_val") or callback.get("gradient_clipping")


def _seed(keys: KeysOfFile) -> int | None:
    if isinstance(keys["seed_everything"], bool):
        return None
    return keys.whole_number("seed_everything")


_RECOMPUTING = ("activation_checkpointing", "activation_checkpointing_policy")
"""Arguments of FSDPStrategy that name the layers which run again in the backward pass."""
_NOT_TAKEN_OF_STRATEGIES = {
    "mixed_precision": "trials compute in the number format of trainer.precision",
    "offload_optimizer_device": "trials have it in the host's memory or on the device",
    "offload_params_device": "trials have them in the host's memory or on the device",
    "partition_activations": "devices of trials do not share out activations",
    "cpu_checkpointing": "trials keep the inputs of recomputed blocks on the device",
    "parallel_devices": "--devices-per-trial says the devices",
    "model_averaging_period": "devices of trials add up gradients at every step",
}
"""{argument: why it is not taken over}; others change neither memory nor speed, or are read."""


def _strategy_arguments(keys: KeysOfFile) -> Mapping[str, Any]:
    value = keys["trainer.strategy"]
    found = value.get("init_args") if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _plan(keys: KeysOfFile) -> Plan | None:
    """Returns what the strategy shares out: a name, or a class with arguments."""
    key = "trainer.strategy"
    value = keys[key]
    arguments = _strategy_arguments(keys)
    if isinstance(value, Mapping):
        name = str(value.get("class_path", "")).rpartition(".")[2]
        if name not in _CLASSES:
            keys.refuse(key, "trials share out by DDP, FSDP2 or DeepSpeed")
            return None
        value = _CLASSES[name]
    for argument, why in _NOT_TAKEN_OF_STRATEGIES.items():
        if arguments.get(argument):
            keys.refuse(key, f"{argument}: {why}")
    name = str(value)
    if name in ("auto", "None"):
        return None
    name = "ddp" if name.startswith("ddp") else name
    if name == "deepspeed" and arguments.get("config") is not None:
        settings = keys_beside(keys, key, DEEPSPEED, value=arguments["config"])
        if settings is not None:
            return read_settings(settings, key).plan
    if name.startswith("deepspeed"):
        words = name.removesuffix("_offload")
        stage = arguments.get(
            "stage", {"zero1": 1, "zero2": 2, "zero3": 3}.get(_STRATEGIES.get(words, "zero2"), 2)
        )
        if stage not in SHARDINGS:
            raise keys.invalid(key, "a strategy with a stage of ZeRO: 0, 1, 2 or 3")
        states = name.endswith("_offload") or arguments.get("offload_optimizer") is True
        parameters = arguments.get("offload_parameters") is True
        offload = "all" if parameters else "optimizer" if states else "none"
        return plan_of_stage(key, stage, offload=offload)
    if name not in _STRATEGIES:
        keys.refuse(key, "trials share out by DDP, FSDP2 or DeepSpeed")
        return None
    sharding = _STRATEGIES[name]
    made_by = str(keys.table_of("optimizer").get("class_path", ""))
    if sharding == "ddp" and made_by.endswith("ZeroRedundancyOptimizer"):
        sharding = "zero1"
    if asked := arguments.get("sharding_strategy"):
        sharding = _FSDP_STRATEGIES.get(str(asked).upper(), sharding)
    on_host = name == "fsdp_cpu_offload" or arguments.get("cpu_offload") is True
    reduction = "bf16" if "bf16" in str(arguments.get("ddp_comm_hook", "")) else "fp32"
    return Plan(
        key=key,
        sharding=sharding,
        offload="all" if on_host else "none",
        gradient_reduction=reduction,
    )


TRAINER = Trainer(
    table=load_table("lightning"),
    signs=frozenset(("trainer", "seed_everything")),
    read=read,
)
