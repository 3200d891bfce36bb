"""The table's model with dropout 0.1 after each feed-forward part, to test memory budgets with it.

autotune search --space peak_memory --scale tiny --no-confirm \
    --model studies/peak_memory/with_dropout.py:make
"""

from torch import Tensor, nn

from autotune.shipped.deep_one import DeepOne, default_feed_forward_width, relative_positions

DROPOUT = 0.1


class WithDropout(DeepOne):
    """forward(tokens [batch, sequence]) -> logits [batch, sequence, vocabulary]."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        offsets, causal = relative_positions(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, offsets, causal)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make(*, layers: int, width: int, heads: int, vocab_size: int) -> nn.Module:
    model = WithDropout(
        layers=layers,
        width=width,
        heads=heads,
        inner=default_feed_forward_width(width),
        vocab_size=vocab_size,
    )
    for block in model.blocks:
        block.feed_forward = nn.Sequential(block.feed_forward, nn.Dropout(DROPOUT))
    return model
