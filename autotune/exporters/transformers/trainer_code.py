"""The text of `autotune_trainer.py`: a Trainer that does what the trial did, in one file that needs no autotune.

Put together from definitions of the trials' own code and of `inside_trainer.py`, as far as the
configuration uses them.
"""

import re
from collections.abc import Mapping
from typing import Any

from autotune.exporters import launch
from autotune.exporters.recipe import Recipe, in_docstring
from autotune.exporters.source import excerpt
from autotune.exporters.trainer_keys import weights_dtype
from autotune.exporters.transformers.trainer_definitions import (
    HERE,
    definitions,
    needs_blocks,
    needs_causal_flag,
)
from autotune.spec.config import TrainingConfig

FILE = "autotune_trainer.py"

_IMPORTS = """\
from __future__ import annotations

import functools
import itertools
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

{before_torch}import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast
"""


def trainer_code(recipe: Recipe, keys: Mapping[str, Any], *, version: str) -> str:
    """`keys`: of TrainingArguments. What they do not do, the code does."""
    config = recipe.config
    in_blocks_by_keys = (
        "gradient_checkpointing_kwargs" in keys or "activation_checkpointing_kwargs" in keys
    )
    before_torch = "".join(f"{line}\n" for line in launch.before_torch(config))
    imports = _IMPORTS.format(before_torch=before_torch and f"{before_torch}\n")
    body = "\n\n\n".join(
        [
            *definitions(recipe, by_keys=in_blocks_by_keys, version=version),
            _sequences(recipe),
            _arguments(),
            _prepare_model(config, by_keys=in_blocks_by_keys, version=version),
            _make_optimizer(recipe),
            _trainer(recipe),
        ]
    )
    process = _process(config)
    needed = _needed(imports, f"{before_torch}{process}{body}")
    return f"{_docstring(recipe)}\n\n{needed}{process}{_constants(recipe, keys)}\n\n{body}\n"


def _docstring(recipe: Recipe) -> str:
    return f'''"""A Trainer with every technique of {in_docstring(recipe.origin)}.

    {recipe.config.describe()}

In a training script of your own, before anything else, since importing this makes settings of the process:

    from autotune_trainer import AutotuneTrainer, model_kwargs, sequences, training_arguments

    model = AutoModelForCausalLM.from_pretrained("...", **model_kwargs())
    data = sequences(texts, encode)  # or a dataset of your own; {recipe.workload.sequence_length} tokens a sequence
    AutotuneTrainer(model=model, args=training_arguments("trainer_output"), train_dataset=data).train()

`train.py` beside it is such a script. Measured on one device; on N of them the global batch is N times as large, unless
gradient_accumulation_steps is divided by N.
"""'''


def _needed(imports: str, body: str) -> str:
    """Without the imports that nothing below uses."""
    lines = (_used(line, body) for line in imports.splitlines())
    return "\n".join(line for line in lines if line is not None) + "\n"


def _used(line: str, body: str) -> str | None:
    """The import with the names that are used; None where none is."""
    match line.replace(",", " ").split():
        case ["from", module, "import", *names] if module != "__future__":
            used = [name for name in names if re.search(rf"\b{name}\b", body)]
            return f"from {module} import {', '.join(used)}" if used else None
        case ["import", "os"]:
            return line if "os." in body else None
        case ["import", _, "as", name] | ["import", "functools" | "itertools" | "math" as name]:
            return line if re.search(rf"\b{name}\.", body) else None
    return line


def _process(config: TrainingConfig) -> str:
    lines = launch.with_torch(config)
    imported = ["import torch._functorch.config", ""] if config.memory_budget != 1.0 else []
    return "\n".join(["", *imported, "# Settings of the process.", *lines, ""]) if lines else ""


def _constants(recipe: Recipe, keys: Mapping[str, Any]) -> str:
    settings = "\n".join(
        f"    {_literal(name)}: {_literal(value)}," for name, value in keys.items()
    )
    return f"""
SEQUENCE_LENGTH = {recipe.workload.sequence_length}
WEIGHTS_DTYPE = torch.{weights_dtype(recipe.config)}
SCHEDULE = {_literal(recipe.workload.schedule)}
SETTINGS = {{
{settings}
}}
"""


def _literal(value: Any) -> str:
    return repr(value).replace("'", '"')


# -- what is put together for this configuration ---------------------------------------------------


def _sequences(recipe: Recipe) -> str:
    kind = f"{recipe.workload.packing}_sequences"
    return f'''{excerpt(HERE, kind)}


def sequences(texts: Iterable[str], encode: Callable[[str], Sequence[int]]) -> list[dict[str, Any]]:
    """A training set for Trainer; `encode` makes a text's tokens."""
    return {kind}(texts, encode, SEQUENCE_LENGTH)'''


def _arguments() -> str:
    return '''def model_kwargs() -> dict[str, Any]:
    """For `from_pretrained` and `from_config`."""
    return {"dtype": WEIGHTS_DTYPE, "attn_implementation": "sdpa"}


def training_arguments(output_dir: str, **changes: Any) -> TrainingArguments:
    """These settings and, or instead of some of them, your own."""
    return TrainingArguments(output_dir=output_dir, **{**SETTINGS, **changes})'''


def _prepare_model(config: TrainingConfig, *, by_keys: bool, version: str) -> str:
    lines = ["set_weights_dtype(model, WEIGHTS_DTYPE)"]
    if version == "4.57":  # later ones do so by themselves
        lines.append("model.config.use_cache = False  # recomputing would fill it twice")
    if needs_causal_flag(config, version):
        lines.append("keep_causal_flag()")
    if config.loss == "chunked":
        lines.append("lose_in_chunks(model, chunked_token_loss)")
    if needs_blocks(config, by_keys=by_keys):
        lines += [
            "found = find_blocks(model)",
            'assert found is not None, "the model has no list of alike blocks"',
        ]
    if config.precision == "fp8":
        lines += ["for block in found.blocks:", "    convert(block)"]
    lines += [] if by_keys else _checkpointing_lines(config)
    if config.compile == "block" and (by_keys or config.checkpointing != "sqrt"):
        lines += ["for block in found.blocks:", "    block.compile(dynamic=False)"]
    if config.compile == "model":
        lines.append("model.compile(dynamic=False)")
    body = "\n".join(f"    {line}" for line in [*lines, "return model"])
    return f'''def prepare_model(model: Any) -> Any:
    """Applies in place what TrainingArguments have no key for, in the order of the trial. AutotuneTrainer calls it."""
{body}'''


def _checkpointing_lines(config: TrainingConfig) -> list[str]:
    match config.checkpointing:
        case "none":
            return []
        case "attention":
            return [
                'assert found.attention_name is not None, "no attention was found in the blocks"',
                "for block in found.blocks:",
                "    attention = getattr(block, found.attention_name)",
                "    attention.__class__ = checkpointed_class(type(attention))",
            ]
        case "selective":
            return [
                "for block in found.blocks:",
                "    block.__class__ = checkpointed_class(type(block), _selective_contexts)",
            ]
        case "sqrt":
            return [
                'kinds = set(getattr(model.config, "layer_types", None) or ())',
                'assert len(kinds) <= 1, "the blocks take different arguments and cannot be run as one"',
                f"checkpoint_segments(list(found.blocks), compiled={config.compile == 'block'})",
            ]
    every = {"block": 1, "every-2": 2, "every-4": 4}[config.checkpointing]
    return [
        f"for block in list(found.blocks)[::{every}]:",
        "    block.__class__ = checkpointed_class(type(block))",
    ]


def _make_optimizer(recipe: Recipe) -> str:
    config = recipe.config
    imports = (
        "    from torchao.optim import AdamW8bit\n\n" if config.optimizer == "adamw-8bit" else ""
    )
    returned = f"    return {_call(*_optimizer_arguments(recipe))}"
    if config.precision == "bf16-stochastic":
        exact = returned.replace("\n", "\n    ")
        arguments = (
            "parameters",
            "exact",
            "learning_rate=learning_rate",
            f"seed={recipe.workload.seed}",
        )
        rounded = _call("StochasticallyRounded", *arguments)
        returned = f"""
    def exact(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    {exact}

    return {rounded}"""
    return f'''def make_optimizer(
    parameters: Sequence[nn.Parameter], *, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Makes the trial's optimizer."""
{imports}{returned}'''


def _call(function: str, *arguments: str) -> str:
    return (
        "\n        ".join([f"{function}(", *(f"{argument}," for argument in arguments)]) + "\n    )"
    )


def _optimizer_arguments(recipe: Recipe) -> tuple[str, ...]:
    """Class and arguments, as `autotune/techniques/optimizer.py` gives them."""
    settings, fusion = recipe.optimizer_settings, recipe.config.optimizer_fusion
    others = [f"{name}={value}" for name, value in settings.items() if name != "weight_decay"]
    plain = ("parameters", "lr=learning_rate", "weight_decay=weight_decay", *others)
    foreach, fused = f"foreach={fusion == 'foreach'}", f"fused={fusion == 'kernel'}"
    match recipe.config.optimizer:
        case "adamw":
            return ("torch.optim.AdamW", *plain, foreach, fused)
        case "adamw-8bit":
            return ("AdamW8bit", *plain)
        case "sgd":
            return ("torch.optim.SGD", *plain, foreach, fused)
        case "adafactor":
            return ("torch.optim.Adafactor", *plain, foreach)
        case "adafactor-fixed-rate":
            return ("AdafactorFixedRate", "parameters", "lr=learning_rate")


_TRAINER = '''class AutotuneTrainer(Trainer):
    """Trainer with the trial's model, optimizer and schedule. Settings that you change keep their usual meaning."""

    def __init__(self, model: Any, args: TrainingArguments | None = None, **others: Any) -> None:
        super().__init__(prepare_model(model), args or training_arguments("trainer_output"), **others)

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        if self.optimizer is not None or self.args.optim != SETTINGS["optim"]:
            return super().create_optimizer(*args)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        {optimizer}
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is not None or self.args.lr_scheduler_type != SETTINGS["lr_scheduler_type"]:
            return super().create_scheduler(num_training_steps, optimizer)
        warmup_steps = self.args.get_warmup_steps(num_training_steps)
        share = functools.partial(
            share_of_rate, steps=num_training_steps, warmup_steps=warmup_steps, schedule=SCHEDULE
        )
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, lambda step: share(step))
        self._created_lr_scheduler = True
        return self.lr_scheduler'''

_OFFLOAD = """

    def compute_loss_context_manager(self) -> Any:
        contexts = super().compute_loss_context_manager()
        contexts.enter_context(offloaded("cpu", model=self.model))
        return contexts"""


_MAKE = """self.optimizer = make_optimizer(
            parameters, learning_rate=self.args.learning_rate, weight_decay=self.args.weight_decay
        )"""
_MAKE_IN_BACKWARD = f"""\
assert self.args.world_size * self.args.gradient_accumulation_steps == 1, "one device, no accumulation"
        assert not self.args.max_grad_norm, "no clipping: each gradient is used before the norm of all is known"
        {_MAKE}
        step_in_backward(self.optimizer)"""


def _trainer(recipe: Recipe) -> str:
    in_backward = recipe.config.optimizer_fusion == "backward"
    text = _TRAINER.replace("{optimizer}", _MAKE_IN_BACKWARD if in_backward else _MAKE)
    return text + (_OFFLOAD if recipe.config.activation_offload == "cpu" else "")
