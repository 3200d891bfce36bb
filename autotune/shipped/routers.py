"""Finds the routers of mixtures: the linear layers whose outputs choose experts.

They stay out of products in 8 bits: they are narrow, so that these save nothing, and an error there
sends tokens to other experts. torchtitan leaves `router.gate` out of its fp8 as well.
"""

from collections.abc import Iterator

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def routers_in(part: nn.Module) -> set[nn.Module]:
    """Returns the linear layers with an output for each of the experts that are beside them.

    Experts are what the same module has in a list, or weights of three dimensions; a router may be
    in a module of its own.
    """
    found: set[nn.Module] = set()
    experts: list[nn.Module] = []
    for child in part.children():
        in_child = routers_in(child)
        found |= in_child
        if not in_child and _experts_of(child):
            experts.append(child)
    counts = _stacks_of(part).union(*map(_experts_of, experts))
    inside = {module for child in experts for module in child.modules()}
    beside = (layer for layer in part.modules() if isinstance(layer, nn.Linear))
    return found.union(
        layer for layer in beside if layer.out_features in counts and layer not in inside
    )


def _experts_of(child: nn.Module) -> set[int]:
    """Returns how many experts a child of a mixture may have; nothing where it has none."""
    own = {len(child)} if isinstance(child, _LISTS) else set()
    return {count for count in own | _stacks_of(child) if count > 1}


def _stacks_of(module: nn.Module) -> set[int]:
    weights: Iterator[nn.Parameter] = module.parameters(recurse=False)
    return {len(weight) for weight in weights if weight.dim() == 3}
