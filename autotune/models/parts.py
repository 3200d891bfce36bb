"""The small protocol every model is used through: where its parts are that techniques replace, and its loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

IGNORED_LABEL = -100

Blocks = nn.ModuleList | nn.Sequential

TokenLoss = Callable[[Tensor, nn.Linear, Tensor], Tensor]
"""(hidden states [batch, sequence, width], head, labels [batch, sequence]) -> sum of token losses,
float32 scalar."""


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """Where the parts of `model` are that techniques replace.

    `model(tokens, labels)` takes two integer tensors [batch, sequence] and returns the sum of the
    token losses as a float32 scalar, so that micro batches add up to the global batch exactly. A
    part that was not found is None; the techniques that need it are left out (`missing_parts` in
    `autotune/techniques/__init__.py`).
    """

    model: nn.Module
    blocks_owner: nn.Module | None = None
    """The module that holds the list of transformer blocks and calls them one after the other."""
    blocks_name: str = ""
    attention_name: str | None = None
    """Attribute of a block that holds its attention part."""
    blocks_are_called_alike: bool = True
    """False when blocks take different arguments, such as masks, so that several cannot be run as
    one."""
    head: nn.Linear | None = None
    """What makes logits of the last hidden states. That nothing else does, `requirements.py` finds
    out."""

    @property
    def blocks(self) -> Blocks:
        assert self.blocks_owner is not None, (
            "a technique that needs blocks was applied to a model without"
        )
        blocks = getattr(self.blocks_owner, self.blocks_name)
        assert isinstance(blocks, nn.ModuleList | nn.Sequential)
        return blocks

    def replace_blocks(self, blocks: list[nn.Module]) -> None:
        assert self.blocks_owner is not None
        replaced = (
            nn.Sequential(*blocks)
            if isinstance(self.blocks, nn.Sequential)
            else nn.ModuleList(blocks)
        )
        setattr(self.blocks_owner, self.blocks_name, replaced)

    def parameters_by_block(self) -> dict[str, list[nn.Parameter]]:
        """`block 0`, `block 1`, ... and `rest`: what is in no block."""
        blocks = [] if self.blocks_owner is None else list(self.blocks)
        found = {f"block {index}": list(block.parameters()) for index, block in enumerate(blocks)}
        inside = {parameter for block in found.values() for parameter in block}
        return {
            **found,
            "rest": [parameter for parameter in self.model.parameters() if parameter not in inside],
        }

    def set_token_loss(self, token_loss: TokenLoss) -> None:
        """Makes the model compute its loss from the last hidden states and the head by `token_loss`."""
        assert self.head is not None, (
            "a technique that needs the head was applied to a model without"
        )
        self.model.token_loss = token_loss  # type: ignore[assignment]


def held_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of what the module itself keeps from step to step besides parameters.

    These are its buffers and the tensors that it has as plain attributes, alone or in lists, tuples
    and dictionaries.
    """
    yield from module.named_buffers(recurse=False)
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield from ((name, leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of cross entropies in float32: logits [batch, sequence, vocabulary], labels [batch, sequence]."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL
    )


def full_token_loss(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """A `TokenLoss` with the logits of the whole batch at once."""
    return next_token_loss(head(hidden), labels)
