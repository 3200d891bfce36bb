"""The protocol of all models: the parts that techniques replace, and the loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

IGNORED_LABEL = -100

Blocks = nn.ModuleList | nn.Sequential

TokenLoss = Callable[[Tensor, nn.Linear, Tensor], Tensor]
"""Function of hidden states [batch, sequence, width], head and labels [batch, sequence] that
returns the sum of the token losses as a float32 scalar."""


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """The parts of `model` that techniques replace.

    `model(tokens, labels)` takes two integer tensors [batch, sequence] and returns the sum of the
    token losses as a float32 scalar, so that micro batches add up to the global batch exactly. A
    part that was not found is None; the techniques that need it are then unavailable
    (`missing_parts` in `autotune/techniques/__init__.py`).
    """

    model: nn.Module
    blocks_owner: nn.Module | None = None
    """The module that has the list of transformer blocks and calls them one after the other."""
    blocks_name: str = ""
    attention_name: str | None = None
    """Name of the attribute of a block that is its attention."""
    blocks_are_called_alike: bool | None = True
    """False if blocks take different arguments, such as masks, so that several cannot be run as
    one. None if it is not known, as in a user's script."""
    head: nn.Linear | None = None
    """The layer from the last hidden states to logits. `techniques/requirements.py` checks that
    nothing else changes the logits."""

    @property
    def blocks(self) -> Blocks:
        """The list of transformer blocks."""
        assert self.blocks_owner is not None, (
            "a technique that needs blocks was applied to a model without blocks"
        )
        blocks = getattr(self.blocks_owner, self.blocks_name)
        assert isinstance(blocks, nn.ModuleList | nn.Sequential)
        return blocks

    def replace_blocks(self, blocks: list[nn.Module]) -> None:
        """Replace the list of blocks by a list of the same type with `blocks`."""
        assert self.blocks_owner is not None
        replacement: Blocks
        if isinstance(self.blocks, nn.Sequential):
            replacement = nn.Sequential(*blocks)
        else:
            replacement = nn.ModuleList(blocks)
        setattr(self.blocks_owner, self.blocks_name, replacement)

    def parameters_by_block(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters by `block 0`, `block 1`, ... and `rest` for those in no block."""
        blocks = [] if self.blocks_owner is None else list(self.blocks)
        found = {f"block {index}": list(block.parameters()) for index, block in enumerate(blocks)}
        inside = {parameter for block in found.values() for parameter in block}
        found["rest"] = [
            parameter for parameter in self.model.parameters() if parameter not in inside
        ]
        return found

    def set_token_loss(self, token_loss: TokenLoss) -> None:
        """Make the model compute its loss from last hidden states and head by `token_loss`."""
        assert self.head is not None, (
            "a technique that needs the head was applied to a model without a head"
        )
        self.model.token_loss = token_loss  # type: ignore[assignment]


def tensors_behind(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with memory of their own that make up a tensor.

    They are codes and scales where it is quantized: the inner tensors of a subclass, or those of
    the `quant_state` that bitsandbytes has beside its codes. Otherwise it is the tensor itself.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # not the mesh of a DTensor
                yield from tensors_behind(inner)
        return
    yield tensor
    state = getattr(tensor, "quant_state", None)
    while state is not None:
        yield from (value for value in vars(state).values() if isinstance(value, Tensor))
        state = state.state2


def held_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the tensors besides parameters that the module itself references.

    These are its buffers, and the tensors in its plain attributes, alone or in lists, tuples and
    dictionaries.
    """
    yield from module.named_buffers(recurse=False)
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield from ((name, leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of cross entropies in float32 of [batch, sequence, vocabulary] logits."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL
    )


def full_token_loss(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """A `TokenLoss` that computes the logits of the whole batch at once."""
    return next_token_loss(head(hidden), labels)
