"""Watches the first steps of a training for what parity is judged by, whichever way the optimizer updates."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotune.spec.config import Precision
from autotune.spec.parity import (
    PARITY_STEPS,
    PROJECTIONS,
    Difference,
    ParityTrace,
    largest_difference,
)
from autotune.spec.training_request import Progress, unwatched


class ParityFailed(Exception):
    """The first steps are not those of a plain training of the same numerics."""


class ParityWatch:
    """The beginning of one training, held against `reference` as soon as it is complete.

    Gradients are read where there is a reference, or the trace itself is wanted.
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
    ) -> None:
        self._device, self._precision, self._reference = device, precision, reference
        self._losses: list[float] = []
        self._steps_begun = 0  # the loss of a step may be known only when the next one has begun
        self._tokens: int | None = None
        self._is_wanted = is_trace or reference is not None  # a sketch takes its time
        self._gradients = GradientSketch(parameters_by_block, progress=progress)
        self._updates: UpdateWatch | None = None
        self._draws_random_numbers = False
        self.difference: Difference | None = None
        """From the reference, once that is known."""

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Compares what updates use with the parameter groups and the state of `optimizer`."""
        self._updates = UpdateWatch(optimizer)

    @contextmanager
    def step(self) -> Iterator[None]:
        """To be put around each step."""
        is_first = self._steps_begun == 0
        self._steps_begun += 1
        before = self._random_state() if is_first else None
        with ExitStack() as watches:
            if is_first and self._is_wanted:
                watches.enter_context(self._gradients.taken())
            if self._updates is not None:
                watches.enter_context(self._updates.step(self._steps_begun))
            yield
        if before is not None:
            self._draws_random_numbers = not torch.equal(before, self._random_state())

    def note(self, loss: float, *, tokens: int | None = None) -> None:
        """Takes the mean token loss of one step after the other, and its tokens as a script reports them.

        Raises ParityFailed.
        """
        self._losses.append(loss)
        if len(self._losses) == 1:
            self._tokens = tokens
        if self._updates is not None and self._updates.error:
            raise ParityFailed(self._updates.error)
        if len(self._losses) == PARITY_STEPS and self._reference is not None:
            self.difference = largest_difference(
                self.trace(), self._reference, precision=self._precision
            )
            if self.difference.is_outside:
                raise ParityFailed(self.difference.message)

    def trace(self) -> ParityTrace:
        return ParityTrace(
            losses=tuple(self._losses[:PARITY_STEPS]),
            gradient_norms=self._gradients.norms(),
            gradient_projections=self._gradients.projections(),
            draws_random_numbers=self._draws_random_numbers,
            tokens=self._tokens,
        )

    @property
    def seconds(self) -> float:
        """What reading the gradients took, which is no part of the training's time: a second a billion parameters."""
        return self._gradients.seconds

    def verdict(self) -> dict[str, Any]:
        """What a measurement says of it; nothing where there was no reference."""
        if self.difference is None:
            return {}
        return {"parity": "same", "parity_message": f"at most, {self.difference.message}"}

    def _random_state(self) -> Tensor:
        return (
            torch.cuda.get_rng_state(self._device)
            if self._device.type == "cuda"
            else torch.get_rng_state()
        )


class UpdateWatch:
    """Whether updates use the learning rates and the state of the optimizer that the training loop sees.

    An update that runs elsewhere than in the optimizer's own `step`, as during the backward pass,
    might keep older ones: then a learning-rate schedule or a state that was loaded is ignored,
    which losses hardly show. The first steps are watched, and one after the learning rate has
    changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._first_rates: tuple[float | None, ...] | None = None
        self._has_seen_change = False
        self._used: dict[Tensor, float] = {}
        """The learning rate that each update of this step used, by its parameter."""
        self.error = ""

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Watches the updates of a step, counted from 1, where they are to be watched."""
        if number > PARITY_STEPS and (self._has_seen_change or self._rates() == self._first_rates):
            yield
            return
        groups = self._optimizer.param_groups
        index_of = {parameter: i for i, group in enumerate(groups) for parameter in group["params"]}

        def watch(stepping: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            if stepping is self._optimizer:
                self._compare(number, index_of)
            else:
                self._note_use(number, stepping, index_of)

        self._used.clear()
        handle = register_optimizer_step_pre_hook(watch)
        try:
            yield
        finally:
            handle.remove()

    def _note_use(
        self, number: int, stepping: torch.optim.Optimizer, index_of: Mapping[Tensor, int]
    ) -> None:
        for group in stepping.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter not in index_of:
                    continue  # the copy that an inner optimizer steps
                rate = _rate_of(group)
                if rate is not None:
                    self._used[parameter] = rate
                if stepping.state.get(parameter) is not self._optimizer.state.get(parameter):
                    self.error = (
                        f"the update of step {number} used another state than that of the optimizer"
                    )

    def _compare(self, number: int, index_of: Mapping[Tensor, int]) -> None:
        """At the loop's call of `step`, when the groups have the learning rates that it wants for this step."""
        rates = self._rates()
        for parameter, used in self._used.items():
            wanted = rates[index_of[parameter]]
            if used != wanted:
                self.error = (
                    f"an update of step {number} used a learning rate of {used:.6g}, and its parameter group has "
                    f"{wanted if wanted is None else format(wanted, '.6g')} when the optimizer steps"
                )
        self._used.clear()  # there may be several updates in what the script reports as one step
        if self._first_rates is None:
            self._first_rates = rates
        self._has_seen_change |= rates != self._first_rates

    def _rates(self) -> tuple[float | None, ...]:
        return tuple(map(_rate_of, self._optimizer.param_groups))


def _rate_of(group: Mapping[str, Any]) -> float | None:
    """The learning rate of a parameter group; None for an optimizer that finds its own."""
    rate = group.get("lr")
    return float(rate) if isinstance(rate, int | float | Tensor) else None


class GradientSketch:
    """Norm and random projections of each block's gradient, read where every optimizer takes its gradients."""

    def __init__(
        self,
        parameters_by_block: Mapping[str, Iterable[nn.Parameter]],
        *,
        progress: Progress = unwatched,
    ) -> None:
        self._progress = progress
        named = [
            (block, parameter)
            for block, group in parameters_by_block.items()
            for parameter in group
        ]
        self._place_of = {
            parameter: (block, index) for index, (block, parameter) in enumerate(named)
        }
        self.seconds = 0.0
        """What reading them took, so far."""
        self._squares: dict[str, Tensor] = {}
        self._projections: dict[str, Tensor] = {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Reads the gradients that optimizers step with in here."""

        def take(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            # A fused update under a GradScaler divides by the scale itself, later than here.
            scale = getattr(optimizer, "grad_scale", None)
            # An inner optimizer steps copies; a sparse gradient has no pieces.
            taken = [
                (self._place_of[parameter], parameter.grad)
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter in self._place_of and parameter.grad is not None
                if parameter.grad.layout == torch.strided
            ]
            if not taken:
                return
            device = taken[0][1].device
            began = _now(device)  # what the device still computes is the step's
            self._progress("parity")
            for (block, index), gradient in taken:
                self._take(gradient, block, index, scale=scale)
            self.seconds += _now(device) - began
            self._progress("step")

        handle = register_optimizer_step_pre_hook(take)
        try:
            yield
        finally:
            handle.remove()

    def norms(self) -> dict[str, float]:
        return {block: square.sqrt().item() for block, square in self._squares.items()}

    def projections(self) -> dict[str, tuple[float, ...]]:
        return {
            block: tuple(projections.tolist()) for block, projections in self._projections.items()
        }

    @torch.no_grad()
    def _take(self, gradient: Tensor, block: str, index: int, *, scale: Tensor | None) -> None:
        """In pieces, so that the signs take little memory."""
        # A generator of its own: the model's random numbers stay what they are.
        signs = torch.Generator(device=gradient.device).manual_seed(index)
        zero = torch.zeros((), device=gradient.device, dtype=torch.float64)
        for piece in gradient.flatten().split(_PIECE):
            values = piece.float() if scale is None else piece.float() / scale
            random = torch.randint(
                0, 2, (PROJECTIONS, len(values)), generator=signs, device=values.device
            )
            projected = (random.to(values.dtype) * 2 - 1) @ values
            self._squares[block] = self._squares.get(block, zero) + values.double().square().sum()
            self._projections[block] = self._projections.get(block, zero) + projected.double()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


_PIECE = 2**16
"""Elements of a gradient that are projected at once."""
