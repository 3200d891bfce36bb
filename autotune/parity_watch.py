"""Watches the first steps of a training for what parity is judged by, whichever way the optimizer updates."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotune.config import Precision
from autotune.parity import PARITY_STEPS, PROJECTIONS, Difference, ParityTrace, largest_difference


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
    ) -> None:
        self._device, self._precision, self._reference = device, precision, reference
        self._losses: list[float] = []
        self._is_wanted = is_trace or reference is not None  # a sketch takes its time
        self._gradients = GradientSketch(parameters_by_block)
        self._draws_random_numbers = False
        self.difference: Difference | None = None
        """From the reference, once that is known."""

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """To be put around the first step."""
        before = self._random_state()
        with self._gradients.taken() if self._is_wanted else nullcontext():
            yield
        self._draws_random_numbers = not torch.equal(before, self._random_state())

    def note(self, loss: float) -> None:
        """The mean token loss of one step after the other. Raises ParityFailed."""
        self._losses.append(loss)
        if len(self._losses) == PARITY_STEPS and self._reference is not None:
            self.difference = largest_difference(self.trace(), self._reference, precision=self._precision)
            if self.difference.is_outside:
                raise ParityFailed(self.difference.message)

    def trace(self) -> ParityTrace:
        return ParityTrace(
            losses=tuple(self._losses[:PARITY_STEPS]),
            gradient_norms=self._gradients.norms(),
            gradient_projections=self._gradients.projections(),
            draws_random_numbers=self._draws_random_numbers,
        )

    @property
    def seconds(self) -> float:
        """What reading the gradients took, which is no part of the first step's time."""
        return self._gradients.seconds

    def verdict(self) -> dict[str, Any]:
        """What a measurement says of it; nothing where there was no reference."""
        if self.difference is None:
            return {}
        return {"parity": "same", "parity_message": f"at most, {self.difference.message}"}

    def _random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()


class GradientSketch:
    """Norm and random projections of each block's gradient, read where every optimizer takes its gradients."""

    def __init__(self, parameters_by_block: Mapping[str, Iterable[nn.Parameter]]) -> None:
        named = [(block, parameter) for block, group in parameters_by_block.items() for parameter in group]
        self._place_of = {parameter: (block, index) for index, (block, parameter) in enumerate(named)}
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
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                gradient = parameter.grad
                # An inner optimizer steps copies; a sparse gradient has no pieces.
                if gradient is not None and parameter in self._place_of and gradient.layout == torch.strided:
                    began = _now(gradient.device)
                    self._take(gradient, *self._place_of[parameter], scale=scale)
                    self.seconds += _now(gradient.device) - began

        handle = register_optimizer_step_pre_hook(take)
        try:
            yield
        finally:
            handle.remove()

    def norms(self) -> dict[str, float]:
        return {block: square.sqrt().item() for block, square in self._squares.items()}

    def projections(self) -> dict[str, tuple[float, ...]]:
        return {block: tuple(projections.tolist()) for block, projections in self._projections.items()}

    @torch.no_grad()
    def _take(self, gradient: Tensor, block: str, index: int, *, scale: Tensor | None) -> None:
        """In pieces, so that the signs take little memory."""
        # A generator of its own: the model's random numbers stay what they are.
        signs = torch.Generator(device=gradient.device).manual_seed(index)
        zero = torch.zeros((), device=gradient.device, dtype=torch.float64)
        for piece in gradient.flatten().split(_PIECE):
            values = piece.float() if scale is None else piece.float() / scale
            random = torch.randint(0, 2, (PROJECTIONS, len(values)), generator=signs, device=values.device)
            projected = (random.to(values.dtype) * 2 - 1) @ values
            self._squares[block] = self._squares.get(block, zero) + values.double().square().sum()
            self._projections[block] = self._projections.get(block, zero) + projected.double()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


_PIECE = 2**16
"""Elements of a gradient that are projected at once."""
