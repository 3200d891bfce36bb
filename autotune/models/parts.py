"""The protocol of all models: the parts that techniques replace, and the loss."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from autotune.shipped.blocks import BlockList, Blocks
from autotune.shipped.token_loss import TokenLoss

Buffers = Mapping[str, tuple[nn.Module, str]]
"""The module that has each buffer or other tensor, and its name there, by its name in the model."""


OWN_LOSS = "the model computes another loss than the cross entropy of its logits"
ONLY_LOSS = "the model gives only its loss, no logits"


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """The parts of `model` that techniques replace.

    `model(tokens, labels)` takes two integer tensors [batch, sequence] and returns the sum of the
    token losses as a float32 scalar, so that micro batches add up to the global batch exactly. In
    evaluation they are cross entropies, in training what the model defines (`own_loss`). A
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
    own_loss: str = ""
    """Why the loss cannot be computed from last hidden states and head; empty if it can."""
    evaluates_cross_entropy: bool = True
    """Whether the loss in evaluation is known to be the cross entropy, whose exponential is the
    perplexity."""
    head: nn.Linear | None = None
    """The layer from the last hidden states to logits. `techniques/requirements.py` checks that
    nothing else changes the logits."""

    @property
    def blocks(self) -> Blocks:
        """The list of transformer blocks."""
        assert self.blocks_owner is not None, (
            "a technique that needs blocks was applied to a model without blocks"
        )
        return BlockList(owner=self.blocks_owner, name=self.blocks_name).blocks

    def parameters_by_block(self) -> dict[str, list[nn.Parameter]]:
        """Returns the parameters by `block 0`, `block 1`, ... and `rest` for those in no block."""
        blocks = [] if self.blocks_owner is None else list(self.blocks)
        found = {f"block {index}": list(block.parameters()) for index, block in enumerate(blocks)}
        inside = {parameter for block in found.values() for parameter in block}
        found["rest"] = [
            parameter for parameter in self.model.parameters() if parameter not in inside
        ]
        return found

    def buffers(self) -> Buffers:
        """Returns where the buffers of the model are, and the tensors in plain attributes.

        Techniques may later give the modules other names, and forward may replace a tensor.
        """
        found: dict[str, tuple[nn.Module, str]] = {}
        for path, module in self.model.named_modules():
            for name, value in {**vars(module), **module._buffers}.items():
                if isinstance(value, Tensor):
                    found[f"{path}.{name}" if path else name] = (module, name)
        return found

    def set_token_loss(self, token_loss: TokenLoss) -> None:
        """Make the model compute its loss from last hidden states and head by `token_loss`."""
        assert self.head is not None, (
            "a technique that needs the head was applied to a model without a head"
        )
        self.model.token_loss = token_loss  # type: ignore[assignment]
