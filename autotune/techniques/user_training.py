"""Applies techniques to the model and optimizer of a user's script, as in every other trial.

The training loop stays in the script: it calls the model, computes the loss, calls backward and
steps the optimizer. So the loss can neither be scaled (fp16-mixed) nor computed in chunks, and the
optimizer is the one that the script created for its layers.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from autotune.errors import IllegalConfiguration, InvalidInput
from autotune.models.parts import ModelParts
from autotune.shipped.activation_offload import offloaded
from autotune.shipped.blocks import find_blocks
from autotune.shipped.changed_method import Method, change_method
from autotune.spec.config import FULL_PRECISIONS, ActivationOffload, Precision, TrainingConfig
from autotune.techniques import attention, compilation, memory_budget, precision, wrap_blocks
from autotune.techniques.feed_forward import check_tiles
from autotune.techniques.own_precision import (
    cast_state,
    cast_weights,
    own_precision,
    why_not_cast,
)
from autotune.techniques.requirements import check_parts, missing_parts
from autotune.techniques.user_optimizer import all_optimizers, check_fusion, set_fusion
from autotune.techniques.widened import widened

_NO_PRECISION: Mapping[Precision, str] = {
    "fp16-mixed": "a script calls backward on its loss itself, so that nothing scales it",
    "fp8": "a script's optimizer was made for the layers that fp8 would replace",
    "int8-mixed": "the layers of a script stay as they are, and int8-mixed computes them otherwise",
    "bf16-stochastic": "a script brings its own optimizer, which rounds to nearest",
}
_NOT_IN_A_SCRIPT = {
    "activation_budget": "what a script will do is not predicted, so that nothing can be planned: "
    "call autotune.checkpoint in it",
    "loss": "a script computes its loss itself",
    "gradient_accumulation_dtype": "a script clips, logs and clears gradients itself, in the "
    "format of its weights",
    "kernels": "a script puts Liger's kernels into its model itself, by use_liger_kernel",
    "offload": "a script's optimizer updates the weights that it was given",
    "engine": "a script calls its model, backward and its optimizer itself",
    "adapter": "a script's optimizer was made for the model's own weights, which it would freeze",
}
"""{technique: why a script's training has nothing but its default}."""

Optimizers = TypeVar("Optimizers", bound=Optimizer | Sequence[Optimizer])
"""One optimizer, or a list or tuple of several."""


def apply_to_user_training(
    config: TrainingConfig, model: nn.Module, optimizers: Optimizers
) -> tuple[nn.Module, Optimizers]:
    """Changes the model and how its optimizers update, in place; returns both as they were given.

    Raises IllegalConfiguration for a technique that the model or an optimizer does not support.
    """
    _check_that_weights_exist(model)
    several = all_optimizers(optimizers)
    formats_before = {
        parameter: parameter.dtype
        for optimizer in several
        for parameter in optimizer.state
        if isinstance(parameter, Tensor)
    }
    apply_to_user_model(config, model)
    for optimizer in several:
        cast_state(optimizer, formats_before)
    set_fusion(several, config.optimizer_fusion, sparse=with_sparse_gradients(model))
    return model, optimizers


def apply_to_user_model(config: TrainingConfig, model: nn.Module) -> None:
    """Applies everything except the optimizer fusion; changes the model in place.

    Does nothing to a model that has this configuration already. Raises IllegalConfiguration for a
    model that has another one, and for a technique that the model does not support.
    """
    applied = _applied.get(model)
    if applied == config:
        return
    if applied is not None:
        raise IllegalConfiguration(
            "the model already has another configuration",
            hint="apply one configuration to a model, or build the model again",
        )
    precision.set_matmul_precision(config.precision)
    memory_budget.set_memory_budget(config.memory_budget)
    if config.compile_mode != "default":
        compilation.set_mode(config.compile_mode)
    attention.set_attention_backend(config.attention)
    for technique, value in config.to_dict().items():
        if reason := _why_not_in_a_script(technique, value):
            raise IllegalConfiguration(
                f"{technique} {value} cannot be applied: {reason}", hint=f"use another {technique}"
            )
    parts = parts_of_user_model(model)
    check_parts(parts, config)
    check_tiles(parts, config)
    own = own_precision(model)
    if config.precision not in (own, "as-is"):
        if own == "as-is":
            raise IllegalConfiguration(
                f"precision {config.precision} cannot be applied: {why_not_cast(model)}",
                hint="use precision as-is",
            )
        cast_weights(model, precision.weights_dtype(config.precision))
        _cast_around_forward(model, config.precision)  # inside what is compiled
    wrap_blocks(parts, config)
    _offload_around_forward(model, config.activation_offload)
    _applied[model] = config


def _why_not_in_a_script(technique: str, value: Any) -> str | None:
    """Returns why a script's training cannot have a value; None if nothing is known against it."""
    if technique == "precision":
        return _NO_PRECISION.get(value)
    is_default = value == getattr(TrainingConfig(), technique)
    return None if is_default else _NOT_IN_A_SCRIPT.get(technique)


def _check_that_weights_exist(model: nn.Module) -> None:
    """Raises InvalidInput for lazy modules, whose weights the first forward pass creates."""
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, tensor in tensors:
            if is_lazy(tensor):
                raise InvalidInput(
                    f"{name} has no size before the model's first call, as in lazy modules, and "
                    "autotune.apply casts and watches weights",
                    hint="call the model once, with a batch, before autotune.apply",
                )


_applied: weakref.WeakKeyDictionary[nn.Module, TrainingConfig] = weakref.WeakKeyDictionary()
"""The configurations that models of this process have."""


def with_sparse_gradients(model: nn.Module) -> set[Tensor]:
    """Returns the weights of the model's embeddings whose gradients are sparse."""
    found = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            found.add(module.weight)
    return found


def parts_of_user_model(model: nn.Module) -> ModelParts:
    """Returns the parts of a model, found by its structure alone.

    How the blocks are called is not known, so several are never combined to a segment.
    """
    found = find_blocks(model)
    if found is None:
        return ModelParts(model=model)
    return ModelParts(
        model=model,
        blocks_owner=found.owner,
        blocks_name=found.name,
        attention_name=found.attention_name,
        blocks_are_called_alike=None,
    )


def missing_in_user_model(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    choices: Mapping[str, Sequence[Any]],
) -> dict[str, dict[str, str]]:
    """Returns which of `choices`, {technique: values}, a script's training does not support.

    The result is {technique: {value: reason}}. Of the technique optimizer only the first value is
    supported: it stands for what the script has.
    """
    _check_that_weights_exist(model)
    several = all_optimizers(optimizers)
    fusions = {}
    # First: what is tried next casts the model.
    for fusion in choices.get("optimizer_fusion", ()):
        try:
            check_fusion(several, fusion, sparse=with_sparse_gradients(model))
        except IllegalConfiguration as error:
            fusions[fusion] = error.message
    without_adapters = {name: choices[name] for name in choices if name != "adapter"}
    weights = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    missing = missing_parts(parts_of_user_model(model), without_adapters)
    # That has cast the model, which the script goes on to use.
    for parameter, data in weights:
        parameter.data = data
    for module, own in buffers:
        module._buffers.update(own)
    for technique, values in choices.items():
        for value in values:
            if reason := _why_not_in_a_script(technique, value):
                missing.setdefault(technique, {})[value] = reason
    others = choices.get("optimizer", ())[1:]
    missing["optimizer"] = dict.fromkeys(others, "a script brings its own optimizer")
    missing["optimizer_fusion"] = fusions
    return {technique: reasons for technique, reasons in missing.items() if reasons}


def _cast_around_forward(model: nn.Module, name: Precision) -> None:
    """Runs forward under autocast, and converts its output to float32 for the script's loss."""
    if name in FULL_PRECISIONS:
        return
    device = next(model.parameters()).device

    def change(forward: Method) -> Method:
        def cast(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with precision.autocast(name, device=device):
                output = forward(self, *args, **kwargs)
            return widened(output)

        return cast

    change_method(model, "forward", change)


def _offload_around_forward(model: nn.Module, place: ActivationOffload) -> None:
    """Offloads outside the compiled region: hooks see what it saves, not what is inside."""
    if place != "none":
        change_method(model, "__call__", _offloading)


def _offloading(call: Method) -> Method:
    def offloading(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with offloaded(self):
            return call(self, *args, **kwargs)

    return offloading
