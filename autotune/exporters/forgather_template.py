"""forgather: a template for an experiment of a project, as text in its form of Jinja over YAML.

The template goes on from the project's own `project.yaml`; blocks in brackets replace those of the
same name. Every key that decides something is said, also at its default: the project's own blocks
may have set it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from autotune.exporters.export import Export, Refusal, Target
from autotune.exporters.named_schedule import named_schedule, warmup_refusal
from autotune.exporters.recipe import OPTIMIZER_SETTINGS, Recipe
from autotune.exporters.script_lines import own_script_note

FILE = "autotune.yaml"


def write(recipe: Recipe, version: str) -> Export:
    refusals = tuple(_refusals(recipe, version))
    done = {**recipe.settings(), **{refusal.setting: refusal.instead for refusal in refusals}}
    command = f"cp {FILE} YOUR-PROJECT/templates/experiments/ && cd YOUR-PROJECT && "
    if done["allocator"] == "expandable":
        command += "PYTORCH_ALLOC_CONF=expandable_segments:True "
    return Export(
        files={FILE: _text(recipe, done, version)},
        command=f"{command}forgather -t {FILE} train",
        refusals=refusals,
        notes=tuple(_notes(recipe, done)),
    )


def _refusals(recipe: Recipe, version: str) -> Iterator[Refusal]:
    config = recipe.config
    found = {
        "precision": _PRECISIONS[version].get(config.precision),
        "checkpointing": _CHECKPOINTING.get(config.checkpointing),
        "compile": _BY_BLOCK if config.compile == "block" else None,
        "memory_budget": _ZERO if config.memory_budget == 0.0 else None,
        "loss": _FULL if config.loss == "chunked" else None,
    }
    for setting, refused in found.items():
        if refused is not None:
            yield Refusal(
                setting=setting, value=getattr(config, setting), instead=refused[0], why=refused[1]
            )
    yield from warmup_refusal(recipe)


_STOCHASTIC = (
    "bf16-true",
    "torch's optimizers, which the file names, round updates of bfloat16 weights to nearest",
)
_PRECISIONS: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "2026-02": {
        "bf16-mixed": (
            "bf16-true",
            "forgather of 2026-02 has no autocast: weights in bfloat16 lose small updates",
        ),
        "fp16-mixed": ("fp32", "forgather of 2026-02 has no autocast and no loss scaling"),
        "bf16-stochastic": _STOCHASTIC,
        "fp8": ("bf16-true", "forgather of 2026-02 has neither fp8 nor autocast"),
    },
    "later": {
        "bf16-stochastic": _STOCHASTIC,
        "fp8": (
            "fp8, the head as well",
            "forgather converts every linear layer, a trial those of the blocks",
        ),
    },
}
"""By version: {precision that it does not do: (what the file does instead, why)}."""

_WHOLE_BLOCKS = (
    "forgather checkpoints every block; other choices are code (enable_activation_checkpoint_fn)"
)
_OTHER_CHECKPOINTING = ("attention", "selective", "every-4", "every-2", "sqrt")
_CHECKPOINTING: Mapping[str, tuple[Any, str]] = dict.fromkeys(
    _OTHER_CHECKPOINTING, ("block", _WHOLE_BLOCKS)
)
_BY_BLOCK = (
    "model",
    "forgather compiles the model as a whole; a step in backward then frees fewer gradients early",
)
_ZERO = (0.01, "forgather takes a budget of 0.0 for none and would keep everything")
_FULL = (
    "full",
    "forgather's loss over hidden states is code (fused_loss_factory), for models that return those",
)


def _text(recipe: Recipe, done: Mapping[str, Any], version: str) -> str:
    arguments = "".join(
        f"    {name}: {_yaml(value)}\n" for name, value in _arguments(done, version).items()
    )
    return f"""## {recipe.origin}
-- extends 'project.yaml'

[config_metadata]
    == super()
    -- set ns.config_name = "autotune"

[datacollator]
data_collator: &data_collator !singleton:forgather.ml.data_collator:DataCollatorForCausalLM@DataCollatorForCausalLM
    tokenizer: *tokenizer
    return_tensors: pt
    padding: "max_length"
    truncation: True
    max_length: {done["sequence_length"]}

[optimizer]
{_optimizer(done)}
[lr_scheduler]
lr_scheduler: &lr_scheduler ~

[trainer_definition]
    -- include 'experiment.trainer_config'

#-------------------- experiment.trainer_config --------------------
-- extends 'project.trainer_config'

[trainer_args]
    == super()
{arguments}"""


_CLASSES = {
    "adamw": "torch:optim.AdamW",
    "adamw-8bit": "torchao.optim:AdamW8bit",
    "adafactor": "torch:optim.Adafactor",
    "sgd": "torch:optim.SGD",
    "adafactor-fixed-rate": "forgather.ml.optim.adafactor:Adafactor",
}


def _optimizer(done: Mapping[str, Any]) -> str:
    name, fusion = done["optimizer"], done["optimizer_fusion"]
    settings = {
        "lr": done["learning_rate"],
        **OPTIMIZER_SETTINGS[name],
        "weight_decay": done["weight_decay"],
    }
    if name in ("adamw", "adafactor", "sgd"):
        settings["foreach"] = fusion == "foreach"
    if name in ("adamw", "sgd"):
        settings["fused"] = fusion == "kernel"
    lines = "".join(f"    {setting}: {_yaml(value)}\n" for setting, value in settings.items())
    return f"optimizer: &optimizer !lambda:{_CLASSES[name]}\n{lines}"


def _arguments(done: Mapping[str, Any], version: str) -> dict[str, Any]:
    """A schedule by name counts where there is no scheduler: `_text` empties the block that makes one."""
    precision, schedule = done["precision"], named_schedule(done)
    return {
        "per_device_train_batch_size": done["micro_batch_size"],
        "gradient_accumulation_steps": done["global_batch"] // done["micro_batch_size"],
        "max_steps": done["steps"],
        "seed": done["seed"],
        "max_grad_norm": done["gradient_clipping"],
        "lr_scheduler_type": schedule.name,
        "lr_scheduler_kwargs": dict(schedule.keywords),
        "warmup_steps": schedule.warmup_steps,
        "default_dtype": "bfloat16" if precision == "bf16-true" else "float32",
        "float32_matmul_precision": "high" if precision == "tf32" else "highest",
        **(_mixed_precision(precision) if version == "later" else {}),
        "gradient_checkpointing": done["checkpointing"] == "block",
        "enable_activation_offloading": done["activation_offload"] == "cpu",
        "torch_compile": done["compile"] == "model",
        "torch_compile_backend": "inductor",
        "torch_compile_mode": "default",
        "torch_compile_dynamic": False,
        "torch_compile_full_graph": False,
        "activation_memory_budget": done["memory_budget"],
        "fuse_optim_with_backward": done["optimizer_fusion"] == "backward",
        "sdpa_backend": None if done["attention"] == "auto" else done["attention"],
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
    """A value as YAML 1.1 reads it, where 1e-08 is a text and 1.0e-08 a number."""
    match value:
        case None:
            return "~"
        case bool() | int():
            return str(value)
        case float():
            digits, e, exponent = str(value).partition("e")
            return f"{digits if '.' in digits else f'{digits}.0'}{e}{exponent}"
        case tuple() | list():
            return f"[{', '.join(map(_yaml, value))}]"
        case dict():
            return f"{{{', '.join(f'{name}: {_yaml(one)}' for name, one in value.items())}}}"
        case _:
            return f'"{value}"'


def _notes(recipe: Recipe, done: Mapping[str, Any]) -> Iterator[str]:
    yield from own_script_note(recipe.workload)
    yield "the template goes on from project.yaml and project.trainer_config of your project: its model and its text"
    if recipe.accumulation_steps > 1:
        yield "gradient accumulation needs compute_loss_func in the project's trainer"
    if done["activation_offload"] == "cpu":
        yield "forgather moves small tensors to the host as well, a trial only those of more than 1 MiB"
    if done["optimizer"] == "adamw-8bit" or recipe.config.precision == "fp8":
        yield "torchao must be installed: pip install torchao"


TARGET = Target(
    title="forgather",
    versions=("2026-02", "later"),
    checked_with="forgather f92f8b8 (2026-02-20), and the reference of its arguments since it has mixed_precision",
    write=write,
)
