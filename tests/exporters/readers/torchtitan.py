"""torchtitan: the module by its syntax tree and a key table, the TOML file as it is imported."""

import ast
import math
import shlex
import tomllib

import torch

from tests.exporters.readers import imported
from tests.exporters.readers.adapters import UNTRAINED
from tests.exporters.readers.devices import ONE_DEVICE, by_fsdp2
from tests.exporters.readers.key_table import check, defaults, load
from tests.exporters.readers.launcher import process_settings

IMPLEMENTATIONS = {"for-loop": "none", "foreach": "foreach", "fused": "kernel"}


def read(export, version):
    tokens = shlex.split(export.command)
    assert tokens[0] == "torchrun"
    processes = int(tokens[1].removeprefix("--nproc_per_node="))
    assert ("autotune_launch.py" in tokens) == ("autotune_launch.py" in export.files)
    process = process_settings(export)
    done = _read_module(export, tokens) if version == "0.3" else _read_toml(export, tokens)
    # What torchtitan sets by itself, the launcher must leave at torch's default.
    assert process["memory_budget"] == 1.0
    assert process["attention"] == "auto"
    if process["tf32"]:
        assert done["precision"] in ("fp32", "tf32")
        done["precision"] = "tf32"
    assert done["devices_per_trial"] == processes
    of_process = {name: process[name] for name in ("allocator", "compile_mode")}
    return {**done, **of_process, "activation_offload": "none"}


def _devices(values):
    replicas, shards, split = (
        values[f"parallelism.{kind}_degree"]
        for kind in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
    )
    reshards = {"always": True, "never": False}[values["parallelism.fsdp_reshard_after_forward"]]
    done = {**ONE_DEVICE, "sharding": "ddp" if replicas > 1 else "none"}
    if shards > 1:
        done = by_fsdp2(
            reshards=reshards,
            groups=replicas,
            group_size=shards,
            reduced_in=torch.float32,
            on_host=False,
            devices=replicas * shards,
        )
    return {
        **done,
        "devices_per_trial": replicas * shards * split,
        "tensor_parallel": split,
        "offload": "all" if values["training.enable_cpu_offload"] else "none",
    }


def _read_module(export, tokens):
    assert tokens[-4:] == ["--module", "autotune_export", "--config", "autotune"]
    table = load("torchtitan_0_3")
    values, calls = _assignments(export.files["autotune_export.py"], table)
    values = {**defaults(table["keys"]), **values}
    assert values["training.disable_cuda_graphs"] is True, "a trial replays no CUDA graphs"
    adamw, checkpoint = calls["optimizer"][1], calls["activation_checkpoint"]
    adamw = {**defaults(table["calls"]["default_adamw"]), **adamw}
    assert (tuple(adamw["betas"]), adamw["eps"]) == ((0.9, 0.999), 1e-8)
    model = {**defaults(table["calls"]["model_registry"]), **calls["model_spec"][1]}
    budget = {**defaults(table["calls"]["MemoryBudgetAC.Config"]), **checkpoint[1]}["memory_budget"]
    kinds = {
        None: "none",
        "FullAC.Config": "block",
        "SelectiveAC.Config": "selective-2",
        "MemoryBudgetAC.Config": "none",
    }
    losses = {"CrossEntropyLoss.Config": "full", "ChunkedLossWrapper.Config": "chunked"}
    return {
        **_common(values),
        "precision": _precision_by_fsdp2(values, model["converters"]),
        **_adapter(model["converters"]),
        "optimizer": "adamw",
        "learning_rate": adamw["lr"],
        "weight_decay": adamw["weight_decay"],
        "optimizer_fusion": IMPLEMENTATIONS[values["optimizer.implementation"]],
        "checkpointing": kinds[checkpoint[0]],
        "memory_budget": budget if checkpoint[0] == "MemoryBudgetAC.Config" else 1.0,
        "attention": {"flex": "flex", "varlen": "flash"}[model["attn_backend"]],
        "loss": losses[calls["loss"][0]],
    }


def _assignments(text, table):
    """Returns ({key: value}, {key: (name of the call, {argument: value})}) of `autotune()`.

    Fails if the function contains anything else.
    """
    tree = ast.parse(text)
    imported = {
        name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names
    }
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert function.name == "autotune"
    first, *assigned, last = function.body
    assert ast.unparse(first) == "c = llama3_debugmodel()"
    assert ast.unparse(last) == "return c"
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} - {"c", "float"}
    assert used == imported
    values, calls = {}, {}
    for node in assigned:
        assert isinstance(node, ast.Assign)
        (target,) = node.targets
        key = ast.unparse(target).removeprefix("c.")
        if key in table["objects"]:
            calls[key] = _call(node.value, table)
            assert calls[key][0] in table["objects"][key]
        else:
            values[key] = _value(node.value)
            check(key, values[key], table["keys"])
    assert set(calls) == set(table["objects"])
    return values, calls


def _call(node, table):
    if isinstance(node, ast.Constant):
        assert node.value is None
        return None, {}
    name, known = ast.unparse(node.func), table["calls"][ast.unparse(node.func)]
    arguments = {}
    for keyword in node.keywords:
        if isinstance(keyword.value, ast.Call):
            inner, _ = _call(keyword.value, table)
            assert keyword.arg in known
            arguments[keyword.arg] = inner
        elif isinstance(keyword.value, ast.List) and keyword.arg == "converters":
            arguments[keyword.arg] = [_call(one, table) for one in keyword.value.elts]
        else:
            arguments[keyword.arg] = _value(keyword.value)
            check(keyword.arg, arguments[keyword.arg], known)
    return name, arguments


def _value(node):
    return math.inf if ast.unparse(node) == "float('inf')" else ast.literal_eval(node)


def _adapter(converters):
    adapters = [settings for name, settings in converters or () if name == "LoRAConverter.Config"]
    if not adapters:
        return UNTRAINED
    [settings] = adapters
    layers = settings["target_modules"]
    assert layers in (["wqkv", "wo"], ["wqkv", "wo", "w1", "w2", "w3"])
    return {
        **UNTRAINED,
        "adapter": "lora",
        "adapter_rank": settings["rank"],
        "adapter_alpha": settings["alpha"],
        "adapter_targets": "attention" if len(layers) == 2 else "all-linear",
    }


def _precision_by_fsdp2(values, converters):
    kinds = (values["training.dtype"], values["training.mixed_precision_param"])
    precision = {
        ("float32", "float32"): "fp32",
        ("float32", "bfloat16"): "bf16-mixed by FSDP2",
        ("bfloat16", "bfloat16"): "bf16-true",
    }[kinds]
    converters = [one for one in converters or () if one[0] != "LoRAConverter.Config"]
    if not converters:
        return precision
    ((name, options),) = converters
    assert name == "Float8LinearConverter.Config"
    assert options["filter_fqns"] == ["lm_head"]
    assert options["model_compile_enabled"] == values["compile.enable"]
    assert precision == "bf16-mixed by FSDP2"
    return {"rowwise": "fp8 by rows"}[options["recipe_name"]]


def _read_toml(export, tokens):
    assert tokens[-2:] == ["--job.config_file", "autotune.toml"]
    known = load("torchtitan_0_2")["keys"]
    written = dict(_flat(tomllib.loads(export.files["autotune.toml"])))
    for key, value in written.items():
        check(key, value, known)
    values = {**defaults(known), **written}
    assert (values["optimizer.beta1"], values["optimizer.beta2"], values["optimizer.eps"]) == (
        0.9,
        0.999,
        1e-8,
    )
    if values["model.converters"]:
        assert values["quantize.linear.float8.recipe_name"] is None, "tensorwise is the default"
        assert values["quantize.linear.float8.filter_fqns"] == ["output"], "the head is in bfloat16"
    done = imported.read("torchtitan", export)
    done["attention"] = _kernels(export, values["experimental.custom_import"])
    weight_decay = values["optimizer.weight_decay"]
    return imported.merged(_common(values), {"weight_decay": weight_decay}, done)


def _flat(table, prefix=""):
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _kernels(export, name):
    body = ast.parse(export.files[f"{name}.py"]).body
    assigned = body[-1]
    assert ast.unparse(assigned.targets[0]) == "ScaledDotProductAttentionWrapper.sdpa_backends"
    names = {
        "FLASH_ATTENTION": "flash",
        "EFFICIENT_ATTENTION": "efficient",
        "MATH": "math",
        "CUDNN_ATTENTION": "cudnn",
    }
    kernels = [names[element.attr] for element in assigned.value.elts]
    return "auto" if set(kernels) == set(names.values()) else kernels[0]


def _common(values):
    schedules = {(0.0, "linear", 0.0): "constant", (None, "cosine", 0.1): "cosine"}
    words = ("decay_ratio", "decay_type", "min_lr_factor")
    steps, warmup = values["training.steps"], values["lr_scheduler.warmup_steps"]
    assert values["lr_scheduler.total_steps"] == max(steps, warmup), (
        "torchtitan would cut the warm-up"
    )
    assert values["compile.components"] == ["model"], "a trial does not compile the loss"
    clipping = values["training.max_norm"]
    return {
        "micro_batch_size": values["training.local_batch_size"],
        "global_batch": values["training.global_batch_size"],
        "sequence_length": values["training.seq_len"],
        "steps": steps,
        "seed": values["debug.seed"],
        "gradient_clipping": None if clipping == math.inf else clipping,
        "schedule": schedules[tuple(values[f"lr_scheduler.{word}"] for word in words)],
        "learning_rate_warmup_steps": warmup,
        "compile": "block" if values["compile.enable"] else "none",
        **_devices(values),
    }
