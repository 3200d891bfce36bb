"""Lines of events: what a search prints on stderr."""

from autotune.study.event_text import excluded_lines

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
