"""Another micro batch of a script is the same training, or its perplexity is not shared.

Each case is a training loop that does once for each micro batch what belongs to the step, or does
it rightly. The gate compares the first steps of the real loop with the whole batch and with micro
batches of one sequence.
"""

from dataclasses import replace

import pytest

from autotune.execution.local import LocalExecutor
from autotune.execution.server.limits import time_limits
from autotune.execution.tasks import Trace
from autotune.spec.config import TrainingConfig
from autotune.spec.user_code import script_sha256
from autotune.spec.workload import make_workload
from autotune.study.running.parity_gate import ParityGate
from tests.building.flows import AtOnce, as_flow
from tests.building.studies import definition

LOOP = """
import torch
import torch.nn.functional as F
from torch import nn

import autotune

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(32, 32), {norm}(32), nn.Dropout({dropout})

    def forward(self, x):
        normed = self.norm(x.flatten(0, 1)).view_as(x)
        return x + self.drop(self.linear(normed).tanh())

torch.manual_seed(0)
blocks = nn.ModuleList([Block(), Block()])
model = nn.Sequential(nn.Embedding(64, 32), *blocks, nn.Linear(32, 64))
model, optimizer = autotune.apply(model, {optimizer})
micro_batch = autotune.current_config(global_batch=4).micro_batch_size
parts_in_step = 4 // micro_batch
tokens = torch.arange(40 * 17).view(10, 4, 17) * 7 % 61
lengths = torch.tensor([16, 3, 9, 5])
{setup}

def loss_of(part, first):
    logits = model(part[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())

{functions}
for step in range(10):
    for first in range(0, 4, micro_batch):
        part = tokens[step, first:first + micro_batch]
        {before}
        loss = loss_of(part, first)
        {backward}
        {each}
    {after}
    {update}
    optimizer.zero_grad()
    {last}
    autotune.report(tokens=64, loss=loss.item())
"""
RIGHT = {
    "norm": "nn.LayerNorm",
    "dropout": "0.0",
    "optimizer": "torch.optim.AdamW(model.parameters(), lr=1e-2)",
    "setup": "",
    "functions": "",
    "before": "",
    "backward": "(loss / parts_in_step).backward()",
    "each": "",
    "after": "",
    "update": "optimizer.step()",
    "last": "",
}
SGD = "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
CLIPPING = "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
MASKED_LOSS = """
def loss_of(part, first):
    labels = part[:, 1:].clone()
    for row, length in enumerate(lengths[first:first + micro_batch]):
        labels[row, length:] = -100
    total = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), labels.flatten(), reduction="sum")
    return total / {labels}
"""
OWN_AVERAGE = """
shadow = {name: weight.detach().clone() for name, weight in model.named_parameters()}
def average():
    for name, weight in model.named_parameters():
        shadow[name] = 0.9 * shadow[name] + 0.1 * weight.detach()
"""
DECAY = "with torch.no_grad(): [weight.mul_(1 - 1e-4) for weight in model.parameters()]"
DECAY_OF_DATA = "[weight.data.mul_(1 - 1e-4) for weight in model.parameters()]"
NOISE = "with torch.no_grad(): [w.add_(1e-3 * torch.randn_like(w)) for w in model.parameters()]"

OTHER_TRAININGS = {
    "sums its losses": {"backward": "loss.backward()"},
    "sums its losses and clips": {"backward": "loss.backward()", "after": CLIPPING},
    "sums its losses and clips by value": {
        "backward": "loss.backward()",
        "optimizer": SGD,
        "after": "nn.utils.clip_grad_value_(model.parameters(), 1e-6)",
    },
    "sums its losses and normalizes by hand": {
        "backward": "loss.backward()",
        "after": "norm = torch.stack([w.grad.norm() for w in model.parameters()]).norm()\n"
        "    [w.grad.div_(norm) for w in model.parameters()]",
    },
    "clips each micro batch": {"each": CLIPPING},
    "divides by the labels of the micro batch": {
        "functions": MASKED_LOSS.replace("{labels}", "(labels != -100).sum()"),
    },
    "steps a schedule for each micro batch": {
        "setup": "schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)",
        "each": "schedule.step()",
    },
    "steps a schedule that changes late for each micro batch": {
        "setup": "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)",
        "each": "schedule.step()",
    },
    "counts micro batches in its own schedule": {
        "setup": "seen = 0",
        "each": "seen += 1; optimizer.param_groups[0]['lr'] = 1e-2 / (1 + seen)",
    },
    "schedules its momentum for each micro batch": {
        "optimizer": SGD,
        "each": "optimizer.param_groups[0]['momentum'] *= 0.98",
    },
    "schedules its decay for each micro batch": {
        "each": "optimizer.param_groups[0]['weight_decay'] *= 0.9",
    },
    "schedules beta for each micro batch": {
        "each": "optimizer.param_groups[0]['betas'] = "
        "(0.9, 0.9 + 0.98 * (optimizer.param_groups[0]['betas'][1] - 0.9))",
    },
    "steps its optimizer for each micro batch": {
        "each": "optimizer.step(); optimizer.zero_grad()",
        "update": "",
    },
    "steps twice for some micro batches": {"after": "if micro_batch == 1: optimizer.step()"},
    "decays its weights for each micro batch": {"each": DECAY},
    "decays the data of its weights for each micro batch": {"each": DECAY_OF_DATA},
    "adds noise to its weights for each micro batch": {"each": NOISE},
    "adds noise to its gradients for each micro batch": {
        "each": "[w.grad.add_(1e-3 * torch.randn_like(w)) for w in model.parameters()]",
    },
    "updates running statistics for each micro batch": {"norm": "nn.BatchNorm1d"},
    "averages its weights for each micro batch": {"setup": OWN_AVERAGE, "each": "average()"},
    "averages its weights with torch for each micro batch": {
        "setup": "averaged = torch.optim.swa_utils.AveragedModel(model, "
        "multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))",
        "each": "averaged.update_parameters(model)",
    },
    "reads other text for each micro batch": {
        "before": "part = tokens[(step + first * micro_batch) % 10, :micro_batch]",
    },
    "updates running statistics for each micro batch and drops activations": {
        "norm": "nn.BatchNorm1d",
        "dropout": "0.1",
    },
    "drops activations and sums its losses": {"dropout": "0.1", "backward": "loss.backward()"},
    "drops activations and steps a schedule for each micro batch": {
        "dropout": "0.1",
        "setup": "schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)",
        "each": "schedule.step()",
    },
}
ONE_TRAINING = {
    "divides its losses": {},
    "clips": {"after": CLIPPING},
    "trains with SGD": {"optimizer": SGD},
    "divides by the labels of the step": {
        "functions": MASKED_LOSS.replace("{labels}", "(lengths.sum() / parts_in_step)"),
    },
    "steps a schedule for each step": {
        "setup": "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=99)",
        "last": "schedule.step()",
    },
    "decays its weights for each step": {"last": DECAY},
    "averages its weights for each step": {"setup": OWN_AVERAGE, "last": "average()"},
    "drops activations": {"dropout": "0.1"},
    "draws its text at random": {
        "setup": "draw = torch.Generator().manual_seed(1)",
        "before": "part = tokens[step, torch.randint(4, (micro_batch,), generator=draw)]",
    },
    "clears its gradients before backward": {
        "update": "optimizer.step(); optimizer.zero_grad(False)"
    },
    "has several groups": {
        "optimizer": "torch.optim.AdamW([{'params': model[0].parameters(), 'lr': 1e-3}, "
        "{'params': [*model[1:].parameters()], 'weight_decay': 0.0}], lr=1e-2)",
    },
}
QUICK = (
    "sums its losses and clips",
    "averages its weights for each micro batch",
    "drops activations",
)


@pytest.fixture(scope="module")
def are_one_training(tmp_path_factory, one_trial_server):
    """are_one_training(changes) compares micro batches of 4 and 1 of the changed loop."""
    folder = tmp_path_factory.mktemp("loops")
    with LocalExecutor(folder) as executor:

        def judge(changes):
            file = folder / "train.py"
            file.write_text(LOOP.format(**{**RIGHT, **changes}))
            workload = make_workload("cpu", {"script": str(file), "global_batch": 4, "steps": 10})
            workload = replace(workload, model_sha256=script_sha256(str(file)))
            study = definition(workload=workload, cap_bytes=2**34)

            def trace(config, *, dropout, dequantized, layers):
                training = executor.training(study, config, study_folder=folder, enforce_cap=False)
                training = replace(training, dequantized=dequantized)
                limits = time_limits(300.0)
                return executor.run(Trace(training=training, dropout=dropout), limits=limits)

            gate = AtOnce(
                ParityGate(
                    as_flow(trace),
                    folder=folder / str(abs(hash(str(changes)))),
                    on_trace=lambda config: None,
                    any_micro_batch=False,
                )
            )
            whole, single = (TrainingConfig(micro_batch_size=size) for size in (4, 1))
            for config in (whole, single):  # the loop runs: a failure would not be alike, too
                assert gate.check(config).kind in ("compare", "same")
            return gate.updates_alike(single, whole)

        yield judge


def cases(table):
    return [
        pytest.param(changes, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, changes in table.items()
    ]


@pytest.mark.parametrize("changes", cases(OTHER_TRAININGS))
def test_a_loop_that_trains_otherwise_with_other_micro_batches_shares_with_none(
    changes, are_one_training
):
    assert not are_one_training(changes)


@pytest.mark.parametrize("changes", cases(ONE_TRAINING))
def test_a_loop_whose_micro_batches_are_one_training_shares_its_perplexity(
    changes, are_one_training
):
    assert are_one_training(changes)
