"""A Trainer with every technique of study tour, trial 39.

    fp32, checkpointing block, compile model, micro-batch 4

In a training script of your own, before anything else, since importing this makes settings of the process:

    from autotune_trainer import AutotuneTrainer, model_kwargs, sequences, training_arguments

    model = AutoModelForCausalLM.from_pretrained("...", **model_kwargs())
    data = sequences(texts, encode)  # or a dataset of your own; 128 tokens a sequence
    AutotuneTrainer(model=model, args=training_arguments("trainer_output"), train_dataset=data).train()

`train.py` beside it is such a script. Measured on one device; on N of them the global batch is N times as large, unless
gradient_accumulation_steps is divided by N.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments

SEQUENCE_LENGTH = 128
WEIGHTS_DTYPE = torch.float32
SCHEDULE = "constant"
SETTINGS = {
    "max_steps": 30,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "optim": "adamw_torch",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-08,
    "learning_rate": 0.002,
    "weight_decay": 0.01,
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    "bf16": False,
    "fp16": False,
    "use_cpu": True,
    "seed": 0,
    "data_seed": 0,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}


def set_weights_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Of floating-point parameters; buffers, such as the frequencies of positions, stay as they are."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


IGNORED_LABEL = -100


def keep_causal_flag() -> None:
    """Compiled, transformers makes a mask of what a kernel's causal flag says, and flash attention takes no mask."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def mask(
        *, q_length: int, kv_length: int, local_size: int | None = None, attention_mask: Any = None, **options: Any
    ) -> Any:
        is_long = local_size is not None and kv_length >= local_size
        is_plain = attention_mask is None and options.get("allow_is_causal_skip", True)
        if is_plain and q_length == kv_length and not is_long:
            return None
        return sdpa_mask(
            q_length=q_length, kv_length=kv_length, local_size=local_size, attention_mask=attention_mask, **options
        )

    AttentionMaskInterface.register("sdpa", mask)


def share_of_rate(step: int, *, steps: int, warmup_steps: int, schedule: str) -> float:
    """Of the learning rate at a step, counted from 0: a linear rise, then constant or a cosine down to a tenth."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def packed_sequences(texts: Iterable[str], encode: Callable[[str], Sequence[int]], length: int) -> list[dict[str, Any]]:
    """Sequences of `length` tokens, cut from one stream of all texts; the beginning of one more is left out."""
    stream = torch.tensor([token for text in texts for token in encode(text)])
    rows = stream[: len(stream) // length * length].view(-1, length)
    # What stands first follows nothing: some versions would count it in the mean.
    return [{"input_ids": row, "labels": F.pad(row[1:], (1, 0), value=IGNORED_LABEL)} for row in rows]


def sequences(texts: Iterable[str], encode: Callable[[str], Sequence[int]]) -> list[dict[str, Any]]:
    """A training set for Trainer; `encode` makes a text's tokens."""
    return packed_sequences(texts, encode, SEQUENCE_LENGTH)


def model_kwargs() -> dict[str, Any]:
    """For `from_pretrained` and `from_config`."""
    return {"dtype": WEIGHTS_DTYPE, "attn_implementation": "sdpa"}


def training_arguments(output_dir: str, **changes: Any) -> TrainingArguments:
    """These settings and, or instead of some of them, your own."""
    return TrainingArguments(output_dir=output_dir, **{**SETTINGS, **changes})


def prepare_model(model: Any) -> Any:
    """Applies in place what TrainingArguments have no key for, in the order of the trial. AutotuneTrainer calls it."""
    set_weights_dtype(model, WEIGHTS_DTYPE)
    keep_causal_flag()
    model.compile(dynamic=False)
    return model


def make_optimizer(
    parameters: Sequence[nn.Parameter], *, learning_rate: float, weight_decay: float, first_index: int = 0
) -> torch.optim.Optimizer:
    """The trial's, for some of the parameters, the first of which has this place among those of the model."""
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        weight_decay=weight_decay,
        betas=(0.9, 0.999),
        eps=1e-08,
        foreach=False,
        fused=False,
    )


class AutotuneTrainer(Trainer):
    """Trainer with the trial's model, optimizer and schedule. Settings that you change keep their usual meaning."""

    def __init__(self, model: Any, args: TrainingArguments | None = None, **others: Any) -> None:
        super().__init__(prepare_model(model), args or training_arguments("trainer_output"), **others)

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        if self.optimizer is not None or self.args.optim != SETTINGS["optim"]:
            return super().create_optimizer(*args)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        make = functools.partial(
            make_optimizer, learning_rate=self.args.learning_rate, weight_decay=self.args.weight_decay
        )
        self.optimizer = make(parameters)
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
        return self.lr_scheduler
