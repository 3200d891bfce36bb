"""Which feed-forward parts may have tiles: what they compute is tried, whatever their size."""

import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autotune.errors import IllegalConfiguration, PredictionImpossible
from autotune.models.parts import ModelParts
from autotune.predictor.predict import predict
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from autotune.techniques.feed_forward import why_nothing_is_saved
from autotune.techniques.user_training import apply_to_user_model
from autotune.training.trainer import Trainer

OTHER_NUMBERS = "computes a token from others"
EACH_CALL = "keeps or changes values in each call"


class Part(nn.Module):
    """A feed-forward part that may have tiles."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.prepare()

    def prepare(self):
        pass

    def forward(self, hidden):
        return self.down(nn.functional.silu(self.up(hidden)))


# -- parts that are wrong in tiles -----------------------------------------------------------------


class Convolves(Part):
    def prepare(self):
        self.mix = nn.Conv1d(self.width, self.width, 4, padding=3, groups=self.width)

    def forward(self, hidden):
        mixed = self.mix(hidden.transpose(1, 2))[..., : hidden.shape[1]].transpose(1, 2)
        return super().forward(mixed)


class ShiftsTokens(Part):
    def forward(self, hidden):
        return super().forward(hidden) + 0.01 * nn.functional.pad(hidden, (0, 0, 1, -1))


class MixesTokensInPlaces(Part):
    """Mixes tokens within windows of four."""

    def forward(self, hidden):
        windows = hidden.reshape(-1, 4, self.width)
        return super().forward((windows + windows.mean(1, keepdim=True)).view(hidden.shape))


class HasCapacity(Part):
    """Drops the tokens of an expert over its share, but never fewer than eight."""

    experts = 4

    def prepare(self):
        self.router = nn.Linear(self.width, self.experts, bias=False)

    def forward(self, hidden):
        rows = hidden.reshape(-1, self.width)
        shares, chosen = self.router(rows).softmax(-1).max(-1)
        capacity = max(8, 2 * len(rows) // self.experts)
        order = nn.functional.one_hot(chosen, self.experts).cumsum(0)
        is_kept = order.gather(1, chosen[:, None])[:, 0] <= capacity
        return (super().forward(rows) * (shares * is_kept)[:, None]).view(hidden.shape)


class HasCapacityInTraining(HasCapacity):
    def forward(self, hidden):
        return super().forward(hidden) if self.training else Part.forward(self, hidden)


class ChoosesTokens(Part):
    """Each expert chooses its tokens among all of a call."""

    def prepare(self):
        self.router = nn.Linear(self.width, 4, bias=False)

    def forward(self, hidden):
        rows = hidden.reshape(-1, self.width)
        shares, chosen = self.router(rows).softmax(-1).topk(max(1, len(rows) // 4), dim=0)
        output = torch.zeros_like(rows)
        for own, share in zip(chosen.T, shares.T, strict=True):
            output = output.index_add(0, own, super().forward(rows[own]) * share[:, None])
        return output.view(hidden.shape)


class NormalizesOverTokens(Part):
    """A batch norm of one's own, which has no statistics."""

    def forward(self, hidden):
        if self.training:
            hidden = hidden / hidden.std((0, 1), keepdim=True)
        return super().forward(hidden)


class ScalesByLargest(Part):
    def forward(self, hidden):
        return super().forward(hidden) / hidden.abs().max()


class CountsPositions(Part):
    def prepare(self):
        self.positions = nn.Parameter(torch.zeros(64, self.width))

    def forward(self, hidden):
        return super().forward(hidden + self.positions[: hidden.shape[1]])


class CountsTokens(Part):
    def forward(self, hidden):
        return super().forward(hidden) / hidden.shape[1] ** 0.5


class _WithLoss(torch.autograd.Function):
    """Passes an output on, and adds the gradient of a loss, as Megatron's mixtures do."""

    @staticmethod
    def forward(ctx, output, loss):
        ctx.save_for_backward(loss)
        return output

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones_like(ctx.saved_tensors[0])


class InjectsLoss(Part):
    def prepare(self):
        self.router = nn.Linear(self.width, 4, bias=False)

    def loss(self, hidden):
        return self.router(hidden).softmax(-1).mean((0, 1)).square().sum()

    def forward(self, hidden):
        return _WithLoss.apply(super().forward(hidden), 100 * self.loss(hidden))


class InjectsLossOfRouter(InjectsLoss):
    def loss(self, hidden):
        return super().loss(hidden.detach())


class KeepsLoss(InjectsLoss):
    def forward(self, hidden):
        self.kept = self.loss(hidden)
        return Part.forward(self, hidden)


class AppendsLoss(InjectsLoss):
    def prepare(self):
        super().prepare()
        self.losses = []

    def forward(self, hidden):
        self.losses.append(self.loss(hidden))
        return Part.forward(self, hidden)


class AppendsLossElsewhere(InjectsLoss):
    def prepare(self):
        super().prepare()
        self.context = SimpleNamespace(losses=[])

    def forward(self, hidden):
        self.context.losses.append(self.loss(hidden))
        return Part.forward(self, hidden)


class CountsTokensOfExperts(InjectsLoss):
    def prepare(self):
        super().prepare()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, hidden):
        self.seen.add_(self.router(hidden).detach().softmax(-1).sum((0, 1)))
        return Part.forward(self, hidden)


class CountsTokensByData(CountsTokensOfExperts):
    def forward(self, hidden):
        self.seen.data.view(-1)[0] += hidden.shape[1]
        return Part.forward(self, hidden)


class CountsCalls(Part):
    calls = 0

    def forward(self, hidden):
        self.calls += 1
        return super().forward(hidden)


class HasBatchNorm(Part):
    def prepare(self):
        self.norm = nn.BatchNorm1d(self.width)

    def forward(self, hidden):
        return super().forward(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


WRONG = {
    Convolves: OTHER_NUMBERS,
    ShiftsTokens: OTHER_NUMBERS,
    HasCapacity: OTHER_NUMBERS,
    HasCapacityInTraining: OTHER_NUMBERS,
    ChoosesTokens: OTHER_NUMBERS,
    NormalizesOverTokens: OTHER_NUMBERS,
    HasBatchNorm: OTHER_NUMBERS,
    ScalesByLargest: OTHER_NUMBERS,
    CountsPositions: OTHER_NUMBERS,
    CountsTokens: OTHER_NUMBERS,
    InjectsLoss: OTHER_NUMBERS,
    InjectsLossOfRouter: OTHER_NUMBERS,
    MixesTokensInPlaces: "is invalid for input of size",
    KeepsLoss: EACH_CALL,
    AppendsLoss: EACH_CALL,
    AppendsLossElsewhere: EACH_CALL,
    CountsTokensOfExperts: EACH_CALL,
    CountsTokensByData: EACH_CALL,
    CountsCalls: EACH_CALL,
}


# -- parts that are right in tiles -----------------------------------------------------------------


class HasDropout(Part):
    def forward(self, hidden):
        return nn.functional.dropout(super().forward(hidden), 0.5, training=self.training)


class AddsNoiseToRouter(Part):
    def prepare(self):
        self.router = nn.Linear(self.width, 4, bias=False)

    def forward(self, hidden):
        logits = self.router(hidden)
        logits = logits + torch.randn_like(logits) - torch.rand(logits.shape).to(logits)
        shares, chosen = (logits * torch.empty_like(logits).uniform_(0.9, 1.1)).max(-1)
        return super().forward(hidden) * (shares * (chosen > 1))[..., None]


class SelectsTokensByValues(Part):
    def forward(self, hidden):
        own = torch.nonzero(hidden[..., 0] > 0, as_tuple=True)
        return hidden.index_put(own, super().forward(hidden[own]))


class KeepsWhatItMakesOnce(Part):
    table = None

    def forward(self, hidden):
        if self.table is None:
            self.table = torch.linspace(0, 1, self.width, device=hidden.device)
        return super().forward(hidden * self.table)


class HasExperts(Part):
    """Each token goes to the expert that its router chooses, however many others do."""

    def prepare(self):
        self.router = nn.Linear(self.width, 4, bias=False)
        self.experts = nn.Parameter(torch.zeros(4, self.width, self.width))

    def forward(self, hidden):
        rows = hidden.reshape(-1, self.width)
        shares, chosen = self.router(rows).softmax(-1).max(-1)
        output = torch.zeros_like(rows)
        for number in chosen.unique():
            own = torch.nonzero(chosen == number)[:, 0]
            products = rows[own] @ self.experts[number] * shares[own, None]
            output = output.index_add(0, own, products)
        return output.view(hidden.shape)


RIGHT = (
    Part,
    HasDropout,
    AddsNoiseToRouter,
    SelectsTokensByValues,
    KeepsWhatItMakesOnce,
    HasExperts,
)

SMALL, LARGE = 32, 5120
"""Widths. Each matrix of the large parts has 100 MiB, more than gets numbers of its own."""


def model_of(kind, width):
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Module(), nn.Module()])
    for block in model.blocks:
        block.mlp = kind(width)
    return model


def reason_of(kind, width):
    with torch.device("meta"):
        model = model_of(kind, width)
    parts = ModelParts(model=model, blocks_owner=model, blocks_name="blocks")
    return why_nothing_is_saved(parts, sequence_length=None)


def of_each_width(kinds):
    return [
        *(pytest.param(kind, SMALL, id=f"{kind.__name__}-small") for kind in kinds),
        *(
            pytest.param(kind, LARGE, id=f"{kind.__name__}-large", marks=pytest.mark.slow)
            for kind in kinds
        ),
    ]


@pytest.mark.parametrize(("kind", "width"), of_each_width(WRONG))
def test_a_part_that_is_wrong_in_tiles_gets_none_whatever_its_size(kind, width):
    assert WRONG[kind] in reason_of(kind, width)


@pytest.mark.parametrize(("kind", "width"), of_each_width(RIGHT))
def test_a_part_that_is_right_in_tiles_may_have_them(kind, width):
    assert reason_of(kind, width) is None


@pytest.mark.parametrize("kind", [ChoosesTokens, KeepsLoss])
def test_a_configuration_by_hand_gives_a_script_no_wrong_tiles(kind):
    model = model_of(kind, SMALL)
    with pytest.raises(IllegalConfiguration, match="feed_forward tiled cannot be applied"):
        apply_to_user_model(TrainingConfig(feed_forward="tiled"), model)


OF_A_FILE = """
    import torch

    class Part(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

        def forward(self, x):
            return self.down(self.up(x / x.abs().max(1, keepdim=True).values))

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Part()

        def forward(self, x):
            return x + self.mlp(x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)
            self.blocks = torch.nn.ModuleList([Block(), Block()])

        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def make():
        return Model()
"""


@pytest.fixture
def workload(tmp_path):
    """The workload of a model whose parts mix tokens."""
    file = tmp_path / f"{tmp_path.name}.py"  # modules of one name are imported once
    file.write_text(textwrap.dedent(OF_A_FILE))
    sizes = {"sequence_length": 32, "global_batch": 1}
    return make_workload("cpu", {"model": f"{file}:make", **sizes})


def test_wrong_tiles_are_not_predicted(workload):
    config = TrainingConfig(micro_batch_size=1, feed_forward="tiled")
    with pytest.raises(PredictionImpossible, match=f"applied: Part {OTHER_NUMBERS}"):
        predict(PredictionRequest(workload=workload, config=config, device="cpu"))


def test_wrong_tiles_are_not_trained(workload, tmp_path):
    config = TrainingConfig(micro_batch_size=1, feed_forward="tiled")
    request = TrainingRequest(
        workload=workload, config=config, device="cpu", cap_bytes=2**30, folder=tmp_path
    )
    with pytest.raises(IllegalConfiguration, match=f"applied: Part {OTHER_NUMBERS}"):
        Trainer(request)


def test_alike_parts_are_tried_once():
    calls = []

    class Noted(Part):
        def forward(self, hidden):
            calls.append(hidden.shape)
            return super().forward(hidden)

    with torch.device("meta"):
        model = model_of(Noted, SMALL)
        for number, block in enumerate(model.blocks):
            block.mlp.layer_index = number
    parts = ModelParts(model=model, blocks_owner=model, blocks_name="blocks")
    assert why_nothing_is_saved(parts, sequence_length=None) is None
    assert len(calls) == 3, "all tokens at once, and both pieces of them"
