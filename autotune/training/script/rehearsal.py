"""Tries the first steps of a user's script, to see what its training loop does not support.

One is a step of the optimizer during backward. Such a step uses each gradient when it is complete
and frees it at once. So a script must not change gradients between backward and the optimizer's
step, as clipping and scaling do, must not add up the gradients of several backward passes, and must
not need them afterwards. Otherwise each trial with
`optimizer_fusion backward` would fail its parity check or crash.

The other is a smaller micro batch, which a script gets from its configuration and may ignore. Each
trial with it would then be the same training under another name.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from autotune.errors import class_and_first_line_of
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import Workload
from autotune.techniques.user_optimizer import all_optimizers
from autotune.techniques.user_training import Optimizers
from autotune.training.parity import before_each_update, parameters_of
from autotune.training.script.run import (
    CLIPS_GRADIENTS,
    ScriptEnd,
    try_script,
    watch_clipping,
)

_CHANGES_GRADIENTS = (
    "the script changes gradients between backward and the optimizer's step, for example scales "
    "them, and optimizer_fusion backward has used and freed them before"
)
_ADDS_GRADIENTS = (
    "the script calls backward more than once before its optimizer steps, and optimizer_fusion "
    "backward would update the weights each time"
)
_HAS_PRE_HOOKS = (
    "the script registers a hook that runs before the optimizer's step, and optimizer_fusion "
    "backward has updated the weights before"
)
_NEEDS_GRADIENTS = "the script fails where gradients are freed during backward"


def why_no_step_in_backward(workload: Workload, *, device: torch.device) -> str:
    """Returns why the script's optimizer cannot step during backward; empty if nothing is known.

    The first step is an unchanged one, in which gradients are watched. In the second one they are
    freed during backward. A script that fails by itself is reported by its trials, not here.
    """
    rehearsal = _Rehearsal(workload)
    watch_clipping(before_clipping=rehearsal.note_clipping, after_norm=rehearsal.forgive_norm)
    try:
        try_script(rehearsal, workload, device=device)
    except (MemoryError, torch.OutOfMemoryError):
        pass
    except Exception as error:
        if rehearsal.has_freed_gradients:
            return f"{_NEEDS_GRADIENTS}: {class_and_first_line_of(error)}"
    return rehearsal.reason


def why_no_micro_batches(workload: Workload, *, micro_batch_size: int, device: torch.device) -> str:
    """Returns why the script has no such micro batch; empty if it has, or if nothing is known.

    A step of the global batch must then call a part of the model at least once a micro batch. One
    that has fewer calls, and one with the whole global batch, ignores it. (One that has fewer calls
    of a micro batch trains on less, which is another training.)
    """
    count = _CountOfCalls(workload, micro_batch_size)
    try:
        try_script(count, workload, device=device, learner=count)
    except Exception:
        return count.whole_batches  # an error is reported by its trials
    if count.whole_batches:
        return count.whole_batches
    expected = workload.global_batch // micro_batch_size
    most_calls = max(count.calls.values(), default=expected)
    if not (count.has_reported and count.has_whole_batch) or most_calls >= expected:
        return ""
    times = "once" if most_calls == 1 else f"{most_calls} times"
    return (
        f"the script calls its model {times} in a step, where {workload.global_batch} sequences in "
        f"micro batches of {micro_batch_size} need {expected} calls: it does not use the micro "
        "batch of autotune.current_config"
    )


class _CountOfCalls:
    """A run of the script that ends with its first step, and counts calls of the model's parts."""

    def __init__(self, workload: Workload, micro_batch_size: int) -> None:
        self.config = TrainingConfig(micro_batch_size=micro_batch_size)
        self.workload = workload
        self.calls: Counter[nn.Module] = Counter()
        self.has_reported = False
        self.has_whole_batch = False
        self.whole_batches = ""

    def learn_global_batch(self, sequences: int) -> None:
        """Does nothing: the workload has it by now."""

    def note_injected(self, what: str, *, is_checked_until_update: bool = False) -> None:
        """Does nothing: this was said when the script was examined."""

    def note_own_choices(self, **choices: Any) -> None:
        """Does nothing: the study has them by now."""

    def note_unknown_global_batch(self, reason: str) -> None:
        """Does nothing: the search was told."""

    def note_whole_batches(self, reason: str) -> None:
        self.whole_batches = reason
        raise ScriptEnd

    def apply(self, model: nn.Module, optimizer: Optimizers) -> tuple[nn.Module, Optimizers]:
        modules = set(model.modules())

        def count(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if module not in modules:
                return
            self.calls[module] += 1
            for value in inputs:
                if isinstance(value, Tensor) and value.shape[:1] == (self.workload.global_batch,):
                    self.has_whole_batch = True

        register_module_forward_pre_hook(count)
        return model, optimizer

    def report(self, **_: Any) -> None:
        self.has_reported = True
        raise ScriptEnd


@dataclass(frozen=True)
class _Gradient:
    """A gradient as backward has left it."""

    tensor: Tensor
    version: int
    norm: Tensor
    """For changes that do not count as a new version, by `grad.data`."""

    @classmethod
    def of(cls, tensor: Tensor) -> "_Gradient":
        return cls(tensor, tensor._version, _norm(tensor))

    def is_unchanged(self, tensor: Tensor) -> bool:
        if tensor is not self.tensor or tensor._version != self.version:
            return False
        return self.has_norm_of(tensor)

    def has_norm_of(self, tensor: Tensor) -> bool:
        return bool(torch.equal(self.norm.nan_to_num(), _norm(tensor).nan_to_num()))


@torch.no_grad()
def _norm(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    norm: Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
    return norm


class _Rehearsal:
    """A run of the script that ends with its second step, or where a reason is found."""

    def __init__(self, workload: Workload) -> None:
        self.config = TrainingConfig(micro_batch_size=workload.global_batch)
        self.workload = workload
        self.reason = ""
        self.has_freed_gradients = False
        self._is_second_step = False
        self._gradients: dict[Tensor, _Gradient] = {}
        """The gradients that are complete and that no optimizer has used, by parameter."""

    def apply(self, model: nn.Module, optimizer: Optimizers) -> tuple[nn.Module, Optimizers]:
        for one in all_optimizers(optimizer):
            for parameter in parameters_of(one):
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note_gradient)
        before_each_update(self._compare)
        return model, optimizer

    def report(self, **_: Any) -> None:
        if self.reason or self._is_second_step:
            raise ScriptEnd
        self._is_second_step = True
        self._gradients.clear()

    def note_clipping(self) -> None:
        self.reason = CLIPS_GRADIENTS

    def forgive_norm(self) -> None:
        """Accepts the product with 1 by which torch's clipping ends where it has no limit."""
        for parameter, known in self._gradients.items():
            gradient = parameter.grad
            if gradient is known.tensor and known.has_norm_of(gradient):
                self._gradients[parameter] = _Gradient.of(gradient)

    def _note_gradient(self, parameter: Tensor) -> None:
        if self._is_second_step:
            parameter.grad = None
            self.has_freed_gradients = True
            return
        assert parameter.grad is not None
        if parameter in self._gradients:
            self.reason = self.reason or _ADDS_GRADIENTS
        self._gradients[parameter] = _Gradient.of(parameter.grad)

    def _compare(self, optimizer: Optimizer) -> None:
        """Compares the gradients that an optimizer is about to use with those of backward."""
        if getattr(optimizer, "grad_scale", None) is not None:  # by which a fused update divides
            self.reason = self.reason or _CHANGES_GRADIENTS
        if getattr(optimizer, "_optimizer_step_pre_hooks", None):
            self.reason = self.reason or _HAS_PRE_HOOKS
        for parameter in parameters_of(optimizer):
            known = self._gradients.pop(parameter, None)
            if known is None or parameter.grad is None:
                continue
            if not known.is_unchanged(parameter.grad):
                self.reason = self.reason or _CHANGES_GRADIENTS
