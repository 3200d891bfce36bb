"""A Trainer with every technique of study tour, trial 39.

    fp32, checkpointing block, compile model, micro-batch 4

Import it first in your training script, because the import makes settings of the process:

    from autotune_trainer import AutotuneTrainer, model_kwargs, sequences, training_arguments

    model = AutoModelForCausalLM.from_pretrained("...", **model_kwargs())
    data = sequences(texts, encode)  # 128 tokens each; or your dataset
    arguments = training_arguments("trainer_output")
    AutotuneTrainer(model=model, args=arguments, train_dataset=data).train()

`train.py` next to it is such a script. Measured on one device. On N devices the global batch
is N times as large, unless gradient_accumulation_steps is divided by N.
"""

from __future__ import annotations

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
    """Casts the floating-point parameters, not buffers such as the frequencies of positions."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def keep_causal_flag() -> None:
    """Makes transformers use the causal flag of the attention kernels in compiled code as well.

    It would make a mask there instead, and flash attention takes no mask.
    """
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def mask(
        *,
        q_length: int,
        kv_length: int,
        local_size: int | None = None,
        attention_mask: Any = None,
        **options: Any,
    ) -> Any:
        is_long = local_size is not None and kv_length >= local_size
        is_plain = attention_mask is None and options.get("allow_is_causal_skip", True)
        if is_plain and q_length == kv_length and not is_long:
            return None
        return sdpa_mask(
            q_length=q_length,
            kv_length=kv_length,
            local_size=local_size,
            attention_mask=attention_mask,
            **options,
        )

    AttentionMaskInterface.register("sdpa", mask)


def scheduled_rate(
    step: int, *, rate: float, steps: int, warmup_steps: int, schedule: str
) -> float:
    """Returns the learning rate at a step, counted from 0, of a training of `steps` steps.

    The warm-up rises to `rate` over `warmup_steps`; a cosine goes down to a tenth of it.
    """
    if step < warmup_steps:
        return rate * (step + 1) / warmup_steps
    if schedule == "constant":
        return rate
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


IGNORED_LABEL = -100
"""The label that cross entropy ignores by default, in torch and in transformers."""


def packed_sequences(
    texts: Iterable[str], encode: Callable[[str], Sequence[int]], length: int
) -> list[dict[str, Any]]:
    """Returns sequences of `length` tokens, cut from one stream of all texts.

    Tokens at the end of the stream that do not fill a sequence are dropped.
    """
    stream = torch.tensor([token for text in texts for token in encode(text)])
    rows = stream[: len(stream) // length * length].view(-1, length)
    # The first token is not predicted; some versions would count its label in the mean.
    return [
        {"input_ids": row, "labels": F.pad(row[1:], (1, 0), value=IGNORED_LABEL)} for row in rows
    ]


def sequences(texts: Iterable[str], encode: Callable[[str], Sequence[int]]) -> list[dict[str, Any]]:
    """Returns a training set for Trainer; `encode` returns the tokens of a text."""
    return packed_sequences(texts, encode, SEQUENCE_LENGTH)


def model_kwargs() -> dict[str, Any]:
    """Returns arguments for `from_pretrained` and `from_config`."""
    return {"dtype": WEIGHTS_DTYPE, "attn_implementation": "sdpa"}


def training_arguments(output_dir: str, **changes: Any) -> TrainingArguments:
    """Returns these settings with your `changes`."""
    return TrainingArguments(output_dir=output_dir, **{**SETTINGS, **changes})


def prepare_model(model: Any) -> Any:
    """Applies in place, in the order of the trial, what TrainingArguments have no key for.

    AutotuneTrainer calls it.
    """
    set_weights_dtype(model, WEIGHTS_DTYPE)
    keep_causal_flag()
    model.compile(dynamic=False)
    return model


def make_optimizer(
    parameters: Sequence[nn.Parameter], *, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Makes the trial's optimizer."""
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
    """Trainer with the trial's techniques, optimizer and schedule.

    An optimizer or schedule that you choose in the arguments is made by Trainer as usual.
    """

    def __init__(self, model: Any, args: TrainingArguments | None = None, **others: Any) -> None:
        if args is None:
            args = training_arguments("trainer_output")
        super().__init__(prepare_model(model), args, **others)

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        if self.optimizer is not None or self.args.optim != SETTINGS["optim"]:
            return super().create_optimizer(*args)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(
            parameters, learning_rate=self.args.learning_rate, weight_decay=self.args.weight_decay
        )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        is_changed = self.args.lr_scheduler_type != SETTINGS["lr_scheduler_type"]
        if self.lr_scheduler is not None or is_changed:
            return super().create_scheduler(num_training_steps, optimizer)
        warmup_steps = self.args.get_warmup_steps(num_training_steps)

        def factor(step: int) -> float:
            return scheduled_rate(
                step,
                rate=1.0,
                steps=num_training_steps,
                warmup_steps=warmup_steps,
                schedule=SCHEDULE,
            )

        optimizer = optimizer or self.optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler
