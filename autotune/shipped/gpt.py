"""The layers of the built-in GPT, and its initial weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.shipped.token_loss import TokenLoss, full_token_loss

ROTARY_BASE = 10_000.0
INITIAL_DEVIATION = 0.02


def rotary_table(*, sequence_length: int, head_size: int) -> Tensor:
    """Returns cosine and sine of the angles of each position: float32 [2, sequence, head_size]."""
    exponents = -torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = torch.pow(ROTARY_BASE, exponents)
    positions = torch.arange(sequence_length, dtype=torch.float32)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_size/2) of x [batch, heads, sequence, head_size] by position."""
    cosine, sine = rotary.to(x.dtype).unbind()
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_size = width // heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # -1: tensor parallelism leaves a device only some of the heads.
        qkv = self.query_key_value(x).view(batch, length, 3, -1, self.head_size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            rotate(query, rotary), rotate(key, rotary), value, is_causal=True
        )
        output: Tensor = self.output(attended.transpose(1, 2).reshape(batch, length, -1))
        return output


def default_feed_forward_width(width: int) -> int:
    """Returns the inner size of the feed-forward: 8/3 of the width, up to a multiple of 32."""
    return -(-8 * width // (3 * 32)) * 32


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, *, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual connection."""

    def __init__(self, *, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width=width, heads=heads)
        self.feed_forward_norm = nn.RMSNorm(width, eps=1e-6)
        self.feed_forward = FeedForward(width=width, inner=inner)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        attended: Tensor = x + self.attention(self.attention_norm(x), rotary)
        output: Tensor = attended + self.feed_forward(self.feed_forward_norm(attended))
        return output


class GPT(nn.Module):
    """forward(tokens, labels), both [batch, sequence] -> sum of token losses, float32 scalar."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        inner: int,
        vocab_size: int,
        sequence_length: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(
            Block(width=width, heads=heads, inner=inner) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.token_loss: TokenLoss = full_token_loss
        table = rotary_table(sequence_length=sequence_length, head_size=width // heads)
        self.register_buffer("rotary", table, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.token_loss(self.norm(x), self.head, labels)


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Draw all matrices from N(0, 0.02) as in GPT-2.

    Those that write to the residual stream have a standard deviation of 0.02 / sqrt(2 * layers).
    """
    assert isinstance(model, GPT)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
    for block in model.blocks:
        assert isinstance(block, Block)
        for residual in (block.attention.output, block.feed_forward.down):
            nn.init.normal_(residual.weight, std=INITIAL_DEVIATION / (2 * len(model.blocks)) ** 0.5)
