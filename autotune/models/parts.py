"""The small protocol every model is used through: where its blocks and their attention are, and its loss."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

IGNORED_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """Where the parts of `model` are that techniques replace.

    `model(tokens, labels)` takes two integer tensors [batch, sequence] and returns the sum of the token losses as a
    float32 scalar, so that micro batches add up to the global batch exactly.
    """

    model: nn.Module
    blocks_owner: nn.Module
    """The module that holds the list of transformer blocks and calls them one after the other."""
    blocks_name: str
    attention_name: str
    """Attribute of a block that holds its attention part."""
    blocks_are_called_alike: bool = True
    """False when blocks take different arguments, such as masks, so that several cannot be run as one."""

    @property
    def blocks(self) -> nn.ModuleList:
        blocks = getattr(self.blocks_owner, self.blocks_name)
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def replace_blocks(self, blocks: list[nn.Module]) -> None:
        setattr(self.blocks_owner, self.blocks_name, nn.ModuleList(blocks))


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of cross entropies in float32: logits [batch, sequence, vocabulary], labels [batch, sequence]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)
