"""Lines of events: what a search prints on stderr."""

from autotune.analysis.pick import DEFAULT_PREFERENCES
from autotune.study.event_text import excluded_lines, time_budget_line
from autotune.study.events import Confirming
from autotune.study.progress import Progress

NO_BLOCKS = "the model has no list of alike blocks"


def test_a_reason_is_said_once_with_all_that_it_excludes():
    assert excluded_lines(
        [
            "precision tf32: TF32 belongs to NVIDIA GPUs",
            f"checkpointing attention: {NO_BLOCKS}",
            f"checkpointing block: {NO_BLOCKS}",
            f"compile block: {NO_BLOCKS}",
            f"configuration 'one': checkpointing block: {NO_BLOCKS}",
            f"configuration 'two': compile block: {NO_BLOCKS}",
            "configuration 'three': loss chunked needs a model with a head",
        ]
    ) == [
        "precision tf32: TF32 belongs to NVIDIA GPUs",
        f"checkpointing attention, block; compile block: {NO_BLOCKS}",
        "configuration 'three': loss chunked needs a model with a head",
        "2 configurations have one of these",
    ]
    assert excluded_lines([]) == []


def test_a_measurement_of_a_confirmation_is_a_line():
    progress = Progress(preferences=DEFAULT_PREFERENCES)
    (line,) = progress.lines(Confirming(doing="#7 in turn with #0: the pick"))
    assert line.endswith("]  Measuring #7 in turn with #0: the pick ...")


def test_a_time_budget_without_a_confirmation_is_for_trials_alone():
    assert time_budget_line(None, for_trials=None) == ""
    assert time_budget_line(600.0, for_trials=600.0).startswith(
        "trials begin for at most 10 m 00 s; "
    )
