"""Loss: cross entropy over the logits of the whole micro batch, or chunk by chunk.

| value | saves | costs |
|---|---|---|
| full | nothing: logits, their float32 copy and both their gradients exist at once | |
| chunked | all of those but one chunk's | recomputes the head; its gradient is a sum over chunks |

Each chunk of tokens is a separate checkpoint: forward stores its hidden states, backward computes
its logits again. In 16 bit the sum over chunks rounds slightly differently. It is never compiled,
even if the model is. Needs a linear head whose logits nothing else changes.

torch 2.13 has `linear_cross_entropy`, which uses chunks, too. It is not used here: autocast does
not apply to that operator, so that its products run in float32 under mixed precision; with bf16
weights it needs three times the memory (and its loss is off by 0.6 %, this one by at most 0.03 %);
torch.compile does not trace into it; and on fake tensors its chunks are invisible. Only in plain
fp32 it needs a quarter less memory. Peaks measured at 2,048 tokens, width 256 and vocabulary
16,000, in MiB (full, torch's, this): 375, 35, 47 in fp32; 384, 35, 29 under autocast; 375, 76, 24
in bf16. Source:
https://docs.pytorch.org/docs/stable/checkpoint.html, arXiv:2410.10989
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune.models.parts import ModelParts, TokenLoss, full_token_loss
from autotune.spec.config import Loss

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


def set_loss(parts: ModelParts, loss: Loss) -> None:
    """Makes the model compute the loss in chunks, for loss `chunked`."""
    if loss == "chunked":
        parts.set_token_loss(chunked_token_loss)


def tokens_in_a_chunk(tokens: int, *, width: int, vocab_size: int) -> int:
    """Returns the tokens of a chunk: at least 64, at most an eighth of `tokens`.

    In between, the logits of a chunk have about as many elements as all hidden states.
    """
    most = -(-tokens // LEAST_CHUNKS)
    return min(most, max(LEAST_TOKENS, -(-tokens * width // vocab_size)))
