"""The model of the exercise "Train a Model That Doesn't Fit", of the sizes that its code has.

The lesson's comment says 350 M parameters. Its code builds 24 layers of 2,048 with a head that is
not tied to the embedding. Attention is `nn.MultiheadAttention` as it is by default, which returns
its weights: no fused kernel computes those, so every layer has scores of
[batch, heads, length, length].
"""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention over all tokens, then GELU between two matrices; a norm before each."""

    def __init__(self, *, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)
        )
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        attended, _weights = self.attention(normed, normed, normed)
        x = x + attended
        output: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return output


class Transformer(nn.Module):
    """forward(tokens) -> logits."""

    def __init__(
        self, *, layers: int, width: int, heads: int, vocab_size: int, sequence_length: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(sequence_length, width)
        self.blocks = nn.ModuleList(
            Block(width=width, heads=heads, inner=4 * width) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(layers: int, width: int, heads: int, vocab_size: int, sequence_length: int) -> nn.Module:
    return Transformer(
        layers=layers,
        width=width,
        heads=heads,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
    )
