"""`training_args.json` alone: a note of the export names what it lacks of the configuration."""

import json

import pytest
import torch
import transformers.modeling_utils

from autotune.exporters import launch
from autotune.exporters.transformers import write
from autotune.shipped.adafactor_fixed_rate import AdafactorFixedRate
from autotune.spec.config import TrainingConfig
from tests.exporters.readers.hugging_face import (
    autocast_by_arguments,
    checkpointing_of,
    parse_json,
    tiny_llama,
    workload_settings,
)
from tests.exporters.readers.transformers import optimizer_of
from tests.exporters.recipes import configurations, recipe


@pytest.mark.slow
@pytest.mark.parametrize("config", configurations().values(), ids=configurations())
def test_what_the_json_alone_lacks_is_named_in_a_note(config):
    check_note(recipe(config), "5")


@pytest.mark.parametrize("value", ["every-2", "every-4"])
def test_before_transformers_5_16_the_json_lacks_checkpointing_of_some_layers(value):
    check_note(recipe(TrainingConfig(checkpointing=value, micro_batch_size=8)), "4.57")


def check_note(asked, version):
    export = write(asked, version)
    done, wanted = json_settings(export, asked), asked.settings()
    lacking = {
        f"{name} {wanted[name]} ({value} instead)"
        for name, value in done.items()
        if value != wanted[name]
    }
    named = export.notes[0].partition("alone lack: ")[2].partition("; ")[0].split(", ")
    assert lacking | {"sequence_length 128 (cut by your script)"} == set(named)


WITHOUT_KEY = ("feed_forward", "gradient_accumulation_dtype", "activation_budget", "offload")


def json_settings(export, asked):
    args, config = parse_json(export.files["training_args.json"]), asked.config
    # What the launcher sets is read in the contract of trl, whose launcher is the same.
    assert export.files.get(launch.FILE) == (
        launch.launcher(asked) if launch.is_needed(config) else None
    )
    is_tf32 = json.loads(export.files["training_args.json"])["tf32"]
    model = tiny_llama(dtype=getattr(torch, json.loads(export.files["model_kwargs.json"])["dtype"]))
    precision = autocast_by_arguments(args, next(model.parameters()).dtype)
    return {
        **{name: getattr(TrainingConfig(), name) for name in WITHOUT_KEY},
        **workload_settings(args),
        "precision": "tf32" if is_tf32 and precision == "fp32" else precision,
        "compile": "model" if args.torch_compile else "none",
        "loss": "full",
        "activation_offload": "none",
        "adapter": "none",
        "checkpointing": checkpointing_by_json(args, model),
        **optimizer_by_json(args, model),
    }


def checkpointing_by_json(args, model):
    options = dict(args.gradient_checkpointing_kwargs or {})
    every = options.pop("every_n_layers", 1)
    return checkpointing_of(
        model,
        [transformers.modeling_utils],
        lambda: (
            args.gradient_checkpointing
            and model.activation_checkpointing_enable(
                every_n_layers=every, activation_checkpointing_kwargs=options
            )
        ),
    )


def optimizer_by_json(args, model):
    optimizer = transformers.Trainer(model, args).create_optimizer()
    by_torch = optimizer.param_groups[0].get(
        "foreach", False
    ) is None and not optimizer.defaults.get("fused")
    optimizer.param_groups[:] = optimizer.param_groups[
        :1
    ]  # the second leaves out norms and biases, as its note says
    done = optimizer_of(optimizer, adafactor="adafactor-fixed-rate")
    if type(optimizer).__module__.startswith("bitsandbytes."):
        assert optimizer.is_paged
        bits = optimizer.args.optim_bits
        done["optimizer"] = "paged-adamw" if bits == 32 else f"paged-adamw-{bits}bit"
    return {
        **done,
        **({"optimizer_fusion": "foreach"} if by_torch else {}),
    }  # torch's own choice on CUDA


def test_transformers_adafactor_is_adafactor_fixed_rate():
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2))
    optimizers = [
        AdafactorFixedRate([ours], lr=0.01),
        transformers.optimization.Adafactor(
            [theirs], lr=0.01, weight_decay=0.01, scale_parameter=False, relative_step=False
        ),
    ]
    for step in range(5):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = torch.sin(torch.arange(12.0) * (step + 1)).view(3, 4)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
