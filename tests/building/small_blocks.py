"""A model whose blocks are compiled into two kernels; one of the default model has over twenty."""

import dataclasses
from pathlib import Path

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.spec.workload import Workload

SOURCE = """
import torch

class Block(torch.nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))

class Model(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 16)
        self.layers = torch.nn.ModuleList(Block(16, 16) for _ in range(2))
        self.head = torch.nn.Linear(16, vocab_size)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""


def with_small_blocks(workload: Workload, folder: Path) -> Workload:
    """Returns `workload` with this model, its text and weights prepared in `folder`/prepared."""
    file = folder / "small_blocks.py"
    file.write_text(SOURCE)
    small = dataclasses.replace(workload, model=f"{file}:Model")
    prepare(Prepare(workload=small, folder=folder / "prepared"))
    return small
