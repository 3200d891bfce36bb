"""A profile in words: where the time goes, who allocates, what is at the peak, what is recomputed.

These are the questions that one opens a profiler for. The trace has the rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.analysis.profile_comparison import Difference, ProfileComparison
from autotune.reporting.profile_files import CODE_USE, FILE_USES
from autotune.spec.config import TrainingConfig
from autotune.spec.profile import Compilation, OperatorUse, Profile
from autotune.units import format_percent, format_size

MOST_ROWS = 10
_PHASES: Mapping[str, str] = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "step": "in the optimizer's step",
}
_MOST_REASONS = 5


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """One operator of a table, ready to show."""

    name: str
    calls: str
    seconds: str
    share: str
    allocated: str


def operator_rows(profile: Profile) -> list[OperatorRow]:
    """Returns the operators that take most time, the slowest first."""
    total = profile.profiled_step_seconds
    return [
        OperatorRow(
            name=one.name,
            calls=f"{one.calls:,.0f}",
            seconds=format_milliseconds(one.seconds),
            share=f"{format_percent(one.seconds / total if total else 0.0)} %",
            allocated=format_size(one.allocated_bytes),
        )
        for one in profile.operators[:MOST_ROWS]
    ]


def sections(profile: Profile, config: TrainingConfig) -> list[tuple[str, list[str]]]:
    """Returns (title, lines) of what a profile says besides its operators."""
    found = [
        ("Where does the time go?", list(_time_lines(profile))),
        ("Which operator allocates most?", list(_allocation_lines(profile.operators))),
        ("What is in memory at the peak?", list(_peak_lines(profile))),
        ("What does checkpointing change?", list(_checkpointing_lines(profile, config))),
    ]
    if profile.compilation is not None:
        found.append(("What was compiled?", list(_compilation_lines(profile.compilation))))
    return found


def _time_lines(profile: Profile) -> Iterator[str]:
    step, profiled = profile.step_seconds, profile.profiled_step_seconds
    yield (
        f"a step takes {format_milliseconds(step)}, and {format_milliseconds(profiled)} "
        "under the profiler; shares are of the latter"
    )
    parts = [
        f"{name} {_share(seconds, profiled)}" for name, seconds in profile.phase_seconds.items()
    ]
    yield ", ".join(parts)
    if profile.idle_seconds is not None:
        yield f"the GPU waits for the host {_share(profile.idle_seconds, profiled)} of a step"


def _allocation_lines(operators: Sequence[OperatorUse]) -> Iterator[str]:
    by_memory = sorted(operators, key=lambda one: -one.allocated_bytes)
    for one in by_memory[:3]:
        yield f"{one.name}: {format_size(one.allocated_bytes)} a step, in {one.calls:,.0f} calls"


def _peak_lines(profile: Profile) -> Iterator[str]:
    peak_bytes = profile.peak_memory_bytes
    where = _PHASES.get(profile.peak_phase, "between the phases of a step")
    yield f"{format_size(peak_bytes)}, {where}:"
    sizes = sorted(profile.bytes_by_category.items(), key=lambda one: -one[1])
    for category, size_bytes in sizes:
        if size_bytes:
            name = category.replace("_", " ")
            yield f"{name} {format_size(size_bytes)}, {_share(size_bytes, peak_bytes)}"


def _checkpointing_lines(profile: Profile, config: TrainingConfig) -> Iterator[str]:
    recomputed = profile.recomputed_seconds
    activations = format_size(profile.bytes_by_category["activations"])
    if not config.recomputation:
        yield f"nothing is computed twice; activations at the peak take {activations}"
    elif recomputed is None:
        yield "forward passes run again inside of compiled code, where they cannot be told apart"
    else:
        yield (
            f"{config.recomputation}: forward passes that run again take "
            f"{format_milliseconds(recomputed)}, "
            f"{_share(recomputed, profile.profiled_step_seconds)} of a step; activations at the "
            f"peak take {activations}"
        )


def _compilation_lines(compilation: Compilation) -> Iterator[str]:
    graphs = compilation.graphs
    seconds = sum(graph.seconds for graph in graphs)
    breaks = sum(count for _, count in compilation.breaks)
    again = [graph for graph in graphs if graph.recompiled_because]
    yield (
        f"{_counted(len(graphs), 'graph')} in {seconds:.1f} s, "
        f"{_counted(breaks, 'graph break')}, {_counted(len(again), 'recompilation')}"
    )
    for graph in graphs[:_MOST_REASONS]:
        yield f"{graph.name}: {graph.operators} operators, {graph.seconds:.1f} s"
    for reason, count in compilation.breaks[:_MOST_REASONS]:
        yield f"graph break, {count} x: {reason.splitlines()[0]}"
    for graph in again[:_MOST_REASONS]:
        yield f"compiled again, {graph.name}: {graph.recompiled_because.splitlines()[0]}"


def file_lines(profile: Profile) -> list[str]:
    """Returns what each file of a profile is for; generated code is one line."""
    lines = []
    for file in profile.files:
        use, opened_by = FILE_USES.get(file.rpartition("/")[2], ("", ""))
        if opened_by:
            lines.append(f"{file}: {use}; open it at {opened_by}")
        elif use:
            lines.append(f"{file}: {use}")
    generated = [file for file in profile.files if file.endswith(".py")]
    if generated:
        lines.append(f"{generated[0]} ... ({len(generated)}): {CODE_USE}")
    return lines


def format_milliseconds(seconds: float) -> str:
    """Returns a time with three digits: `1.23 ms`, `123 ms`, `1,230 ms`."""
    milliseconds = 1000 * seconds
    if milliseconds >= 100:
        return f"{milliseconds:,.0f} ms"
    return f"{milliseconds:.3g} ms"


def _share(part: float, whole: float) -> str:
    return f"{format_percent(part / whole if whole else 0.0)} %"


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


# -- two profiles ----------------------------------------------------------------------------------


def comparison_sections(
    comparison: ProfileComparison, *, names: tuple[str, str]
) -> list[tuple[str, list[str]]]:
    """Returns (title, lines) of where the time and the bytes of two trials differ."""
    return [
        ("Time of a step", list(_time_differences(comparison, names))),
        ("Memory at the peak", list(_memory_differences(comparison, names))),
    ]


def _time_differences(comparison: ProfileComparison, names: tuple[str, str]) -> Iterator[str]:
    step = comparison.step
    ratio = step.first / step.second if step.second else 0.0
    yield (
        f"{names[0]} {format_milliseconds(step.first)}, {names[1]} "
        f"{format_milliseconds(step.second)}: {names[1]} has {ratio:.2f} times the speed"
    )
    for phase in comparison.phases:
        yield f"{phase.name}: {_time_change(phase)}"
    if comparison.recomputed is not None and (
        comparison.recomputed.first or comparison.recomputed.second
    ):
        yield f"forward passes that run again: {_time_change(comparison.recomputed)}"
    if comparison.idle is not None:
        yield f"the GPU waits for the host: {_time_change(comparison.idle)}"
    if comparison.compiled.first or comparison.compiled.second:
        yield f"within compiled regions: {_time_change(comparison.compiled)}"
    for operator in comparison.operators[:MOST_ROWS]:
        yield f"{operator.name}: {_time_change(operator)}"


def _memory_differences(comparison: ProfileComparison, names: tuple[str, str]) -> Iterator[str]:
    peak = comparison.peak
    yield (
        f"{names[0]} {format_size(round(peak.first))}, {names[1]} {format_size(round(peak.second))}"
    )
    for category in comparison.categories:
        sign = "+" if category.change > 0 else "-"
        change = format_size(round(abs(category.change)))
        yield (
            f"{category.name.replace('_', ' ')}: {format_size(round(category.first))} to "
            f"{format_size(round(category.second))} ({sign}{change})"
        )
    if not comparison.categories:
        yield "every kind of memory is the same, within 1 % of the peak"


def _time_change(one: Difference) -> str:
    sign = "+" if one.change >= 0 else "-"
    return (
        f"{format_milliseconds(one.first)} to {format_milliseconds(one.second)} "
        f"({sign}{format_milliseconds(abs(one.change))})"
    )
