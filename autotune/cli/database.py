"""Open the studies database for a command."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.storage.store import StudyStore


@contextmanager
def open_store(storage: str, *, create: bool = False) -> Iterator["StudyStore"]:
    """Yield the store of the studies database at a URL. Raises what `StudyStore` raises."""
    # SQLAlchemy takes 0.3 s to import, which the help of a command does without.
    from autotune.storage.store import StudyStore  # noqa: PLC0415

    with closing(StudyStore(storage, create=create)) as store:
        yield store
