"""`autotune.checkpoint`: the peak meets the budget, and the model trains as before."""

import copy

import pytest
import torch
from torch import nn

import autotune
from autotune.errors import IllegalConfiguration, InvalidInput
from autotune.predictor.activation_budget import planner_of
from autotune.predictor.user_training import Change, FakeUserTraining, UserTraining
from autotune.shipped import selective
from autotune.shipped.changed_method import Changed
from autotune.shipped.granularity import recompute_but
from autotune.shipped.selective import ATTENTION, operator_name
from autotune.spec.prediction import KeptOfBlock
from studies.activation_budget.measure import Mixer
from studies.activation_budget.measure import plain as plain_step
from tests.predictor.measured_steps import measured_peak
from tests.predictor.user_forms import Form

WIDTH = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, hidden):
        heads = self.attention(self.norm(hidden)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in heads)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(mixed.transpose(1, 2).flatten(2))
        up = nn.functional.relu(self.up(self.dropout(hidden)), inplace=True)
        return hidden + self.down(up)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def form() -> Form:
    torch.manual_seed(0)
    model = Model()
    return Form(model, torch.randn(32, 128, WIDTH), torch.optim.AdamW(model.parameters()))


def budgeted(one: Form, budget, **settings):
    return autotune.checkpoint(
        one.model, one.batch, one.optimizer, budget=budget, device="cpu", **settings
    )


@pytest.fixture(scope="module")
def peaks():
    """The predicted peaks with every block recomputed, and with none."""
    with pytest.raises(IllegalConfiguration) as error:
        budgeted(form(), "1KiB")
    least = float(error.value.message.split(" MiB that")[0].rsplit(" ", 1)[1]) * 2**20
    return least, budgeted(form(), "1GiB").peak_memory_bytes


@pytest.fixture(scope="module")
def planned(peaks):
    """A training within a budget in between, with the budget and the answer."""
    least, most = peaks
    one, budget = form(), round(least + 0.8 * (most - least))
    return one, budget, budgeted(one, budget)


def test_the_measured_peak_is_the_predicted_one_and_within_one_percent_of_the_budget(planned):
    one, budget, answer = planned
    assert measured_peak(one) == answer.peak_memory_bytes
    assert 0.99 * budget <= answer.peak_memory_bytes <= budget


def test_blocks_keep_and_recompute_something(planned):
    _, _, answer = planned
    assert any(block.operators or block.recomputed_parts for block in answer.blocks)


def test_where_the_planned_peak_is_over_the_budget_another_plan_is_found():
    torch.manual_seed(0)
    model = Mixer(layers=4, patches=49, width=64)
    training = UserTraining(
        model=model,
        batch=torch.randn(4, 49, 768),
        optimizer=torch.optim.AdamW(model.parameters()),
        step=plain_step,
    )
    planner = planner_of(training, gpu=None)
    least, whole = planner.least.peak_memory_bytes, planner.whole.peak_memory_bytes
    found = planner.find(least + 45 * (whole - least) // 100)
    assert found.prediction.peak_memory_bytes > least  # that of every block recomputed


@pytest.mark.slow
def test_plans_that_are_over_by_little_again_and_again_do_not_use_up_all_tries():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
    training = UserTraining(
        model=model,
        batch=torch.randn(8, 64, 64),
        optimizer=torch.optim.AdamW(model.parameters()),
        step=lambda model, batch: model(batch).square().mean(),
    )
    planner = planner_of(training, gpu=None)
    least, whole = planner.least.peak_memory_bytes, planner.whole.peak_memory_bytes
    budget = least + 15 * (whole - least) // 100
    assert planner.find(budget).prediction.peak_memory_bytes > 0.94 * budget


def test_it_computes_the_same_gradients_with_dropout(planned):
    one, _, _ = planned
    gradients = []
    for model in (one.model, _without_checkpointing(one)):
        torch.manual_seed(1)
        model.zero_grad()
        model(one.batch).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for ours, plain in zip(*gradients, strict=True):
        assert torch.equal(ours, plain)


def _without_checkpointing(one):
    model = Model()
    model.load_state_dict(one.model.state_dict())
    return model


def test_names_of_parameters_stay_and_copies_do_the_same(planned):
    one, _, _ = planned
    names = [name for name, _ in Model().named_parameters()]
    assert [name for name, _ in copy.deepcopy(one.model).named_parameters()] == names
    assert all(type(block).__name__ == "Block" for block in one.model.blocks)


def test_what_is_changed_in_place_or_drawn_at_random_runs_again(planned):
    _, _, answer = planned
    kept = [name for block in answer.blocks for name in block.operators or ()]
    assert not {name.rpartition(" ")[0] for name in kept} & {"native_dropout", "bernoulli", "relu"}


def test_nothing_is_changed_where_everything_fits():
    one = form()
    answer = budgeted(one, "1GiB")
    assert answer.blocks == (KeptOfBlock(),) * 3
    assert not any(isinstance(module, Changed) for module in one.model.modules())


def test_a_budget_that_is_too_small_names_the_least_and_changes_nothing():
    one = form()
    with pytest.raises(IllegalConfiguration, match="with every block recomputed") as error:
        budgeted(one, "1KiB")
    assert "\n" not in error.value.message
    assert not any(isinstance(module, Changed) for module in one.model.modules())


def test_the_answer_says_what_how_many_blocks_keep(planned):
    _, _, answer = planned
    assert str(answer).startswith("predicted peak ")
    assert len(answer.to_dict()["blocks"]) == 3


def test_a_model_that_recomputes_its_blocks_already_is_refused():
    one = form()
    for block in one.model.blocks:
        block.gradient_checkpointing = True  # as transformers has it
    with pytest.raises(InvalidInput, match="recomputes its blocks already") as error:
        budgeted(one, "8MiB")
    assert "gradient_checkpointing_disable" in error.value.hint


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"budget": "much"}, "budget"),
        ({"model": nn.Linear(2, 2)}, "no list of alike blocks"),
        ({"device": "abacus"}, "abacus"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(change, says):
    one = form()
    given = {"model": one.model, "batch": one.batch, "budget": "1MiB", "device": "cpu", **change}
    with pytest.raises(InvalidInput, match=says):
        autotune.checkpoint(**given)


def test_recomputed_parts_have_the_predicted_peak():
    one, plain = form(), form()
    names = ("attention", "up")
    for block in one.model.blocks:
        recompute_but(block, names)
    training = UserTraining(model=plain.model, batch=plain.batch, optimizer=plain.optimizer)

    def keep(_run, blocks):
        for block in blocks:
            recompute_but(block, names)

    fake = FakeUserTraining(training, Change(), gpu=None, change_blocks=keep)
    predicted = fake.predict()
    assert measured_peak(one) == predicted.peak_memory_bytes


def test_attention_that_drops_scores_at_random_is_not_kept():
    kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert operator_name(kernel) == ATTENTION
    assert not selective.draws(kernel, (None, None, None, 0.0), {})
    assert selective.draws(kernel, (None, None, None, 0.1), {})


# -- several stacks of blocks ----------------------------------------------------------------------


class Translator(nn.Module):
    """An encoder and a decoder."""

    def __init__(self):
        super().__init__()
        self.both = nn.Transformer(64, 4, 3, 3, 256, dropout=0.1, batch_first=True)

    def forward(self, hidden):
        return self.both(hidden, hidden[:, :64]).square().mean()


@pytest.mark.slow
def test_encoder_and_decoder_are_planned_together():
    def translator():
        torch.manual_seed(0)
        model = Translator()
        return Form(model, torch.randn(8, 128, 64), torch.optim.AdamW(model.parameters()))

    one = translator()
    planner = planner_of(
        UserTraining(model=one.model, batch=one.batch, optimizer=one.optimizer), gpu=None
    )
    least, whole = planner.least.peak_memory_bytes, planner.whole.peak_memory_bytes
    assert least < 0.5 * whole
    budget = (least + whole) // 2
    answer = budgeted(one, budget)
    assert len(answer.blocks) == 6
    assert measured_peak(one) == answer.peak_memory_bytes
    assert 0.9 * budget < answer.peak_memory_bytes <= budget
