"""A typical user's model: blocks in a list, logits and loss in a tuple, a tied head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width=width, heads=heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class CausalSelfAttention(nn.Module):
    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Model(nn.Module):
    def __init__(
        self, *, layers: int, width: int, heads: int, vocab_size: int, sequence_length: int
    ) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocab_size, width),
            nn.Embedding(sequence_length, width),
        )
        self.blocks = nn.ModuleList(Block(width=width, heads=heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def build(layers: int, width: int, heads: int, vocab_size: int, sequence_length: int) -> nn.Module:
    return Model(
        layers=layers,
        width=width,
        heads=heads,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
    )
