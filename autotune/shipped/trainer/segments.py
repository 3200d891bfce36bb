"""Recomputes segments of blocks without changing the names of their parameters."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune.shipped.segments import segment_bounds


def checkpoint_segments(blocks: Sequence[nn.Module], *, compiled: bool) -> None:
    """Recomputes the blocks in about sqrt(blocks) segments; the first block of each runs them all.

    All blocks must take the same arguments, and return their output or a tuple with their output
    first.
    """
    kind = type(blocks[0])
    run = torch.compile(kind.forward, dynamic=False) if compiled else kind.forward
    bounds = segment_bounds(len(blocks))
    leading, following = _segment_classes(kind, run)
    for start, end in itertools.pairwise(bounds):
        for block in blocks[start:end]:
            block.__class__ = following
        blocks[start].__class__ = leading
        # A tuple, because a list of modules would register them a second time.
        blocks[start].segment = tuple(blocks[start:end])  # type: ignore[assignment]


def _segment_classes(
    kind: type[nn.Module], run: Callable[..., Any]
) -> tuple[type[nn.Module], type[nn.Module]]:
    """Returns the class of the first block of a segment and the class of the others.

    The first runs all blocks of the segment; the others return their input.
    """

    def run_segment(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output: Any = hidden
        for block in self.segment:
            output = run(block, output[0] if isinstance(output, tuple) else output, *args, **kwargs)
        return output

    def lead(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = checkpoint(run_segment, self, hidden, *args, use_reentrant=False, **kwargs)
        for block in self.segment:
            block.returns_tuple = isinstance(output, tuple)
        return output

    def follow(self: Any, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return (hidden,) if self.returns_tuple else hidden

    return (
        type(kind.__name__, (kind,), {"forward": functools.wraps(kind.forward)(lead)}),
        type(kind.__name__, (kind,), {"forward": functools.wraps(kind.forward)(follow)}),
    )
