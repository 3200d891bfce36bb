"""Parity: do two configurations compute the same training? Decided from its first steps.

Two trainings from the same weights on the same batches are compared by the loss of each of the
first steps and by the gradient of each block at the first step. The losses alone are not enough:
with wrong gradients the first loss is still equal.

A gradient is stored as its norm and a few random projections. The root mean square of the
differences between two gradients' projections on vectors of random signs estimates the norm of
their difference (Achlioptas 2003, doi:10.1016/S0022-0000(03)00025-4); with eight projections the
relative error is about a quarter.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autotune.spec.config import Precision
from autotune.spec.schema import Schema

PARITY_STEPS = 3
PROJECTIONS = 8


@dataclass(frozen=True, kw_only=True)
class ParityTrace(Schema):
    """Losses and gradients of the first steps of a training."""

    losses: tuple[float, ...]
    """Mean token loss before each of the first `PARITY_STEPS` updates, in nats."""
    gradient_norms: Mapping[str, float]
    """Euclidean norm of the gradient of the first global batch, by block; `rest`: all parameters
    outside the blocks. Empty if the optimizer made no step, as after an overflow with GradScaler.
    """
    gradient_projections: Mapping[str, tuple[float, ...]]
    """Projections of that gradient on `PROJECTIONS` vectors of random signs, which are the same for
    every configuration."""
    draws_random_numbers: bool
    """Whether a step draws random numbers, as dropout does."""
    tokens: int | None = None
    """Tokens of the first step as reported by a script; None if the workload decides them."""
    compared_with: str = ""
    """Which training it is of, for the record, where that is not the plain one on one device."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def described(self, difference: str) -> str:
        """Return a clause on a difference from this trace, which says where this is not plain."""
        return (
            f"{difference}, compared with {self.compared_with}"
            if self.compared_with
            else difference
        )

    def gradient_difference(self, reference: "ParityTrace", block: str) -> float:
        """Estimate |gradient - reference gradient| / |reference gradient| of a block."""
        pairs = zip(
            self.gradient_projections[block], reference.gradient_projections[block], strict=True
        )
        mean_square = statistics.fmean((value - expected) ** 2 for value, expected in pairs)
        norm = reference.gradient_norms[block]
        if norm == 0.0:
            return 0.0 if mean_square == 0.0 else math.inf
        return math.sqrt(mean_square) / norm


@dataclass(frozen=True, kw_only=True)
class ParityTolerance:
    """Largest relative differences that count as rounding."""

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
    "fp64": ParityTolerance(loss=1e-4, gradient=1e-2),
    "fp16-true": ParityTolerance(loss=1e-2, gradient=1e-1),
    "as-is": ParityTolerance(loss=1e-2, gradient=1e-1),
}
"""At least four times what `studies/parity/` measured on small models, because rounding grows with
depth and length; for comparison, a memory budget with dropout 0.1 differs by 7 to 17 %. The
tolerance of fp32 is wider than rounding alone needs: a ReLU whose input is within rounding of zero
passes its whole gradient or none, and one such ReLU of 64,512 changed the gradient of a block by
0.14 %. tf32 and fp8 were not measured, because the hardware was not available; tf32 has as many
mantissa bits as fp16, fp8 four fewer than bf16. fp64 has the tolerance of fp32, and what scripts
bring in fp16 or in several formats that of bf16-true."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference between two traces."""

    multiple: float
    """The difference divided by the tolerance; above 1.0 the trainings are not the same."""
    message: str
    """Where the difference is and how large, as a clause."""

    @property
    def is_outside(self) -> bool:
        """Whether the difference exceeds the tolerance; NaN does."""
        return not self.multiple <= 1.0


def largest_difference(
    trace: ParityTrace, reference: ParityTrace, *, precision: Precision, strictness: float = 1.0
) -> Difference:
    """Return the largest difference over the losses of all steps and the gradients of all blocks.

    Only blocks that are in both traces are compared. The tolerances are divided by `strictness`,
    for two trainings that must agree better than rounding allows. If GradScaler skipped the first
    update of one training, because its scaled gradients overflowed, only the first losses are
    compared.
    """
    tolerance = TOLERANCES[precision]
    steps = PARITY_STEPS if _was_updated(trace) and _was_updated(reference) else 1
    losses = list(zip(trace.losses, reference.losses, strict=False))[:steps]
    differences = [
        _loss_difference(step, loss, expected, allowed=tolerance.loss / strictness)
        for step, (loss, expected) in enumerate(losses, start=1)
    ]
    for block, norm in trace.gradient_norms.items():
        if math.isfinite(norm) and math.isfinite(reference.gradient_norms.get(block, math.nan)):
            difference = trace.gradient_difference(reference, block)
            allowed = tolerance.gradient / strictness
            differences.append(_gradient_difference(block, difference, allowed=allowed))
    return max(differences, key=_severity)


def _severity(difference: Difference) -> float:
    return math.inf if math.isnan(difference.multiple) else difference.multiple


def _was_updated(trace: ParityTrace) -> bool:
    return bool(trace.gradient_norms) and all(map(math.isfinite, trace.gradient_norms.values()))


def _loss_difference(step: int, loss: float, expected: float, *, allowed: float) -> Difference:
    if expected != 0.0:
        difference = abs(loss - expected) / abs(expected)
    else:
        difference = 0.0 if loss == 0.0 else math.inf
    return Difference(
        multiple=difference / allowed,
        message=f"the loss of step {step} is {loss:.6g} for {expected:.6g}, "
        f"{_percent(difference)} off and {_percent(allowed)} allowed",
    )


def _gradient_difference(block: str, difference: float, *, allowed: float) -> Difference:
    return Difference(
        multiple=difference / allowed,
        message=f"the gradient of {block} is {_percent(difference)} off at step 1 and "
        f"{_percent(allowed)} allowed",
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %"
