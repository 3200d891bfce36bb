"""The attribute by which a block knows the blocks that are recomputed together with it."""

SEGMENT = "_segment"
