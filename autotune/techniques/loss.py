"""Loss: cross entropy over the logits of the whole micro batch, or chunk by chunk.

| value | saves | costs |
|---|---|---|
| full | nothing: logits, their float32 copy and both their gradients exist at once | |
| chunked | all of those but a chunk's | the head's product once more; its gradient is a sum over chunks |

Each chunk of tokens is a checkpoint of its own: forward keeps its hidden states, backward makes its
logits again. In 16 bit the sum over chunks rounds a little differently. It is never compiled, also
where the model is. Needs a linear head whose logits nothing else changes.

torch 2.13 has `linear_cross_entropy` with chunks of its own. It is not used: an operator that no
autocast reaches, so that its products run in float32 under mixed precision; with bf16 weights it
needs three times the memory of this (and its loss is 0.6 % off where this one is within 0.03 %);
torch.compile does not look into it; and on fake tensors its chunks are invisible. Only in plain
fp32 it needs a quarter less. Measured at 2,048 tokens, width 256, vocabulary 16,000, in MiB of
peak: full 375, its 35, this 47 in fp32; 384, 35, 29 under autocast; 375, 76, 24 in bf16. Source:
https://docs.pytorch.org/docs/stable/checkpoint.html, arXiv:2410.10989
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune.models.parts import ModelParts, TokenLoss, full_token_loss
from autotune.spec.config import Loss

LEAST_CHUNKS = 8
LEAST_TOKENS = 64
"""Every chunk adds to the gradient of the whole head: with few tokens in each that takes longer
than their products."""


def _chunked(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """A `TokenLoss` for which the logits of the whole batch never exist at once."""
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    tokens = tokens_in_a_chunk(hidden.shape[0], width=hidden.shape[1], vocab_size=head.out_features)
    losses = [
        # No randomness in it: without preserve_rng_state no generator's state is kept for every
        # chunk.
        checkpoint(
            full_token_loss,
            piece[None],
            head,
            wanted[None],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for piece, wanted in zip(hidden.split(tokens), labels.split(tokens), strict=True)
    ]
    total: Tensor = sum(losses[1:], start=losses[0])
    return total


chunked_token_loss: TokenLoss = torch.compiler.disable(_chunked)
"""Not compiled: unrolled into the graph of a whole model, 32 chunks took half a minute to compile.
"""


def set_loss(parts: ModelParts, loss: Loss) -> None:
    if loss == "chunked":
        parts.set_token_loss(chunked_token_loss)


def tokens_in_a_chunk(tokens: int, *, width: int, vocab_size: int) -> int:
    """So many that a chunk's logits hold about as many numbers as all hidden states; at least 64, at most an eighth."""
    most = -(-tokens // LEAST_CHUNKS)
    return min(most, max(LEAST_TOKENS, -(-tokens * width // vocab_size)))
