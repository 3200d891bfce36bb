"""forgather: a template for an experiment of a project, in its format of Jinja over YAML.

The template extends the project's `project.yaml`; blocks in brackets replace those of the same
name. Every key that has an effect is written, also at its default, because the blocks of the
project may have set it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from autotune.exporters.adapters import left_to_script, packages
from autotune.exporters.devices import Closest
from autotune.exporters.export import Export, Target
from autotune.exporters.named_schedule import named_schedule, warmup_reasons
from autotune.exporters.reasons import KNOWN, MADE_BY_CLASS, Reason, Table, reasons_in
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import answers_note, user_script_note
from autotune.spec.config import CUDA_GRAPHS
from autotune.spec.optimizers import OPTIMIZERS, OptimizerFacts
from autotune.system.allocator_settings import assignments

FILE = "autotune.yaml"
_COLLATOR = "DataCollatorForCausalLM"


def write(recipe: Recipe, version: str) -> Export:
    closest = Closest(recipe, "forgather", {**MADE_BY_CLASS, "compile_mode": CUDA_GRAPHS})
    closest.use_torch("forgather has no DeepSpeed")
    closest.use_one_device("forgather's trainer shares out nothing among devices but layers")
    closest.leave_out_offload("forgather moves activations to the host, and nothing else")
    config = closest.config
    closest.lacks(reasons_in({"precision": _PRECISIONS[version], **_LACKING}, config))
    closest.lacks(
        left_to_script(config, recipe.workload, before="your project's model block returns it")
    )
    closest.lacks(warmup_reasons(closest.recipe))
    recipe, effective = closest.recipe, closest.effective()
    command = f"cp {FILE} YOUR-PROJECT/templates/experiments/ && cd YOUR-PROJECT && "
    if effective["allocator"] == "expandable":
        command += f"{assignments(expandable=True)} "
    return Export(
        files={FILE: _text(recipe, effective, version)},
        command=f"{command}forgather -t {FILE} train",
        unsupported=closest.unsupported(),
        notes=tuple(_notes(recipe, effective)),
    )


_STOCHASTIC = (
    "bf16-true",
    "the file uses torch's optimizers, which round updates of bfloat16 weights to nearest",
)
_PRECISIONS: Mapping[str, Mapping[str, Reason]] = {
    "2026-02": {
        "bf16-mixed": (
            "bf16-true",
            "forgather of 2026-02 has no autocast: weights in bfloat16 lose small updates",
        ),
        "fp16-mixed": ("fp32", "forgather of 2026-02 has no autocast and no loss scaling"),
        "bf16-stochastic": _STOCHASTIC,
        "fp8": ("bf16-true", "forgather of 2026-02 has neither fp8 nor autocast"),
        "int8-mixed": ("bf16-true", "forgather of 2026-02 has neither int8 nor autocast"),
    },
    "later": {
        "bf16-stochastic": _STOCHASTIC,
        "fp8": (
            "fp8, the head as well",
            "forgather converts every linear layer; the trial converted those of the blocks",
        ),
        "int8-mixed": ("bf16-mixed", "forgather has no products in int8"),
    },
}
"""{version: {precision that it does not support: (what the file does instead, why)}}."""

_WHOLE_BLOCKS = (
    "forgather checkpoints every block; other choices are code (enable_activation_checkpoint_fn)"
)
_OTHER_CHECKPOINTING = [value for value in KNOWN["checkpointing"] if value != "block"]
_OWN_CLASSES = {"adafactor-fixed-rate": "forgather.ml.optim.adafactor:Adafactor"}
_LACKING: Table = {
    "optimizer": {
        name: ("adamw", "its class is in no package that forgather could import")
        for name, facts in OPTIMIZERS.items()
        if facts.is_ours and name not in _OWN_CLASSES
    },
    "checkpointing": dict.fromkeys(_OTHER_CHECKPOINTING, ("block", _WHOLE_BLOCKS)),
    "compile": {
        "block": (
            "model",
            "forgather compiles the model as a whole; a step in backward then frees fewer "
            "gradients early",
        )
    },
    "memory_budget": {
        0.0: (
            0.01,
            "forgather treats a budget of 0.0 as no budget and would save every activation",
        )
    },
    "loss": {
        "chunked": (
            "full",
            "forgather's loss on hidden states is code (fused_loss_factory), for models that "
            "return them",
        )
    },
}


def _text(recipe: Recipe, effective: Mapping[str, Any], version: str) -> str:
    arguments = "".join(
        f"    {name}: {_yaml(value)}\n" for name, value in _arguments(effective, version).items()
    )
    return f"""## {recipe.origin}
-- extends 'project.yaml'

[config_metadata]
    == super()
    -- set ns.config_name = "autotune"

[datacollator]
data_collator: &data_collator !singleton:forgather.ml.data_collator:{_COLLATOR}@{_COLLATOR}
    tokenizer: *tokenizer
    return_tensors: pt
    padding: "max_length"
    truncation: True
    max_length: {effective["sequence_length"]}

[optimizer]
{_optimizer(effective)}
[lr_scheduler]
lr_scheduler: &lr_scheduler ~

[trainer_definition]
    -- include 'experiment.trainer_config'

#-------------------- experiment.trainer_config --------------------
-- extends 'project.trainer_config'

[trainer_args]
    == super()
{arguments}"""


def _optimizer(effective: Mapping[str, Any]) -> str:
    name, fusion = effective["optimizer"], effective["optimizer_fusion"]
    facts = OPTIMIZERS[name]
    settings = {
        "lr": effective["learning_rate"],
        **facts.settings,
        "weight_decay": effective["weight_decay"],
        **facts.flags(fusion),
    }
    lines = "".join(f"    {setting}: {_yaml(value)}\n" for setting, value in settings.items())
    kind = _OWN_CLASSES.get(name) or _class(facts)
    return f"optimizer: &optimizer !lambda:{kind}\n{lines}"


def _class(facts: OptimizerFacts) -> str:
    """Returns the class as forgather names it."""
    if facts.module == "torch.optim":
        return f"torch:optim.{facts.class_name}"
    return f"{facts.module}:{facts.class_name}"


def _arguments(effective: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Returns the arguments of the trainer.

    lr_scheduler_type has an effect only without a scheduler, so `_text` empties the block that
    makes one.
    """
    precision = effective["precision"]
    schedule = named_schedule(effective)
    return {
        "per_device_train_batch_size": effective["micro_batch_size"],
        "gradient_accumulation_steps": effective["global_batch"] // effective["micro_batch_size"],
        "max_steps": effective["steps"],
        "seed": effective["seed"],
        "max_grad_norm": effective["gradient_clipping"],
        "lr_scheduler_type": schedule.name,
        "lr_scheduler_kwargs": dict(schedule.keywords),
        "warmup_steps": schedule.warmup_steps,
        "default_dtype": "bfloat16" if precision == "bf16-true" else "float32",
        "float32_matmul_precision": "high" if precision == "tf32" else "highest",
        **(_mixed_precision(precision) if version == "later" else {}),
        "gradient_checkpointing": effective["checkpointing"] == "block",
        "enable_activation_offloading": effective["activation_offload"] == "cpu",
        "torch_compile": effective["compile"] == "model",
        "torch_compile_backend": "inductor",
        "torch_compile_mode": effective["compile_mode"],
        "torch_compile_dynamic": False,
        "torch_compile_full_graph": False,
        "activation_memory_budget": effective["memory_budget"],
        "fuse_optim_with_backward": effective["optimizer_fusion"] == "backward",
        "sdpa_backend": None if effective["attention"] == "auto" else effective["attention"],
        "resume_from_checkpoint": False,
    }


def _mixed_precision(precision: str) -> dict[str, Any]:
    is_fp8 = precision.startswith("fp8")
    modes = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}
    return {
        "mixed_precision": "bf16" if is_fp8 else modes.get(precision, "no"),
        "fp8_recipe": "tensorwise" if is_fp8 else None,
    }


def _yaml(value: Any) -> str:
    """Returns `value` in YAML 1.1, in which 1e-08 is a string and 1.0e-08 a number."""
    match value:
        case None:
            return "~"
        case bool() | int():
            return str(value)
        case float():
            digits, e, exponent = str(value).partition("e")
            if "." not in digits:
                digits += ".0"
            return f"{digits}{e}{exponent}"
        case tuple() | list():
            return f"[{', '.join(map(_yaml, value))}]"
        case dict():
            entries = [f"{name}: {_yaml(entry)}" for name, entry in value.items()]
            return f"{{{', '.join(entries)}}}"
        case _:
            return f'"{value}"'


def _notes(recipe: Recipe, effective: Mapping[str, Any]) -> Iterator[str]:
    yield from user_script_note(recipe.workload)
    yield from answers_note(recipe.workload)
    yield (
        "the template extends project.yaml and project.trainer_config of your project, which "
        "define model and text"
    )
    if recipe.accumulation_steps > 1:
        yield "gradient accumulation needs compute_loss_func in the project's trainer"
    if effective["activation_offload"] == "cpu":
        yield (
            "forgather moves small tensors to the host as well; the trial moved those of more than "
            "1 MiB"
        )
    needed = packages(recipe.config)
    if needed:
        names = ", ".join(needed)
        yield f"{names} must be installed: pip install {' '.join(needed)}"


TARGET = Target(
    title="forgather",
    versions=("2026-02", "later"),
    checked_with="forgather f92f8b8 (2026-02-20), and the reference of its arguments since it has "
    "mixed_precision",
    write=write,
)
