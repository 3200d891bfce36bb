"""Parity: whether two configurations compute the same training, told from its first steps.

Two trainings from the same weights on the same batches are compared by the loss of each step and by
the gradient of each block at the first. The losses alone do not tell: wrong gradients leave the
first loss equal. A gradient is kept as its norm and a few random projections: the root mean square
of the differences of two gradients' projections on random signs estimates the norm of their
difference (Achlioptas 2003, doi:10.1016/S0022-0000(03)00025-4), to about a quarter with eight.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autotune.spec.config import Precision

PARITY_STEPS = 3
PROJECTIONS = 8


@dataclass(frozen=True, kw_only=True)
class ParityTrace:
    """The beginning of a training."""

    losses: tuple[float, ...]
    """Mean token loss before each of the first `PARITY_STEPS` updates, in nats."""
    gradient_norms: Mapping[str, float]
    """Euclidean norm of the first global batch's gradient, by block; `rest`: all parameters outside
    the blocks. Empty where the optimizer made no step, as a GradScaler skips the one that
    overflowed."""
    gradient_projections: Mapping[str, tuple[float, ...]]
    """Its projections on `PROJECTIONS` vectors of random signs, the same ones for every
    configuration."""
    draws_random_numbers: bool
    """Whether a step draws random numbers, as dropout does."""
    tokens: int | None = None
    """Tokens of the first step as a script has reported them; None where the workload says how many
    they are."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "ParityTrace":
        projections = {
            block: tuple(values) for block, values in stored["gradient_projections"].items()
        }
        return cls(
            **{**stored, "losses": tuple(stored["losses"]), "gradient_projections": projections}
        )

    def gradient_difference(self, reference: "ParityTrace", block: str) -> float:
        """Estimated norm of the difference between the gradients of a block, relative to the reference's norm."""
        pairs = zip(
            self.gradient_projections[block], reference.gradient_projections[block], strict=True
        )
        square = statistics.fmean((mine - its) ** 2 for mine, its in pairs)
        norm = reference.gradient_norms[block]
        return math.sqrt(square) / norm if norm else (math.inf if square else 0.0)


@dataclass(frozen=True, kw_only=True)
class ParityTolerance:
    """Largest relative differences that are rounding."""

    loss: float
    gradient: float


TOLERANCES: Mapping[Precision, ParityTolerance] = {
    "fp32": ParityTolerance(loss=1e-4, gradient=1e-2),
    "tf32": ParityTolerance(loss=1e-3, gradient=1e-2),
    "bf16-mixed": ParityTolerance(loss=2e-3, gradient=3e-2),
    "bf16-true": ParityTolerance(loss=1e-2, gradient=1e-1),
    "bf16-stochastic": ParityTolerance(loss=1e-2, gradient=1e-1),
    "fp16-mixed": ParityTolerance(loss=1e-3, gradient=1e-2),
    "fp8": ParityTolerance(loss=2e-2, gradient=2e-1),
}
"""At least four times what `studies/parity/` measured on small models, as rounding grows with depth
and length; a memory budget with dropout 0.1 is 7 to 17 % off. In fp32 room is left for more than
rounding: a ReLU whose input is within rounding of zero passes its whole gradient or none, and one
of 64,512 moved a block's gradient by 0.14 %. tf32 and fp8 were not measured, for want of the
hardware: tf32 has the bits of fp16, fp8 four fewer than bf16."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference between two traces, as a multiple of what is allowed: above 1.0 they are not the same."""

    multiple: float
    message: str
    """Where it is and how large, as a clause."""

    @property
    def is_outside(self) -> bool:
        return not self.multiple <= 1.0  # NaN is outside


def largest_difference(
    trace: ParityTrace, reference: ParityTrace, *, precision: Precision, strictness: float = 1.0
) -> Difference:
    """How far `trace` is from `reference`: the losses of all steps and the gradients of all blocks that are in both.

    `strictness`: by how much less than rounding allows is allowed, where the two are more alike
    than that. Where a GradScaler skipped the first update of one, as its scaled gradients
    overflowed, only the first losses can be the same.
    """
    tolerance = TOLERANCES[precision]
    compared = PARITY_STEPS if _was_updated(trace) and _was_updated(reference) else 1
    losses = list(zip(trace.losses, reference.losses, strict=False))[:compared]
    differences = [
        _of_losses(step, mine, its, allowed=tolerance.loss / strictness)
        for step, (mine, its) in enumerate(losses, start=1)
    ] + [
        _of_gradients(
            block,
            trace.gradient_difference(reference, block),
            allowed=tolerance.gradient / strictness,
        )
        for block in trace.gradient_norms
        if math.isfinite(
            trace.gradient_norms[block] + reference.gradient_norms.get(block, math.nan)
        )
    ]
    return max(differences, key=lambda one: math.inf if math.isnan(one.multiple) else one.multiple)


def _was_updated(trace: ParityTrace) -> bool:
    return bool(trace.gradient_norms) and all(map(math.isfinite, trace.gradient_norms.values()))


def _of_losses(step: int, mine: float, its: float, *, allowed: float) -> Difference:
    difference = abs(mine - its) / abs(its) if its else (0.0 if mine == its else math.inf)
    return Difference(
        multiple=difference / allowed,
        message=f"the loss of step {step} is {mine:.6g} for {its:.6g}, {_percent(difference)} off and "
        f"{_percent(allowed)} allowed",
    )


def _of_gradients(block: str, difference: float, *, allowed: float) -> Difference:
    return Difference(
        multiple=difference / allowed,
        message=f"the gradient of {block} is {_percent(difference)} off at step 1 and {_percent(allowed)} allowed",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
