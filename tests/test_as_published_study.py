"""The study of the published table's trainer."""

from studies.peak_memory.as_published import CHANGES, ONE_HANDLE, WITHOUT_ALLOCATOR, patched


def test_what_the_study_of_the_trainer_patches_is_there():
    changes = [change for each in CHANGES.values() for change in each]
    with patched((*changes, *WITHOUT_ALLOCATOR, *ONE_HANDLE)):
        pass
