"""What Unsloth's script asks for, by a table of the arguments of its functions.

Unsloth cannot be imported without a GPU: what it makes of them is what its source says. trl's part
is parsed by trl itself.
"""

import ast
import functools
import json

from trl import SFTConfig

from autotune.exporters.adapters import EXPERT_WEIGHTS
from autotune.exporters.unsloth_script import FILE
from autotune.system.allocator_settings import for_any_torch
from tests.exporters.readers.adapters import NOTHING_BESIDE, UNTRAINED, start_of
from tests.exporters.readers.devices import ONE_DEVICE
from tests.exporters.readers.hugging_face import (
    FOLDER,
    optimizer_by_arguments,
    workload_settings,
)
from tests.exporters.readers.key_table import load

CALLS = load("unsloth")["calls"]
TARGETS = {
    ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"): "all-linear",
    ("k_proj", "o_proj", "q_proj", "v_proj"): "attention",
}


def read(export, version):
    assert version == "2026.10"
    text = export.files[FILE]
    constants = constants_of(text)
    model = with_defaults(constants["MODEL"], CALLS["from_pretrained"])
    adapter = constants["ADAPTER"]
    assert {"optim", "padding_free", "bf16", "fp16"} <= set(constants["TRAINING"]), (
        "Unsloth's own are not those of trl"
    )
    args = arguments(json.dumps(constants["TRAINING"]))
    assert model["full_finetuning"] == (not adapter)
    assert ("get_peft_model" in text) == bool(adapter)
    assert model["max_seq_length"] == args.max_length
    assert model["offload_embedding"] is False, "it would move it where memory is tight"
    assert args.padding_free is False
    assert text.index("os.environ") < text.index("from unsloth") < text.index("from trl")
    return {
        **ONE_DEVICE,
        **workload_settings(args),
        **optimizer_by_arguments(args),
        **adapter_of(model, adapter),
        "precision": precision(model, adapter, args),
        "checkpointing": checkpointing(model, adapter, args),
        "loss": "chunked",
        "allocator": allocator_of(text),
        "sequence_length": args.max_length,
    }


def allocator_of(text):
    """Returns the kind of segments that it sets for any torch."""
    for expandable, allocator in ((True, "expandable"), (False, "default")):
        variables = for_any_torch(expandable=expandable).items()
        if all(f'os.environ["{name}"] = "{value}"\n' in text for name, value in variables):
            return allocator
    raise AssertionError("Unsloth turns expandable segments on, unless a variable says otherwise")


def constants_of(text):
    """Returns {name: value} of what the script assigns as a literal."""
    return {
        ast.unparse(statement.targets[0]): ast.literal_eval(statement.value)
        for statement in ast.parse(text).body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict)
    }


def with_defaults(given, known):
    assert set(given) <= set(known), set(given) - set(known)
    return {**known, **given}


@functools.cache
def arguments(text):
    known = {"use_cpu": True, "report_to": "none"}
    return SFTConfig(**{**json.loads(text), **known, "output_dir": FOLDER})


def precision(model, adapter, args):
    assert not (args.bf16 and args.fp16)
    if model["dtype"] == "float16":
        assert args.fp16, "it would raise TypeError, or choose itself"
        return "fp16-mixed"
    assert model["dtype"] == "bfloat16"
    if adapter or model["float32_mixed_precision"]:
        assert args.bf16, "it would turn it on by itself"
        return "bf16-mixed"
    assert not args.bf16, "bfloat16 weights are trained without autocast"
    return "bf16-true"


def adapter_of(model, adapter):
    if not adapter:
        return UNTRAINED
    said = with_defaults(adapter, CALLS["get_peft_model"])
    whole = tuple(said["modules_to_save"] or ())
    assert set(whole) <= {"embed_tokens", "lm_head"}, "it would raise TypeError"
    base = "fp16" if model["dtype"] == "float16" else "bf16"
    if model["load_in_4bit"] or model["load_in_8bit"]:
        base = "nf4" if model["load_in_4bit"] else "int8 by bitsandbytes"
    return {
        "adapter": "dora" if said["use_dora"] else "lora",
        "adapter_rank": said["r"],
        # Its own kernels: unsloth/models/llama.py, patch_peft_model.
        "adapter_kernels": "none" if said["use_dora"] or said["lora_dropout"] else "fused",
        "adapter_targets": targets_of(said),
        "base_weights": base,
        **NOTHING_BESIDE,
        "adapter_dropout": said["lora_dropout"],
        "adapter_alpha": said["lora_alpha"],
        "adapter_scaling": "rslora" if said["use_rslora"] else "standard",
        "adapter_init": start_of(said["init_lora_weights"]),
        "modules_to_save": whole,
        "modules_to_save_dtype": "adapter",  # all that is trained is in float32
    }


def targets_of(said):
    """Returns which layers get adapters; it finds experts itself unless it is told which."""
    targets, experts = TARGETS[tuple(sorted(said["target_modules"]))], said["target_parameters"]
    assert experts is not None
    if experts:
        assert (targets, tuple(experts)) == ("all-linear", EXPERT_WEIGHTS)
        return "experts"
    return targets


def checkpointing(model, adapter, args):
    wanted = model["use_gradient_checkpointing"]
    assert adapter.get("use_gradient_checkpointing", wanted) is wanted
    assert args.gradient_checkpointing is wanted, "the trainer's own would count"
    return "block" if wanted else "none"
