"""The functions that a user's training script calls to be searched.

    config = autotune.current_config(global_batch=16)       # use config.micro_batch_size
    model, optimizer = autotune.apply(model, optimizer)
    autotune.report(tokens=tokens_in_the_step, loss=loss)   # after each optimizer step

In a trial of `autotune search --script` these calls run the trial. Without a search the script
trains as it would without them, or with the configuration in the JSON file that AUTOTUNE_CONFIG
names. A training loop that is not searched can load a configuration and apply it:

    config = autotune.load_config("autotune_config.json")   # from `autotune export --to pytorch`
    model, optimizer = autotune.apply(model, optimizer, config=config)

Loads torch only in `apply`.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from autotune.errors import InvalidInput
from autotune.spec.config import (
    AS_IS,
    LegalityContext,
    TrainingConfig,
    check_legal,
    configuration_of,
)
from autotune.spec.optimizers import OPTIMIZERS
from autotune.spec.user_files import read_json
from autotune.spec.workload import Workload
from autotune.system.allocator_settings import assignments, own_settings

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Optimizers = TypeVar("Optimizers", bound="Optimizer | Sequence[Optimizer]")
"""One optimizer, or a list or tuple of several."""

CONFIG_VARIABLE = "AUTOTUNE_CONFIG"


class Run(Protocol):
    """The trial in which a script runs. The functions of this module delegate to it."""

    @property
    def config(self) -> TrainingConfig: ...

    @property
    def workload(self) -> Workload: ...

    def apply(
        self, model: "nn.Module", optimizer: Optimizers
    ) -> "tuple[nn.Module, Optimizers]": ...

    def report(
        self, *, tokens: int | None, rows: int | None, loss: Any, evaluation_loss: Any
    ) -> None: ...


class Learner(Protocol):
    """Is told what a script shows of itself when it is run before its first trial."""

    def learn_global_batch(self, sequences: int) -> None:
        """Takes the sequences of a step, before they are compared with those of the workload."""

    def note_injected(self, what: str, *, is_checked_until_update: bool = False) -> None:
        """Takes what the script has got from us, such as `its Trainer gets ...`.

        It may find until the first update of the weights that it cannot follow the script.
        """

    def note_own_choices(self, **choices: Any) -> None:
        """Takes what its trainer does by itself of that which a configuration decides."""

    def note_unknown_global_batch(self, reason: str) -> None:
        """Takes the reason for which nobody can tell the sequences of an optimizer step."""

    def note_whole_batches(self, reason: str) -> None:
        """Takes the reason for which the script has no smaller micro batch."""


_running: list[Run] = []
"""The trial that runs in this process; empty if there is none."""
_learning: list["Learner"] = []
"""Is told what the script that runs shows of itself, before its first step."""
_reported: list[Callable[[int], None]] = []
"""Gets the tokens of each step outside of a trial, to compare the training with what a trial has
measured."""
_called: list[str] = []
"""Which functions of ours the script has called, or something that calls them for it."""


def begin(run: Run, *, learner: Learner | None = None) -> None:
    """Starts a trial in this process: from now on the script's calls are delegated to `run`."""
    _running[:] = [run]
    _learning[:] = [learner] if learner else []
    _called.clear()


def learners() -> Sequence[Learner]:
    """Returns who learns of the script that runs: nobody in a trial."""
    return _learning


def was_called() -> bool:
    """Returns whether the script asks for its configuration, or applies it, itself."""
    return bool(_called)


def functions_called() -> frozenset[str]:
    """Returns the names of `apply` and `current_config` where the script has called them."""
    return frozenset(_called)


def current_run() -> Run | None:
    """Returns the trial that runs in this process, if there is one."""
    return _running[0] if _running else None


def promised_trial() -> dict[str, Any]:
    """Returns the numbers and facts of the trial that AUTOTUNE_CONFIG names; {} if it has none."""
    file = os.environ.get(CONFIG_VARIABLE)
    if _running or not file:
        return {}
    content = read_json(Path(file), hint=_HOW_TO_NAME)
    measured = content.get("measured") if isinstance(content, dict) else None
    return measured if isinstance(measured, dict) and "trial" in measured else {}


def has_configuration() -> bool:
    """Returns whether there is a configuration to apply: a trial's, or that of a named file."""
    return bool(_running or os.environ.get(CONFIG_VARIABLE))


def current_config(*, global_batch: int | None = None) -> TrainingConfig:
    """Returns the configuration to train with.

    In a trial it is that of the trial, otherwise the one in the file that AUTOTUNE_CONFIG names,
    and without that a plain training, as the script itself brings it.

    `global_batch` is the number of sequences in an optimizer step of the script. Outside a trial it
    is also the default micro batch size. Raises InvalidInput if its search has another number, if
    the micro batch does not divide it, or if the file is invalid.
    """
    return config_of_run(global_batch)


def config_of_run(global_batch: int | None, *, set_by: str = "") -> TrainingConfig:
    """Returns the configuration as `current_config` does, and raises what it raises.

    `set_by` says which settings of the script decide the number of sequences.
    """
    sequences = f"{global_batch} sequences in an optimizer step"
    if set_by:
        sequences += f" ({set_by})"
    _called.append("current_config")
    run = current_run()
    if run is not None:
        if global_batch is not None:
            for learner in _learning:
                learner.learn_global_batch(global_batch)
        if global_batch not in (None, run.workload.global_batch):
            raise InvalidInput(
                f"the script trains on {sequences}, and its search on {run.workload.global_batch}",
                hint=f"search with --global-batch {global_batch}",
            )
        return run.config
    default = 1 if global_batch is None else global_batch
    file = os.environ.get(CONFIG_VARIABLE)
    if not file:
        return configuration_of({**AS_IS, "micro_batch_size": default})
    config = load_config(file, global_batch=default)
    if global_batch is not None and global_batch % config.micro_batch_size:
        raise InvalidInput(
            f"{file} has a micro batch of {config.micro_batch_size}, which does not divide the "
            f"{sequences}",
            hint="train on as many sequences in a step as in the study",
        )
    return config


@overload
def apply(model: "nn.Module", optimizer: TrainingConfig) -> "nn.Module": ...
@overload
def apply(model: "nn.Module", *, config: TrainingConfig) -> "nn.Module": ...
@overload
def apply(
    model: "nn.Module", optimizer: Optimizers, config: TrainingConfig | None = None
) -> "tuple[nn.Module, Optimizers]": ...
def apply(
    model: "nn.Module",
    optimizer: "Optimizers | TrainingConfig | None" = None,
    config: TrainingConfig | None = None,
) -> "nn.Module | tuple[nn.Module, Optimizers]":
    """Applies a configuration; returns the model and the optimizer, which it changes in place.

    `apply(model, optimizer)` applies the configuration of the trial or, outside a search, the file
    that AUTOTUNE_CONFIG names. `apply(model, optimizer, config=config)` applies the given
    configuration. `apply(model, config)` returns only the model and cannot change how the optimizer
    updates: it warns where the configuration would.

    Of several optimizers, pass a list: `apply(model, [muon, adam])`. Each stays the object that it
    is, with its settings, hooks, state and learning-rate schedules.

    Call it once, when the model is on its device. Raises IllegalConfiguration for a technique that
    the model or the optimizer does not support, and for a model that has another configuration.
    """
    if isinstance(optimizer, TrainingConfig):
        optimizer, config = None, optimizer
    if optimizer is None:
        return _apply_to_model(config, model)
    if config is None and _running:
        _called.append("apply")
        return _running[0].apply(model, optimizer)
    if config is None and not has_configuration():
        return model, optimizer
    # torch: scripts that only read their configuration do without it.
    from autotune.techniques.user_optimizer import all_optimizers  # noqa: PLC0415
    from autotune.techniques.user_training import apply_to_user_training  # noqa: PLC0415

    is_named = config is None
    if config is None:
        config = current_config()
    else:
        names = [type(one).__name__ for one in all_optimizers(optimizer)]
        measured = OPTIMIZERS[config.optimizer].class_name
        if measured not in names:
            warnings.warn(
                f"the configuration was measured with {measured}, and the optimizer is "
                f"{' and '.join(names)}: the size of its state may differ",
                stacklevel=2,
            )
    _check_applicable(config)
    model, optimizer = apply_to_user_training(config, model, optimizer)
    if is_named and promised_trial():
        _compare_reports(model, *all_optimizers(optimizer))
    return model, optimizer


def _compare_reports(model: "nn.Module", *optimizers: "Optimizer") -> None:
    """Compares the next steps that the script reports with those of the trial."""
    from autotune.shipped.promise import Promise  # noqa: PLC0415  # torch, as above

    first = next(model.parameters(), None)
    promise = Promise(
        promised_trial(),
        device_type="cpu" if first is None else first.device.type,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        is_first=os.environ.get("RANK", "0") == "0",
    )

    def reported(tokens: int) -> None:
        promise.step_ended(tokens)
        promise.step_begins(model, *optimizers)
        if promise.is_over:
            _reported.clear()

    _reported[:] = [reported]
    promise.step_begins(model, *optimizers)


def _apply_to_model(config: TrainingConfig | None, model: "nn.Module") -> "nn.Module":
    from autotune.techniques.user_training import apply_to_user_model  # noqa: PLC0415  # torch, as above

    if config is None:
        raise InvalidInput(
            "autotune.apply was given neither an optimizer nor a configuration",
            hint="call apply(model, optimizer), or apply(model, config)",
        )
    if config.optimizer_fusion not in ("none", "as-is"):
        warnings.warn(
            f"optimizer_fusion {config.optimizer_fusion} is not applied to a model alone: "
            "call autotune.apply(model, optimizer, config=config)",
            stacklevel=3,
        )
    _check_applicable(config)
    apply_to_user_model(config, model)
    return model


def _check_applicable(config: TrainingConfig) -> None:
    """Raises IllegalConfiguration; warns if the process did not start with the right allocator."""
    check_legal(config, LegalityContext.of_script(config, global_batch=config.micro_batch_size))
    is_expandable = "expandable_segments:True" in own_settings()
    if config.allocator == "expandable" and not is_expandable:
        warnings.warn(
            "allocator expandable is not applied, since torch reads this setting before there is "
            "a model: start the training by the export's autotune_launch.py, or with "
            f"{assignments(expandable=True)}",
            stacklevel=4,
        )


def report(
    *,
    tokens: int | None = None,
    rows: int | None = None,
    loss: Any,
    evaluation_loss: Any = None,
) -> None:
    """Reports an optimizer step: its tokens, and its mean token loss in nats (number or tensor).

    A model without tokens reports `rows` instead, such as images, and its mean loss, which need be
    no cross entropy. `evaluation_loss` is the same loss on held-out data, if the script has just
    evaluated. A trial ends with the report of its last step. Outside a trial, with AUTOTUNE_CONFIG,
    the first steps are compared with those of the trial that the file is from.
    """
    if _running:
        _running[0].report(tokens=tokens, rows=rows, loss=loss, evaluation_loss=evaluation_loss)
    elif _reported:
        _reported[0](tokens or rows or 0)


def load_config(file: str | Path, *, global_batch: int = 1) -> TrainingConfig:
    """Loads a configuration from a JSON file of `autotune export`, or from an object of its fields.

    `global_batch` is used for a micro batch size that is missing, and what the script brings for a
    precision or an optimizer fusion that is missing. Raises InvalidInput.
    """
    content = read_json(Path(file), hint=_HOW_TO_NAME)
    if isinstance(content, dict) and "config" in content:
        content = content["config"]
    if not isinstance(content, dict):
        raise InvalidInput(
            f"{file} holds no configuration", hint='write for example {"precision": "bf16-mixed"}'
        )
    try:
        return configuration_of({**AS_IS, "micro_batch_size": global_batch, **content})
    except InvalidInput as error:
        raise InvalidInput(f"{file}: {error.message}", hint=error.hint) from None


_HOW_TO_NAME = (
    f"name the autotune_config.json of an export (in {CONFIG_VARIABLE} for a script that is "
    "run by itself)"
)
