"""A few steps of a small model as in a trial, to compare them with another trainer's steps."""

import torch

from autotune.exporters.script_lines import loss_line
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
    """Returns tokens and labels of global batches; most labels of some rows are left out.

    As of padded texts and of conversations, where they are the workload's.
    """
    generator = torch.Generator().manual_seed(1)
    shape = (steps, workload.global_batch, workload.sequence_length)
    tokens = torch.randint(0, workload.vocab_size, shape, generator=generator)
    labels = tokens.clone()
    if workload.packing == "padded" or workload.chat_column is not None:
        labels[:, : workload.global_batch // 4, 2:] = -100
    return torch.stack([tokens, labels], dim=2)


def gives_logits(model):
    """Make the small model return logits instead of a loss, as that of a user's script."""
    model.token_loss = lambda hidden, head, _labels: head(hidden)
    return model


def script_loss(model, recipe, sequences, *, labels_of_step):
    """Returns the loss of a user's script: by the line of the export, where it has one.

    `sequences`, [micro batch, 2, sequence], are tokens and labels. A script without such a line has
    the mean over its micro batch.
    """
    tokens, labels = sequences.unbind(1)
    logits = model(tokens, labels)
    workload = recipe.workload
    if workload.packing == "packed" and workload.chat_column is None:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    names = {"torch": torch, "logits": logits, "labels": labels, "labels_of_step": labels_of_step}
    exec(loss_line(recipe), names)
    return names["loss"]


def count_labels(sequences):
    """Returns how many labels tokens and labels, [sequences, 2, length], have."""
    return int((sequences[:, 1] >= 0).sum())


def trained(recipe, *, steps):
    """Returns the model after `steps` with the trial's update, clipping, autocast and rates."""
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
        for sequences in batch.split(config.micro_batch_size):
            tokens, labels = sequences.unbind(1)
            with autocast(config.precision, device=CPU):
                loss = model(tokens, labels) / count_labels(batch)
            updater.backward(loss)
        updater.step()
    return model


def distance(model, other, start):
    """Returns the distance of two models, relative to how far training has moved them."""

    def apart(one, two):
        pairs = zip(one.parameters(), two.parameters(), strict=True)
        return (
            sum((a.detach().float() - b.detach().float()).square().sum() for a, b in pairs)
            .sqrt()
            .item()
        )

    return apart(model, other) / apart(other, start)
