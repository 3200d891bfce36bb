"""Where `sqrt` cuts the blocks of a model into segments that are recomputed whole."""

import math
from typing import Any

from torch import nn


def segment_bounds(layers: int) -> list[int]:
    """Return where `sqrt` cuts the blocks: segment i has those from bounds[i] to bounds[i + 1].

    It makes round(sqrt(layers)) segments of nearly equal length.
    """
    segments = round(math.sqrt(layers))
    return [round(index * layers / segments) for index in range(segments + 1)]


class Segment(nn.Module):
    """Several consecutive blocks as one module.

    A block may return a tuple whose first element is the input of the next block.
    """

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        output: Any = x
        for block in self.blocks:
            output = block(output[0] if isinstance(output, tuple) else output, *args, **kwargs)
        return output
