"""Find the blocks of a model and their attention by structure, for any model family.

The blocks are a list of alike modules that can be called, outside of any other such list. Alike are
modules of one class, and of classes with a common base, as a hybrid model has for its layers with
and without attention. Of several lists they are the one with the most modules in it, of which some
are trained: a longer list of heads has fewer, and nothing of a frozen teacher is kept for backward.
Their attention is the child that has attention in its name and contains matrices.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

Blocks = nn.ModuleList | nn.Sequential


@dataclass(frozen=True, kw_only=True)
class BlockList:
    """The list of transformer blocks that the module `owner` has under `name`."""

    owner: nn.Module
    name: str

    @property
    def blocks(self) -> Blocks:
        """The blocks that are there now."""
        blocks = getattr(self.owner, self.name)
        assert isinstance(blocks, nn.ModuleList | nn.Sequential)
        return blocks

    @property
    def attention_name(self) -> str | None:
        """Name of the attribute of each block that is its attention; None if there is none."""
        for name, child in self.blocks[0].named_children():
            names = f"{name} {type(child).__name__}".lower()
            if "attn" not in names and "attention" not in names:
                continue
            matrices = sum(parameter.dim() == 2 for parameter in child.parameters())
            # A norm may also have attention in its name, but has no matrices.
            if matrices > 1 and all(hasattr(block, name) for block in self.blocks):
                return name
        return None


def find_blocks(model: nn.Module) -> BlockList | None:
    """Returns the list of alike modules that does most in training; None if there is no list."""
    return max(_block_lists(model), key=_part_in_training, default=None)


def find_stacks(model: nn.Module) -> list[BlockList]:
    """Returns the lists of alike modules that are trained and do much, in their order in the model.

    An encoder and a decoder, for example: each has at least half the modules of the largest list.
    """
    sizes = []
    for found in _block_lists(model):
        is_trained, size, _ = _part_in_training(found)
        if is_trained:
            sizes.append((size, found))
    largest = max((size for size, _ in sizes), default=0)
    return [found for size, found in sizes if 2 * size >= largest]


def _part_in_training(candidate: BlockList) -> tuple[bool, int, int]:
    blocks = candidate.blocks
    is_trained = any(parameter.requires_grad for parameter in blocks.parameters())
    return is_trained, sum(1 for _ in blocks.modules()), len(blocks)


def _block_lists(module: nn.Module) -> Iterator[BlockList]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList) and all(map(can_be_called, child)):
            if _are_alike(child):
                yield BlockList(owner=module, name=name)
        elif isinstance(child, nn.Sequential) and _is_of_blocks(child):
            yield BlockList(owner=module, name=name)
        else:
            yield from _block_lists(child)


def can_be_called(module: nn.Module | None) -> bool:
    """Returns whether it is a module with a forward pass, unlike a list of the parts of a block."""
    if module is None:  # the place of a norm that this model has not
        return False
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def read_by(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a module and those in it that only hold weights."""
    yield module
    for child in module.children():
        if not can_be_called(child):
            yield from read_by(child)


def _are_alike(modules: nn.ModuleList) -> bool:
    """Whether all modules have one class, or classes with a common base that is not torch's."""
    classes = {_own_class(module) for module in modules}
    if len(classes) <= 1:
        return bool(classes)
    shared = set.intersection(*(set(one.__mro__) for one in classes))
    return any(issubclass(base, nn.Module) and not _is_of_torch(base) for base in shared)


def _own_class(module: nn.Module) -> Any:
    """Returns the class of a block, or the one that it had before it was recomputed."""
    kind: Any = type(getattr(module, "_checkpoint_wrapped_module", module))
    while "_before" in vars(kind):
        kind = kind._before.kind
    return kind


def _is_of_torch(base: type) -> bool:
    return base.__module__.partition(".")[0] == "torch"


def _is_of_blocks(modules: nn.Sequential) -> bool:
    """Whether all modules have one class and children, unlike the layers of a feed-forward."""
    has_one_class = len({_own_class(module) for module in modules}) == 1
    return has_one_class and any(True for _ in modules[0].children())
