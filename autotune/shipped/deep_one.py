"""The layers of the built-in Deep One, and its initial weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.shipped.token_loss import TokenLoss, full_token_loss

RESIDUAL_FACTOR = 2.828
"""(2 * layers) ** (1/4) of DeepNet's decoder, for the 32 layers of the full size; used at every
size."""
INITIAL_GAIN = 0.25
"""(8 * layers) ** (-1/4) of DeepNet's decoder, for the same 32 layers; for value, output and
feed-forward matrices."""
PADDING_TOKEN = 1
"""Token whose embedding starts at zero, as in the tokenizer of the table. Byte-level text does not
use this byte."""


def default_feed_forward_width(width: int) -> int:
    """Returns the inner size of the feed-forward: width * 5400 / 2048, to a multiple of 8."""
    return max(8, round(width * 5400 / 2048 / 8) * 8)


def initial_slopes(heads: int) -> Tensor:
    """Returns float32 [heads]: geometric from 1/2 to 1/256, the second half of the heads zero."""
    slopes = 1.0 / torch.logspace(1, 8, heads, base=2)
    slopes[heads // 2 :] = 0.0
    return slopes


def relative_positions(sequence_length: int, *, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns offsets of keys to queries and the causal mask, both float32 [sequence, sequence].

    For query i and key j the offset is j - i; the mask is 0 for j <= i and -inf for j > i.
    """
    positions = torch.arange(sequence_length, device=device, dtype=torch.float32)
    offsets = positions[None, :] - positions[:, None]
    return offsets, torch.zeros_like(offsets).masked_fill(offsets > 0, float("-inf"))


class Attention(nn.Module):
    """Attention with a bias [heads, sequence, sequence] on its scores, made in each layer."""

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_size = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.slopes = nn.Parameter(initial_slopes(heads))

    def forward(self, x: Tensor, offsets: Tensor, causal: Tensor) -> Tensor:
        query, key, value = (self._split(part(x)) for part in (self.query, self.key, self.value))
        bias = torch.addcmul(causal, self.slopes.float()[:, None, None], offsets).to(query.dtype)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output

    def _split(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] to [batch, heads, sequence, head size]."""
        batch, length, _ = x.shape
        # -1: tensor parallelism leaves a device only some of the heads.
        return x.view(batch, length, -1, self.head_size).transpose(1, 2)


class FeedForward(nn.Module):
    """down(up(x) * relu(gate(x)))."""

    def __init__(self, *, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.up(x) * F.relu(self.gate(x)))
        return output


class Block(nn.Module):
    """Attention and feed-forward, each with its residual connection and norm."""

    def __init__(self, *, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(width=width, heads=heads)
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.feed_forward = FeedForward(width=width, inner=inner)
        self.feed_forward_norm = nn.RMSNorm(width, eps=1e-6)

    def forward(self, x: Tensor, offsets: Tensor, causal: Tensor) -> Tensor:
        attended = self.attention_norm(x * RESIDUAL_FACTOR + self.attention(x, offsets, causal))
        output: Tensor = self.feed_forward_norm(
            attended * RESIDUAL_FACTOR + self.feed_forward(attended)
        )
        return output


class DeepOne(nn.Module):
    """forward(tokens, labels), both [batch, sequence] -> sum of token losses, float32 scalar."""

    def __init__(self, *, layers: int, width: int, heads: int, inner: int, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(
            Block(width=width, heads=heads, inner=inner) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.token_loss: TokenLoss = full_token_loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        offsets, causal = relative_positions(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, offsets, causal)
        return self.token_loss(self.norm(x), self.head, labels)


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Draw initial weights as DeepNet does.

    Embeddings are N(0, 1/sqrt(width)) with a zero row for padding; matrices are Xavier-uniform,
    those of value, output and feed-forward with gain INITIAL_GAIN.
    """
    assert isinstance(model, DeepOne)
    nn.init.normal_(model.embedding.weight, std=model.embedding.embedding_dim**-0.5)
    model.embedding.weight[PADDING_TOKEN] = 0.0
    nn.init.xavier_uniform_(model.head.weight)
    for block in model.blocks:
        assert isinstance(block, Block)
        attention, feed_forward = block.attention, block.feed_forward
        for matrix in (attention.query, attention.key):
            nn.init.xavier_uniform_(matrix.weight)
        for matrix in (
            attention.value,
            attention.output,
            feed_forward.gate,
            feed_forward.up,
            feed_forward.down,
        ):
            nn.init.xavier_uniform_(matrix.weight, gain=INITIAL_GAIN)
        attention.slopes.copy_(initial_slopes(attention.heads))
