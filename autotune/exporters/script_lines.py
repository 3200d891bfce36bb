"""Lines of Python for the user's training script, for what no file of a trainer can express.

Each is one line as it would be typed, with the names `model` and `optimizer`. The reasons of
refusals quote them.
"""

from autotune.exporters.adapters import loading_arguments
from autotune.exporters.bundle import BLOCKS
from autotune.exporters.recipe import SMALLEST_RATE, Recipe
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import Workload

COPY_THE_LOSS = "the script computes the loss: copy the loss in chunks from the pytorch export"
SAVE_ON_CPU = "write with torch.autograd.graph.save_on_cpu(pin_memory=True):"
SAVES_ALL = "which also moves small tensors and the weights that products save"
"""What to write for `loss` chunked and for `activation_offload`."""

_BF16_WEIGHTS = "for weight in model.parameters(): weight.data = weight.data.to(torch.bfloat16)"
"""Leaves buffers, such as the frequencies of positions, in their dtype, as trials do."""


def bf16_weights_line(config: TrainingConfig) -> str:
    """Returns the line that stores in bfloat16 what is trained."""
    if config.adapter == "none":
        return _BF16_WEIGHTS
    # The model's own weights may be quantized.
    return f"{_BF16_WEIGHTS} if weight.requires_grad else weight.data"


def optimizer_class(recipe: Recipe) -> str:
    """Returns the full name of the optimizer's class; our own is in a module beside the script."""
    return recipe.optimizer.class_path.removeprefix("autotune.shipped.")


def imported_optimizer(recipe: Recipe) -> tuple[str, str]:
    """Returns the optimizer's class as a script names it, and the import that it needs.

    The import is empty for a class of torch, which scripts import, and for our own, which is in
    their text.
    """
    facts = recipe.optimizer
    if facts.package:
        return facts.class_name, f"from {facts.module} import {facts.class_name}"
    return facts.class_path if facts.module == "torch.optim" else facts.class_name, ""


def parameters_of(recipe: Recipe, *, otherwise: str = "parameters") -> str:
    """Returns the expression of the parameters of `model` that the optimizer is made of."""
    of_matrices = recipe.optimizer.of_matrices
    return f"matrices_apart(model, {dict(of_matrices)})" if of_matrices else otherwise


def optimizer_arguments(recipe: Recipe) -> dict[str, object]:
    """Returns all arguments of the trial's optimizer, as types that JSON has.

    An optimizer step in the backward pass is not an argument of the optimizer.
    """
    config = recipe.config
    arguments = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in recipe.optimizer.arguments.items()
    }
    rate = recipe.workload.learning_rate_of(config.optimizer, config.adapter)
    return {"lr": rate, **arguments, **recipe.optimizer.flags(config.optimizer_fusion)}


def optimizer_line(recipe: Recipe) -> str:
    """Returns the expression that makes the trial's optimizer."""
    settings = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in optimizer_arguments(recipe).items()
    }
    arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    parameters = parameters_of(recipe, otherwise="model.parameters()")
    parameters = parameters.replace("matrices_apart", "matrices.matrices_apart")
    if recipe.config.sharding == "zero1" and recipe.config.engine == "torch":
        return (
            "torch.distributed.optim.ZeroRedundancyOptimizer("
            f"{parameters}, optimizer_class={optimizer_class(recipe)}, {arguments})"
        )
    return f"{optimizer_class(recipe)}({parameters}, {arguments})"


def blocks_line(config: TrainingConfig, *, compiled: bool = False) -> str:
    """Returns the call of `autotune_blocks.py` that applies the techniques of `config` to blocks.

    The call compiles the blocks only if `compiled` is true.
    """
    arguments = []
    if config.checkpointing != "none":
        arguments.append(f'checkpointing="{config.checkpointing}"')
    if compiled:
        arguments.append("compiled=True")
    if config.precision == "fp8":
        arguments.append("fp8=True")
    if config.precision == "int8-mixed":
        arguments.append("int8=True")
    return f"{BLOCKS.removesuffix('.py')}.prepare_blocks({', '.join(['model', *arguments])})"


def learning_rate_factor_expression(workload: Workload) -> str:
    """Returns the factor of the learning rate at `step` (counted from 0) as a Python expression.

    The expression needs `math` if the schedule is a cosine.
    """
    warmup = workload.learning_rate_warmup_steps
    if workload.schedule == "constant":
        return "1.0" if warmup == 1 else f"min(1.0, (step + 1) / {warmup})"
    amplitude = (1 - SMALLEST_RATE) / 2
    progress = f"max(0, step - {warmup}) / {max(1, workload.steps - warmup)}"
    decay = f"{SMALLEST_RATE} + {amplitude} * (1 + math.cos(math.pi * {progress}))"
    return decay if warmup == 1 else f"min((step + 1) / {warmup}, {decay})"


def write_schedule(workload: Workload, *, before: str = "") -> str:
    """Returns the instruction to write the schedule's line; `before` precedes the call in it."""
    factor = learning_rate_factor_expression(workload)
    line = f"{before}torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {factor})"
    return f"import math and write {line}" if "math." in line else f"write {line}"


def user_script_note(workload: Workload) -> list[str]:
    """Returns a note for a study of the user's script, whose settings autotune does not know.

    The list is empty for other studies.
    """
    if workload.script is None:
        return []
    return [
        f"the trial ran {workload.describe_model()}, which defines model, optimizer, learning "
        "rate, sequence length, loss and data itself: put them in place of those in these files, "
        "which are defaults"
    ]


def text_notes(workload: Workload, *, says_tokenizer: bool = False) -> list[str]:
    """Returns notes for a trainer that reads the text itself.

    Such a trainer uses the tokenizer of its model unless the files name another
    (`says_tokenizer`).
    """
    notes = []
    uses_model_tokenizer = workload.tokenizer in (workload.model_source, "model")
    if workload.script is None and not uses_model_tokenizer and not says_tokenizer:
        names = {
            "bytes": "bytes",
            "bpe": f"those of a BPE of {workload.vocab_size} trained on its text",
        }
        tokens = names.get(workload.tokenizer, f"those of {workload.tokenizer}")
        notes.append(
            f"the trial's tokens were {tokens}; these files use the tokenizer of the model instead"
        )
    if workload.streaming:
        notes.append(
            "the study streamed its text and read no more than its steps use; these files read all "
            "of it"
        )
    return notes


ANSWERS_ONLY = (
    "each conversation rendered by the tokenizer's chat template, with the label -100 on all that "
    "is no answer"
)


def answers_only(workload: Workload) -> str:
    """Returns what became of the rows of which a part was not learned."""
    format = workload.prompts
    if format is None:
        return ANSWERS_ONLY
    rendered = ", rendered by the tokenizer's chat template" if format.is_chat else ""
    labels = "" if format.learned == "all" else ", with the label -100 on all that is no answer"
    return f"its rows read as {format.describe()}{rendered}{labels}"


def answers_note(workload: Workload) -> list[str]:
    """Returns a note for a trainer whose text the user provides, if parts were not learned."""
    if not workload.learns_answers:
        return []
    how = answers_only(workload)
    return [f"the trial's text was {workload.dataset}, {how}: its files cannot say so"]


def loss_line(recipe: Recipe) -> str:
    """Returns the line that computes the trial's loss of a micro batch without some of its labels.

    The trial divides by the labels of the whole step. Trainers with a loop of the user divide the
    loss by the number of micro batches, and average gradients over replicas.
    """
    arguments = "logits.flatten(0, 1).float(), labels.flatten()"
    parts = _parts_of_a_step(recipe)
    if parts == 1:
        return f"loss = torch.nn.functional.cross_entropy({arguments})"
    summed = f'torch.nn.functional.cross_entropy({arguments}, reduction="sum")'
    return f"loss = {parts} * {summed} / labels_of_step"


def _parts_of_a_step(recipe: Recipe) -> int:
    """Returns the number of micro batches of a step, on all devices together."""
    return recipe.accumulation_steps * recipe.replicas


def model_and_data_note(recipe: Recipe) -> str:
    """Returns a sentence on what was trained, which the user's script must provide."""
    workload = recipe.workload
    if workload.script is not None:
        [note] = user_script_note(workload)
        return f"{note[0].upper()}{note[1:]}."
    note = (
        f"The trial trained {workload.describe_model()} on {workload.dataset}; your script "
        "provides model and data"
    )
    if workload.learns_answers:
        note += f", {answers_only(workload)}"
    if workload.packing == "padded":
        note += ", each sequence the beginning of a text and padding without labels (-100)"
    if workload.learns_answers or workload.packing == "padded":
        note += f". With labels[i] the token after logits[i], write {loss_line(recipe)}"
        parts = _parts_of_a_step(recipe)
        if parts > 1:
            note += (
                f", where labels_of_step is how many labels the {parts} micro batches of a step "
                f"have together: what is divided by {parts} again is the sum of their gradients"
            )
    if not workload.pretrained:
        return f"{note}."
    # Since transformers 5 the weights stay in the dtype that they were saved in.
    arguments = f"{workload.model_source!r}, {loading_arguments(recipe.config)}"
    return f"{note}: write model = transformers.AutoModelForCausalLM.from_pretrained({arguments})."
