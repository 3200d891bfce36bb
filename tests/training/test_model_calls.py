"""What would change nothing, because of what a script calls of its model, is excluded."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autotune.shipped.blocks import find_blocks
from autotune.spec.config import CHOICES
from autotune.spec.workload import make_workload
from autotune.training.script.run import ScriptEnd
from autotune.training.script.trainer import _Examination
from autotune.training.speed import NothingCompiled, TimedStep, measured_speed

TOKENS = torch.arange(32).view(4, 8) % 16
SEARCHED = {name: list(CHOICES[name]) for name in ("precision", "checkpointing", "compile")}
SEARCHED["activation_offload"] = list(CHOICES["activation_offload"])
OF_NO_SCRIPT = set(CHOICES["precision"]) - {"fp32", "tf32", "bf16-mixed", "bf16-true"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = self.make_blocks()

    def make_blocks(self):
        return nn.ModuleList(Block() for _ in range(3))

    def through_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens):
        return self.head(self.through_blocks(self.embedding(tokens)))

    def loss(self, tokens):
        return mean_loss(self.head(self.through_blocks(self.embedding(tokens))), tokens)


class ListsOfLists(Network):
    """As in x-transformers: a layer is a list of attention and feed-forward, without a forward."""

    def make_blocks(self):
        return nn.ModuleList(nn.ModuleList([Block(), nn.Linear(8, 8)]) for _ in range(3))

    def through_blocks(self, x):
        for mix, feed in self.blocks:
            x = feed(mix(x))
        return x


class PartsOfBlocks(Network):
    """Calls what is in its blocks, and no block."""

    def through_blocks(self, x):
        for block in self.blocks:
            x = x + block.down(block.up(x).relu())
        return x


class ListsOfBlocks(Network):
    """As in a U-Net: each stage is a list of blocks."""

    def make_blocks(self):
        return nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    def through_blocks(self, x):
        for stage in self.blocks:
            for block in stage:
                x = block(x)
        return x


def mean_loss(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def call(network):
    return mean_loss(network(TOKENS), TOKENS)


def call_forward(network):
    return mean_loss(network.forward(TOKENS), TOKENS)


def call_method(network):
    return network.loss(TOKENS)


def evaluate_first(network):
    with torch.no_grad():
        network(TOKENS)
    return network.loss(TOKENS)


def excluded(network, loss_of):
    """Returns {technique: values} that are excluded for a script with this model and loop."""
    optimizer = torch.optim.SGD(network.parameters())
    examination = _Examination(make_workload("cpu", {"global_batch": 4}), SEARCHED)
    try:
        model, optimizer = examination.apply(network, optimizer)
        loss_of(model).backward()
        optimizer.step()
    except ScriptEnd:
        pass
    found = examination.result().unavailable
    return {technique: set(values) - OF_NO_SCRIPT for technique, values in found.items()}


AUTOCAST = {"precision": {"bf16-mixed", "bf16-true"}}
AROUND_CALLS = {"compile": {"model"}, "activation_offload": {"cpu"}}
OF_BLOCKS = {
    "compile": {"block"},
    "checkpointing": set(CHOICES["checkpointing"]) - {"none"},
}
ALWAYS = {"precision": set(), "checkpointing": {"attention", "sqrt"}}
"""Without attention, and without knowing how blocks are called."""
FORMS = {
    "the model is called": (Network, call, {}),
    "its forward is called": (Network, call_forward, AROUND_CALLS),
    "a method is called": (Network, call_method, AUTOCAST | AROUND_CALLS),
    "a method is called after an evaluation": (Network, evaluate_first, AUTOCAST | AROUND_CALLS),
    "blocks are lists": (ListsOfLists, call, OF_BLOCKS),
    "parts of blocks are called": (PartsOfBlocks, call, OF_BLOCKS),
    "lists of blocks": (ListsOfBlocks, call, {}),
}


@pytest.mark.parametrize(("kind", "loss_of", "expected"), FORMS.values(), ids=FORMS)
def test_what_would_change_nothing_is_excluded_and_nothing_else(kind, loss_of, expected):
    assert excluded(kind(), loss_of) == {**ALWAYS, **expected}


def test_blocks_are_modules_that_can_be_called():
    assert find_blocks(ListsOfLists()) is None
    found = find_blocks(ListsOfBlocks())
    assert [type(block) for block in found.blocks] == [Block, Block]


def test_a_compiled_trial_in_which_nothing_was_compiled_has_no_speed():
    torch._dynamo.utils.counters.clear()
    steps = [TimedStep(seconds=1.0, tokens=8, loss=1.0) for _ in range(3)]
    with pytest.raises(NothingCompiled, match="no graph"):
        measured_speed(steps, steps, compiled=True)
    assert measured_speed(steps, steps, compiled=False)["tokens_per_second"] == 8.0
