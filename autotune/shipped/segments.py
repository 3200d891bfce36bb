"""Recomputes segments of several blocks: checkpointing `sqrt`."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autotune.shipped.changed_method import Method, change_method
from autotune.shipped.checkpointing import run_recomputed
from autotune.shipped.segment import SEGMENT


def segment_bounds(layers: int) -> list[int]:
    """Returns where `sqrt` cuts the blocks: segment i has those from bounds[i] to bounds[i + 1].

    It makes round(sqrt(layers)) segments of nearly equal length.
    """
    segments = round(math.sqrt(layers))
    return [round(index * layers / segments) for index in range(segments + 1)]


class Segment:
    """Consecutive blocks that are recomputed together, when the first one is called.

    A later one then returns what it has returned in that call, provided that its input is what the
    block before has returned.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        self.outputs: dict[int, tuple[Any, Any]] = {}
        """Input and output of the blocks that have run and were not called yet, by their index."""
        self._calls = [type(block).__call__ for block in blocks]

    def run(self, hidden: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls the blocks one after the other; returns all outputs."""
        outputs = []
        for block, call in zip(self.blocks, self._calls, strict=True):
            output = call(block, hidden, *args, **kwargs)
            outputs.append(output)
            hidden = _hidden_of(output)
        return tuple(outputs)


def _hidden_of(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def recompute_segments(blocks: Sequence[nn.Module]) -> None:
    """Recomputes the blocks in about sqrt(blocks) segments: arXiv:1604.06174.

    Each block must get the output of the one before, or the first element of it, and all must get
    the same other arguments. Hooks of the blocks are recomputed with them.
    """
    for start, end in itertools.pairwise(segment_bounds(len(blocks))):
        segment = Segment(blocks[start:end])
        for index, block in enumerate(segment.blocks):
            object.__setattr__(block, SEGMENT, (segment, index))
            change_method(block, "__call__", _in_segments)


def _in_segments(call: Method) -> Method:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        segment, index = getattr(self, SEGMENT, (None, 0))  # a copy of a block has none
        if segment is None or not args or not torch.is_grad_enabled():
            return call(self, *args, **kwargs)
        if index > 0:
            hidden, output = segment.outputs.pop(index, (None, None))
            return output if hidden is args[0] else call(self, *args, **kwargs)
        segment.outputs = {}  # of a forward pass that an exception has ended
        outputs = run_recomputed(segment.blocks, segment.run, args, kwargs, {})
        segment.outputs = {
            later: (_hidden_of(outputs[later - 1]), outputs[later])
            for later in range(1, len(outputs))
        }
        return outputs[0]

    return called
