"""A few steps of a small model as in a trial, to compare them with another trainer's steps."""

import torch

from autotune.models.gpt import build
from autotune.shipped.gpt import initialize
from autotune.techniques.optimizer_fusion import UpdateRule, make_updater
from autotune.techniques.precision import autocast, gradient_scaler, weights_dtype
from autotune.training.step import TrainingStep

CPU = torch.device("cpu")


def small_model(workload, precision="fp32"):
    torch.manual_seed(workload.seed)
    model = build(workload)
    initialize(model)
    return model.to(weights_dtype(precision))


def global_batches(workload, steps):
    generator = torch.Generator().manual_seed(1)
    shape = (steps, workload.global_batch, workload.sequence_length)
    return torch.randint(0, workload.vocab_size, shape, generator=generator)


def mean_loss(model, tokens):
    """Return the loss of a user's script: the mean over its micro batch."""
    return model(tokens, tokens) / tokens.numel()


def trained(recipe, *, steps):
    """Return the model after `steps` with the trial's update, clipping, autocast and rates."""
    config, workload = recipe.config, recipe.workload
    model = small_model(workload, config.precision)
    rule = UpdateRule(
        optimizer=config.optimizer,
        fusion=config.optimizer_fusion,
        learning_rate=workload.learning_rate_of(config.optimizer),
    )
    scaler = gradient_scaler(config.precision, device=CPU)
    updater = make_updater(
        list(model.parameters()), rule, scaler=scaler, gradient_clipping=workload.gradient_clipping
    )
    rates = TrainingStep(None, workload=workload, config=config, device=CPU, marker=None)
    for step, batch in enumerate(global_batches(workload, steps)):
        updater.set_learning_rate(rates.learning_rate(step))
        for tokens in batch.split(config.micro_batch_size):
            with autocast(config.precision, device=CPU):
                loss = model(tokens, tokens) / batch.numel()
            updater.backward(loss)
        updater.step()
    return model


def distance(model, other, start):
    """Return the distance of two models, relative to how far training has moved them."""

    def apart(one, two):
        pairs = zip(one.parameters(), two.parameters(), strict=True)
        return (
            sum((a.detach().float() - b.detach().float()).square().sum() for a, b in pairs)
            .sqrt()
            .item()
        )

    return apart(model, other) / apart(other, start)
