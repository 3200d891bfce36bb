"""Where the blocks of a model are and which part of them is attention, by structure alone: no names of families.

The blocks are the longest list of modules of one class that is inside no other list; their
attention is the child with attention in its name and matrices in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from autotune.models.parts import Blocks


@dataclass(frozen=True, kw_only=True)
class BlockList:
    """A list of transformer blocks: `getattr(owner, name)` is `blocks`."""

    owner: nn.Module
    name: str
    blocks: Blocks

    @property
    def attention_name(self) -> str | None:
        """Attribute of every block that holds its attention part."""
        for name, child in self.blocks[0].named_children():
            words = f"{name} {type(child).__name__}".lower()
            matrices = sum(parameter.dim() == 2 for parameter in child.parameters())
            is_attention = (
                "attn" in words or "attention" in words
            ) and matrices > 1  # a norm may be named after it
            if is_attention and all(hasattr(block, name) for block in self.blocks):
                return name
        return None


def find_blocks(model: nn.Module) -> BlockList | None:
    """None where there is no list of alike modules."""
    return max(_block_lists(model), key=lambda candidate: len(candidate.blocks), default=None)


def _block_lists(module: nn.Module) -> Iterator[BlockList]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            if len({type(block) for block in child}) == 1:
                yield BlockList(owner=module, name=name, blocks=child)
        elif isinstance(child, nn.Sequential) and _is_of_blocks(child):
            yield BlockList(owner=module, name=name, blocks=child)
        else:
            yield from _block_lists(child)


def _is_of_blocks(modules: nn.Sequential) -> bool:
    """A feed-forward part is a sequence too, of modules without children."""
    return len({type(module) for module in modules}) == 1 and any(
        True for _ in modules[0].children()
    )
