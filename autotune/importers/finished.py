"""Makes an ImportedTraining of what an importer found, after the rules on configurations."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.errors import InvalidInput
from autotune.importers.imported import ImportedTraining, NotTaken
from autotune.importers.keys_of_file import KeysOfFile
from autotune.importers.several_devices import Plan, device_choices
from autotune.spec.config import (
    FULL_PRECISIONS,
    KERNELS_OF_16_BITS,
    QUANTIZED_WEIGHTS,
    LegalityContext,
    TrainingConfig,
    rule_violations,
)

_OPTIONS = {
    "model": "--model",
    "sequence_length": "--seq-len",
    "global_batch": "--global-batch",
}
"""{what every training has: the option that says it}."""
KERNEL_OF_ADAPTERS = "lora_mlp_kernel"
"""The key of axolotl by which its kernels of adapters are named."""
_LEFT_OUT = {
    "adapter_kernels": (KERNEL_OF_ADAPTERS, "trials have peft's layers, which keep more"),
    "offload": ("layer_offloading", "frozen layers of trials stay on the device"),
    "compile_mode": ("torch_compile_mode", "trials compile in the default mode"),
}
"""{technique: the key that asks for it, and what is done without} of what trains the same numbers.
"""
_MAKE_A_MODEL = ("model", "script", "layers", "width")
"""Settings of a request by which it has a model of its own."""
_OF_AUTOCAST = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}
"""{precision: the number format of frozen weights in 16 bits beside its adapters}."""


def finished(
    keys: KeysOfFile,
    *,
    workload: Mapping[str, Any],
    config: Mapping[str, Any],
    plan: Plan | None = None,
) -> ImportedTraining:
    """Returns the training, on the devices of `plan`.

    Raises InvalidInput for techniques that exclude one another here, and for a training whose
    model, length or batch neither the file nor an option says.
    """
    workload = {**workload, **_nodes(keys, workload)}
    told = {**workload, **keys.options}
    of_option = any(keys.options.get(name) is not None for name in _MAKE_A_MODEL)
    if of_option:
        told["model"] = "that of an option"
    for name, option in _OPTIONS.items():
        if told.get(name) is None and keys.options.get("script") is None:
            raise InvalidInput(
                f"{keys.file} does not say the {name.replace('_', ' ')} of its training",
                hint=f"give it by {option}",
            )
    at = LegalityContext(
        global_batch=told["global_batch"],
        clips_gradients=workload.get("gradient_clipping") is not None,
        drops_inputs_of_adapters=bool(workload.get("adapter_dropout")),
        adapters_begin_as_weights=workload.get("adapter_init") == "pissa",
        sequence_length=told["sequence_length"],
        devices=workload.get("devices_per_trial") or 1,
    )
    config = dict(config)
    if config["precision"] in FULL_PRECISIONS and config.get("attention") in KERNELS_OF_16_BITS:
        config["attention"] = "auto"  # the kernel is for 16-bit numbers
    if config.get("base_weights") in QUANTIZED_WEIGHTS and config["precision"] in FULL_PRECISIONS:
        config["precision"] = "bf16-mixed"
        keys.refuse("bf16", "trials multiply weights in 4 and 8 bits in bfloat16")
    if config.get("base_weights") in _OF_AUTOCAST.values():
        # In 16 bits; where nothing is under autocast, in the number format of what is trained.
        config["base_weights"] = _OF_AUTOCAST.get(config["precision"], "trained")
    if plan is not None and plan.tensor_parallel > 1 and config.pop("kernels", "none") != "none":
        keys.refuse(plan.key, "trials that split matrices have the model's own norms")
    later = {name: config.pop(name) for name in _LEFT_OUT if name in config}
    complete = {**TrainingConfig().to_dict(), **config}
    chosen = TrainingConfig(**{**config, **device_choices(keys, plan, complete, at)})
    if broken := rule_violations(chosen.to_dict(), replace(at, own=chosen)):
        raise InvalidInput(
            f"{keys.file} describes a training that autotune cannot do: {broken[0]}",
            hint="describe it by options instead: see autotune search --help",
        )
    for name, value in later.items():
        key, without = _LEFT_OUT[name]
        wanted = replace(chosen, **{name: value})
        if broken := rule_violations(wanted.to_dict(), replace(at, own=wanted)):
            keys.refuse(key, f"{without}: {broken[0]}")
        else:
            chosen = wanted
    return ImportedTraining(
        trainer=keys.table.title,
        file=keys.file.name,
        workload={
            name: value
            for name, value in workload.items()
            if value is not None and not (of_option and name in ("model", "model_config"))
        },
        config=chosen.to_dict(),
        taken=keys.taken(),
        without_effect=keys.without_effect(),
        not_taken=tuple(
            NotTaken(key=key, value=value, why=why)
            for key, (value, why) in keys.not_taken().items()
        ),
        defaults=keys.defaults(),
    )


def devices_of(keys: KeysOfFile, stated: int | None = None) -> int:
    """Returns the number of devices: of an option, of the file, of its launcher, or one."""
    given = keys.options.get("devices_per_trial")
    if given is not None:
        return int(given)
    if stated is None and keys.launcher is not None:
        stated = keys.launcher.whole_number("num_processes", least=1)
    return stated or 1


def _nodes(keys: KeysOfFile, workload: Mapping[str, Any]) -> dict[str, int | None]:
    """Returns the setting for the nodes that the devices of a training are on, if they are several.

    The trainer's own file says them, or its launcher; of a number of devices that is given beside
    the file they say nothing.
    """
    nodes: int = workload.get("nodes_per_trial") or 1
    if nodes == 1 and keys.launcher is not None:
        nodes = keys.launcher.whole_number("num_machines", least=1) or 1
    if keys.options.get("devices_per_trial") is not None or nodes == 1:
        return {"nodes_per_trial": None}
    devices = workload.get("devices_per_trial") or 1
    if devices % nodes:
        raise InvalidInput(
            f"{keys.file} has {devices} devices on {nodes} nodes, which cannot have as many each",
            hint="give the devices by --devices-per-trial, and the nodes by --nodes-per-trial",
        )
    return {"nodes_per_trial": nodes}
