"""forgather: the blocks of the template, read strictly, each as the YAML that it makes."""

import shlex
import textwrap

import yaml

from tests.exporters.readers.adapters import UNTRAINED
from tests.exporters.readers.devices import ONE_DEVICE
from tests.exporters.readers.key_table import check, defaults, load
from tests.exporters.readers.launcher import allocator_of
from tests.exporters.readers.named_rates import schedule_named

OPTIMIZERS = {
    "torch:optim.AdamW": ("adamw", {"betas": [0.9, 0.999], "eps": 1e-8}),
    "torchao.optim:AdamW8bit": ("adamw-8bit", {"betas": [0.9, 0.999], "eps": 1e-8}),
    "torchao.optim:AdamW4bit": ("adamw-4bit", {"betas": [0.9, 0.999], "eps": 1e-8}),
    "torchao.optim:AdamWFp8": ("adamw-fp8", {"betas": [0.9, 0.999], "eps": 1e-8}),
    "bitsandbytes.optim:PagedAdamW": ("paged-adamw", {"betas": [0.9, 0.999], "eps": 1e-8}),
    "bitsandbytes.optim:PagedAdamW8bit": (
        "paged-adamw-8bit",
        {"betas": [0.9, 0.999], "eps": 1e-8},
    ),
    "torch:optim.Adafactor": ("adafactor", {"eps": [1.1920928955078125e-07, 1e-3]}),
    "torch:optim.SGD": ("sgd", {"momentum": 0.9}),
    "forgather.ml.optim.adafactor:Adafactor": ("adafactor-fixed-rate", {}),
}
FLAGS = {"torch:optim.AdamW": {"foreach", "fused"}, "torch:optim.SGD": {"foreach", "fused"}}
FLAGS["torch:optim.Adafactor"] = {"foreach"}
DIRECTIVES = {
    "-- extends 'project.yaml'",
    "-- extends 'project.trainer_config'",
    "-- include 'experiment.trainer_config'",
    '-- set ns.config_name = "autotune"',
    "== super()",
}
HEADING = "#-------------------- experiment.trainer_config --------------------"


class Template(yaml.SafeLoader):
    """Load YAML with forgather's tags.

    `!lambda:module:name` and `!singleton:module:name@id` become `{"made by": ...}`.
    """


def _made(loader, suffix, node):
    return {"made by": suffix.partition("@")[0], **loader.construct_mapping(node, deep=True)}


Template.add_multi_constructor("!lambda:", _made)
Template.add_multi_constructor("!singleton:", _made)


def read(export, version):
    blocks = _blocks(export.files["autotune.yaml"])
    assert set(blocks) == {
        "config_metadata",
        "datacollator",
        "optimizer",
        "lr_scheduler",
        "trainer_definition",
        "trainer_args",
    }
    table = load("forgather")
    known = {**table["keys"], **(table["later"] if version == "later" else {})}
    written = blocks["trainer_args"]
    for key, value in written.items():
        check(key, value, known)
    assert set(written) == set(known), "a project may have set what is not said"
    assert written["resume_from_checkpoint"] is False
    assert blocks["lr_scheduler"] == {"lr_scheduler": None}
    values = {**defaults(table["later"]), **written}
    assert values["torch_compile_backend"] == "inductor"
    return {
        **_numbers(values, blocks),
        **_optimizer(blocks["optimizer"]["optimizer"], values),
        **_techniques(values),
        **UNTRAINED,
        **ONE_DEVICE,
    } | {"allocator": _allocator(export)}


def _blocks(text):
    """Returns {name of a block: its YAML}; other lines must be known directives or comments."""
    found, name = {}, None
    for line in text.splitlines():
        words = line.strip()
        if words.startswith("[") and line.endswith("]"):
            name = words[1:-1]
            found[name] = []
        elif words.startswith(("--", "==")):
            assert words in DIRECTIVES, words
        elif words and not words.startswith("##") and words != HEADING:
            found[name].append(line)
    return {name: _yaml(lines) for name, lines in found.items()}


def _yaml(lines):
    anchors = "tokenizer: &tokenizer its own\n"
    said = yaml.load(anchors + textwrap.dedent("\n".join(lines)), Loader=Template)
    return {name: value for name, value in said.items() if name != "tokenizer"}


def _numbers(values, blocks):
    collator = blocks["datacollator"]["data_collator"]
    assert (collator["padding"], collator["truncation"], collator["tokenizer"]) == (
        "max_length",
        True,
        "its own",
    )
    return {
        "micro_batch_size": values["per_device_train_batch_size"],
        "global_batch": values["per_device_train_batch_size"]
        * values["gradient_accumulation_steps"],
        "sequence_length": collator["max_length"],
        "steps": values["max_steps"],
        "seed": values["seed"],
        "gradient_clipping": values["max_grad_norm"],
        **schedule_named(
            values["lr_scheduler_type"],
            warmup=values["warmup_steps"],
            steps=values["max_steps"],
            keywords=values["lr_scheduler_kwargs"],
        ),
    }


def _optimizer(said, values):
    said = dict(said)
    made_by = said.pop("made by")
    name, settings = OPTIMIZERS[made_by]
    flags = {flag: said.pop(flag) for flag in FLAGS.get(made_by, ())}
    found = {
        "optimizer": name,
        "learning_rate": said.pop("lr"),
        "weight_decay": said.pop("weight_decay"),
    }
    assert said == settings
    fusion = "none"
    if flags.get("foreach"):
        fusion = "foreach"
    elif flags.get("fused"):
        fusion = "kernel"
    if values["fuse_optim_with_backward"]:
        assert fusion == "none"
        assert (values["gradient_accumulation_steps"], values["max_grad_norm"]) == (1, None), (
            "forgather asserts it"
        )
        fusion = "backward"
    return {**found, "optimizer_fusion": fusion}


def _techniques(values):
    precision = {
        ("float32", "highest", None, None): "fp32",
        ("float32", "high", None, None): "tf32",
        ("bfloat16", "highest", None, None): "bf16-true",
        ("float32", "highest", "bf16", None): "bf16-mixed",
        ("float32", "highest", "fp16", None): "fp16-mixed",
        ("float32", "highest", "bf16", "tensorwise"): "fp8, the head as well",
    }
    mixed = None if values["mixed_precision"] == "no" else values["mixed_precision"]
    kinds = (
        values["default_dtype"],
        values["float32_matmul_precision"],
        mixed,
        values["fp8_recipe"],
    )
    return {
        "precision": precision[kinds],
        "checkpointing": "block" if values["gradient_checkpointing"] else "none",
        "compile": "model" if values["torch_compile"] else "none",
        # forgather asks whether the value is true, so that 0.0 sets nothing.
        "memory_budget": values["activation_memory_budget"] or 1.0,
        "compile_mode": values["torch_compile_mode"],
        "attention": values["sdpa_backend"] or "auto",
        "activation_offload": "cpu" if values["enable_activation_offloading"] else "none",
    }


def _allocator(export):
    words = shlex.split(export.command)
    return allocator_of(dict(word.split("=", 1) for word in words if "_CONF=" in word))
