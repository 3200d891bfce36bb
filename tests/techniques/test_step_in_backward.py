"""An optimizer that steps in the backward pass looks unchanged to all other code."""

import copy
import pickle

import pytest
import torch
from torch import nn

from autotune.shipped.step_in_backward import step_in_backward
from autotune.shipped.stochastic_rounding import StochasticallyRounded


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def momentum(model):
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[2].parameters(), "momentum": 0.5},
    ]
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9, foreach=False)


def rounded(model):
    def make(parameters):
        return torch.optim.AdamW(parameters, lr=0.01, foreach=False)

    return StochasticallyRounded(model.bfloat16().parameters(), make, learning_rate=0.01, seed=3)


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def train(model, optimizer, *, steps, schedule=None):
    for _ in range(steps):
        model(torch.ones(2, 4, dtype=model[0].weight.dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()


def weights(model):
    return [parameter.tolist() for parameter in model.parameters()]


KINDS = pytest.mark.parametrize("make", [adamw, momentum, rounded])
WAYS = (lambda optimizer: optimizer, step_in_backward)


@KINDS
def test_it_follows_a_schedule_after_a_state_was_loaded(make):
    """As accelerate does with every optimizer that it prepares."""

    def trained(change):
        model = small_model()
        optimizer = change(make(model))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(
            model,
            optimizer,
            steps=5,
            schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        )
        return weights(model)

    plain, in_backward = map(trained, WAYS)
    assert in_backward == plain


@KINDS
@pytest.mark.parametrize("saved_by", WAYS, ids=["plain", "in backward"])
def test_a_resumed_training_takes_the_steps_of_an_uninterrupted_one(make, saved_by):
    """Also from a checkpoint that the plain optimizer has saved."""

    def schedule_of(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    whole = small_model()
    optimizer = make(whole)
    train(whole, optimizer, steps=6, schedule=schedule_of(optimizer))

    first = small_model()
    optimizer = saved_by(make(first))
    schedule = schedule_of(optimizer)
    train(first, optimizer, steps=3, schedule=schedule)
    checkpoint = copy.deepcopy([first.state_dict(), optimizer.state_dict(), schedule.state_dict()])

    second = small_model()
    optimizer = step_in_backward(make(second))
    schedule = schedule_of(optimizer)
    for part, state in zip((second, optimizer, schedule), checkpoint, strict=True):
        part.load_state_dict(state)
    train(second, optimizer, steps=3, schedule=schedule)
    assert weights(second) == weights(whole)


def test_a_parameter_group_that_is_added_later_is_updated_with_its_rate():
    def trained(change):
        model = small_model()
        optimizer = change(torch.optim.AdamW(model[0].parameters(), lr=0.01, foreach=False))
        train(model, optimizer, steps=1)
        model.zero_grad()
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.05})
        train(model, optimizer, steps=2)
        return weights(model)

    plain, in_backward = map(trained, WAYS)
    assert in_backward == plain


def test_a_parameter_that_becomes_trainable_later_is_updated():
    def trained(change):
        model = small_model()
        model[0].weight.requires_grad_(False)
        optimizer = change(adamw(model))
        train(model, optimizer, steps=1)
        model[0].weight.requires_grad_(True)
        train(model, optimizer, steps=2)
        return weights(model)

    plain, in_backward = map(trained, WAYS)
    assert in_backward == plain


def test_each_gradient_is_freed_in_the_backward_pass():
    model = small_model()
    step_in_backward(adamw(model))
    model(torch.ones(2, 4)).sum().backward()
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4


def test_hooks_on_its_step_are_called_once_a_step():
    model = small_model()
    optimizer = step_in_backward(adamw(model))
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    train(model, optimizer, steps=2)
    assert called == ["post", "post"]


@pytest.mark.parametrize("make", [adamw, momentum])
def test_copies_and_pickles_are_optimizers_of_the_original_class(make):
    """Plain ones, with the same state: also where the step in backward is not installed."""
    model = small_model()
    optimizer = step_in_backward(make(model))
    train(model, optimizer, steps=1)
    copied = copy.deepcopy([model, optimizer])
    for other_model, other in (copied, pickle.loads(pickle.dumps([model, optimizer]))):
        assert type(other) is type(make(small_model()))
        train(other_model, other, steps=1)
    train(model, optimizer, steps=1)
    assert weights(copied[0]) == weights(model)


def test_a_hook_before_its_step_is_rejected():
    optimizer = step_in_backward(adamw(small_model()))
    with pytest.raises(RuntimeError, match="its updates are made by then"):
        optimizer.register_step_pre_hook(lambda *_: None)
