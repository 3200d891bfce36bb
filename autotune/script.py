"""What a training script of the user's own calls: the configuration, its application, and a report of each step.

    config = autotune.current_config(global_batch=16)         # config.micro_batch_size sequences a forward pass
    model, optimizer = autotune.apply(model, optimizer)
    autotune.report(tokens=tokens_in_the_step, loss=loss)     # after each optimizer step

In a trial of `autotune search --script` they do what the trial needs. Run by itself the script trains as it would
without them, or with the configuration in the JSON file that AUTOTUNE_CONFIG names. Loads torch only in `apply`.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from autotune.config import TrainingConfig
from autotune.errors import InvalidInput

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

CONFIG_VARIABLE = "AUTOTUNE_CONFIG"


class Run(Protocol):
    """A trial that a script runs in."""

    @property
    def config(self) -> TrainingConfig: ...

    def apply(self, model: "nn.Module", optimizer: "Optimizer") -> "tuple[nn.Module, Optimizer]": ...

    def report(self, *, tokens: int, loss: Any, evaluation_loss: Any) -> None: ...


_running: list[Run] = []
"""The trial this process is, if it is one."""


def begin(run: Run) -> None:
    """Makes this process a trial: from here on the script's calls go to `run`."""
    _running[:] = [run]


def current_config(*, global_batch: int = 1) -> TrainingConfig:
    """The configuration to train with; a plain fp32 training where nothing else is asked for. Raises InvalidInput.

    `global_batch` is the script's own number of sequences in an optimizer step: run by itself, it takes them at once.
    """
    if _running:
        return _running[0].config
    file = os.environ.get(CONFIG_VARIABLE)
    return read_config(Path(file), global_batch=global_batch) if file else TrainingConfig(micro_batch_size=global_batch)


def apply(model: "nn.Module", optimizer: "Optimizer") -> "tuple[nn.Module, Optimizer]":
    """The model and the optimizer to train with in the place of those given, which have taken no step yet.

    To be called when the model is on its device; learning rate schedules belong on the optimizer that is returned.
    Raises IllegalConfiguration for a technique that the model or the optimizer cannot take.
    """
    if _running:
        return _running[0].apply(model, optimizer)
    if not os.environ.get(CONFIG_VARIABLE):
        return model, optimizer
    from autotune.techniques.own_training import apply_to_own

    return apply_to_own(current_config(), model, optimizer)


def report(*, tokens: int, loss: Any, evaluation_loss: Any = None) -> None:
    """Says that an optimizer step is done: its tokens, and its mean token loss in nats, a number or a tensor.

    `evaluation_loss` is the same on text that is not trained on, where the script has just evaluated. A trial ends
    with the report of its last step.
    """
    if _running:
        _running[0].report(tokens=tokens, loss=loss, evaluation_loss=evaluation_loss)


def read_config(file: Path, *, global_batch: int = 1) -> TrainingConfig:
    """A configuration from a JSON object of its fields, as `config` of a trial in `--json`. Raises InvalidInput.

    A micro batch that is not said is the whole global batch.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise InvalidInput(f"{file} holds no configuration", hint='write for example {"precision": "bf16-mixed"}')
        return TrainingConfig(**{"micro_batch_size": global_batch, **content})
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror}", hint=f"check {CONFIG_VARIABLE}") from None
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{file} holds no configuration: {error}", hint=f"check {CONFIG_VARIABLE}") from None
