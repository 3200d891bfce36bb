"""A model that draws from any generator repeats its training from the same weights."""

import textwrap

import pytest
import torch

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.spec.config import TrainingConfig
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from autotune.training.trainer import Trainer

SOURCE = """
    import random
    import numpy
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self, draw, vocab_size):
            super().__init__()
            self.draw = draw
            self.embedding = nn.Embedding(vocab_size, 8)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.head = nn.Linear(8, vocab_size)
            with torch.no_grad():
                self.head.weight += draw()

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:  # also in evaluation
                if self.draw() < 0.5:
                    x = x + torch.tanh(layer(x))
            return self.head(x)

    def python(vocab_size):
        return Model(random.random, vocab_size)

    def numpy_generator(vocab_size):
        return Model(numpy.random.rand, vocab_size)

    def torch_generator(vocab_size):
        return Model(lambda: torch.rand((), device="cpu").item(), vocab_size)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    (folder / "model.py").write_text(textwrap.dedent(SOURCE))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("generator", ["python", "numpy_generator", "torch_generator"])
def test_weights_training_and_evaluation_repeat(folder, generator):
    sizes = {"sequence_length": 8, "global_batch": 2, "steps": 8, "warmup_steps": 3}
    workload = make_workload(
        "cpu",
        {"model": f"{folder}/model.py:{generator}", "evaluation_sequences": 8, **sizes},
    )
    results, weights = [], []
    for name in ("first", "second"):
        prepared = folder / f"{generator}-{name}"
        prepare(Prepare(workload=workload, folder=prepared))
        weights.append(torch.load(prepared / "weights.pt")["network.head.weight"])
        request = TrainingRequest(
            workload=workload,
            config=TrainingConfig(micro_batch_size=1),
            folder=prepared,
            device="cpu",
            cap_bytes=2**40,
            requested_at=0.0,
        )
        measurement = Trainer(request).run()
        results.append((measurement.final_loss, measurement.perplexity))
    assert torch.equal(*weights)
    assert results[0] == results[1]
