"""Loads the files of `write_exports.py` with the trainer itself.

    python load_exports.py FOLDER torchtitan-0.3

Runs where the trainer is installed (autotune need not be). Every value must come out of the
trainer's own parser as it was written, and where the trainer can be taken apart on a CPU, do what
was asked: learning rates step by step from its own scheduler, the optimizer that it builds, which
blocks of a small model it checkpoints or compiles.
"""

import contextlib
import importlib
import json
import math
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import torch
import torch._functorch.config
from torch import nn

LAYERS = 5
WRAPPED = {
    "none": [],
    "block": [0, 1, 2, 3, 4],
    "every-2 from block 1 on": [1, 3],
    "every-4 from block 3 on": [3],
    "selective-2": [0, 1, 2, 3, 4],
}
FUSIONS = {
    "none": (False, False),
    "foreach": (True, False),
    "kernel": (False, True),
    "backward": (False, False),
}


class Model(nn.Module):
    """A model as torchtitan needs it, with blocks by name in `layers`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(index): nn.Linear(4, 4) for index in range(LAYERS)})


def torchtitan_0_3(folder, asked):
    from torchtitan.components.quantization import float8
    from torchtitan.config import ConfigManager

    sys.modules.pop("autotune_export", None)
    importlib.invalidate_caches()
    arguments = asked["command"].partition("torchtitan.train ")[2].split()
    done = asked["done"]
    float8.has_cuda_capability = lambda *_: (
        True
    )  # asked before the model is converted; no product is computed here
    config = ConfigManager().parse_args(arguments)
    model = Model()
    if config.activation_checkpoint is not None:
        config.activation_checkpoint.build(dump_folder="").apply(model)
    check_blocks(model, done)
    optimizers = config.optimizer.build(model_parts=[model])
    check_optimizer(optimizers.optimizers[0], done)
    schedulers = config.lr_scheduler.build(
        optimizers=optimizers, training_steps=config.training.steps
    )
    check_rates(optimizers.optimizers[0], schedulers, asked)
    loss = config.loss.build(compile_config=config.compile)
    assert (
        type(loss).__name__
        == {"full": "CrossEntropyLoss", "chunked": "ChunkedLossWrapper"}[done["loss"]]
    )
    assert not hasattr(loss, "num_chunks") or config.training.seq_len % loss.num_chunks == 0
    attention = {type(one).__qualname__.partition(".")[0] for one in inner_attentions(config)}
    assert attention == {{"flex": "FlexAttention", "flash": "VarlenAttention"}[done["attention"]]}
    assert config.compile.enable == (done["compile"] == "block")
    in_float8 = [name.endswith("lm_head") for name in float8_layers(config.model_spec.model)]
    assert (in_float8 != []) == (done["precision"] == "fp8 by rows")
    assert not any(in_float8)
    check_training(config.training, config.debug, done)


def inner_attentions(config):
    return [layer.attention.inner_attention for layer in config.model_spec.model.layers]


def float8_layers(model):
    from torchtitan.components.quantization.float8 import Float8Linear

    return [name for name, *_ in model.traverse(Float8Linear.Config)]


def torchtitan_0_2(folder, asked):
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import activation_checkpoint, utils
    from torchtitan.models.attention import ScaledDotProductAttentionWrapper

    done = asked["done"]
    arguments = asked["command"].partition("torchtitan.train ")[2].split()
    config = ConfigManager().parse_args(arguments)
    check_values(tomllib.loads((folder / "autotune.toml").read_text()), config)
    sys.modules.pop("autotune_attention", None)
    importlib.invalidate_caches()
    importlib.import_module(config.experimental.custom_import)
    backends = [one.name for one in ScaledDotProductAttentionWrapper.sdpa_backends]
    assert len(backends) == (4 if done["attention"] == "auto" else 1)
    assert done["attention"] == "auto" or backends[0].lower().startswith(done["attention"])
    model, options = Model(), config.activation_checkpoint
    if options.mode != "none":
        activation_checkpoint._layer_sac_count = 0
        activation_checkpoint.apply_ac(model, options, model_compile_enabled=config.compile.enable)
    check_blocks(model, done)
    optimizers = build_optimizers([model], config.optimizer, parallel_dims=NoParallelism())
    assert type(optimizers).__name__ == (
        "OptimizersInBackwardContainer"
        if done["optimizer_fusion"] == "backward"
        else "OptimizersContainer"
    )
    check_optimizer(optimizers.optimizers[0], done)
    schedulers = build_lr_schedulers(optimizers, config.lr_scheduler, config.training.steps)
    check_rates(optimizers.optimizers[0], schedulers, asked)
    if config.training.mixed_precision_param == "bfloat16":
        autocast = utils.maybe_enable_amp(NoParallelism(), "bfloat16", "cpu")
        assert (type(autocast).__name__, autocast.fast_dtype) == ("autocast", torch.bfloat16)
    check_training(config.training, config.debug, done)


class NoParallelism:
    ep_enabled = pp_enabled = fsdp_enabled = tp_enabled = False


def check_values(written, config):
    for name, value in written.items():
        read = getattr(config, name)
        if isinstance(value, dict):
            check_values(value, read)
        else:
            assert read == value, (name, value, read)


def check_blocks(model, done):
    wrapped = [
        int(name)
        for name, one in model.layers.named_children()
        if type(one).__name__ == "CheckpointWrapper"
    ]
    budget = torch._functorch.config.activation_memory_budget
    torch._functorch.config.activation_memory_budget = 1.0
    assert wrapped == WRAPPED[done["checkpointing"]], wrapped
    assert budget == done["memory_budget"]


def check_optimizer(optimizer, done):
    (group,) = optimizer.param_groups
    assert type(optimizer) is torch.optim.AdamW
    assert (tuple(group["betas"]), group["eps"]) == ((0.9, 0.999), 1e-8)
    assert group["weight_decay"] == done["weight_decay"]
    assert (group["foreach"], group["fused"]) == FUSIONS[done["optimizer_fusion"]]


def check_rates(optimizer, schedulers, asked):
    for step, wanted in enumerate(asked["rates"]):
        rate = optimizer.param_groups[0]["lr"]
        assert math.isclose(rate, wanted, rel_tol=1e-9), (step, rate, wanted)
        optimizer.step()
        schedulers.step()


def check_training(training, debug, done):
    limit = math.inf if done["gradient_clipping"] is None else done["gradient_clipping"]
    found = (
        training.local_batch_size,
        training.global_batch_size,
        training.seq_len,
        training.steps,
    )
    wanted = [
        done[name] for name in ("micro_batch_size", "global_batch", "sequence_length", "steps")
    ]
    assert [*found] == wanted
    assert (training.max_norm, debug.seed) == (limit, done["seed"])


def axolotl_0_19(folder, asked):
    import yaml
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.schemas.config import AxolotlInputConfig

    written = yaml.safe_load((folder / "axolotl.yaml").read_text())
    config = AxolotlInputConfig(**DictDefault(written).to_dict())
    for key, value in written.items():
        assert is_as_written(value, getattr(config, key)), (key, value, getattr(config, key))
    assert not set(written) - set(type(config).model_fields), (
        "axolotl ignores what it does not know"
    )
    done = asked["done"]
    assert config.micro_batch_size * config.gradient_accumulation_steps == done["global_batch"]
    if done["checkpointing"] == "selective":
        check_selective(config.selective_checkpointing)
    check_named_optimizer(config, done)


def is_as_written(value, read):
    """Returns whether every written key was read; axolotl adds its defaults."""
    if isinstance(value, list):
        return len(value) == len(read) and all(map(is_as_written, value, read))
    if isinstance(value, dict):
        known = read if isinstance(read, dict) else read.model_dump()
        return all(is_as_written(one, known[name]) for name, one in value.items())
    return getattr(read, "value", read) == value


NAMED: dict[str, tuple[str, dict[str, object]]] = {
    "adamw": ("torch.optim.adamw", {}),
    "sgd without momentum": ("torch.optim.sgd", {}),
    "adafactor-fixed-rate": (
        "transformers.optimization",
        {"scale_parameter": False, "relative_step": False},
    ),
    "adamw-8bit": ("torchao.optim.adam", {"bf16_stochastic_round": False}),
    "adamw-4bit": ("torchao.optim.adam", {"bf16_stochastic_round": False}),
    "paged-adamw": ("bitsandbytes.optim.adamw", {"is_paged": True, "optim_bits": 32}),
    "paged-adamw-8bit": ("bitsandbytes.optim.adamw", {"is_paged": True, "optim_bits": 8}),
}


def check_named_optimizer(config, done):
    """Check the name with transformers, to which axolotl passes the names of optimizers."""
    if config.optimizer == "ao_adamw_fp8":
        return  # its own name for torchao.optim.AdamWFp8, which it makes itself
    from transformers import Trainer, TrainingArguments

    arguments = {
        name: getattr(config, name)
        for name in (
            "learning_rate",
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "max_grad_norm",
        )
        if getattr(config, name) is not None
    }
    made = TrainingArguments(output_dir="out", optim=config.optimizer, use_cpu=True, **arguments)
    assert (made.max_grad_norm or None) == done["gradient_clipping"]
    optimizer, keywords = Trainer.get_optimizer_cls_and_kwargs(made)
    module, wanted = NAMED[done["optimizer"]]
    assert optimizer.__module__ == module, optimizer
    assert all(keywords[name] == value for name, value in wanted.items()), keywords
    assert keywords["lr"] == done["learning_rate"]
    assert "momentum" not in keywords
    assert keywords.get("fused", False) == (done["optimizer_fusion"] == "kernel")
    if "adamw" in done["optimizer"]:
        assert (keywords["betas"], keywords["eps"]) == ((0.9, 0.999), 1e-8)


def check_selective(options):
    """Check that axolotl saves exactly these operators, which it selects by parts of names."""
    from axolotl.monkeypatch.selective_checkpointing import SacPolicyState, build_sac_policy
    from torch.utils.checkpoint import CheckpointPolicy

    policy = build_sac_policy(options.save, SacPolicyState(), options.save_sliding_window, None)
    aten = torch.ops.aten
    kept = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm, aten._scaled_mm)
    kept += (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention)
    kept += (
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
    )
    for packet in kept:
        assert policy(None, packet.default) is CheckpointPolicy.MUST_SAVE, packet
    for packet in (
        aten.silu,
        aten.gelu,
        aten.add,
        aten.mul,
        aten.native_layer_norm,
        aten._softmax,
        aten.rsqrt,
    ):
        operator = getattr(packet, packet.overloads()[0])
        assert policy(None, operator) is CheckpointPolicy.PREFER_RECOMPUTE, packet


TRAINERS = {
    "torchtitan-0.3": (torchtitan_0_3, "torchtitan"),
    "torchtitan-0.2": (torchtitan_0_2, "torchtitan"),
    "axolotl-0.19": (axolotl_0_19, "axolotl"),
}


def main(folder, trainer):
    load, package = TRAINERS[trainer]
    cases, failed = sorted((folder / trainer).iterdir()), 0
    for case in cases:
        sys.path.insert(0, str(case))
        try:
            with contextlib.chdir(case):
                load(case, json.loads((case / "asked.json").read_text()))
        except (
            Exception,
            SystemExit,
        ) as error:  # whatever a trainer raises, and tyro leaves the process
            failed += 1
            print(f"{case.name}: {type(error).__name__}: {error}")
        finally:
            sys.path.remove(str(case))
    print(
        f"{package} {version(package)}, torch {torch.__version__}: "
        f"{len(cases) - failed} of {len(cases)} as requested"
    )
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2]))
