"""Sees what a script calls of its model, and so which techniques would change nothing in it.

Autocast is applied around the model's forward pass, compilation and offloading around its call, and
recomputation around the calls of its blocks. A script that computes its loss by another method of
the model, or a model that uses parts of its blocks only, would train as without them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from autotune.models.parts import ModelParts
from autotune.shipped.changed_method import Method, change_method
from autotune.spec.config import FULL_PRECISIONS, Precision
from autotune.techniques.requirements import missing_blocks

_NOT_CALLED = (
    "the script computes its loss without calling its model, as by another method of it, and "
    "{what} is applied where the model is called: write it as model(...)"
)


_PRODUCTS = frozenset(
    [
        "linear",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "einsum",
        "conv1d",
        "conv2d",
        "conv3d",
        "multi_head_attention_forward",
        "lstm",
        "gru",
    ]
)
"""Names of the functions of torch that autocast runs in a lower precision."""


class ModelCalls(TorchFunctionMode):
    """Follows the first forward pass of a training: `at_end` is called when it has returned.

    A pass that records no gradients is of an evaluation, and does not count.
    """

    def __init__(self, model: nn.Module, *, at_end: Callable[[], None]) -> None:
        super().__init__()
        self.autocast_format: str | None = None
        """To what autocast casts at the first product with a weight of the model in a training:
        empty without autocast, None before that product. That a module computes without autocast
        says nothing: its forward may turn it on."""
        self._weights = set(model.parameters())
        self._at_end = at_end
        self._forward_depth = self._call_depth = 0
        self._is_in_training_forward = False
        self._computes_outside = self._computes_outside_of_call = False
        self._called: set[nn.Module] = set()
        change_method(model, "forward", self._watched_forward)
        change_method(model, "__call__", self._watched_call)
        self._watching = ExitStack()
        self._watching.callback(register_module_forward_pre_hook(self._note_call).remove)
        self._watching.enter_context(self)

    def close(self) -> None:
        """Stops following calls."""
        self._watching.close()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A pass that will be recomputed records no gradients, either.
        is_training = torch.is_grad_enabled() or self._is_in_training_forward
        is_product = getattr(function, "__name__", "") in _PRODUCTS
        if self.autocast_format is None and is_training and is_product:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and (
                    value in self._weights or value._base in self._weights
                ):
                    self._note_product(value.device.type)
                    break
        return function(*args, **kwargs)

    def _note_product(self, device_type: str) -> None:
        self.autocast_format = ""
        if torch.is_autocast_enabled(device_type):
            to_format = torch.get_autocast_dtype(device_type)
            self.autocast_format = str(to_format).removeprefix("torch.")
        self._computes_outside = self._forward_depth == 0
        self._computes_outside_of_call = self._call_depth == 0

    def missing(
        self, parts: ModelParts, choices: Mapping[str, Sequence[Any]], *, own_precision: Precision
    ) -> dict[str, dict[str, str]]:
        """Returns which of `choices` would change nothing, {technique: {value: reason}}."""
        found: dict[str, dict[str, str]] = {}
        if self._computes_outside:
            applied = [*FULL_PRECISIONS, own_precision, "as-is"]
            others = [value for value in choices.get("precision", ()) if value not in applied]
            found["precision"] = dict.fromkeys(others, _NOT_CALLED.format(what="autocast"))
        if self._computes_outside_of_call:
            for technique, value, what in (
                ("compile", "model", "compilation of the whole model"),
                ("activation_offload", "cpu", "offloading"),
            ):
                if value in choices.get(technique, ()):
                    found[technique] = {value: _NOT_CALLED.format(what=what)}
        if parts.blocks_owner is not None and not self._called.intersection(parts.blocks):
            for technique, reasons in missing_blocks(choices).items():
                found.setdefault(technique, {}).update(reasons)
        return {technique: reasons for technique, reasons in found.items() if reasons}

    def _note_call(self, module: nn.Module, _inputs: Any) -> None:
        self._called.add(module)

    def _watched_forward(self, forward: Method) -> Method:
        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._forward_depth += 1
            self._is_in_training_forward = torch.is_grad_enabled()
            try:
                output = forward(module, *args, **kwargs)
            finally:
                self._forward_depth -= 1
                self._is_in_training_forward = False
            if torch.is_grad_enabled() and not self._computes_outside:
                self._at_end()
            return output

        return watched

    def _watched_call(self, call: Method) -> Method:
        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._call_depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._call_depth -= 1

        return watched
