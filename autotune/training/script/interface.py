"""What a training script of the user's own calls: the configuration, its application, and a report of each step.

    config = autotune.current_config(global_batch=16)         # config.micro_batch_size sequences a forward pass
    model, optimizer = autotune.apply(model, optimizer)
    autotune.report(tokens=tokens_in_the_step, loss=loss)     # after each optimizer step

In a trial of `autotune search --script` they do what the trial needs. Run by itself the script
trains as it would without them, or with the configuration in the JSON file that AUTOTUNE_CONFIG
names. A loop that is not searched applies a configuration it has read:

    config = autotune.load_config("autotune_config.json")     # what `autotune export --to pytorch` has written
    model, optimizer = autotune.apply(model, optimizer, config=config)

Loads torch only in `apply`.
"""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, overload

from autotune.errors import InvalidInput
from autotune.spec.config import Circumstances, TrainingConfig, check_legal

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

CONFIG_VARIABLE = "AUTOTUNE_CONFIG"


class Run(Protocol):
    """A trial that a script runs in."""

    @property
    def config(self) -> TrainingConfig: ...

    def apply(
        self, model: "nn.Module", optimizer: "Optimizer"
    ) -> "tuple[nn.Module, Optimizer]": ...

    def report(self, *, tokens: int, loss: Any, evaluation_loss: Any) -> None: ...


_running: list[Run] = []
"""The trial this process is, if it is one."""


def begin(run: Run) -> None:
    """Makes this process a trial: from here on the script's calls go to `run`."""
    _running[:] = [run]


def current_config(*, global_batch: int = 1) -> TrainingConfig:
    """The configuration to train with; a plain fp32 training where nothing else is asked for.

    Raises InvalidInput.

    `global_batch` is the script's own number of sequences in an optimizer step: run by itself, it
    takes them at once.
    """
    if _running:
        return _running[0].config
    file = os.environ.get(CONFIG_VARIABLE)
    return (
        load_config(file, global_batch=global_batch)
        if file
        else TrainingConfig(micro_batch_size=global_batch)
    )


@overload
def apply(model: "nn.Module", optimizer: TrainingConfig) -> "nn.Module": ...
@overload
def apply(model: "nn.Module", *, config: TrainingConfig) -> "nn.Module": ...
@overload
def apply(
    model: "nn.Module", optimizer: "Optimizer", config: TrainingConfig | None = None
) -> "tuple[nn.Module, Optimizer]": ...
def apply(
    model: "nn.Module",
    optimizer: "Optimizer | TrainingConfig | None" = None,
    config: TrainingConfig | None = None,
) -> "nn.Module | tuple[nn.Module, Optimizer]":
    """The model and the optimizer to train with in the place of those given, which have taken no step yet.

    `apply(model, optimizer)` applies what the search asks for, or the file that AUTOTUNE_CONFIG
    names; `apply(model, optimizer, config=config)` the given configuration. `apply(model, config)`
    gives the model alone, and cannot change how the optimizer updates: it warns where the
    configuration does.

    To be called when the model is on its device; learning rate schedules belong on the optimizer
    that is returned. Raises IllegalConfiguration for a technique that the model or the optimizer
    cannot take.
    """
    if isinstance(optimizer, TrainingConfig):
        optimizer, config = None, optimizer
    if optimizer is None:
        return _applied_to_model(config, model)
    if config is None and _running:
        return _running[0].apply(model, optimizer)
    if config is None and not os.environ.get(CONFIG_VARIABLE):
        return model, optimizer
    from autotune.techniques.user_training import apply_to_user_training

    if config is not None and type(optimizer).__name__ != (measured := _CLASSES[config.optimizer]):
        warnings.warn(
            f"the configuration was measured with {measured}: {type(optimizer).__name__} has a state of its own size",
            stacklevel=2,
        )
    config = config or current_config()
    _check_applicable(config)
    return apply_to_user_training(config, model, optimizer)


def _applied_to_model(config: TrainingConfig | None, model: "nn.Module") -> "nn.Module":
    from autotune.techniques.user_training import apply_to_user_model

    if config is None:
        raise InvalidInput(
            "autotune.apply was given neither an optimizer nor a configuration",
            hint="call apply(model, optimizer), or apply(model, config)",
        )
    if config.optimizer_fusion != "none":
        warnings.warn(
            f"optimizer_fusion {config.optimizer_fusion} is not applied to a model alone: "
            "call autotune.apply(model, optimizer, config=config)",
            stacklevel=3,
        )
    _check_applicable(config)
    apply_to_user_model(config, model)
    return model


def _check_applicable(config: TrainingConfig) -> None:
    """Raises IllegalConfiguration; warns of what a process has settled before it has a model."""
    check_legal(config, Circumstances(global_batch=config.micro_batch_size))
    said = f"{os.environ.get('PYTORCH_ALLOC_CONF')} {os.environ.get('PYTORCH_CUDA_ALLOC_CONF')}"
    if config.allocator == "expandable" and "expandable_segments:True" not in said:
        warnings.warn(
            "allocator expandable is not applied, for torch reads it before there is a model: "
            "start by the export's autotune_launch.py, or with PYTORCH_ALLOC_CONF=expandable_segments:True",
            stacklevel=4,
        )


_CLASSES: Mapping[str, str] = {
    "adamw": "AdamW",
    "adafactor": "Adafactor",
    "sgd": "SGD",
    "adafactor-fixed-rate": "AdafactorFixedRate",
    "adamw-8bit": "AdamW8bit",
}
"""The class of each optimizer that trials measure with."""


def report(*, tokens: int, loss: Any, evaluation_loss: Any = None) -> None:
    """Says that an optimizer step is done: its tokens, and its mean token loss in nats, a number or a tensor.

    `evaluation_loss` is the same on text that is not trained on, where the script has just
    evaluated. A trial ends with the report of its last step.
    """
    if _running:
        _running[0].report(tokens=tokens, loss=loss, evaluation_loss=evaluation_loss)


def load_config(file: str | Path, *, global_batch: int = 1) -> TrainingConfig:
    """The configuration in a JSON file: one that `autotune export` has written, or an object of its fields alone.

    A micro batch that is not said is the whole global batch. Raises InvalidInput.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        if isinstance(content, dict) and isinstance(content.get("config"), dict):
            content = content["config"]
        if not isinstance(content, dict):
            raise InvalidInput(
                f"{file} holds no configuration",
                hint='write for example {"precision": "bf16-mixed"}',
            )
        return TrainingConfig(**{"micro_batch_size": global_batch, **content})
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror}", hint=_HOW_TO_NAME) from None
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{file} holds no configuration: {error}", hint=_HOW_TO_NAME) from None


_HOW_TO_NAME = f"name the autotune_config.json of an export (in {CONFIG_VARIABLE} for a script that is run by itself)"
