"""Parity: do two configurations compute the same training? Decided from its first steps.

Two trainings from the same weights on the same batches are compared by

    losses       of the first `PARITY_STEPS` steps
    gradients    of each block at the first step, as the optimizer uses them
    norms        of these gradients as backward has left them: clipping hides their size
    micro batches  what a part of them adds to the gradients: one of many hardly changes the sum
    settings     of the optimizer's groups at each update (rate, betas, decay, ...), and the number
                 of updates and of steps of learning-rate schedules
    updates      the change of each block's weights in the first `UPDATE_STEPS` steps
    corrections  what changes weights outside of the optimizer, such as a decay in the loop
    buffers      the change of each buffer in the same steps
    averages     the change of averages of the weights that a script keeps

The losses alone are not enough: with wrong gradients the first loss is still equal, and with a
wrong schedule or a buffer that is updated twice the first steps hardly differ.

A gradient is stored as its norm and a few random projections. The root mean square of the
differences between two gradients' projections on vectors of random signs estimates the norm of
their difference (Achlioptas 2003, doi:10.1016/S0022-0000(03)00025-4); with eight projections the
relative error is about a quarter. Projections are linear, so that those of a change are the
difference of those after and before it, and no copy of the weights is needed.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autotune.spec.config import Precision
from autotune.spec.result import Outcome
from autotune.spec.schema import Schema

PARITY_STEPS = 3
UPDATE_STEPS = 2
"""Steps at whose end weights and buffers are read. They belong to the warm-up, so that reading sets
no peak and disturbs no timing."""
PROJECTIONS = 8


@dataclass(frozen=True, kw_only=True)
class ParityTrace(Schema):
    """What the first steps of a training have computed."""

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
    backward_norms: Mapping[str, float] = field(default_factory=dict)
    """Norm of that gradient as backward has left it, before it is clipped or unscaled, by block.
    Empty where several devices share the gradients out."""
    added_projections: tuple[tuple[float, ...], ...] = ()
    """Projections of what each part of the step's micro batches, at best each of them, has added to
    the gradients of a few parameters. The parts are of equal size. Empty where a step has one micro
    batch, in a script, and where several devices share the gradients out."""
    group_settings: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Each number in the optimizer's parameter groups, such as `lr of group 0`, at each of its
    updates in the first `PARITY_STEPS` steps."""
    schedule_steps: int = 0
    """How often torch's learning-rate schedules have stepped in these steps of a script."""
    update_projections: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Projections of the change of a block's weights in the first `UPDATE_STEPS` steps. Empty where
    several devices share the weights out."""
    corrections: Mapping[str, float] = field(default_factory=dict)
    """The change of the sum of a block's squared weights outside of the optimizer in these steps,
    divided by that sum; without the blocks that change in the optimizer only."""
    buffer_projections: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Projections of the change of each buffer that has changed in these steps, by its name."""
    average_projections: tuple[float, ...] = ()
    """Projections of the change of all averages of weights that a script keeps; empty where it
    keeps none."""
    tokens: int | None = None
    """Tokens of the first step as reported by a script; None if the workload decides them."""
    compared_with: str = ""
    """Which training it is of, for the record, where that is not the plain one on one device."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def described(self, difference: str) -> str:
        """Returns a clause on a difference from this trace, which says where this is not plain."""
        return (
            f"{difference}, compared with {self.compared_with}"
            if self.compared_with
            else difference
        )

    def gradient_difference(self, reference: "ParityTrace", block: str) -> float:
        """Estimate |gradient - reference gradient| / |reference gradient| of a block."""
        return relative_distance(
            self.gradient_projections[block],
            reference.gradient_projections[block],
            norm=reference.gradient_norms[block],
        )


def relative_distance(
    projections: Sequence[float], expected: Sequence[float], *, norm: float | None = None
) -> float:
    """Returns an estimate of |vector - expected vector| / norm from the projections of two vectors.

    Without a norm, that of the expected vector is estimated in the same way.
    """
    pairs = zip(projections, expected, strict=True)
    distance = math.sqrt(statistics.fmean((value - other) ** 2 for value, other in pairs))
    if norm is None:
        norm = math.sqrt(statistics.fmean(other**2 for other in expected))
    return _share(distance, norm)


def _share(difference: float, expected: float) -> float:
    if expected != 0.0:
        return abs(difference / expected)
    return 0.0 if difference == 0.0 else math.inf


@dataclass(frozen=True, kw_only=True)
class NoTrace(Schema):
    """Why there is no trace of a training."""

    outcome: Outcome
    """How its first steps have ended."""
    message: str

    @property
    def lacks_room(self) -> bool:
        """Whether memory or time was lacking, which says nothing against the training itself."""
        return self.outcome in ("out_of_memory", "over_cap", "timeout")


@dataclass(frozen=True, kw_only=True)
class ParityTolerance:
    """Largest relative differences that count as rounding."""

    loss: float
    """Also of the settings of the optimizer, which may follow from losses."""
    gradient: float
    change: float
    """Of the changes of weights and buffers. An optimizer such as Adam divides a gradient by its
    size, so that an element that rounding turns over counts as much as any other."""


TOLERANCES: Mapping[Precision, ParityTolerance] = {
    "fp32": ParityTolerance(loss=1e-4, gradient=1e-2, change=0.3),
    "tf32": ParityTolerance(loss=1e-3, gradient=1e-2, change=0.3),
    "bf16-mixed": ParityTolerance(loss=2e-3, gradient=3e-2, change=0.5),
    "bf16-true": ParityTolerance(loss=1e-2, gradient=1e-1, change=0.7),
    "bf16-stochastic": ParityTolerance(loss=1e-2, gradient=1e-1, change=0.7),
    "fp16-mixed": ParityTolerance(loss=1e-3, gradient=1e-2, change=0.5),
    "fp8": ParityTolerance(loss=2e-2, gradient=2e-1, change=0.7),
    "int8-mixed": ParityTolerance(loss=2e-2, gradient=2e-1, change=0.7),
    "fp64": ParityTolerance(loss=1e-4, gradient=1e-2, change=0.3),
    "fp16-true": ParityTolerance(loss=1e-2, gradient=1e-1, change=0.6),
    "as-is": ParityTolerance(loss=1e-2, gradient=1e-1, change=0.6),
}
"""At least four times what `studies/parity/` measured on small models, because rounding grows with
depth and length; for comparison, a memory budget with dropout 0.1 differs by 7 to 17 %. The
tolerance of fp32 is wider than rounding alone needs: a ReLU whose input is within rounding of zero
passes its whole gradient or none, and one such ReLU of 64,512 changed the gradient of a block by
0.14 %. int8-mixed differs by a tenth of its tolerance (`studies/int8_mixed/`). tf32 and fp8 were
not measured, because the hardware was not available; tf32 has as many mantissa bits as fp16, fp8
four fewer than bf16. fp64 has the tolerance of fp32, and what scripts bring in fp16 or in several
formats that of bf16-true. A change that is made twice instead of once differs by 0.8 or more, and
one that is made half as often by 0.4."""


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
    trace: ParityTrace,
    reference: ParityTrace,
    *,
    precision: Precision,
    strictness: float = 1.0,
    other_micro_batch: bool = False,
) -> Difference:
    """Returns the largest difference of two traces in units of the tolerance.

    Only what is in both traces is compared: blocks, settings and buffers. The tolerances are
    divided by `strictness`, for two trainings that must agree better than rounding allows. If
    GradScaler skipped an update of one training, because its scaled gradients overflowed, only the
    first losses are compared. With `other_micro_batch` two plain trainings are compared that may
    differ in nothing else: not by their losses, as a script may report those of a micro batch, but
    by the averages that they keep.
    """
    tolerance = TOLERANCES[precision]
    allowed = ParityTolerance(
        loss=tolerance.loss / strictness,
        gradient=tolerance.gradient / strictness,
        change=tolerance.change / strictness,
    )
    are_updated = _was_updated(trace) and _was_updated(reference)
    differences = list(_gradient_differences(trace, reference, allowed=allowed.gradient))
    if other_micro_batch and are_updated:
        averages = (trace.average_projections, reference.average_projections)
        differences.append(
            _change_difference("averages of weights", *averages, allowed=allowed.change)
        )
    if not other_micro_batch:
        pairs = zip(trace.losses, reference.losses, strict=False)
        for step, (loss, expected) in enumerate(pairs, start=1):
            if step == 1 or are_updated:
                differences.append(_loss_difference(step, loss, expected, allowed=allowed.loss))
    if are_updated:
        differences += _setting_differences(trace, reference, allowed=allowed.loss)
        differences += _change_differences(trace, reference, allowed=allowed.change)
    if not differences:
        return Difference(multiple=math.nan, message="nothing of them can be compared")
    return max(differences, key=_severity)


def has_similar_settings(
    trace: ParityTrace, reference: ParityTrace, *, precision: Precision
) -> bool:
    """Returns whether two trainings update as often, at the same rates and with the same settings.

    It holds for two trainings on other text, too, whose gradients differ.
    """
    allowed = TOLERANCES[precision].loss
    differences = _setting_differences(trace, reference, allowed=allowed)
    return not any(difference.is_outside for difference in differences)


def _severity(difference: Difference) -> float:
    return math.inf if math.isnan(difference.multiple) else difference.multiple


def _was_updated(trace: ParityTrace) -> bool:
    return bool(trace.gradient_norms) and all(map(math.isfinite, trace.gradient_norms.values()))


def _loss_difference(step: int, loss: float, expected: float, *, allowed: float) -> Difference:
    difference = _share(loss - expected, expected)
    return Difference(
        multiple=difference / allowed,
        message=f"the loss of step {step} is {loss:.6g} for {expected:.6g}, "
        f"{_percent(difference)} off and {_percent(allowed)} allowed",
    )


def _gradient_differences(
    trace: ParityTrace, reference: ParityTrace, *, allowed: float
) -> Iterator[Difference]:
    for block, norm in trace.gradient_norms.items():
        if math.isfinite(norm) and math.isfinite(reference.gradient_norms.get(block, math.nan)):
            difference = trace.gradient_difference(reference, block)
            yield _off(f"the gradient of {block}", difference, "at step 1", allowed=allowed)
    for block, norm in trace.backward_norms.items():
        expected = reference.backward_norms.get(block, math.nan)
        if math.isfinite(norm) and math.isfinite(expected):
            what = f"the norm of the gradient of {block} as backward leaves it"
            yield _off(what, _share(norm - expected, expected), "at step 1", allowed=allowed)
    yield from _part_differences(trace, reference, allowed=_OF_A_PART * allowed)


_OF_A_PART = 3
"""The gradients of micro batches may differ by so many times what their sum may: rounding is a
larger part of them."""


def _part_differences(
    trace: ParityTrace, reference: ParityTrace, *, allowed: float
) -> Iterator[Difference]:
    """Yield the differences in what each part of the micro batches adds to the gradients.

    Where one has more parts than the other, as many as belong together are added up.
    """
    added, expected = trace.added_projections, reference.added_projections
    parts = math.gcd(len(added), len(expected)) if added and expected else 0
    for part in range(parts):
        what = f"the gradient of part {part + 1} of {parts} of the micro batches"
        pair = (_part_of(added, part, parts), _part_of(expected, part, parts))
        yield _off(what, relative_distance(*pair), "at step 1", allowed=allowed)


def _part_of(projections: Sequence[tuple[float, ...]], part: int, parts: int) -> tuple[float, ...]:
    size = len(projections) // parts
    together = projections[part * size : (part + 1) * size]
    return tuple(map(math.fsum, zip(*together, strict=True)))


def _setting_differences(
    trace: ParityTrace, reference: ParityTrace, *, allowed: float
) -> Iterator[Difference]:
    """Yield the differences in how often optimizer and schedules step, and with what."""
    if trace.schedule_steps != reference.schedule_steps:
        yield Difference(
            multiple=math.inf,
            message=f"learning-rate schedules step {trace.schedule_steps} times in the first "
            f"{PARITY_STEPS} steps for {reference.schedule_steps} times",
        )
    for name, values in trace.group_settings.items():
        wanted = reference.group_settings.get(name)
        if wanted is None:
            continue  # another class of optimizers that updates alike, as one on the host
        if len(values) != len(wanted):
            yield Difference(
                multiple=math.inf,
                message=f"the optimizer steps {len(values)} times in the first {PARITY_STEPS} "
                f"steps for {len(wanted)} times",
            )
            continue
        for update, (value, expected) in enumerate(zip(values, wanted, strict=True), start=1):
            difference = _share(value - expected, expected)
            yield Difference(
                multiple=difference / allowed,
                message=f"{name} is {value:.6g} for {expected:.6g} at update {update}",
            )


def _change_differences(
    trace: ParityTrace, reference: ParityTrace, *, allowed: float
) -> Iterator[Difference]:
    """Yield the differences in how weights and buffers change."""
    when = f"after {UPDATE_STEPS} steps"
    blocks = [name for name in trace.update_projections if name in reference.update_projections]
    for block in blocks:
        update, wanted = trace.update_projections[block], reference.update_projections[block]
        difference = relative_distance(update, wanted)
        yield _off(f"the update of {block}", difference, when, allowed=allowed)
        change = trace.corrections.get(block, 0.0)
        expected = reference.corrections.get(block, 0.0)
        difference = _share(change - expected, max(abs(change), abs(expected)))
        what = f"what changes the weights of {block} outside of the optimizer"
        yield _off(what, difference, when, allowed=allowed)
    for name in {**trace.buffer_projections, **reference.buffer_projections}:
        yield _change_difference(
            f"buffer {name}",
            trace.buffer_projections.get(name, ()),
            reference.buffer_projections.get(name, ()),
            allowed=allowed,
        )


def _change_difference(
    what: str, change: Sequence[float], expected: Sequence[float], *, allowed: float
) -> Difference:
    """Returns the difference of two changes, of which an empty one is none."""
    unchanged = (0.0,) * PROJECTIONS
    difference = relative_distance(change or unchanged, expected or unchanged)
    when = f"after {UPDATE_STEPS} steps"
    return _off(f"the change of {what}", difference, when, allowed=allowed)


def _off(what: str, difference: float, when: str, *, allowed: float) -> Difference:
    return Difference(
        multiple=difference / allowed,
        message=f"{what} is {_percent(difference)} off {when} and {_percent(allowed)} allowed",
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %"
