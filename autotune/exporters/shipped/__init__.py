"""Files that exports carry as they are: real modules of this package that need torch and nothing of autotune."""

from collections.abc import Iterable
from functools import cache
from importlib.resources import files

BLOCKS = "autotune_blocks.py"
"""Recomputes, compiles or converts the blocks of a model; one line in the user's own script."""
CALLBACK = "autotune_callback.py"
"""A callback of Lightning."""
ADAFACTOR = "adafactor_fixed_rate.py"
"""The one optimizer of ours, a technique's own file."""

_FOLDERS = {BLOCKS: "exporters/shipped", CALLBACK: "exporters/shipped", ADAFACTOR: "techniques"}


@cache
def shipped_text(name: str) -> str:
    # From the package above: importing autotune.techniques would load torch.
    return files("autotune").joinpath(_FOLDERS[name], name).read_text(encoding="utf-8")


def shipped_files(words: Iterable[str]) -> dict[str, str]:
    """{name: text} of those whose module is named in `words`, such as lines that are to be written."""
    said = " ".join(words)
    return {
        name: shipped_text(name) for name in (BLOCKS, ADAFACTOR) if name.removesuffix(".py") in said
    }
