"""Files that exports contain unchanged: modules of this package that need torch, not autotune."""

from collections.abc import Iterable
from functools import cache
from importlib.resources import files

BLOCKS = "autotune_blocks.py"
"""Checkpoints, compiles or converts the blocks of a model by one line in the user's script."""
CALLBACK = "autotune_callback.py"
"""A callback for Lightning."""
ADAFACTOR = "adafactor_fixed_rate.py"
"""The optimizer that neither torch nor torchao has: the module of that technique."""

_FOLDERS = {BLOCKS: "exporters/shipped", CALLBACK: "exporters/shipped", ADAFACTOR: "techniques"}


@cache
def shipped_text(name: str) -> str:
    """Return the text of one of these files."""
    # Read as data of the top package: importing autotune.techniques would load torch.
    return files("autotune").joinpath(_FOLDERS[name], name).read_text(encoding="utf-8")


def shipped_files(lines: Iterable[str]) -> dict[str, str]:
    """Return {name: text} of the files whose module is named in `lines`."""
    text = " ".join(lines)
    return {
        name: shipped_text(name) for name in (BLOCKS, ADAFACTOR) if name.removesuffix(".py") in text
    }
