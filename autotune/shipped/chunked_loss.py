"""The loss chunk by chunk, without the logits of the whole batch."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune.shipped.token_loss import TokenLoss, full_token_loss

LEAST_CHUNKS = 8
LEAST_TOKENS = 64
"""Smallest chunk. Every chunk adds to the gradient of the whole head, which for few tokens takes
longer than their products."""


def _chunked(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Computes a `TokenLoss` without ever holding the logits of the whole batch."""
    hidden = hidden.flatten(0, 1)
    labels = labels.flatten()
    tokens = tokens_in_a_chunk(hidden.shape[0], width=hidden.shape[1], vocab_size=head.out_features)
    losses = [
        # The loss is not random, so the state of the random number generator need not be stored
        # for every chunk.
        checkpoint(
            full_token_loss,
            hidden_chunk[None],
            head,
            label_chunk[None],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for hidden_chunk, label_chunk in zip(
            hidden.split(tokens), labels.split(tokens), strict=True
        )
    ]
    total: Tensor = sum(losses[1:], start=losses[0])
    return total


chunked_token_loss: TokenLoss = torch.compiler.disable(_chunked)
"""Not compiled: unrolled into the graph of a whole model, 32 chunks took half a minute to compile.
"""


def tokens_in_a_chunk(tokens: int, *, width: int, vocab_size: int) -> int:
    """Returns the tokens of a chunk: at least 64, at most an eighth of `tokens`.

    In between, the logits of a chunk have about as many elements as all hidden states.
    """
    most = -(-tokens // LEAST_CHUNKS)
    return min(most, max(LEAST_TOKENS, -(-tokens * width // vocab_size)))
