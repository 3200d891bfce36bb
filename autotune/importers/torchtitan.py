"""torchtitan up to 0.2.2: its TOML file. Later versions have Python modules, which are not run.

The number of devices is that of `torchrun`; the degrees of the file divide them. Where weights are
shared out FSDP2 computes in `mixed_precision_param`, elsewhere autocast does, and with split
matrices alone nothing does (torchtitan/distributed/utils.py: maybe_enable_amp).
"""

import math
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from autotune.errors import InvalidInput, suggestion
from autotune.importers.finished import devices_of, finished
from autotune.importers.imported import ImportedTraining, Trainer
from autotune.importers.key_table import load_table
from autotune.importers.keys_of_file import KeysOfFile
from autotune.importers.several_devices import Plan
from autotune.spec.model_file import model_name

_FUSIONS = {"for-loop": "none", "foreach": "foreach", "fused": "kernel"}
_DATASETS = {
    "c4": {
        "dataset": "allenai/c4",
        "dataset_config": "en",
        "text_column": "text",
        "streaming": True,
    }
}
"""{name of torchtitan: settings}. Source: torchtitan/hf_datasets/text_datasets.py."""
_OTHER_ATTENTION = ("_flex", "_flex_attn", "_varlen", "_varlen_attn")
"""Endings of flavors of the same sizes."""
_SHARD = "parallelism.data_parallel_shard_degree"
_OPTION = "activation_checkpoint.selective_ac_option"


def read(keys: KeysOfFile) -> ImportedTraining:
    """Returns the training. Raises InvalidInput."""
    plan, devices = _plan(keys)
    replicas = max(1, devices // plan.tensor_parallel)
    micro_batch_size = keys.whole_number("training.local_batch_size", least=1) or 1
    optimizer = _optimizer(keys)
    config: dict[str, Any] = {
        "precision": _precision(keys, plan, devices),
        **_checkpointing(keys),
        **optimizer,
        "micro_batch_size": micro_batch_size,
    }
    workload: dict[str, Any] = {
        **_model(keys),
        "pretrained": False,
        "sequence_length": keys.whole_number("training.seq_len", least=1),
        "global_batch": _global_batch(keys) or micro_batch_size * replicas,
        "packing": "packed",
        "schedule": _schedule(keys),
        "seed": keys.whole_number("debug.seed"),
        **_dataset(keys),
    }
    if devices > 1:
        workload["devices_per_trial"] = devices
    if rate := keys.number("optimizer.lr"):
        workload["learning_rates"] = {"adamw": rate}
    limit = keys["training.max_norm"]
    if limit != math.inf and optimizer["optimizer_fusion"] != "backward":
        workload["gradient_clipping"] = keys.number("training.max_norm") or None
    return finished(keys, workload=workload, config=config, plan=plan)


def _global_batch(keys: KeysOfFile) -> int | None:
    """Returns the sequences of a step; None where the file leaves them to the devices."""
    if keys["training.global_batch_size"] == -1:
        return None
    return keys.whole_number("training.global_batch_size", least=1)


# -- devices ---------------------------------------------------------------------------------------


def _degree(keys: KeysOfFile, name: str) -> int:
    return keys.whole_number(f"parallelism.{name}_parallel_degree", least=1) or 1


def _plan(keys: KeysOfFile) -> tuple[Plan, int]:
    """Returns what is shared out, and the devices of a trial."""
    split = _degree(keys, "tensor")
    others = 1
    for name, why in (
        ("pipeline", "devices of trials each have a part of every layer, not of the layers"),
        ("context", "devices of trials do not share out a sequence"),
    ):
        others *= _degree(keys, name)
        if _degree(keys, name) > 1:
            keys.refuse(f"parallelism.{name}_parallel_degree", why)
    replicate = keys.whole_number("parallelism.data_parallel_replicate_degree", least=1) or 1
    shard = keys[_SHARD]
    if shard != -1:
        shard = keys.whole_number(_SHARD, least=1) or 1
    stated = replicate * max(1, shard) * split * others
    all_devices = devices_of(keys, stated)
    if all_devices % (replicate * split * others) != 0:
        raise InvalidInput(
            f"{keys.file} divides {replicate * split * others} devices, of which "
            f"{all_devices} is no multiple",
            hint="give another --devices-per-trial",
        )
    shard = all_devices // (replicate * split * others)
    devices = all_devices // others
    resharded = keys.one_of(
        "parallelism.fsdp_reshard_after_forward", ("default", "always", "never")
    )
    sharding = "zero2" if resharded == "never" else "zero3"
    if shard == 1 and (replicate > 1 or keys[_SHARD] != -1):
        sharding = "ddp"
    elif replicate > 1:
        sharding = "hsdp"
    offload = "none"
    if keys.flag("training.enable_cpu_offload"):
        if shard > 1:
            offload = "all"
        else:
            keys.refuse("training.enable_cpu_offload", "it moves what several devices share out")
    return (
        Plan(
            key=_SHARD,
            sharding=sharding,
            sharding_group=shard if sharding == "hsdp" else 1,
            tensor_parallel=split,
            offload=offload,
        ),
        devices,
    )


# -- techniques ------------------------------------------------------------------------------------


def _precision(keys: KeysOfFile, plan: Plan, devices: int) -> str:
    of_weights = keys.one_of("training.dtype", ("float32", "bfloat16"))
    computed = keys.one_of("training.mixed_precision_param", ("float32", "bfloat16"))
    converters = keys.list_of("model.converters")
    others = [one for one in converters if str(one).rpartition(".")[2] != "float8"]
    if others:
        keys.refuse("model.converters", "trials convert linear layers to fp8 alone")
    if keys.flag("quantize.linear.float8.enable_float8_linear") or len(converters) > len(others):
        return "fp8"
    if of_weights == "bfloat16":
        return "bf16-true"
    is_split_alone = plan.tensor_parallel > 1 and devices == plan.tensor_parallel
    return "fp32" if computed == "float32" or is_split_alone else "bf16-mixed"


def _checkpointing(keys: KeysOfFile) -> dict[str, Any]:
    compiles = keys.flag("compile.enable") and "model" in keys.list_of("compile.components")
    techniques: dict[str, Any] = {"compile": "block" if compiles else "none"}
    if keys.flag("compile.enable") and "loss" in keys.list_of("compile.components"):
        keys.refuse(
            "compile.components",
            "the loss of trials is not compiled, and has all logits in float32 three times: the "
            "file needs less than predicted",
        )
    mode = keys.one_of("activation_checkpoint.mode", ("selective", "full", "memory_budget", "none"))
    option = str(keys[_OPTION])
    if mode == "memory_budget":
        budget = keys.number("activation_checkpoint.memory_budget")
        if compiles:
            techniques["memory_budget"] = budget
        else:
            keys.refuse("activation_checkpoint.mode", "a memory budget needs compile.enable")
    elif mode == "full" or (mode == "selective" and option == "1"):
        techniques["checkpointing"] = "block"
    elif mode == "selective" and option == "op":
        techniques["checkpointing"] = "selective-2"
    elif mode == "selective":
        if option not in ("2", "4"):
            if not option.isdigit() or int(option) < 1:
                raise keys.invalid(_OPTION, '"op", or a number such as "2"')
            keys.refuse(_OPTION, "trials recompute every second block")
            option = "2"
        techniques["checkpointing"] = f"every-{option}"
    return techniques


def _optimizer(keys: KeysOfFile) -> dict[str, Any]:
    keys.one_of("optimizer.name", ("AdamW", "Adam"))
    if keys["optimizer.name"] == "Adam":
        keys.refuse("optimizer.name", "trials have AdamW, with as many numbers of state")
    fusion = _FUSIONS[str(keys.one_of("optimizer.implementation", tuple(_FUSIONS)))]
    if keys.says("optimizer.fused"):
        fusion = "kernel" if keys.flag("optimizer.fused") else "foreach"
    if keys.flag("optimizer.early_step_in_backward"):
        fusion = "backward"
    return {"optimizer": "adamw", "optimizer_fusion": fusion}


def _schedule(keys: KeysOfFile) -> str:
    if keys["lr_scheduler.decay_ratio"] == 0:
        return "constant"
    if keys["lr_scheduler.decay_type"] != "cosine":
        keys.refuse("lr_scheduler.decay_type", "trials have cosine, the nearest of two schedules")
    return "cosine"


# -- model and data --------------------------------------------------------------------------------


@cache
def _models() -> Mapping[str, Any]:
    text = resources.files(__package__).joinpath("torchtitan_models.toml").read_text("utf-8")
    return tomllib.loads(text)


def _model(keys: KeysOfFile) -> dict[str, Any]:
    """Returns the model by its sizes; one with the code of transformers by its name."""
    if name := keys.text("hf_transformers.model"):
        return {"model": name}
    family, flavor = keys.text("model.name") or "", keys.text("model.flavor") or ""
    if keys.options.get("model") is not None:
        return {}
    for ending in _OTHER_ATTENTION:
        if flavor.endswith(ending):
            flavor = flavor.removesuffix(ending)
            keys.refuse("model.flavor", "trials have scaled_dot_product_attention")
    flavors = _models().get(family)
    if flavors is None:
        raise InvalidInput(
            f"{keys.file} has model.name: {family!r:.60}, whose sizes autotune does not know",
            hint=suggestion(family, _models(), otherwise="name a model of these sizes by --model"),
        )
    if flavor not in flavors or flavor == "common":
        known = [one for one in flavors if one != "common"]
        raise InvalidInput(
            f"{keys.file} has model.flavor: {flavor!r:.60}, whose sizes autotune does not know",
            hint=suggestion(
                flavor,
                known,
                otherwise=f"use one of {', '.join(known)}, or name a model of these sizes by "
                "--model",
            ),
        )
    content = {**flavors["common"], **flavors[flavor]}
    if content["model_type"] == "deepseek_v3":
        content.setdefault("q_lora_rank", None)
    return {"model": model_name(content), "model_config": content}


def _dataset(keys: KeysOfFile) -> dict[str, Any]:
    if path := keys.text("training.dataset_path"):
        return {"dataset": path}
    name = keys.text("training.dataset") or ""
    if name not in _DATASETS:
        keys.refuse("training.dataset", "a name of torchtitan: give --dataset")
    return dict(_DATASETS.get(name, {}))


TRAINER = Trainer(
    table=load_table("torchtitan"),
    signs=frozenset(("job", "parallelism", "lr_scheduler", "activation_checkpoint", "training")),
    suffixes=(".toml",),
    read=read,
)
