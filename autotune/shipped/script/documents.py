"""The documents of a script that reads a data set."""

from collections.abc import Iterable
from typing import Any

from autotune.shipped.script.dataset import read_dataset


def read_documents(name: str, *, split: str) -> Iterable[Any]:
    return read_dataset(name, split=split)
