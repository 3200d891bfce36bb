"""Where the time and the bytes of two profiled trials differ. Pure functions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autotune.spec.prediction import Category
from autotune.spec.profile import Profile

_LEAST_SHARE = 0.01
"""Differences of less than this share of the first trial's step or peak are not listed."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One part of a step or of a peak, of the first and of the second trial."""

    name: str
    first: float
    second: float

    @property
    def change(self) -> float:
        return self.second - self.first


@dataclass(frozen=True, kw_only=True)
class ProfileComparison:
    """Two profiles side by side: seconds of a step and bytes at the peak, largest change first."""

    phases: tuple[Difference, ...]
    """In their order in a step."""
    operators: tuple[Difference, ...]
    """Seconds of a step."""
    recomputed: Difference | None
    """Seconds; None where one of them does not tell."""
    idle: Difference | None
    """Seconds in which the GPU waits for the host; None on a CPU."""
    compiled: Difference
    """Seconds within compiled regions."""
    categories: tuple[Difference, ...]
    """Bytes at the peak."""
    step: Difference
    """Seconds of a step without a profiler."""
    peak: Difference


def compare_profiles(first: Profile, second: Profile) -> ProfileComparison:
    """Returns where two profiles of one study differ.

    Parts of a step are those of its profiled steps, scaled to the time of a step without profiler:
    the profiler slows a step of many operators more than one of few.
    """
    of_first, of_second = _seconds_by_operator(first), _seconds_by_operator(second)
    least = _LEAST_SHARE * first.step_seconds
    operators = _differences(of_first, of_second, least=least)
    categories = _differences(
        dict(first.bytes_by_category),
        dict(second.bytes_by_category),
        least=_LEAST_SHARE * first.peak_memory_bytes,
    )
    names = [*first.phase_seconds, *(set(second.phase_seconds) - set(first.phase_seconds))]
    return ProfileComparison(
        phases=tuple(
            Difference(
                name=name,
                first=first.phase_seconds.get(name, 0.0) * _scale(first),
                second=second.phase_seconds.get(name, 0.0) * _scale(second),
            )
            for name in names
        ),
        operators=tuple(operators),
        recomputed=_optional(
            "recomputed", first, first.recomputed_seconds, second, second.recomputed_seconds
        ),
        idle=_optional("idle", first, first.idle_seconds, second, second.idle_seconds),
        compiled=Difference(
            name="compiled regions",
            first=sum(_compiled_seconds(of_first)),
            second=sum(_compiled_seconds(of_second)),
        ),
        categories=tuple(categories),
        step=Difference(name="step", first=first.step_seconds, second=second.step_seconds),
        peak=Difference(
            name="peak", first=first.peak_memory_bytes, second=second.peak_memory_bytes
        ),
    )


def _scale(profile: Profile) -> float:
    if not profile.profiled_step_seconds:
        return 1.0
    return profile.step_seconds / profile.profiled_step_seconds


def _seconds_by_operator(profile: Profile) -> dict[str, float]:
    return {one.name: one.seconds * _scale(profile) for one in profile.operators}


def _compiled_seconds(seconds_by_operator: Mapping[str, float]) -> Iterator[float]:
    for name, seconds in seconds_by_operator.items():
        if "CompiledFxGraph" in name or name.startswith(("CompiledFunction", "Torch-Compiled")):
            yield seconds


def _differences(
    first: Mapping[str, float] | Mapping[Category, int],
    second: Mapping[str, float] | Mapping[Category, int],
    *,
    least: float,
) -> list[Difference]:
    names = [*first, *(name for name in second if name not in first)]
    found = [
        Difference(name=str(name), first=dict(first).get(name, 0), second=dict(second).get(name, 0))
        for name in names
    ]
    found = [one for one in found if abs(one.change) >= least]
    return sorted(found, key=lambda one: -abs(one.change))


def _optional(
    name: str, first: Profile, of_first: float | None, second: Profile, of_second: float | None
) -> Difference | None:
    if of_first is None or of_second is None:
        return None
    return Difference(name=name, first=of_first * _scale(first), second=of_second * _scale(second))
