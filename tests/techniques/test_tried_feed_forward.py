"""Which feed-forward parts may have tiles: what they compute is tried, whatever their size."""

import textwrap
import threading
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from autotune.errors import IllegalConfiguration, PredictionImpossible
from autotune.models.kinds import kinds_of
from autotune.models.parts import ModelParts
from autotune.predictor.predict import predict
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from autotune.techniques.feed_forward import why_nothing_is_saved
from autotune.techniques.user_training import apply_to_user_model
from autotune.training.trainer import Trainer

OTHER_NUMBERS = "gives other numbers for a sequence in two pieces"
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


class ShiftsTokensInBf16(ShiftsTokens):
    def forward(self, hidden):
        with torch.autocast(hidden.device.type, dtype=torch.bfloat16):
            return super().forward(hidden).to(hidden.dtype)


class CountsInList(Part):
    def prepare(self):
        self.seen = []

    def forward(self, hidden):
        self.seen.append(hidden.shape[1])
        return super().forward(hidden)


class ShufflesTokens(Part):
    def forward(self, hidden):
        order = torch.randint(hidden.shape[1], (hidden.shape[1],))
        return super().forward(hidden) + hidden[:, order]


class HoldsLock(Part):
    def prepare(self):
        self.lock = threading.Lock()


WRONG = {
    CountsInList: EACH_CALL,
    ShufflesTokens: OTHER_NUMBERS,
    HoldsLock: "HoldsLock cannot be copied to try it: cannot pickle '_thread.lock' object",
    Convolves: OTHER_NUMBERS,
    ShiftsTokensInBf16: OTHER_NUMBERS,
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


class ComputesInBf16(Part):
    def forward(self, hidden):
        up = functional.linear(hidden.bfloat16(), self.up.weight.bfloat16())
        return functional.linear(up, self.down.weight.bfloat16()).to(hidden.dtype)


class HasOwnAutocast(Part):
    def forward(self, hidden):
        with torch.autocast(hidden.device.type, dtype=torch.bfloat16):
            return super().forward(hidden).to(hidden.dtype)


class _Draws(Part):
    def draw(self, hidden):
        raise NotImplementedError

    def forward(self, hidden):
        return super().forward(hidden + self.draw(hidden))


class DrawsNormal(_Draws):
    def draw(self, hidden):
        return torch.normal(0.0, 1.0, (self.width,))


class DrawsWholeNumbers(_Draws):
    def draw(self, hidden):
        return torch.randint(3, 9, hidden.shape)


class DrawsGeometric(_Draws):
    def draw(self, hidden):
        return torch.empty_like(hidden).geometric_(0.5)


class DrawsOrder(_Draws):
    def draw(self, hidden):
        return torch.linspace(0, 1, self.width)[torch.randperm(self.width)]


class DrawsExperts(_Draws):
    def draw(self, hidden):
        shares = hidden.reshape(-1, self.width).softmax(-1)
        return torch.multinomial(shares, 1).view(*hidden.shape[:-1], 1)


class HasRandomSlopes(Part):
    def forward(self, hidden):
        return super().forward(functional.rrelu(hidden, training=self.training))


class HasLongVector(Part):
    def prepare(self):
        self.vector = nn.Parameter(torch.ones(2**24 + self.width))

    def forward(self, hidden):
        return super().forward(hidden * self.vector[: self.width])


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
    ComputesInBf16,
    HasOwnAutocast,
    DrawsNormal,
    DrawsWholeNumbers,
    DrawsGeometric,
    DrawsOrder,
    DrawsExperts,
    HasRandomSlopes,
    HasLongVector,
    SelectsTokensByValues,
    KeepsWhatItMakesOnce,
    HasExperts,
)

SMALL, LARGE = 32, 5120
"""Widths. Each matrix of the large parts has 100 MiB, more than gets numbers of its own."""


def model_with(feed_forwards):
    model = nn.Module()
    model.blocks = nn.ModuleList()
    for part in feed_forwards:
        block = nn.Module()
        block.mlp = part
        model.blocks.append(block)
    return model


def model_of(kind, width):
    return model_with([kind(width), kind(width)])


def reason_of(kind, width):
    with torch.device("meta"):
        return reason_of_model(model_of(kind, width))


def reason_of_model(model):
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


@pytest.fixture
def process_group(tmp_path):
    address = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", rank=0, world_size=1, init_method=address)
    yield
    distributed.destroy_process_group()


def test_a_part_with_divided_weights_is_named(process_group):
    model = model_of(Part, SMALL)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block.mlp, mesh=mesh)
    assert "the weights of FSDPPart are divided over devices" in reason_of_model(model)


@pytest.fixture(params=["high", "medium"])
def few_bits(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def test_parts_are_tried_in_whole_products(few_bits):
    precisions = set()

    class Noted(Part):
        def forward(self, hidden):
            precisions.add(torch.get_float32_matmul_precision())
            return super().forward(hidden)

    assert reason_of(Noted, SMALL) is None
    assert precisions == {"highest"}
    assert torch.get_float32_matmul_precision() == few_bits


# -- which parts are alike -------------------------------------------------------------------------


def mixes_tokens(hidden):
    return hidden.softmax(1)


class MixesAsTold(Part):
    """Mixes tokens if one of its attributes says so."""

    stride, dims, options, function = 0, (), None, None

    def forward(self, hidden):
        dims = [*self.dims, *(self.options.dims if self.options else ())]
        if self.stride == 1 or len(getattr(self, "table", ())) == 1:
            dims = [1]
        if dims:
            hidden = hidden - hidden.mean(dims, keepdim=True)
        return super().forward(self.function(hidden) if self.function else hidden)


def mixed_by(**attributes):
    part = MixesAsTold(SMALL)
    for name, value in attributes.items():
        setattr(part, name, value)
    return part


def with_table(size):
    part = MixesAsTold(SMALL)
    part.register_buffer("table", torch.zeros(size))
    return part


def of_one_name(kind):
    return type("Part", (kind,), {})(SMALL)


UNLIKE = {
    "number": lambda: [mixed_by(stride=1), mixed_by(stride=2)],
    "tuple": lambda: [mixed_by(dims=(1,)), mixed_by(dims=())],
    "list": lambda: [mixed_by(dims=[1]), mixed_by(dims=[])],
    "config": lambda: [
        mixed_by(options=SimpleNamespace(dims=[1])),
        mixed_by(options=SimpleNamespace(dims=[])),
    ],
    "function": lambda: [mixed_by(function=mixes_tokens), mixed_by(function=functional.gelu)],
    "lambda": lambda: [mixed_by(function=lambda x: x.softmax(1)), mixed_by(function=lambda x: x)],
    "buffer": lambda: [with_table(1), with_table(2)],
    "class": lambda: [of_one_name(ShiftsTokens), of_one_name(Part)],
}


@pytest.mark.parametrize("attribute", UNLIKE)
def test_parts_that_are_not_alike_are_each_tried(attribute):
    mixing, other = UNLIKE[attribute]()
    assert reason_of_model(model_with([other])) is None
    assert OTHER_NUMBERS in reason_of_model(model_with([mixing, other]))
    assert OTHER_NUMBERS in reason_of_model(model_with([other, mixing]))


ALIKE = {
    "index": lambda number: mixed_by(layer_idx=number),
    "function": lambda number: mixed_by(function=functional.gelu),
    "lambda": lambda number: mixed_by(function=lambda x: x),
    "method": lambda number: mixed_by(step=MixesAsTold(SMALL).prepare),
    "config": lambda number: mixed_by(options=SimpleNamespace(dims=[])),
    "parametrization": lambda number: nn.utils.parametrizations.weight_norm(
        nn.Linear(SMALL, SMALL)
    ),
}


@pytest.mark.parametrize("attribute", ALIKE)
def test_parts_that_hold_the_same_are_alike(attribute):
    first, second = kinds_of([ALIKE[attribute](number) for number in range(2)])
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize(
    "family", [{"model_type": "llama"}, {"model_type": "mixtral"}, {"model_type": "gpt2"}]
)
def test_blocks_of_a_model_of_transformers_are_alike(family):
    config = transformers.AutoConfig.for_model(
        **family, num_hidden_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=64
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    blocks = model.transformer.h if config.model_type == "gpt2" else model.model.layers
    assert len(set(kinds_of(blocks))) == 1
    assert len(set(kinds_of(blocks[:2]))) == 1
