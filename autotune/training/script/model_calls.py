"""Sees what a script calls of its model, and so which techniques would change nothing in it.

Autocast is applied around the model's forward pass, compilation and offloading around its call, and
recomputation around the calls of its blocks. A script that computes its loss by another method of
the model, or a model that uses parts of its blocks only, would train as without them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from autotune.models.parts import ModelParts
from autotune.shipped.changed_method import Method, change_method
from autotune.spec.config import FULL_PRECISIONS, Precision
from autotune.techniques.requirements import missing_blocks

_NOT_CALLED = (
    "the script computes its loss without calling its model, as by another method of it, and "
    "{what} is applied where the model is called: write it as model(...)"
)


class ModelCalls:
    """Follows the first forward pass of a training: `at_end` is called when it has returned.

    A pass that records no gradients is of an evaluation, and does not count.
    """

    def __init__(self, model: nn.Module, *, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._forward_depth = self._call_depth = 0
        self._is_in_training_forward = False
        self._computes_outside = self._computes_outside_of_call = False
        self._called: set[nn.Module] = set()
        self._handle = register_module_forward_pre_hook(self._note_call)
        change_method(model, "forward", self._watched_forward)
        change_method(model, "__call__", self._watched_call)

    def close(self) -> None:
        """Stops following calls."""
        self._handle.remove()

    @property
    def is_training(self) -> bool:
        """Whether what is computed now belongs to a training, also where it will be recomputed."""
        return torch.is_grad_enabled() or self._is_in_training_forward

    def note_product(self) -> None:
        """Must be called at the first product with a weight of the model in a training."""
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
            with self._in_call():
                return call(module, *args, **kwargs)

        return watched

    @contextmanager
    def _in_call(self) -> Iterator[None]:
        self._call_depth += 1
        try:
            yield
        finally:
            self._call_depth -= 1
