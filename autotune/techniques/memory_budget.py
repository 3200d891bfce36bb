"""torch.compile's activation memory budget: how much of the activations the partitioner may keep.

1.0 keeps what the default partitioner keeps; 0.0 recomputes the whole compiled region, as
checkpointing would. In between a knapsack solver chooses what to recompute. Compiled by block, the
budget holds within each block. Source: `activation_memory_budget` in torch/_functorch/config.py,
https://pytorch.org/blog/activation-checkpointing-techniques/
"""

import torch._functorch.config


def set_memory_budget(budget: float) -> None:
    """A setting of the whole process; must be made before compiling."""
    torch._functorch.config.activation_memory_budget = budget
