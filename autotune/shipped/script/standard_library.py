"""The documents of a script whose text is the documentation of the standard library."""

from collections.abc import Iterable
from typing import Any

from autotune.shipped.python_docs import standard_library_texts
from autotune.shipped.script.dataset import read_dataset
from autotune.shipped.script.written import TEXT


def read_documents(name: str, *, split: str) -> Iterable[Any]:
    """Reads the text of the study, or another one as `read_dataset` does."""
    if name == TEXT:
        return standard_library_texts()
    return read_dataset(name, split=split)
