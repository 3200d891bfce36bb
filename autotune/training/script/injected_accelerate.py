"""Makes a loop with accelerate searched that has no line of ours.

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

The configuration is applied once `prepare` has both the model and its optimizers. The first loader
that is prepared is that of the training data, and yields micro batches; each update is reported,
with the losses that `backward` was given. What a loop does once for each of its batches happens
once for the micro batches of that batch: clipping, `zero_grad`, a step of a schedule. Where a
loop does something that cannot be followed, an error names the line.

Imports accelerate.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer, lr_scheduler

from autotune.errors import InvalidInput
from autotune.shipped.batch_tokens import count_tokens
from autotune.shipped.changed_method import Method, change_method
from autotune.spec.terms import Counted
from autotune.training.script import interface
from autotune.training.script.counted import counted_in
from autotune.training.script.micro_batches import WHOLE_BATCH, MicroBatches, split_batches
from autotune.training.script.run import watch_clipping

_BY_HAND = "or call autotune.apply and autotune.report yourself: see docs/scripts.md"


def change(_accelerator: ModuleType) -> None:
    """Changes the classes of accelerate: the first Accelerator that prepares is followed."""
    followed: list[_Loop | None] = []

    def loop_of(accelerator: Accelerator) -> _Loop | None:
        """Returns how an Accelerator is followed; None if its script, or a Trainer, calls ours."""
        if not followed:
            followed.append(None if interface.was_called() else _Loop(accelerator))
        loop = followed[0]
        return loop if loop is not None and loop.accelerator is accelerator else None

    def current() -> _Loop | None:
        return followed[0] if followed else None

    def check_clipping() -> None:
        loop = current()
        if loop is not None:
            loop.check_clipping()

    _change_preparing(loop_of)
    _change_steps(current)
    watch_clipping(before_clipping=check_clipping)
    for kind in (DataLoaderShard, DataLoaderDispatcher):
        kind.__iter__ = _delivering(kind.__iter__, current)
    for kind in vars(lr_scheduler).values():
        is_schedule = isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
        if is_schedule and "step" in vars(kind):
            kind.step = _once_a_batch(kind.step, current)


def _change_preparing(loop_of: "Callable[[Accelerator], _Loop | None]") -> None:
    prepare, prepare_model = Accelerator.prepare, Accelerator.prepare_model
    prepare_optimizer = Accelerator.prepare_optimizer
    prepare_data_loader = Accelerator.prepare_data_loader
    is_preparing: list[bool] = []

    @functools.wraps(prepare)
    def all_at_once(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        is_preparing.append(True)
        try:
            prepared = prepare(self, *args, **kwargs)
        finally:
            is_preparing.pop()
        loop = loop_of(self)
        if loop is not None:
            loop.apply()
        return prepared

    @functools.wraps(prepare_model)
    def with_model(self: Accelerator, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        loop = loop_of(self)
        prepared = prepare_model(self, model, *args, **kwargs)
        if loop is not None and not kwargs.get("evaluation_mode"):
            loop.models.append(model)
            if not is_preparing:
                loop.apply()
        return prepared

    @functools.wraps(prepare_optimizer)
    def with_optimizer(self: Accelerator, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        loop = loop_of(self)
        prepared = prepare_optimizer(self, optimizer, *args, **kwargs)
        if loop is not None:
            loop.add_optimizer(getattr(optimizer, "optimizer", optimizer))
            if not is_preparing:
                loop.apply()
        return prepared

    @functools.wraps(prepare_data_loader)
    def with_loader(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        loop = loop_of(self)
        prepared = prepare_data_loader(self, *args, **kwargs)
        if loop is not None:
            loop.take_loader(prepared)
        return prepared

    Accelerator.prepare = all_at_once
    Accelerator.prepare_model = with_model
    Accelerator.prepare_optimizer = with_optimizer
    Accelerator.prepare_data_loader = with_loader


def _change_steps(current: "Callable[[], _Loop | None]") -> None:
    accumulate, backward = Accelerator.accumulate, Accelerator.backward
    clip_norm, clip_value = Accelerator.clip_grad_norm_, Accelerator.clip_grad_value_
    step, zero_grad = AcceleratedOptimizer.step, AcceleratedOptimizer.zero_grad

    @functools.wraps(accumulate)
    def accumulated(self: Accelerator, *models: Any) -> Any:
        loop = current()
        if loop is not None:
            loop.accumulates = True
        return accumulate(self, *models)

    @functools.wraps(backward)
    def with_loss(self: Accelerator, loss: Tensor, **kwargs: Any) -> None:
        loop = current()
        if loop is not None and self is loop.accelerator:
            loss = loop.weighted(loss)
        backward(self, loss, **kwargs)

    @functools.wraps(clip_norm)
    def clipped(
        self: Accelerator, parameters: Any, max_norm: float, *args: Any, **kwargs: Any
    ) -> Any:
        loop = current()
        is_whole = loop is None or loop.part.ends_batch
        return clip_norm(self, parameters, max_norm if is_whole else float("inf"), *args, **kwargs)

    @functools.wraps(clip_value)
    def clipped_by_value(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        loop = current()
        if loop is None or loop.part.ends_batch:
            clip_value(self, *args, **kwargs)

    @functools.wraps(step)
    def stepped(self: AcceleratedOptimizer, closure: Any = None) -> None:
        loop = current()
        is_step = loop is not None and self.optimizer in loop.optimizers
        if not is_step or not self.gradient_state.sync_gradients:
            step(self, closure)
            return
        assert loop is not None
        loop.check_step()
        step(self, closure)
        loop.note_update(self.optimizer)

    @functools.wraps(zero_grad)
    def zeroed(self: AcceleratedOptimizer, *args: Any, **kwargs: Any) -> None:
        loop = current()
        if loop is None or self.optimizer not in loop.optimizers:
            zero_grad(self, *args, **kwargs)
        elif not loop.is_inside_batch:
            state, before = self.gradient_state, self.gradient_state.sync_gradients
            state._set_sync_gradients(before or loop.part.is_of_last_batch)  # as in the script
            zero_grad(self, *args, **kwargs)
            state._set_sync_gradients(before)

    Accelerator.accumulate, Accelerator.backward = accumulated, with_loss
    Accelerator.clip_grad_norm_, Accelerator.clip_grad_value_ = clipped, clipped_by_value
    AcceleratedOptimizer.step, AcceleratedOptimizer.zero_grad = stepped, zeroed


def _delivering(iterate: Callable[..., Any], current: "Callable[[], _Loop | None]") -> Any:
    @functools.wraps(iterate)
    def batches(self: Any) -> Iterator[Any]:
        for batch in iterate(self):
            loop = current()
            if loop is not None:
                loop.note_batch(self, batch)
            yield batch

    return batches


def _once_a_batch(step: Callable[..., Any], current: "Callable[[], _Loop | None]") -> Any:
    @functools.wraps(step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        loop = current()
        if loop is not None and self.optimizer in loop.optimizers and not loop.part.ends_batch:
            return None
        return step(self, *args, **kwargs)

    return call


class _Loop:
    """The training loop of the script, as far as it was seen."""

    def __init__(self, accelerator: Accelerator) -> None:
        _check_parts(accelerator)
        for learner in interface.learners():
            learner.note_own_choices(**_own_choices(accelerator))
        _leave_to_configuration(accelerator)
        self.accelerator = accelerator
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.accumulates = False
        """Whether the loop calls `accelerator.accumulate`."""
        self.part = WHOLE_BATCH
        """What the current micro batch is in the training of the script."""
        self.is_inside_batch = False
        """Whether there are gradients of a part of the script's current batch."""
        self._model: nn.Module | None = None
        self._loader: Any = None
        self._micro_batches: MicroBatches | None = None
        self._accumulated = accelerator.gradient_accumulation_steps
        self._delivered: Any = None
        """The loader of the last batch."""
        self._has_gradients = False
        self._losses: list[Tensor] = []
        self._tokens = 0
        self._counted: Counted = "tokens"
        self._updated: set[Optimizer] = set()

    # -- what is prepared --------------------------------------------------------------------------

    def add_optimizer(self, optimizer: Optimizer) -> None:
        if self._model is not None:
            raise InvalidInput(
                f"an optimizer is prepared after another one was, {_line_of_script()}",
                hint=f"pass all in one call of accelerator.prepare, {_BY_HAND}",
            )
        self.optimizers.append(optimizer)

    def apply(self) -> None:
        """Applies the configuration, if the model and its optimizers are there."""
        if self._model is not None or not self.optimizers:
            return
        stepped = {
            parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        trained = [model for model in self.models if not stepped.isdisjoint(model.parameters())]
        if not trained:
            return
        if len(trained) > 1:
            raise InvalidInput(
                f"{len(trained)} models are trained together, {_line_of_script()}, and a search "
                "changes one",
                hint=f"put them in one module, {_BY_HAND}",
            )
        self._model = trained[0]
        optimizers = self.optimizers
        interface.apply(self._model, optimizers if len(optimizers) > 1 else optimizers[0])
        change_method(self._model, "zero_grad", self._zeroing)
        self._first_pass = register_module_forward_pre_hook(self._check_loader)
        for learner in interface.learners():
            learner.note_injected(
                "its accelerator.prepare applies the configuration", is_checked_until_update=True
            )

    def _zeroing(self, zero_grad: Method) -> Method:
        def zero(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if not self.is_inside_batch:
                zero_grad(module, *args, **kwargs)

        return zero

    def _check_loader(self, module: nn.Module, _inputs: Any) -> None:
        """Raises InvalidInput if training begins without a loader that was prepared."""
        if module is self._model and torch.is_grad_enabled():
            self._first_pass.remove()
            if self._loader is None:
                raise InvalidInput(
                    "the batches of the script do not come from a loader that was prepared",
                    hint=f"write loader = accelerator.prepare(loader), {_BY_HAND}",
                )

    def take_loader(self, prepared: Any) -> None:
        """Lets the first loader yield micro batches."""
        if self._loader is not None:
            return
        self._loader = prepared
        state = self.accelerator.gradient_state
        if not state.sync_with_dataloader:
            raise InvalidInput(
                "a GradientAccumulationPlugin has sync_with_dataloader=False",
                hint=f"leave it out, {_BY_HAND}",
            )
        self._micro_batches = split_batches(
            prepared.base_dataloader if isinstance(prepared, DataLoaderShard) else prepared,
            accumulated=self._accumulated,
            set_by=f"gradient_accumulation_steps {self._accumulated} of its Accelerator",
            has_old_length=True,  # loops compute the length of their schedules from it
        )
        if self._micro_batches is not None:
            self.accelerator.gradient_accumulation_steps = self._micro_batches.accumulation

    # -- what the loop does ------------------------------------------------------------------------

    def note_batch(self, loader: Any, batch: Any) -> None:
        """Is called before the loop gets a batch of a prepared loader."""
        self._delivered = loader
        if loader is not self._loader:
            return
        if self._has_gradients and self.part.ends_step and self._micro_batches is not None:
            raise InvalidInput(
                "the loop adds up the gradients of several batches itself: its optimizer has not "
                f"made a step after the last one, {_line_of_script()}",
                hint="write Accelerator(gradient_accumulation_steps=...) and `with "
                f"accelerator.accumulate(model):`, {_BY_HAND}",
            )
        self.is_inside_batch = not self.part.ends_batch
        if self._micro_batches is not None:
            self.part = self._micro_batches.parts.popleft()
            self.accelerator.gradient_state._set_sync_gradients(self.part.ends_step)
        self._tokens += int(count_tokens(batch))
        self._counted = counted_in(batch)

    def weighted(self, loss: Tensor) -> Tensor:
        """Notes a loss before its backward pass; returns it with its weight."""
        if self._delivered is not self._loader:
            raise InvalidInput(
                f"the loop trains on another loader than the first one that was prepared, "
                f"{_line_of_script()}",
                hint=f"prepare the loader of the training data first, {_BY_HAND}",
            )
        if self._accumulated > 1 and not self.accumulates:
            raise InvalidInput(
                f"the Accelerator has gradient_accumulation_steps={self._accumulated}, and the "
                f"loop does not call accelerator.accumulate, {_line_of_script()}",
                hint=f"write `with accelerator.accumulate(model):` around each pass, {_BY_HAND}",
            )
        self._has_gradients = True
        self.is_inside_batch = self.is_inside_batch or not self.part.ends_batch
        if self.part.weight != 1.0:
            loss = loss * self.part.weight
        self._losses.append(loss.detach() / self.accelerator.gradient_accumulation_steps)
        return loss

    def check_clipping(self) -> None:
        """Raises InvalidInput where gradients of a part of a batch are clipped."""
        if self.part.ends_batch:
            return
        reason = (
            f"the loop clips gradients by torch's own function, {_line_of_script()}, which does "
            "not wait for all micro batches, as accelerator.clip_grad_norm_ does"
        )
        for learner in interface.learners():
            learner.note_whole_batches(reason)
        raise InvalidInput(reason, hint="write accelerator.clip_grad_norm_")

    def check_step(self) -> None:
        """Raises InvalidInput where the optimizer makes a step within one of the configuration."""
        if not self.part.ends_step:
            raise InvalidInput(
                f"the optimizer makes a step between the batches of one, {_line_of_script()}",
                hint=f"let each pass over the loader end by itself, {_BY_HAND}",
            )

    def note_update(self, optimizer: Optimizer) -> None:
        """Reports a step once each optimizer has updated."""
        self._updated.add(optimizer)
        if len(self._updated) < len(self.optimizers) or not self._losses:
            return
        self._has_gradients = self.is_inside_batch = False
        loss, tokens = torch.stack(self._losses).sum(), self._tokens
        self._losses, self._tokens = [], 0
        self._updated.clear()
        interface.report(**{self._counted: tokens}, loss=loss)


def _check_parts(accelerator: Accelerator) -> None:
    """Raises InvalidInput where another library has the model, or a process has a part of it."""
    kind = accelerator.distributed_type
    if kind != DistributedType.NO or accelerator.mixed_precision == "fp8":
        what = "mixed_precision fp8" if kind == DistributedType.NO else kind.value
        raise InvalidInput(
            f"a search cannot be combined with {what} of accelerate",
            hint="train in one process on one device, without it",
        )


def _own_choices(accelerator: Accelerator) -> dict[str, str]:
    """Returns what the configuration decides, as the Accelerator has it."""
    compiles = accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
    precisions = {"bf16": "bf16-mixed", "fp16": "fp16-mixed"}
    return {
        "precision": precisions.get(accelerator.mixed_precision, "fp32"),
        "compile": "model" if compiles else "none",
    }


def _leave_to_configuration(accelerator: Accelerator) -> None:
    """Turns off what the configuration decides, and what saves or sends."""
    accelerator.state._mixed_precision = "no"
    accelerator.native_amp, accelerator.scaler = False, None
    accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
    accelerator.log_with = []
    accelerator.save_state = accelerator.save_model = _save_nothing


def _save_nothing(*_: Any, **__: Any) -> None:
    """A trial saves no checkpoint."""


def _line_of_script() -> str:
    """Returns the place in the code of the user, as `train.py, line 12`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        is_ours = file.startswith(os.path.dirname(__file__))
        if not is_ours and "site-packages" not in file and os.path.exists(file):
            return f"{os.path.basename(file)}, line {frame.f_lineno}"
        frame = frame.f_back
    return "in its loop"
