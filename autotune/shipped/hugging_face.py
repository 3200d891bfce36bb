"""A causal language model of transformers, called with tokens and labels."""

from typing import Any

import torch
from torch import Tensor, nn

from autotune.shipped.token_loss import TokenLoss, next_token_loss


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
