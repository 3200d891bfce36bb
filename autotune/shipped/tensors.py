"""The tensors that a module holds besides parameters."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def held_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the tensors besides parameters that the module itself references.

    These are its buffers, and the tensors in its plain attributes, alone or in lists, tuples and
    dictionaries.
    """
    yield from module.named_buffers(recurse=False)
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield from ((name, leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
