"""Where two profiles differ, from profiles made by hand."""

import dataclasses

from autotune.analysis.profile_comparison import compare_profiles
from autotune.reporting.profile_text import comparison_sections
from autotune.spec.prediction import CATEGORIES, Timeline
from autotune.spec.profile import OperatorUse, Profile


def operator(name, seconds):
    return OperatorUse(
        name=name, calls=1.0, host_seconds=seconds, device_seconds=0.0, allocated_bytes=10
    )


PLAIN = Profile(
    device="cpu",
    steps=1,
    step_seconds=1.0,
    profiled_step_seconds=2.0,
    phase_seconds={"forward": 0.6, "backward": 1.2, "step": 0.2},
    recomputed_seconds=0.0,
    idle_seconds=None,
    operators=(operator("aten::mm", 1.0), operator("aten::add", 0.4)),
    other_operators=0,
    peak_memory_bytes=1000,
    peak_phase="forward",
    bytes_by_category={**dict.fromkeys(CATEGORIES, 0), "parameters": 400, "activations": 600},
    holders=(),
    timeline=Timeline(events=(), bytes_by_category={}, phases=(), peak_event=-1),
    compilation=None,
    files=(),
    torch_version="2.13.0",
)
CHECKPOINTED = dataclasses.replace(
    PLAIN,
    step_seconds=1.5,
    profiled_step_seconds=3.0,
    phase_seconds={"forward": 0.6, "backward": 2.2, "step": 0.2},
    recomputed_seconds=1.0,
    operators=(operator("aten::mm", 2.0), operator("aten::add", 0.41)),
    peak_memory_bytes=700,
    bytes_by_category={**dict.fromkeys(CATEGORIES, 0), "parameters": 400, "activations": 300},
)


def test_times_are_those_of_steps_without_a_profiler():
    (forward, backward, _) = compare_profiles(PLAIN, CHECKPOINTED).phases
    assert (forward.first, forward.second) == (0.3, 0.3)
    assert (backward.first, backward.second) == (0.6, 1.1)


def test_only_what_differs_is_listed_and_the_largest_change_comes_first():
    compared = compare_profiles(PLAIN, CHECKPOINTED)
    assert [one.name for one in compared.operators] == ["aten::mm"]
    assert [(one.name, one.change) for one in compared.categories] == [("activations", -300)]
    fewer = dataclasses.replace(
        CHECKPOINTED, bytes_by_category=CHECKPOINTED.bytes_by_category | {"parameters": 300}
    )
    compared = compare_profiles(PLAIN, fewer)
    assert [one.name for one in compared.categories] == ["activations", "parameters"]


def test_recomputed_work_is_told_apart():
    compared = compare_profiles(PLAIN, CHECKPOINTED)
    assert compared.recomputed is not None
    assert compared.recomputed.change == 0.5


def test_the_words_name_both_trials_and_the_ratio_of_their_speeds():
    compared = compare_profiles(PLAIN, CHECKPOINTED)
    ((_, times), (_, sizes)) = comparison_sections(compared, names=("#0", "#4"))
    assert times[0] == "#0 1,000 ms, #4 1,500 ms: #4 has 0.67 times the speed"
    assert sizes[1] == "activations: 600 B to 300 B (-300 B)"
