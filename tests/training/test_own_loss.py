"""The loss that a model defines is trained, and perplexity is that of the plain cross entropy.

Each form of loss is trained as by a loop written by hand, with each precision.
"""

import dataclasses
import textwrap

import pytest
import torch
import torch.nn.functional as F

from autotune.data.batches import TokenSequences
from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.models import build_model
from autotune.predictor.predict import predict
from autotune.shipped.seeds import seed_generators
from autotune.shipped.training_order import training_order
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import model_name
from autotune.spec.prediction import PredictionRequest
from autotune.spec.provenance import OF_OWN_LOSS
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from autotune.techniques.requirements import missing_parts
from autotune.training.trainer import Trainer

LENGTH, GLOBAL_BATCH, STEPS, RATE = 16, 4, 8, 1e-2
SOURCE = '''
    import dataclasses
    from types import SimpleNamespace
    from typing import NamedTuple
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Model(nn.Module):
        def __init__(self, vocab_size):
            super().__init__()
            self.embedding = nn.Embedding(vocab_size, 16)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
            self.router = nn.Linear(16, 4)
            self.drop = nn.Dropout(0.0)
            self.head = nn.Linear(16, vocab_size)

        def logits_and_balance(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            gates = self.router(x).softmax(-1)
            hidden = self.drop(x * gates.max(-1, keepdim=True).values)
            return self.head(hidden), 4 * gates.mean((0, 1)).square().sum()

        def logits(self, tokens):
            return self.logits_and_balance(tokens)[0]

        def cross_entropy(self, logits, labels, **options):
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)

    @dataclasses.dataclass(frozen=True)
    class Output:
        logits: torch.Tensor
        loss: torch.Tensor = None

    class Slots:
        __slots__ = ("loss", "logits")

    class Named(NamedTuple):
        count: torch.Tensor
        loss: torch.Tensor

    # -- the cross entropy, in many forms ----------------------------------------------------------

    class Logits(Model):
        def forward(self, tokens):
            return self.logits(tokens)

    class Both(Model):
        def forward(self, tokens, labels=None):
            logits = self.logits(tokens)
            return Output(logits, None if labels is None else self.cross_entropy(logits, labels))

    class ByHand(Model):
        def forward(self, tokens, targets):
            logits = self.logits(tokens)
            chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
            output = Slots()
            output.logits = logits
            output.loss = -(chosen * (targets >= 0)).sum() / (targets >= 0).sum()
            return output

    class Divided(Model):
        def forward(self, tokens, labels):
            logits = self.logits(tokens)
            total = self.cross_entropy(logits, labels, reduction="sum")
            return total / (labels != -100).sum(), logits

    class ShiftsAndGivesLogits(Model):
        def forward(self, tokens, labels):
            logits = self.logits(tokens)
            return self.cross_entropy(logits[:, :-1], labels[:, 1:]), logits

    # -- only a loss -------------------------------------------------------------------------------

    class OnlyLoss(Model):
        def forward(self, tokens, labels):
            return self.cross_entropy(self.logits(tokens), labels)

    class Counts(Model):
        def forward(self, tokens, labels):
            count = torch.tensor(float(labels.numel()), device=tokens.device)
            return Named(count, self.cross_entropy(self.logits(tokens), labels))

    class Sum(Model):
        def forward(self, tokens, labels):
            return {"loss": self.cross_entropy(self.logits(tokens), labels, reduction="sum")}

    class PerToken(Model):
        def forward(self, tokens, y):
            return F.cross_entropy(self.logits(tokens).transpose(1, 2), y, reduction="none")

    class Flat(Model):
        def forward(self, tokens, labels):
            return [self.cross_entropy(self.logits(tokens), labels, reduction="none")]

    class ShiftsInside(Model):
        def forward(self, input_ids, labels):
            logits = self.logits(input_ids)
            return SimpleNamespace(loss=self.cross_entropy(logits[:, :-1], labels[:, 1:]))

    # -- another loss ------------------------------------------------------------------------------

    class Smoothed(Model):
        def forward(self, tokens, labels):
            logits = self.logits(tokens)
            return self.cross_entropy(logits, labels, label_smoothing=0.1), logits

    class SmoothedInTraining(Model):
        def forward(self, tokens, labels):
            smoothing = 0.1 if self.training else 0.0
            return self.cross_entropy(self.logits(tokens), labels, label_smoothing=smoothing)

    class SmoothedOnly(Model):
        def forward(self, tokens, labels):
            return self.cross_entropy(self.logits(tokens), labels, label_smoothing=0.1)

    class LargeLogits(Model):
        """The logits are returned with and without targets; a term is added in place."""
        def forward(self, tokens, targets=None):
            logits = self.logits(tokens)
            if targets is None:
                return logits, None
            loss = self.cross_entropy(logits, targets)
            loss += 1e-2 * logits.logsumexp(-1).square().mean()
            return logits, loss

    class Balanced(Model):
        def forward(self, tokens, labels):
            logits, balance = self.logits_and_balance(tokens)
            loss = self.cross_entropy(logits, labels) + 0.5 * balance
            return {"loss": loss, "logits": logits}

    class BalancedLater(Model):
        """The term of the router is zero in the beginning."""
        def __init__(self, vocab_size):
            super().__init__(vocab_size)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, tokens, labels):
            if self.training:
                self.calls += 1
            logits, balance = self.logits_and_balance(tokens)
            weight = 0.5 * (self.calls > 20)
            return self.cross_entropy(logits, labels) + weight * balance, logits

    class Scaled(Model):
        """Its cross entropy is of other logits than it returns."""
        def forward(self, tokens, labels):
            logits = self.logits(tokens)
            return {"loss": self.cross_entropy(logits / 2, labels), "logits": logits}

    class Dropped(Smoothed):
        def __init__(self, vocab_size):
            super().__init__(vocab_size)
            self.drop = nn.Dropout(0.3)
'''


def cross_entropy(logits, labels, **options):
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), **options)


def mean_cross_entropy(model, tokens, labels):
    return cross_entropy(model.logits(tokens), labels)


def shifted_cross_entropy(model, tokens, labels):
    """As a loop does that gives such a model tokens of which each is the label of the one before.

    The last label is no token of the sequence.
    """
    return cross_entropy(model.logits(tokens)[:, :-1], labels[:, :-1])


def smoothed(model, tokens, labels):
    return cross_entropy(model.logits(tokens), labels, label_smoothing=0.1)


def with_large_logits(model, tokens, labels):
    logits = model.logits(tokens).float()
    return cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


def balanced(model, tokens, labels):
    logits, balance = model.logits_and_balance(tokens)
    return cross_entropy(logits, labels) + 0.5 * balance


def scaled(model, tokens, labels):
    return cross_entropy(model.logits(tokens) / 2, labels)


@dataclasses.dataclass(frozen=True)
class Case:
    """What a loop written by hand computes for a model."""

    trained: object
    evaluated: object = mean_cross_entropy
    may_be_chunked: bool = False
    is_perplexity: bool = True


CROSS_ENTROPY = Case(mean_cross_entropy, may_be_chunked=True)
CASES = {
    **dict.fromkeys(("Logits", "Both", "ByHand", "Divided", "ShiftsAndGivesLogits"), CROSS_ENTROPY),
    **dict.fromkeys(("OnlyLoss", "Counts", "Sum", "PerToken", "Flat"), Case(mean_cross_entropy)),
    "ShiftsInside": Case(shifted_cross_entropy, shifted_cross_entropy),
    "Smoothed": Case(smoothed),
    "SmoothedInTraining": Case(smoothed),
    "SmoothedOnly": Case(smoothed, smoothed, is_perplexity=False),
    "LargeLogits": Case(with_large_logits),
    "Balanced": Case(balanced),
    "BalancedLater": Case(mean_cross_entropy),
    "Scaled": Case(scaled),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(textwrap.dedent(SOURCE))
    (folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(400)))
    return folder


@pytest.fixture(scope="module")
def request_of(folder):
    """request_of(name, **choices) trains a model; its text and weights are prepared once."""

    def make(name, **choices):
        workload = make_workload(
            "cpu",
            {
                "model": f"{folder}/own.py:{name}",
                "dataset": f"{folder}/text.txt",
                "sequence_length": LENGTH,
                "global_batch": GLOBAL_BATCH,
                "steps": STEPS,
                "warmup_steps": 3,
                "evaluation_sequences": 4,
                "learning_rates": {"adamw": RATE},
            },
        )
        prepared = folder / name
        if not prepared.exists():
            prepare(Prepare(workload=workload, folder=prepared))
        return TrainingRequest(
            workload=workload,
            config=TrainingConfig(**{"micro_batch_size": GLOBAL_BATCH, **choices}),
            folder=prepared,
            device="cpu",
            cap_bytes=2**40,
            requested_at=0.0,
        )

    return make


def by_hand(request, case):
    """The losses of the steps and the held-out loss of a loop written by hand."""
    workload, precision = request.workload, request.config.precision
    network = build_model(workload).model.network
    drawn = torch.load(request.folder / "weights.pt")
    network.load_state_dict({name.removeprefix("network."): drawn[name] for name in drawn})
    if precision == "bf16-true":
        for weight in network.parameters():
            weight.data = weight.data.bfloat16()
    trainer = Trainer(request)  # for the settings of the optimizer
    defaults = trainer.training.updater.optimizer.defaults
    settings = {name: defaults[name] for name in ("betas", "eps", "weight_decay", "foreach")}
    optimizer = torch.optim.AdamW(network.parameters(), **settings)
    mixed = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed")
    train, held_out = (
        TokenSequences(request.folder / f"{part}.npy", sequence_length=LENGTH)
        for part in ("train", "held_out")
    )
    order = training_order(sequences=len(train), global_batch=GLOBAL_BATCH, seed=workload.seed)
    seed_generators(workload.seed)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = trainer.step.learning_rate(step)
        with mixed:
            loss = case.trained(network, *train.batch(next(order)))
        loss.float().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    network.eval()
    with torch.no_grad(), mixed:
        return losses, case.evaluated(network, *held_out.batch(range(4))).item()


def trained(request):
    trainer = Trainer(request)
    batches = trainer.batches()
    losses = [trainer.take_step(step, next(batches)) for step in range(STEPS)]
    return losses, trainer._evaluate()


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        (name, "fp32")
        if precision == "fp32"
        # A loss that the model computes in 16 bits stands for the rest.
        else pytest.param(name, precision, marks=() if name == "OnlyLoss" else pytest.mark.slow)
        for name in CASES
        for precision in ("fp32", "bf16-mixed", "bf16-true")
    ],
)
def test_it_is_trained_and_evaluated_as_by_hand(name, precision, request_of):
    request = request_of(name, precision=precision)
    losses, held_out = by_hand(request, CASES[name])
    found_losses, found_held_out = trained(request)
    rounding = 1e-5 if precision == "fp32" else 5e-3
    assert found_losses == pytest.approx(losses, rel=rounding)
    assert found_held_out == pytest.approx(held_out, rel=rounding)


@pytest.mark.parametrize("name", CASES)
def test_a_loss_in_chunks_is_offered_only_for_the_cross_entropy(name, request_of):
    workload = request_of(name).workload
    with torch.device("meta"):
        parts = build_model(workload)
    reason = missing_parts(parts, {"loss": ["chunked"]}).get("loss", {}).get("chunked", "")
    assert bool(reason) is not CASES[name].may_be_chunked
    if reason:
        assert "loss" in reason


@pytest.mark.parametrize("name", CASES)
def test_a_loss_that_may_be_no_cross_entropy_is_not_called_a_perplexity(name, request_of):
    trainer = Trainer(request_of(name))
    source = trainer._perplexity_source()
    assert source.of_own_loss is not CASES[name].is_perplexity
    assert (OF_OWN_LOSS in str(source)) is source.of_own_loss
    assert (trainer._bits_per_byte(1.0) is None) is source.of_own_loss


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("name", ["Smoothed", "Sum", "ShiftsInside", "PerToken"])
def test_accumulation_trains_as_the_whole_batch(name, micro_batch_size, request_of):
    whole, _ = trained(request_of(name))
    parts, _ = trained(request_of(name, micro_batch_size=micro_batch_size))
    assert parts == pytest.approx(whole, rel=1e-5)


def test_a_term_of_a_micro_batch_counts_by_its_share_of_the_labels(request_of):
    request = request_of("Balanced", micro_batch_size=1)
    trainer = Trainer(request)
    batch = next(trainer.batches())
    labels = batch.labels.clone()
    labels[0, 4:] = -100
    network = trainer.training.parts.model.network
    expected = sum(
        balanced(network, tokens[None], row[None]).item() * (row >= 0).sum().item()
        for tokens, row in zip(batch.tokens, labels, strict=True)
    )
    loss = trainer.step(0, batch._replace(labels=labels))
    assert loss == pytest.approx(expected / (labels >= 0).sum().item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Balanced", "ShiftsInside"])
@pytest.mark.parametrize("choices", [{}, {"micro_batch_size": 1}], ids=str)
def test_the_peak_is_predicted_with_the_models_own_loss(name, choices, request_of):
    request = request_of(name, **choices)
    predicted = predict(
        PredictionRequest(workload=request.workload, config=request.config, device="cpu")
    )
    measured = Trainer(request).run().peak_memory_bytes
    # A product with a number of Python makes a tensor of eight bytes, which no fake tensor is.
    assert measured == pytest.approx(predicted.peak_memory_bytes, abs=8)


def test_dropout_does_not_hide_that_two_losses_are_one(request_of, folder):
    """The module of labels and logits is compared in one pass, which draws one mask."""
    assert build_model(request_of("Dropped").workload).own_loss
    text = textwrap.dedent(SOURCE) + textwrap.dedent("""
        class DroppedByHand(ByHand):
            def __init__(self, vocab_size):
                super().__init__(vocab_size)
                self.drop = nn.Dropout(0.3)
    """)
    (folder / "dropped.py").write_text(text)
    workload = make_workload("cpu", {"model": f"{folder}/dropped.py:DroppedByHand"})
    assert not build_model(workload).own_loss


# -- transformers ----------------------------------------------------------------------------------

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "vocab_size": 256,
    "num_experts_per_tok": 2,
}
EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "head_dim": 8},
}


def of_transformers(kind, **settings):
    content = {"model_type": kind, **SIZES, **EXPERTS.get(kind, {}), **settings}
    sizes = {"layers": 2, "width": 32, "heads": 4, "vocab_size": 256, "sequence_length": LENGTH}
    return make_workload(
        "cpu", {"model": model_name(content), "model_config": content, "global_batch": 4, **sizes}
    )


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_balanced_where_the_config_says_so(kind, device):
    balances = of_transformers(kind, output_router_logits=True)
    with torch.device(device):
        own, plain = build_model(balances), build_model(of_transformers(kind))
    assert (own.own_loss, plain.own_loss) == (
        "the model computes another loss than the cross entropy of its logits",
        "",
    )
    assert (balances.has_loss_of_tokens, of_transformers(kind).has_loss_of_tokens) == (False, True)


@pytest.mark.parametrize("kind", EXPERTS)
def test_a_model_of_transformers_is_trained_with_its_own_loss(kind):
    settings = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = build_model(of_transformers(kind, **settings)).model
    tokens, labels = torch.randint(0, 256, (2, 3, LENGTH))
    labels[0, 5:] = -100
    output = model.network(tokens, labels=labels, shift_labels=labels)
    expected = cross_entropy(output.logits, labels) + 0.5 * output.aux_loss
    count = (labels >= 0).sum()
    assert model(tokens, labels).item() == pytest.approx((expected * count).item(), rel=1e-5)
    model.eval()
    plain = cross_entropy(output.logits, labels) * count
    assert model(tokens, labels).item() == pytest.approx(plain.item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_the_plain_loss_of_a_model_of_transformers_stays_autotunes(kind):
    model = build_model(of_transformers(kind, head_dim=8)).model
    assert model.own_loss is None
