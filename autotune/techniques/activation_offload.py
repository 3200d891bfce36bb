"""Activation offload: activations are stored in pinned host memory between forward and backward.

| value | saves | costs |
|---|---|---|
| none | | |
| cpu | activations of more than 1 MiB until backward | copies both ways, host memory |

With checkpointing only the inputs of the blocks are saved for backward, and moved. A tensor that
several operators save is copied for each of them. The copies run on the stream of the computation,
in order with it: nothing is overwritten before it is copied, and nothing overlaps. Parameters are
not moved. Needs a device with separate memory. Source: torch.autograd.graph.save_on_cpu,
https://docs.pytorch.org/docs/stable/autograd.html
"""


def pinned_bytes(size_bytes: int) -> int:
    """Returns the host memory that torch pins for a tensor: the next power of two, in bytes."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0
