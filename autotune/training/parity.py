"""Records the losses and gradients of the first steps of a training, for the parity check.

The check compares them with those of a plain training of the same numerics, the reference. It works
for every way in which the optimizer updates.
"""

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autotune.spec.config import Precision
from autotune.spec.parity import (
    PARITY_STEPS,
    PROJECTIONS,
    Difference,
    ParityTrace,
    largest_difference,
)
from autotune.spec.training_request import Progress, unwatched
from autotune.techniques.deepspeed_engine import EngineOptimizer
from autotune.techniques.offload import StateOnHost
from autotune.techniques.sharding import gradient_of
from autotune.techniques.user_optimizer import held_optimizers


class ParityFailed(Exception):
    """The first steps differ from those of a plain training of the same numerics."""


class ParityWatch:
    """Records the first steps of a training and compares them with `reference`, if there is one.

    Gradients are read where there is a reference, or where `is_trace`: the trace is the result.
    """

    def __init__(
        self,
        parameters_by_block: Mapping[str, Iterable[nn.Parameter]],
        *,
        device: torch.device,
        precision: Precision,
        reference: ParityTrace | None,
        is_trace: bool = False,
        progress: Progress = unwatched,
        whole_gradient: Callable[[nn.Parameter], Tensor] | None = None,
    ) -> None:
        self._device = device
        self._precision = precision
        self._reference = reference
        self._losses: list[float] = []
        self._steps_begun = 0  # the loss of a step may be known only when the next one has begun
        self._tokens: int | None = None
        self._reads_gradients = is_trace or reference is not None  # reading them takes time
        self._gradients = GradientSketch(
            parameters_by_block, device=device, progress=progress, whole_gradient=whole_gradient
        )
        self._updates: UpdateWatch | None = None
        self._draws_random_numbers = False
        self.difference: Difference | None = None
        """The largest difference from the reference, once it is known."""

    def follow(self, *optimizers: torch.optim.Optimizer) -> None:
        """From now on, compares what updates use with the groups and the state of `optimizers`.

        Also follows their gradients to the host.
        """
        self._updates = UpdateWatch(*optimizers)
        for optimizer in optimizers:
            if isinstance(optimizer, StateOnHost):
                self._gradients.follow(optimizer.gradients_on_host)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Must surround each training step."""
        is_first = self._steps_begun == 0
        self._steps_begun += 1
        before = self._random_state() if is_first else None
        with ExitStack() as watches:
            if is_first and self._reads_gradients:
                watches.enter_context(self._gradients.taken())
            if self._updates is not None:
                watches.enter_context(self._updates.step(self._steps_begun))
            yield
        if before is not None:
            self._draws_random_numbers = not torch.equal(before, self._random_state())

    def note(self, loss: float, *, tokens: int | None = None) -> None:
        """Records the mean token loss of a step, in order, and the tokens that a script reports.

        Raises ParityFailed where the first steps differ from the reference, or where an update used
        other settings than the optimizer has.
        """
        self._losses.append(loss)
        if len(self._losses) == 1:
            self._tokens = tokens
        if self._updates is not None and self._updates.error:
            raise ParityFailed(self._updates.error)
        if self._reference is not None and not math.isfinite(loss):
            self._check_that_plain_training_diverged(self._reference)
        if len(self._losses) == PARITY_STEPS and self._reference is not None:
            self.difference = largest_difference(
                self.trace(), self._reference, precision=self._precision
            )
            if self.difference.is_outside:
                raise ParityFailed(self._reference.described(self.difference.message))

    def _check_that_plain_training_diverged(self, reference: ParityTrace) -> None:
        """Raises ParityFailed where the loss is NaN or infinite in a step that has one there."""
        step = len(self._losses)
        if step > len(reference.losses) or not math.isfinite(reference.losses[step - 1]):
            return
        expected = reference.losses[step - 1]
        message = f"the loss of step {step} is {self._losses[-1]} for {expected:.6g}"
        raise ParityFailed(reference.described(message))

    def trace(self) -> ParityTrace:
        """Returns what the first steps had, for a comparison."""
        return ParityTrace(
            losses=tuple(self._losses[:PARITY_STEPS]),
            gradient_norms=self._gradients.norms(),
            gradient_projections=self._gradients.projections(),
            draws_random_numbers=self._draws_random_numbers,
            tokens=self._tokens,
        )

    @property
    def seconds(self) -> float:
        """The time spent on reading gradients, about a second per billion parameters.

        It must be subtracted from the time of the training.
        """
        return self._gradients.seconds

    def verdict(self) -> dict[str, Any]:
        """Returns the fields of a measurement for parity, empty where there was no reference."""
        if self.difference is None or self._reference is None:
            return {}
        message = self._reference.described(self.difference.message)
        return {"parity": "same", "parity_message": f"at most, {message}"}

    def _random_state(self) -> Tensor:
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state()


def before_each_update(hook: Callable[[torch.optim.Optimizer], None]) -> RemovableHandle:
    """Calls `hook` before each optimizer's update, when the gradients that it uses are complete.

    Where `step` is given a closure that computes them, this is after the closure's first call.
    """

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        _, *positional = args
        closure = positional[0] if positional else kwargs.get("closure")
        if not callable(closure):
            hook(optimizer)
            return None
        is_first_call = True

        @functools.wraps(closure)
        def closure_and_hook() -> Any:
            nonlocal is_first_call
            result = closure()
            if is_first_call:
                is_first_call = False
                hook(optimizer)
            return result

        if positional:
            return (optimizer, closure_and_hook, *positional[1:]), kwargs
        return args, {**kwargs, "closure": closure_and_hook}

    return register_optimizer_step_pre_hook(before_step)


class UpdateWatch:
    """Checks that updates use the learning rates and the state of the training loop's optimizers.

    An update that does not run in the optimizer's `step`, but for example during the backward pass,
    might use older ones. A learning-rate schedule or a loaded state would then be ignored, which
    the losses hardly show. The first steps are checked, and one after the learning rate has
    changed. What a wrapper among them lets the optimizer that it holds do is its own affair.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        self._held = {held for optimizer in optimizers for held in held_optimizers(optimizer)}
        self._first_rates: tuple[float | None, ...] | None = None
        self._has_seen_change = False
        self._used: dict[Tensor, float] = {}
        """The learning rate that each update of this step used, by parameter."""
        self.error = ""
        """What is wrong with an update; empty while nothing is."""

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Checks the updates of step `number`, counted from 1, if that step is to be checked."""
        if number > PARITY_STEPS and (self._has_seen_change or self._rates() == self._first_rates):
            yield
            return
        owner_of = {
            parameter: optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

        def check(stepping: torch.optim.Optimizer) -> None:
            if stepping in self._optimizers:
                self._compare(number, stepping)
            elif stepping not in self._held:
                self._record_update(number, stepping, owner_of)

        self._used.clear()
        handle = before_each_update(check)
        try:
            yield
        finally:
            handle.remove()

    def _record_update(
        self,
        number: int,
        stepping: torch.optim.Optimizer,
        owner_of: Mapping[Tensor, torch.optim.Optimizer],
    ) -> None:
        for group in stepping.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter not in owner_of:
                    continue  # no gradient, or the copy of a parameter in an inner optimizer
                rate = _learning_rate(group)
                if rate is not None:
                    self._used[parameter] = rate
                if stepping.state.get(parameter) is not owner_of[parameter].state.get(parameter):
                    self.error = (
                        f"the update of step {number} used another state than that of the optimizer"
                    )

    def _compare(self, number: int, stepping: torch.optim.Optimizer) -> None:
        """Compares the learning rates that updates used with those of the parameter groups.

        Called when the training loop calls `step`: the groups then have the rates for this step.
        """
        for group in stepping.param_groups:
            rate_of_group = _learning_rate(group)
            for parameter in group["params"]:
                # Forgotten: a script may update several times in what it reports as one step.
                used = self._used.pop(parameter, None)
                if used is not None and used != rate_of_group:
                    shown_rate = None if rate_of_group is None else format(rate_of_group, ".6g")
                    self.error = (
                        f"an update of step {number} used a learning rate of {used:.6g}, and its "
                        f"parameter group has {shown_rate} when the optimizer steps"
                    )
        rates = self._rates()
        if self._first_rates is None:
            self._first_rates = rates
        self._has_seen_change |= rates != self._first_rates

    def _rates(self) -> tuple[float | None, ...]:
        return tuple(
            _learning_rate(group)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        )


def _learning_rate(group: Mapping[str, Any]) -> float | None:
    """Returns the learning rate of a parameter group; None if the optimizer has none."""
    rate = group.get("lr")
    return float(rate) if isinstance(rate, int | float | Tensor) else None


class GradientSketch:
    """Norm and random projections of the gradient of each block of the model.

    Read by a hook that runs before every optimizer's step.
    """

    def __init__(
        self,
        parameters_by_block: Mapping[str, Iterable[nn.Parameter]],
        *,
        device: torch.device,
        progress: Progress = unwatched,
        whole_gradient: Callable[[nn.Parameter], Tensor] | None = None,
    ) -> None:
        self._device = device
        self._progress = progress
        self._whole_gradient = whole_gradient or gradient_of
        self._position_of: dict[Tensor, tuple[str, int]] = {}
        """The block of each parameter, and its index in the model."""
        index = 0
        for block, group in parameters_by_block.items():
            for parameter in group:
                self._position_of[parameter] = (block, index)
                index += 1
        self.seconds = 0.0
        """Time spent on reading gradients so far."""
        self._squares: dict[str, Tensor] = {}
        self._projections: dict[str, Tensor] = {}

    def follow(self, copies: Mapping[Tensor, Tensor]) -> None:
        """Reads the gradients of these copies instead of those of the parameters themselves."""
        for parameter, copy in copies.items():
            self._position_of[copy] = self._position_of[parameter]

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Reads the gradients of all optimizer steps inside.

        What is kept of them is in the host's memory afterwards, where it counts for no peak.
        """
        parts: set[torch.optim.Optimizer] = set()

        def read_gradients(optimizer: torch.optim.Optimizer) -> None:
            if optimizer in parts:
                return  # the same gradients as those of the optimizer that holds it
            if not isinstance(optimizer, StateOnHost):
                parts.update(held_optimizers(optimizer))
            elif optimizer.part_on_device is not None:
                parts.add(optimizer.part_on_device)
            # A fused update under a GradScaler divides by the scale itself, later than here.
            scale = getattr(optimizer, "grad_scale", None)
            found: list[tuple[str, int, nn.Parameter]] = []
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    # An inner optimizer steps copies, which are not the model's parameters.
                    if parameter not in self._position_of:
                        continue
                    if parameter.grad is None:
                        # DeepSpeed has them elsewhere.
                        if isinstance(optimizer, EngineOptimizer):
                            found.append((*self._position_of[parameter], parameter))
                        continue
                    found.append((*self._position_of[parameter], parameter))
            if not found:
                return
            # Waits first: what the device still computes is the step's time.
            began = _now(self._device)
            self._progress("parity")
            for block, index, parameter in found:
                self._add(self._whole_gradient(parameter), block, index, scale=scale)
            self.seconds += _now(self._device) - began
            self._progress("step")

        handle = before_each_update(read_gradients)
        try:
            yield
        finally:
            handle.remove()
        for sums in (self._squares, self._projections):
            sums.update({block: total.cpu() for block, total in sums.items()})

    def norms(self) -> dict[str, float]:
        """Returns the norm of each block's gradient."""
        return {block: square.sqrt().item() for block, square in self._squares.items()}

    def projections(self) -> dict[str, tuple[float, ...]]:
        """Returns the projections of each block's gradient on random vectors of signs."""
        return {
            block: tuple(projections.tolist()) for block, projections in self._projections.items()
        }

    @torch.no_grad()
    def _add(self, gradient: Tensor, block: str, index: int, *, scale: Tensor | None) -> None:
        """Adds one parameter's gradient to the sums of its block.

        Works in pieces, so that the random signs take little memory.
        """
        # A separate generator, so that the model's random numbers do not change. Its numbers depend
        # on the device, so those for a gradient on the host come from the training's device, too.
        signs = torch.Generator(device=self._device).manual_seed(index)
        zero = torch.zeros((), device=self._device, dtype=torch.float64)
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()  # of the same rows in an equal training
        for piece in gradient.flatten().split(_PIECE):
            values = piece.to(self._device).float() if scale is None else piece.float() / scale
            random = torch.randint(
                0, 2, (PROJECTIONS, len(values)), generator=signs, device=values.device
            )
            projected = (random.to(values.dtype) * 2 - 1) @ values
            self._squares[block] = self._squares.get(block, zero) + values.double().square().sum()
            self._projections[block] = self._projections.get(block, zero) + projected.double()


def _now(device: torch.device) -> float:
    """Waits for the device and returns the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


_PIECE = 2**16
"""Elements of a gradient that are projected at once."""
