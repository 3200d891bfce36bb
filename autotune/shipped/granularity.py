"""Recomputes the parts of blocks that a value of `checkpointing` names."""

from collections.abc import Sequence

from torch import nn

from autotune.shipped.checkpointing import recompute
from autotune.shipped.selective import (
    alternating_contexts,
    attention_contexts,
    contexts_keeping,
    selective_contexts,
)

EVERY = {"block": 1, "every-2": 2, "every-4": 4}
"""Blocks whose index is divisible by this number are recomputed."""
SELECTIVE = {
    "selective": selective_contexts,
    "selective-2": alternating_contexts,
    "save-attention": attention_contexts,
}
"""Which tells, by operator, what is kept of a block."""

Kept = frozenset[tuple[str, int]] | tuple[str, ...]
"""Calls of operators, as `contexts_keeping` takes them; or names of parts of a block."""


def recompute_but(block: nn.Module, kept: Kept | None) -> None:
    """Recomputes a block, but for the results of the operators that it keeps; None keeps all.

    With names of parts, only these are recomputed.
    """
    if isinstance(kept, tuple):
        for name in kept:
            recompute(getattr(block, name))
    elif kept is not None:
        recompute(block, context_fn=contexts_keeping(kept) if kept else None)


def recompute_in_blocks(
    blocks: Sequence[nn.Module], granularity: str, *, attention_name: str | None
) -> None:
    """Applies every granularity within single blocks; `sqrt` is `recompute_segments`.

    `attention_name` is the attribute of each block that is its attention. Raises ValueError if that
    is needed and None.
    """
    if granularity in ("none", "sqrt"):
        return
    # A block that the model calls several times is in the list as often.
    for block in dict.fromkeys(blocks[:: EVERY.get(granularity, 1)]):
        if granularity in SELECTIVE:
            recompute(block, context_fn=SELECTIVE[granularity])
        elif granularity != "attention":
            recompute(block)
        elif attention_name is None:
            raise ValueError(f"no attention module was found in {type(block).__name__}")
        else:
            recompute(getattr(block, attention_name))
