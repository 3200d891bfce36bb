"""torch.compile's activation memory budget: the share of activations that is stored for backward.

1.0 stores what the default partitioner stores; 0.0 recomputes the whole compiled region, as
checkpointing would. In between a knapsack solver chooses what to recompute. If blocks are compiled
separately, the budget applies to each block. Source: `activation_memory_budget` in
torch/_functorch/config.py,
https://pytorch.org/blog/activation-checkpointing-techniques/
"""

import torch._functorch.config


def set_memory_budget(budget: float) -> None:
    """Sets the budget, from 0.0 to 1.0, of the whole process. Must be called before compiling."""
    torch._functorch.config.activation_memory_budget = budget
