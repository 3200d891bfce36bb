"""Causal language models of Hugging Face transformers, from a config.json.

`transformers_network.py` builds the network. The parts of a model are found by structure
(`structure.py`). transformers is an optional dependency and is imported only when a model is built:
https://huggingface.co/docs/transformers
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autotune.errors import InvalidInput
from autotune.models.parts import ModelParts, TokenLoss, next_token_loss
from autotune.models.structure import find_blocks
from autotune.spec.workload import Workload

_PROBED_TOKENS = 4
_NOISE = 1e-4
"""Largest difference that counts as rounding, relative to the standard deviation of the logits. It
occurs with mixtures of experts, whose matrix products depend on the other tokens."""


class HuggingFaceModel(nn.Module):
    """forward(tokens, labels), both [batch, sequence] -> sum of token losses, float32 scalar."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network
        self.token_loss: TokenLoss | None = None
        """If set, computes the loss from the last hidden states and the head; otherwise the loss is
        computed from the logits."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if self.token_loss is None:
            return next_token_loss(self.logits(tokens), labels)
        return self.token_loss(self.hidden(tokens), self.network.get_output_embeddings(), labels)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits, [batch, sequence, vocabulary]."""
        logits: Tensor = self._run(self.network, tokens).logits
        return logits

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states, [batch, sequence, width]."""
        hidden: Tensor = self._run(self.network.base_model, tokens)[0]
        return hidden

    def _run(self, network: Any, tokens: Tensor) -> Any:
        # A mask of ones says that nothing is padding; without it transformers would look for
        # several sequences packed into one.
        return network(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)


def build(workload: Workload, *, weights_folder: Path | None = None) -> HuggingFaceModel:
    """Return the model in float32, with random weights or those from `weights_folder`.

    Raises InvalidInput if transformers is not installed or cannot build the model.
    """
    try:
        # An extra, and seconds to import, which only the trials of these models take.
        from autotune.models import transformers_network  # noqa: PLC0415
    except ImportError as error:
        raise InvalidInput(
            f"model {workload.model} needs the transformers library: {error}",
            hint='pip install "autotune[huggingface]"',
        ) from None
    return HuggingFaceModel(transformers_network.build(workload, weights_folder=weights_folder))


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Raise InvalidInput if a token sees a later one; the weights were drawn during `build`."""
    assert isinstance(model, HuggingFaceModel)
    model.eval()
    tokens = torch.zeros(1, _PROBED_TOKENS, dtype=torch.int64)
    changed = tokens.clone()
    changed[:, _PROBED_TOKENS // 2 :] = 1
    try:
        before = model.logits(tokens)[:, : _PROBED_TOKENS // 2]
        after = model.logits(changed)[:, : _PROBED_TOKENS // 2]
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        lines = str(error).splitlines()
        raise InvalidInput(
            f"the model fails in its first forward pass: {lines[0] if lines else ''}",
            hint="look for sizes in its config.json that do not fit together",
        ) from error
    model.train()
    if (before - after).abs().max() > _NOISE * before.std():
        raise InvalidInput(
            "the model lets a token see later ones: it is an encoder, not a causal language model",
            hint="use the config.json of a decoder; some become one by is_decoder = true",
        )


def find_parts(model: nn.Module) -> ModelParts:
    """Find the parts by structure; a part that is not found is None."""
    assert isinstance(model, HuggingFaceModel)
    found = find_blocks(model)
    head = None
    if hasattr(model.network, "get_output_embeddings"):
        embeddings = model.network.get_output_embeddings()
        head = embeddings if isinstance(embeddings, nn.Linear) else None
    if found is None:
        return ModelParts(model=model, head=head)
    kinds = set(getattr(model.network.config, "layer_types", None) or ())
    classes = {type(block) for block in found.blocks}
    return ModelParts(
        model=model,
        blocks_owner=found.owner,
        blocks_name=found.name,
        attention_name=found.attention_name,
        blocks_are_called_alike=len(kinds) <= 1 and len(classes) == 1,
        head=head,
    )
