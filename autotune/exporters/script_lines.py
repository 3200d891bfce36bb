"""Lines of Python for a training script of the user's own: what belongs there and in no trainer's file.

Each is one line as it would be typed, with the names `model` and `optimizer`; the reasons of
refusals quote them.
"""

from autotune.exporters.recipe import SMALLEST_RATE, Recipe
from autotune.exporters.shipped import BLOCKS
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import Workload

_CLASSES = {
    "adamw": "torch.optim.AdamW",
    "adafactor": "torch.optim.Adafactor",
    "sgd": "torch.optim.SGD",
    "adamw-8bit": "torchao.optim.AdamW8bit",
    "adafactor-fixed-rate": "adafactor_fixed_rate.AdafactorFixedRate",
}
WITHOUT_FLAGS = ("adamw-8bit", "adafactor-fixed-rate")
"""Optimizers that take neither `foreach` nor `fused`, nor other settings than the rate from us."""

BF16_WEIGHTS = "for weight in model.parameters(): weight.data = weight.data.to(torch.bfloat16)"
"""Without the buffers, such as frequencies of positions, which trials leave as they are."""


def optimizer_class(recipe: Recipe) -> str:
    """Full name of the class."""
    return _CLASSES[recipe.config.optimizer]


def optimizer_arguments(recipe: Recipe) -> dict[str, object]:
    """Everything that the trial's optimizer was made with, in JSON's types; a step in backward is no argument."""
    config = recipe.config
    rate = recipe.workload.learning_rate_of(config.optimizer)
    if config.optimizer == "adafactor-fixed-rate":
        return {"lr": rate}
    settings = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in recipe.optimizer_settings.items()
    }
    return {"lr": rate, **settings, **optimizer_flags(config)}


def optimizer_flags(config: TrainingConfig) -> dict[str, bool]:
    """torch's own choice of them differs between devices, so both are always said."""
    if config.optimizer in WITHOUT_FLAGS:
        return {}
    flags = {
        "foreach": config.optimizer_fusion == "foreach",
        "fused": config.optimizer_fusion == "kernel",
    }
    return {"foreach": flags["foreach"]} if config.optimizer == "adafactor" else flags


def optimizer_line(recipe: Recipe) -> str:
    settings = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in optimizer_arguments(recipe).items()
    }
    arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return f"{optimizer_class(recipe)}(model.parameters(), {arguments})"


def blocks_line(config: TrainingConfig, *, compiled: bool = False) -> str:
    """The call of `autotune_blocks.py` that does what `config` asks of blocks; compiling only where it is asked."""
    arguments = []
    if config.checkpointing != "none":
        arguments.append(f'checkpointing="{config.checkpointing}"')
    if compiled:
        arguments.append("compiled=True")
    if config.precision == "fp8":
        arguments.append("fp8=True")
    return f"{BLOCKS.removesuffix('.py')}.prepare_blocks({', '.join(['model', *arguments])})"


def rate_share(workload: Workload) -> str:
    """The share of the learning rate at `step`, counted from 0, as an expression of Python that may need `math`."""
    warmup = workload.learning_rate_warmup_steps
    rising = "1.0" if warmup == 1 else f"min(1.0, (step + 1) / {warmup})"
    if workload.schedule == "constant":
        return rising
    amplitude = (1 - SMALLEST_RATE) / 2
    done = f"max(0, step - {warmup}) / {max(1, workload.steps - warmup)}"
    falling = f"{SMALLEST_RATE} + {amplitude} * (1 + math.cos(math.pi * {done}))"
    return falling if warmup == 1 else f"min((step + 1) / {warmup}, {falling})"


def write_schedule(workload: Workload, *, before: str = "") -> str:
    """What to do in words; `before` stands in front of the call, in the same line."""
    line = (
        f"{before}torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {rate_share(workload)})"
    )
    return f"import math and write {line}" if "math." in line else f"write {line}"


def own_script_note(workload: Workload) -> list[str]:
    """Of a study of somebody's own script, whose numbers autotune never saw; nothing for another."""
    if workload.script is None:
        return []
    ran = workload.describe_model()
    return [
        f"the trial ran {ran}, whose model, optimizer, rate, loss and data are its own: they belong in place of ours"
    ]


def text_notes(workload: Workload, *, says_tokenizer: bool = False) -> list[str]:
    """For a trainer that reads the text itself, by the tokenizer of its model unless the files say another."""
    notes, is_own = [], workload.tokenizer in (workload.model_source, "model")
    if workload.script is None and not is_own and not says_tokenizer:
        names = {
            "bytes": "bytes",
            "bpe": f"those of a BPE of {workload.vocab_size} trained on its text",
        }
        made = names.get(workload.tokenizer, f"those of {workload.tokenizer}")
        notes.append(
            f"the trial's tokens were {made}; the files leave the choice to the model, which has its own"
        )
    if workload.streaming:
        notes.append(
            "the study streamed its text and read no more than its steps use; the files read all of it"
        )
    return notes


def model_and_data(recipe: Recipe) -> str:
    """What was trained: the names that are a script's to fill in."""
    workload = recipe.workload
    if workload.script is not None:
        [note] = own_script_note(workload)
        return f"{note[0].upper()}{note[1:]}."
    said = f"The trial trained {workload.describe_model()} on {workload.dataset}; model and data are your script's"
    if workload.packing == "padded":
        said += ", each sequence the beginning of a text and padding without labels (-100)"
        if (steps := recipe.accumulation_steps) > 1:
            said += f", its loss the sum of a micro batch / the labels of all {steps} of a step, not a mean of means"
    if not workload.pretrained:
        return f"{said}."
    # Since version 5 the weights keep the dtype that they were saved in.
    dtype = "bfloat16" if recipe.config.precision in ("bf16-true", "bf16-stochastic") else "float32"
    name = f"{workload.model_source!r}, dtype=torch.{dtype}"
    return f"{said}: write model = transformers.AutoModelForCausalLM.from_pretrained({name})."
