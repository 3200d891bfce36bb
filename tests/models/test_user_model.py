"""User's models: their loss is right for every form of output; parts are found by structure."""

import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.errors import InvalidInput, StudyMismatch
from autotune.models import build_model
from autotune.models.weights import Placement, draw_weights, load_model
from autotune.shipped.token_loss import next_token_loss
from autotune.spec.file_watch import files_until_apply
from autotune.spec.workload import make_workload
from autotune.techniques.checkpointing import checkpoint_in_blocks, checkpoint_segments
from autotune.techniques.requirements import missing_parts

CPU = torch.device("cpu")
FLOAT32 = Placement(dtype=torch.float32, device=CPU)
SOURCE = textwrap.dedent('''
    import collections
    from types import SimpleNamespace
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Attention(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inside, self.outside = nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x):
            heads = (t.unflatten(-1, (2, -1)) for t in self.inside(x).chunk(3, dim=-1))
            q, k, v = (t.transpose(1, 2) for t in heads)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.outside(y.transpose(1, 2).flatten(2))

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm, self.attn = nn.LayerNorm(width), Attention(width)
            self.mlp = nn.Linear(width, width)

        def forward(self, x, *_):
            x = x + self.attn(self.norm(x))
            return x + torch.tanh(self.mlp(x))

    class Model(nn.Module):
        def __init__(self, vocab_size=256, layers_of_mine=4, width_of_mine=16):
            super().__init__()
            layers, width = layers_of_mine, width_of_mine
            self.embedding = nn.Embedding(vocab_size, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
            self.head = nn.Linear(width, vocab_size, bias=False)
            self.head.weight = self.embedding.weight

        def logits(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

        def forward(self, tokens):
            return self.logits(tokens)

    class AsTuple(Model):
        def forward(self, tokens):
            return self.logits(tokens), None

    class AsMapping(Model):
        def forward(self, tokens):
            hidden = torch.zeros(*tokens.shape, 8)
            return collections.OrderedDict(hidden=hidden, logits=self.logits(tokens))

    class AsObject(Model):
        def forward(self, tokens):
            return SimpleNamespace(logits=self.logits(tokens))

    class WithLoss(Model):
        """As nanoGPT: without targets only the last position, and -1 is ignored."""
        def forward(self, tokens, targets=None):
            logits = self.logits(tokens)
            if targets is None:
                return logits[:, [-1]], None
            flat = logits.view(-1, logits.size(-1))
            return logits, F.cross_entropy(flat, targets.view(-1), ignore_index=-1)

    class OnlyLoss(Model):
        def forward(self, tokens, labels):
            logits = self.logits(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return loss + 0.1 * logits.square().mean()

    class Sequence(Model):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*self.blocks)

        def logits(self, tokens):
            return self.head(self.blocks(self.embedding(tokens)))

    class Numbered(Model):
        def logits(self, tokens):
            x = self.embedding(tokens)
            for index, block in enumerate(self.blocks):
                x = block(x, 1000 + index)
            return self.head(x)

    class Softened(Model):
        def forward(self, tokens):
            return 30 * torch.tanh(self.logits(tokens) / 30)

    class Values(Model):
        """Needs values, not only shapes, and has a tensor that is not a buffer."""
        def __init__(self):
            super().__init__()
            self.scale = float(torch.linspace(0, 1, 5)[4].item())
            self.loose = torch.full((), 2.0)
            self.register_buffer("kept", torch.full((), 3.0), persistent=False)

        def forward(self, tokens):
            return self.logits(tokens) * self.scale * self.loose * self.kept

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    class Ahead(Model):
        def logits(self, tokens):
            return super().logits(tokens.flip(1))

    class KnowsItsWidth(Model):
        def forward(self, tokens, labels):
            logits = self.logits(tokens)
            flat = logits.view(-1, 256)
            return logits, F.cross_entropy(flat, labels.flatten(), ignore_index=-100)

    def inner(feed_forward_width):
        return Model(width_of_mine=feed_forward_width)

    def sized(layers, vocab_size):
        return Model(vocab_size, layers)

    def narrow():
        return Model(vocab_size=100)

    def no_module():
        return 3

    def without_output():
        return nn.Embedding(256, 8)

    def failing():
        raise RuntimeError("not today")
''')
SHAPES = ["Model", "AsTuple", "AsMapping", "AsObject", "WithLoss", "Sequence"]


@pytest.fixture
def workload_of(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)

    def workload(function, **settings):
        return make_workload(
            "cpu", {"model": f"{file}:{function}", "sequence_length": 16, **settings}
        )

    return workload


@pytest.fixture
def make_parts(workload_of):
    def make(function):
        torch.manual_seed(0)
        return build_model(workload_of(function))

    return make


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(1)
    tokens, labels = torch.randint(0, 256, (2, 3, 16))
    labels[0, 5:] = -100
    return tokens, labels


def loss_and_gradients(parts, batch):
    parameters = list(parts.model.parameters())
    loss = parts.model(*batch)
    return loss.item(), torch.autograd.grad(loss, parameters)


# -- the loss --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_it_returns_the_loss_is_the_sum_over_valid_tokens(shape, make_parts, batch):
    model = make_parts(shape).model
    tokens, labels = batch
    expected = next_token_loss(model.network.logits(tokens), labels)
    assert model(tokens, labels).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_loss_that_is_more_than_cross_entropy_is_used_unchanged(make_parts, batch):
    model = make_parts("OnlyLoss").model
    tokens, labels = batch
    assert model(tokens, labels).item() == pytest.approx(
        model.network(tokens, labels).item() * 37, rel=1e-6
    )


def test_labels_that_are_all_ignored_leave_a_loss_of_zero_and_finite_gradients(make_parts, batch):
    loss, gradients = loss_and_gradients(
        make_parts("WithLoss"), (batch[0], torch.full_like(batch[1], -100))
    )
    assert loss == 0.0
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_chunked_loss_gets_the_input_of_the_head(shape, make_parts, batch):
    parts = make_parts(shape)
    plain = loss_and_gradients(parts, batch)
    parts.set_token_loss(
        lambda hidden, head, labels: next_token_loss(F.linear(hidden, head.weight), labels)
    )
    by_parts = loss_and_gradients(parts, batch)
    assert by_parts[0] == pytest.approx(plain[0], rel=1e-5)
    assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(by_parts[1], plain[1], strict=True))


# -- its parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_its_parts_are_found_on_the_meta_device(shape, workload_of):
    with torch.device("meta"):
        parts = build_model(workload_of(shape))
    assert len(parts.blocks) == 4
    assert parts.attention_name == "attn"
    assert missing_parts(parts, {"checkpointing": ["attention", "sqrt"], "loss": ["chunked"]}) == {}


@pytest.mark.parametrize("granularity", ["attention", "selective", "every-2", "block", "sqrt"])
@pytest.mark.parametrize("shape", ["WithLoss", "Sequence"])
def test_checkpointing_leaves_loss_and_gradients_alone(granularity, shape, make_parts, batch):
    parts = make_parts(shape)
    checkpoint_in_blocks(parts, granularity)
    checkpoint_segments(parts, granularity)
    loss, gradients = loss_and_gradients(parts, batch)
    plain_loss, plain_gradients = loss_and_gradients(make_parts(shape), batch)
    assert loss == plain_loss
    assert all(torch.equal(*pair) for pair in zip(gradients, plain_gradients, strict=True))


@pytest.mark.parametrize(
    ("function", "technique", "value", "reason"),
    [
        ("Plain", "checkpointing", "block", "no list of alike blocks"),
        ("Numbered", "checkpointing", "sqrt", "different arguments"),
        ("Softened", "loss", "chunked", "no linear head"),
        ("OnlyLoss", "loss", "chunked", "only its loss, no logits"),
        ("KnowsItsWidth", "loss", "chunked", "no linear head"),
    ],
)
def test_techniques_that_need_a_missing_part_are_unavailable(
    function, technique, value, reason, workload_of
):
    with torch.device("meta"):
        parts = build_model(workload_of(function))
    missing = missing_parts(parts, {technique: [value], "compile": ["model"]})
    assert list(missing) == [technique]
    assert list(missing[technique]) == [value]
    assert reason in missing[technique][value]


# -- its weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["WithLoss", "Values"])
def test_loaded_it_computes_what_was_drawn(function, workload_of, batch, tmp_path):
    workload = workload_of(function)
    count = draw_weights(workload, file=tmp_path / "weights.pt")
    loaded = load_model(workload, file=tmp_path / "weights.pt", placement=FLOAT32).model
    torch.manual_seed(workload.seed)
    assert loaded(*batch).item() == build_model(workload).model(*batch).item()
    assert count == sum(parameter.numel() for parameter in loaded.parameters())
    assert loaded.network.head.weight is loaded.network.embedding.weight


def test_it_runs_on_fake_tensors(workload_of, batch):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = load_model(workload_of("WithLoss"), file=None, placement=FLOAT32).model
        model(*(mode.from_tensor(tensor) for tensor in batch)).backward()


def test_it_is_called_with_the_sizes_it_takes(workload_of):
    parts = build_model(workload_of("sized", layers=3, vocab_size=300))
    assert len(parts.blocks) == 3
    assert parts.head.out_features == 300


def test_a_feed_forward_width_that_is_set_is_passed_on(workload_of):
    assert build_model(workload_of("inner", feed_forward_width=48)).head.in_features == 48


def test_a_module_is_looked_for_where_the_search_was_started(tmp_path, monkeypatch):
    package = tmp_path / "package_of_mine"
    package.mkdir()
    (package / "models.py").write_text(SOURCE)
    (package / "__init__.py").write_text("from . import sizes")
    (package / "sizes.py").write_text("")
    monkeypatch.chdir(tmp_path)
    parts = build_model(make_workload("cpu", {"model": "package_of_mine.models:Model"}))
    assert len(parts.blocks) == 4
    assert set(files_until_apply()) == {"package_of_mine/__init__.py", "package_of_mine/sizes.py"}


# -- invalid models --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "named"),
    [
        ("nope", "has no function 'nope'"),
        ("no_module", r"no_module returns int, not a torch\.nn\.Module"),
        ("without_output", "8 wide, the vocabulary has 256"),
        ("failing", "RuntimeError: not today"),
        ("narrow", "100 wide, the vocabulary has 256"),
        ("Ahead", "lets a token see later ones"),
    ],
)
def test_a_module_that_is_not_a_language_model_is_rejected_in_one_sentence(
    function, named, workload_of, tmp_path
):
    with pytest.raises(InvalidInput, match=named) as raised:
        draw_weights(workload_of(function), file=tmp_path / "weights.pt")
    assert raised.value.hint
    assert "\n" not in raised.value.message


def test_a_file_that_changed_since_the_study_began_is_not_run(workload_of, tmp_path):
    workload = workload_of("Model", model_sha256="0" * 64)
    with pytest.raises(StudyMismatch, match="has changed since the study was created"):
        build_model(workload)
