"""A typical training loop: a small GPT that learns to predict the characters of this file.

It also runs without a search (`python train.py`). A search needs only the three lines marked with
`autotune`.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import autotune

SEQUENCES, LENGTH, WIDTH, LAYERS = 16, 64, 128, 4
STEPS, EVALUATE_EVERY = 200, 10
TEXT = torch.tensor(list(Path(__file__).read_bytes()))
TRAINING, HELD_OUT = TEXT[:-500], TEXT[-500:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=4, batch_first=True)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        attended, _ = self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)
        x = x + attended
        return x + self.feed_forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.characters(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(x)


def batch_of(text: torch.Tensor, device: str) -> torch.Tensor:
    starts = torch.randint(len(text) - LENGTH - 1, (SEQUENCES,))
    return torch.stack([text[start : start + LENGTH + 1] for start in starts]).to(device)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = autotune.apply(model, optimizer)  # autotune
    micro_batch = autotune.current_config(global_batch=SEQUENCES).micro_batch_size  # autotune
    for step in range(1, STEPS + 1):
        total = 0.0
        for part in batch_of(TRAINING, device).split(micro_batch):
            loss = loss_of(model, part) * len(part) / SEQUENCES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        evaluated = None
        if step % EVALUATE_EVERY == 0:
            with torch.no_grad():
                evaluated = loss_of(model, batch_of(HELD_OUT, device)).item()
            perplexity = math.exp(evaluated)
            print(f"step {step}: loss {total:.3f}, perplexity on held-out text {perplexity:.1f}")
        autotune.report(
            tokens=SEQUENCES * LENGTH, loss=total, evaluation_loss=evaluated
        )  # autotune


if __name__ == "__main__":
    main()
