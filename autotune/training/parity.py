"""Records what the first steps of a training compute, for the parity check.

The check compares it with a plain training of the same numerics, the reference
(`autotune/spec/parity.py` says what and why), for every way in which the optimizer updates. It
reads in the first `UPDATE_STEPS` steps; what is kept are numbers on the host.
"""

import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from autotune.models.parts import Buffers
from autotune.spec.config import Precision
from autotune.spec.parity import (
    PARITY_STEPS,
    PROJECTIONS,
    UPDATE_STEPS,
    Difference,
    ParityTrace,
    largest_difference,
)
from autotune.spec.training_request import ReportsStage, unwatched
from autotune.techniques.deepspeed_engine import EngineOptimizer
from autotune.techniques.offload import StateOnHost
from autotune.techniques.optimizer_fusion import Updater
from autotune.techniques.sharding import gradient_of
from autotune.techniques.user_optimizer import held_optimizers

Projections = tuple[float, ...]
"""`PROJECTIONS` numbers."""


class ParityFailed(Exception):
    """The first steps differ from those of a plain training of the same numerics."""


class ParityWatch:
    """Records the first steps of a training and compares them with `reference`, if there is one.

    Gradients, weights and buffers are read where there is a reference, or where `is_trace`: the
    trace is the result. With `shares_out`, several devices have parts of the
    weights or add their gradients up after backward: then these are compared by the gradients that
    the optimizer uses. With `watches_averages`, also what a script keeps in the form of weights.
    Where a step is known to have several `micro_batches`, each a backward pass of `updater`, so is
    what they add to the gradients; `sums_in_fp32` says that it must be added up so of weights with
    fewer bits, too.
    """

    def __init__(
        self,
        parameters_by_block: Mapping[str, Iterable[nn.Parameter]],
        *,
        device: torch.device,
        precision: Precision,
        reference: ParityTrace | None,
        is_trace: bool = False,
        progress: ReportsStage = unwatched,
        whole_gradient: Callable[[nn.Parameter], Tensor] | None = None,
        buffers: Buffers | None = None,
        shares_out: bool = False,
        watches_averages: bool = False,
        updater: Updater | None = None,
        micro_batches: int = 1,
        sums_in_fp32: bool = False,
    ) -> None:
        self._device = device
        self._precision = precision
        self._reference = reference
        self._losses: list[float] = []
        self._steps_begun = 0  # the loss of a step may be known only when the next one has begun
        self._tokens: int | None = None
        self._reads = is_trace or reference is not None  # reading takes time
        self._stopwatch = Stopwatch(device, progress)
        blocks = {block: list(parameters) for block, parameters in parameters_by_block.items()}
        self._gradients = GradientSketch(
            blocks,
            device=device,
            stopwatch=self._stopwatch,
            whole_gradient=whole_gradient,
            reads_backward=not shares_out,
        )
        self._sums: SumWatch | None = None
        if updater is not None and micro_batches > 1 and not shares_out:
            self._sums = SumWatch(
                blocks,
                updater=updater,
                micro_batches=micro_batches,
                in_fp32=sums_in_fp32,
                device=device,
                stopwatch=self._stopwatch,
            )
        whole = {} if shares_out else blocks
        self._corrections = CorrectionWatch(whole)
        self._weights = ChangeSketch(functools.partial(_trained_weights, whole), device=device)
        self._buffers = ChangeSketch(
            functools.partial(_present_buffers, buffers or {}), device=device
        )
        self._optimizers: list[torch.optim.Optimizer] = []
        self._averages: ChangeSketch | None = None
        if watches_averages:
            parameters = [parameter for _, parameter in _with_block(blocks)]
            self._averages = ChangeSketch(
                functools.partial(_averages_of_weights, parameters, self._optimizers),
                device=device,
            )
        self._updates: UpdateWatch | None = None
        self._schedule_steps = 0
        self._draws_random_numbers = False
        self.difference: Difference | None = None
        """The largest difference from the reference, once it is known."""

    def follow(self, *optimizers: torch.optim.Optimizer) -> None:
        """From now on, compares what updates use with the groups and the state of `optimizers`.

        Also follows their gradients to the host.
        """
        self._updates = UpdateWatch(*optimizers)
        self._optimizers += optimizers
        for optimizer in optimizers:
            if isinstance(optimizer, StateOnHost):
                self._gradients.follow(optimizer.gradients_on_host)

    def note_schedule_step(self) -> None:
        """Must be called whenever a learning-rate schedule steps."""
        if self._steps_begun <= PARITY_STEPS:
            self._schedule_steps += 1

    @contextmanager
    def step(self) -> Iterator[None]:
        """Must surround each training step."""
        is_first = self._steps_begun == 0
        self._steps_begun += 1
        reads_weights = self._reads and self._steps_begun <= UPDATE_STEPS
        before = self._random_state() if is_first else None
        if is_first and reads_weights:
            with self._stopwatch.reading():
                self._corrections.begin()
                self._weights.begin()
                self._buffers.begin()
        with ExitStack() as watches:
            if is_first and self._reads:
                watches.enter_context(self._gradients.taken())
                if self._sums is not None:
                    watches.enter_context(self._sums.watched())
            if reads_weights:
                watches.enter_context(self._corrections.watched(self._stopwatch))
            if is_first and reads_weights and self._averages is not None:
                watches.enter_context(self._averages.begun_at_first_update(self._stopwatch))
            if self._updates is not None:
                watches.enter_context(self._updates.step(self._steps_begun))
            yield
        if before is not None:
            self._draws_random_numbers = not torch.equal(before, self._random_state())
        if reads_weights and self._steps_begun == UPDATE_STEPS:
            with self._stopwatch.reading():
                self._corrections.end()
                self._weights.end()
                self._buffers.end()
                if self._averages is not None:
                    self._averages.end()

    def note(self, loss: float, *, tokens: int | None = None) -> None:
        """Records the mean token loss of a step, in order, and the tokens that a script reports.

        Raises ParityFailed where the first steps differ from the reference, where an update used
        other settings than the optimizer has, and where gradients are no sum over micro batches.
        """
        self._losses.append(loss)
        if len(self._losses) == 1:
            self._tokens = tokens
        if self._updates is not None and self._updates.error:
            raise ParityFailed(self._updates.error)
        if self._sums is not None and self._sums.error:
            raise ParityFailed(self._sums.error)
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
        averages = {} if self._averages is None else self._averages.nonzero()
        return ParityTrace(
            losses=tuple(self._losses[:PARITY_STEPS]),
            gradient_norms=self._gradients.norms(),
            gradient_projections=self._gradients.projections(),
            backward_norms=self._gradients.backward_norms(),
            added_projections=() if self._sums is None else self._sums.added(),
            group_settings={} if self._updates is None else self._updates.settings(),
            schedule_steps=self._schedule_steps,
            update_projections=self._weights.changes,
            corrections=self._corrections.corrections,
            buffer_projections=self._buffers.nonzero(),
            average_projections=averages.get(_AVERAGES, ()),
            draws_random_numbers=self._draws_random_numbers,
            tokens=self._tokens,
        )

    @property
    def seconds(self) -> float:
        """The time spent on reading, which must be subtracted from the time of the training."""
        return self._stopwatch.seconds

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


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yields the parameters of all groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


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
        self._settings: dict[str, list[float]] = {}
        self.error = ""
        """What is wrong with an update; empty while nothing is."""

    def settings(self) -> dict[str, tuple[float, ...]]:
        """Returns each number in the parameter groups, at each update of the first steps."""
        return {name: tuple(values) for name, values in self._settings.items()}

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Checks the updates of step `number`, counted from 1, if that step is to be checked."""
        if number > PARITY_STEPS and (self._has_seen_change or self._rates() == self._first_rates):
            yield
            return
        owner_of: dict[Tensor, tuple[torch.optim.Optimizer, Mapping[str, Any]]] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                owner_of.update(dict.fromkeys(group["params"], (optimizer, group)))

        def check(stepping: torch.optim.Optimizer) -> None:
            if stepping in self._optimizers:
                self._compare(number, stepping, owner_of)
                if number <= PARITY_STEPS:
                    self._note_settings(stepping)
            elif stepping not in self._held:
                self._record_update(number, stepping, owner_of)

        self._used.clear()
        with before_each_update(check):
            yield

    def _record_update(
        self,
        number: int,
        stepping: torch.optim.Optimizer,
        owner_of: Mapping[Tensor, tuple[torch.optim.Optimizer, Mapping[str, Any]]],
    ) -> None:
        for group in stepping.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter not in owner_of:
                    continue  # no gradient, or the copy of a parameter in an inner optimizer
                rate = _learning_rate(group)
                if rate is not None:
                    self._used[parameter] = rate
                owner, _ = owner_of[parameter]
                if stepping.state.get(parameter) is not owner.state.get(parameter):
                    self.error = (
                        f"the update of step {number} used another state than that of the optimizer"
                    )

    def _compare(
        self,
        number: int,
        stepping: torch.optim.Optimizer,
        owner_of: Mapping[Tensor, tuple[torch.optim.Optimizer, Mapping[str, Any]]],
    ) -> None:
        """Compares the learning rates that updates used with those of the parameter groups.

        Called when the training loop calls `step`: the groups then have the rates for this step. A
        script may update several times in what it reports as one step.
        """
        for parameter, used in list(self._used.items()):
            owner, group = owner_of[parameter]
            if owner is not stepping:
                continue
            del self._used[parameter]
            rate_of_group = _learning_rate(group)
            if used != rate_of_group:
                shown_rate = None if rate_of_group is None else format(rate_of_group, ".6g")
                self.error = (
                    f"an update of step {number} used a learning rate of {used:.6g}, and its "
                    f"parameter group has {shown_rate} when the optimizer steps"
                )
        rates = self._rates()
        if self._first_rates is None:
            self._first_rates = rates
        self._has_seen_change |= rates != self._first_rates

    def _note_settings(self, stepping: torch.optim.Optimizer) -> None:
        index = 0
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if optimizer is stepping:
                    for name, number in _numbers(group):
                        self._settings.setdefault(f"{name} of group {index}", []).append(number)
                index += 1

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


_FUSION = ("params", "foreach", "fused", "capturable", "differentiable")
"""Entries of a parameter group that say how it is updated, and not with which numbers."""


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the numbers in a parameter group with their names, such as `betas[0]`."""
    for name, value in group.items():
        if name in _FUSION:
            continue
        parts = {name: value}
        if isinstance(value, tuple | list):
            parts = {f"{name}[{position}]": part for position, part in enumerate(value)}
        for part_name, part in parts.items():
            is_number = isinstance(part, int | float)
            if is_number or (isinstance(part, Tensor) and part.numel() == 1):
                number = float(part)
                if math.isfinite(number):
                    yield part_name, number


class Stopwatch:
    """Adds up the time that reading takes, and reports it as a phase of its own."""

    def __init__(self, device: torch.device, progress: ReportsStage = unwatched) -> None:
        self._device = device
        self._progress = progress
        self.seconds = 0.0
        """Time spent on reading so far."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Must surround what is read, of which nothing may change."""
        # Waits first: what the device still computes is the step's time.
        began = _now(self._device)
        self._progress("parity")
        with torch.no_grad():
            yield
        self.seconds += _now(self._device) - began
        self._progress("step")


class GradientSketch:
    """Norm and random projections of the gradient of each block of the model.

    Read by a hook that runs before every optimizer's step. With `reads_backward`, also the norm
    that backward leaves, by hooks that run whenever a gradient has been accumulated.
    """

    def __init__(
        self,
        parameters_by_block: Mapping[str, Sequence[nn.Parameter]],
        *,
        device: torch.device,
        stopwatch: Stopwatch,
        whole_gradient: Callable[[nn.Parameter], Tensor] | None = None,
        reads_backward: bool = True,
    ) -> None:
        self._device = device
        self._stopwatch = stopwatch
        self._whole_gradient = whole_gradient or gradient_of
        self._reads_backward = reads_backward
        self._position_of: dict[Tensor, tuple[str, int]] = {}
        """The block of each parameter, and its index in the model."""
        for index, (block, parameter) in enumerate(_with_block(parameters_by_block)):
            self._position_of[parameter] = (block, index)
        self._squares: dict[str, float] = {}
        self._projections: dict[str, Projections] = {}
        self._left_by_backward: dict[Tensor, float] = {}
        """The sum of the squares of each parameter's gradient when backward has last added to it.
        """
        self._backward_squares: dict[str, float] = {}

    def follow(self, copies: Mapping[Tensor, Tensor]) -> None:
        """Reads the gradients of these copies instead of those of the parameters themselves."""
        self._reads_backward = False
        for parameter, copy in copies.items():
            self._position_of[copy] = self._position_of[parameter]

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Reads the gradients of all optimizer steps inside."""
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
            found = []
            for parameter in parameters_of(optimizer):
                has_gradient = parameter.grad is not None or isinstance(optimizer, EngineOptimizer)
                # An inner optimizer steps copies, which are not the model's parameters.
                if has_gradient and parameter in self._position_of:
                    found.append(parameter)
            if not found:
                return
            with self._stopwatch.reading():
                for parameter in found:
                    self._add(parameter, self._whole_gradient(parameter), scale=scale)

        handles: list[RemovableHandle] = [before_each_update(read_gradients)]
        if self._reads_backward:
            handles += [
                parameter.register_post_accumulate_grad_hook(self._note_backward)
                for parameter in self._position_of
                if parameter.requires_grad
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._left_by_backward.clear()

    def norms(self) -> dict[str, float]:
        """Returns the norm of each block's gradient."""
        return {block: _square_root(square) for block, square in self._squares.items()}

    def backward_norms(self) -> dict[str, float]:
        """Returns the norm of each block's gradient as backward has left it, where it is finite."""
        norms = {block: _square_root(square) for block, square in self._backward_squares.items()}
        return {block: norm for block, norm in norms.items() if math.isfinite(norm)}

    def projections(self) -> dict[str, Projections]:
        """Returns the projections of each block's gradient on random vectors of signs."""
        return dict(self._projections)

    def _note_backward(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        # A part of a divided gradient says nothing of the whole.
        if gradient is not None and type(gradient) is Tensor and gradient.layout == torch.strided:
            self._left_by_backward[parameter] = _squares(gradient.detach())

    def _add(self, parameter: nn.Parameter, gradient: Tensor, *, scale: Tensor | None) -> None:
        """Adds one parameter's gradient to the sums of its block."""
        block, index = self._position_of[parameter]
        squares, projections = _sketch(gradient, seed=index, device=self._device)
        left = self._left_by_backward.pop(parameter, squares)
        if scale is not None:
            # As a fused update divides: with a scale that has come down to 0 nothing is a number.
            inverse = scale.double().reciprocal().item()
            squares = squares * inverse**2
            projections = tuple(value * inverse for value in projections)
        self._squares[block] = self._squares.get(block, 0.0) + squares
        _add_to(self._projections, block, projections)
        if self._reads_backward:
            self._backward_squares[block] = self._backward_squares.get(block, 0.0) + left


class SumWatch:
    """What micro batches add to the gradients of a step, and whether the gradients are its sum.

    The gradient of a whole step has room for an error of adding up: of 64 micro batches one that is
    lost changes it by 3 %. What one micro batch adds has not. It is enough to look at a sample of
    a few parameters, outside of the blocks where there are such: nearly every loss reaches them.
    Of many micro batches some in a row are looked at together.

    A micro batch is one call of the updater's backward, whatever runs in it: a weight's gradient
    may get several parts, as from a pass that a checkpoint runs within the pass.
    """

    def __init__(
        self,
        parameters_by_block: Mapping[str, Sequence[nn.Parameter]],
        *,
        updater: Updater,
        micro_batches: int,
        in_fp32: bool,
        device: torch.device,
        stopwatch: Stopwatch,
    ) -> None:
        trained: dict[str, list[nn.Parameter]] = {}
        for block, parameter in _with_block(parameters_by_block):
            if parameter.requires_grad:
                trained.setdefault(block, []).append(parameter)
        self._trained = [one for parameters in trained.values() for one in parameters]
        self._candidates = trained.get("rest") or next(iter(trained.values()), [])
        self._added: dict[int, AddedUp] = {}
        """What has been added, by the index of the candidate: of those reached the first ones."""
        self._updater = updater
        self._micro_batches = micro_batches
        most_parts = min(micro_batches, _MOST_PARTS)
        parts = max(count for count in range(1, most_parts + 1) if micro_batches % count == 0)
        self._micro_batches_of_part = micro_batches // parts
        self._in_fp32 = in_fp32
        self._device = device
        self._stopwatch = stopwatch
        self._calls = 0
        self._passes = 0
        """The calls of backward that have reached a trained weight."""
        self._is_reached = False
        self._off = 0.0
        """The distance of the gradients from what was added up, relative to it."""
        self.error = ""
        """What is wrong with a sum; empty while nothing is."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Reads what is added inside, which must be the backward passes of one step."""
        handles = [
            parameter.register_hook(functools.partial(self._note_added, index))
            for index, parameter in enumerate(self._candidates)
        ]
        handles += [
            parameter.register_post_accumulate_grad_hook(self._note_reached)
            for parameter in self._trained
        ]
        run = self._updater.backward
        own = vars(self._updater)
        before = own.get("backward")

        def backward(loss: Tensor) -> None:
            self._is_reached = False  # what forward may have added is no pass
            run(loss)
            self._end_call()

        own["backward"] = backward
        try:
            yield
        finally:
            del own["backward"]
            if before is not None:
                own["backward"] = before
            for handle in handles:
                handle.remove()
        self._check()

    def added(self) -> tuple[Projections, ...]:
        """Returns the projections of what each part of the micro batches has added, if finite."""
        parts = self._micro_batches // self._micro_batches_of_part
        sums = [
            _sum_of(added.by_part[part] for added in self._added.values() if part in added.by_part)
            for part in range(parts if self._added else 0)
        ]
        return tuple(sums) if all(math.isfinite(value) for one in sums for value in one) else ()

    def _note_added(self, index: int, gradient: Tensor) -> None:
        if gradient.layout != torch.strided:  # of a sparse one, each sum has other rows
            return
        if index not in self._added:
            # The same ones with each size of micro batches, whichever of them is reached first.
            if len(self._added) == _SUMMED_PARAMETERS:
                if index > (last := max(self._added)):
                    return
                del self._added[last]
            self._added[index] = AddedUp()
        added = self._added[index]
        added.in_this_part = added.in_this_part + _sample(gradient)

    def _note_reached(self, _: Tensor) -> None:
        self._is_reached = True

    def _end_call(self) -> None:
        self._calls += 1
        self._passes += self._is_reached
        if self._calls % self._micro_batches_of_part == 0:
            with self._stopwatch.reading():
                part = self._calls // self._micro_batches_of_part - 1
                for index, added in self._added.items():
                    added.end_part(part, seed=index, device=self._device)
        if self._calls == self._micro_batches:
            with self._stopwatch.reading():
                self._off = self._distance_from_sum()

    def _distance_from_sum(self) -> float:
        distance, norm = 0.0, 0.0
        for index, added in self._added.items():
            parameter = self._candidates[index]
            gradient = parameter.grad
            finfo = torch.finfo(parameter.dtype)
            is_exact = self._in_fp32 or finfo.eps <= torch.finfo(torch.float32).eps
            total = added.in_all
            if not is_exact or gradient is None or not isinstance(total, Tensor):
                continue
            if gradient.layout == torch.strided:
                distance += _squares(_sample(gradient) - total)
                norm += _squares(total)
        return math.sqrt(distance / norm) if norm else 0.0

    def _check(self) -> None:
        if self._passes not in (0, self._micro_batches):
            self.error = (
                f"backward has added to the gradients {self._passes} times in a step of "
                f"{self._micro_batches} micro batches"
            )
        elif math.isfinite(self._off) and self._off > _EXACT:
            self.error = (
                f"the gradients differ by {100 * self._off:.2g} % from the sum over "
                f"{self._micro_batches} micro batches, by more than a sum in fp32 does"
            )


class AddedUp:
    """What backward passes have added to a sample of one gradient, in float64."""

    def __init__(self) -> None:
        self.in_this_part: Tensor | float = 0.0
        self.in_all: Tensor | float = 0.0
        self.by_part: dict[int, Projections] = {}
        """Projections of what each part of the micro batches has added."""

    def end_part(self, part: int, *, seed: int, device: torch.device) -> None:
        if isinstance(self.in_this_part, Tensor):
            self.by_part[part] = _sketch(self.in_this_part, seed=seed, device=device)[1]
            self.in_all = self.in_all + self.in_this_part
            self.in_this_part = 0.0


def _sample(gradient: Tensor) -> Tensor:
    """Returns `_SAMPLED` numbers of a gradient in float64, from all of it, or fewer than twice."""
    values = _flat(gradient.detach())
    return values[:: max(1, len(values) // _SAMPLED)].to(torch.float64, copy=True)


_SUMMED_PARAMETERS = 8
"""Of a block, the first ones that are reached."""
_SAMPLED = 2**13
_MOST_PARTS = 32
"""Parts of the micro batches of a step that are compared. In a part of three, a micro batch that
counts twice changes the sum by a third of it or more, which every precision but fp8 notices."""
_EXACT = 1e-4
"""A sum of a thousand numbers in fp32 is off by less; one of two numbers in bf16 by 1e-3."""


class ChangeSketch:
    """What the first steps change in the tensors that `tensors` yields as (name, seed, tensor)."""

    def __init__(self, tensors: Callable[[], "_Tensors"], *, device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._at_begin: dict[str, Projections] = {}
        self.changes: dict[str, tuple[float, ...]] = {}
        """Projections of the change under each name that was there before, where it is finite."""

    def begin(self) -> None:
        """Reads the tensors before the first step."""
        self._at_begin = self._projections()

    @contextmanager
    def begun_at_first_update(self, stopwatch: Stopwatch) -> Iterator[None]:
        """Reads before the first update: until then averages are those of the initial weights."""

        def begin(*_: Any) -> None:
            if not self._at_begin:
                with stopwatch.reading():
                    self.begin()

        with register_optimizer_step_pre_hook(begin):
            yield

    def end(self) -> None:
        """Reads the tensors after the last step, and forgets all but the differences."""
        for name, projections in self._projections().items():
            before = self._at_begin.get(name, projections)
            change = tuple(now - then for now, then in zip(projections, before, strict=True))
            if all(map(math.isfinite, change)):
                self.changes[name] = change
        self._at_begin.clear()

    def nonzero(self) -> dict[str, tuple[float, ...]]:
        """Returns the changes of what has changed."""
        return {name: change for name, change in self.changes.items() if any(change)}

    def _projections(self) -> dict[str, Projections]:
        found: dict[str, Projections] = {}
        for name, seed, tensor in self._tensors():
            _, projections = _sketch(tensor, seed=seed, device=self._device)
            _add_to(found, name, projections)
        return found


class CorrectionWatch:
    """What the first steps change in the trained weights outside of the optimizer."""

    def __init__(self, parameters_by_block: Mapping[str, Sequence[nn.Parameter]]) -> None:
        self._block_of: dict[Tensor, str] = {
            parameter: block
            for block, parameter in _with_block(parameters_by_block)
            if parameter.requires_grad and type(parameter.data) is Tensor
        }
        self._known: dict[Tensor, float] = {}
        """The sum of the squares of each parameter when it was last read."""
        self._corrections: dict[str, float] = {}
        self.corrections: dict[str, float] = {}
        """What no optimizer has done, as in `ParityTrace`."""

    def begin(self) -> None:
        """Reads the weights before the first step."""
        for parameter, block in self._block_of.items():
            self._known[parameter] = _squares(parameter.data)
            self._corrections[block] = 0.0

    @contextmanager
    def watched(self, stopwatch: Stopwatch) -> Iterator[None]:
        """Watches the updates of a step, and at its end what has changed since the last one."""

        def read(optimizer: torch.optim.Optimizer, *_: Any, is_correction: bool) -> None:
            with stopwatch.reading():
                self._read(parameters_of(optimizer), is_correction=is_correction)

        with (
            register_optimizer_step_pre_hook(functools.partial(read, is_correction=True)),
            register_optimizer_step_post_hook(functools.partial(read, is_correction=False)),
        ):
            yield
        with stopwatch.reading():
            self._read(self._known, is_correction=True)

    def _read(self, parameters: Iterable[Tensor], *, is_correction: bool) -> None:
        for parameter in parameters:
            if parameter in self._known:
                squares = _squares(parameter.data)
                if is_correction:
                    change = squares - self._known[parameter]
                    self._corrections[self._block_of[parameter]] += change
                self._known[parameter] = squares

    def end(self) -> None:
        """Forgets the weights after the last step, and all but the corrections."""
        totals = dict.fromkeys(self._corrections, 0.0)
        for parameter, squares in self._known.items():
            totals[self._block_of[parameter]] += squares
        for block, changes in self._corrections.items():
            correction = changes / (totals[block] or 1.0)
            if correction != 0.0 and math.isfinite(correction):
                self.corrections[block] = correction
        self._known.clear()
        self._corrections.clear()


# -- the tensors whose change is read --------------------------------------------------------------

_Tensors = Iterator[tuple[str, int, Tensor]]


def _trained_weights(blocks: Mapping[str, Sequence[nn.Parameter]]) -> _Tensors:
    """Yields the weights that this process has whole, by the names of their blocks."""
    for seed, (block, parameter) in enumerate(_with_block(blocks)):
        if parameter.requires_grad and type(parameter.data) is Tensor:
            yield block, seed, parameter.data


def _present_buffers(buffers: Buffers) -> _Tensors:
    for seed, (name, (module, key)) in enumerate(buffers.items()):
        buffer = {**vars(module), **module._buffers}.get(key)
        if buffer is not None and type(buffer) is Tensor and buffer.layout == torch.strided:
            yield name, seed, buffer


_AVERAGES = "averages"


def _averages_of_weights(
    parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
) -> _Tensors:
    """Yields the tensors of the form of weights that a script keeps, all by one name.

    Such are averages of the weights, with which a script may evaluate. They belong neither to the
    model nor to its optimizers, so that they are looked for among all tensors.
    """
    yield _AVERAGES, 0, torch.zeros(())  # so that those which are made later count whole
    own: set[int] = set()
    for parameter in parameters:
        own.add(parameter.data_ptr())
        if parameter.grad is not None:
            own.add(parameter.grad.data_ptr())
    for optimizer in optimizers:
        for state in optimizer.state.values():
            own.update(value.data_ptr() for value in state.values() if type(value) is Tensor)
    seeds = {parameter.shape: seed for seed, parameter in enumerate(parameters)}
    for found in gc.get_objects():
        if type(found) in (Tensor, nn.Parameter) and found.shape in seeds:
            is_plain = found.is_floating_point() and found.layout == torch.strided
            if is_plain and not found.is_meta and found.data_ptr() not in own:
                own.add(found.data_ptr())
                yield _AVERAGES, seeds[found.shape], found


# -- sums over tensors -----------------------------------------------------------------------------

_PIECE = {"cpu": 2**16, "cuda": 2**18}
"""Elements that are projected at once, so that the random signs take little memory: 22 MiB for the
larger number. A GPU waits for the host in smaller pieces."""


def _sketch(tensor: Tensor, *, seed: int, device: torch.device) -> tuple[float, Projections]:
    """Returns the sum of the squares of a tensor, and its projections on vectors of signs.

    Both in float64, so that the difference of two projections is the projection of the difference.
    """
    # A separate generator, so that the model's random numbers do not change. Its numbers depend
    # on the device, so those for a gradient on the host come from the training's device, too.
    signs = torch.Generator(device=device).manual_seed(seed)
    masks = (2 ** torch.arange(PROJECTIONS, device=device)).to(torch.uint8).unsqueeze(1)
    squares = torch.tensor(0.0, device=device, dtype=torch.float64)
    projections = torch.tensor([0.0] * PROJECTIONS, device=device, dtype=torch.float64)
    for piece in _flat(tensor).split(_PIECE[device.type]):
        values = piece.to(device).double()
        # Each bit of a random byte is a sign.
        random = torch.randint(
            0, 256, (len(values),), generator=signs, device=device, dtype=torch.uint8
        )
        is_positive = random.bitwise_and(masks) != 0
        # The sum of the values with a sign of 1, less that of the others.
        projections += 2 * (is_positive.double() @ values) - values.sum()
        squares += values.square().sum()
    return squares.item(), tuple(projections.tolist())


def _squares(tensor: Tensor) -> float:
    """Returns the sum of the squares of a tensor in float64; equal tensors have equal ones."""
    total = torch.tensor(0.0, device=tensor.device, dtype=torch.float64)
    for piece in _flat(tensor).split(_PIECE[tensor.device.type]):
        total += piece.double().square().sum()
    return total.item()


def _square_root(square: float) -> float:
    """Returns the norm; NaN where the gradient is not a number."""
    return math.nan if math.isnan(square) else math.sqrt(square)


def _flat(tensor: Tensor) -> Tensor:
    """Returns the real numbers of a tensor, one after the other."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()  # of the same rows in an equal training
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()


def _add_to(sums: dict[str, Projections], name: str, projections: Projections) -> None:
    before = sums.get(name, (0.0,) * PROJECTIONS)
    sums[name] = tuple(value + other for value, other in zip(before, projections, strict=True))


def _sum_of(several: Iterable[Projections]) -> Projections:
    total = (0.0,) * PROJECTIONS
    for one in several:
        total = tuple(value + other for value, other in zip(total, one, strict=True))
    return total


def _with_block(
    parameters_by_block: Mapping[str, Sequence[nn.Parameter]],
) -> Iterator[tuple[str, nn.Parameter]]:
    for block, parameters in parameters_by_block.items():
        for parameter in parameters:
            yield block, parameter


def _now(device: torch.device) -> float:
    """Waits for the device and returns the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
