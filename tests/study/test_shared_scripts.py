"""A script's perplexity is shared, too: noise of its evaluation decides nothing."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

import autotune
from autotune.spec.provenance import PerplexitySource
from autotune.study.running.trial_runner import possible_representatives
from tests.building.results import record, shared_with

SCRIPT = """
import torch, autotune
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
model, optimizer = autotune.apply(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
micro_batch = autotune.current_config(global_batch=4).micro_batch_size
tokens = torch.arange(4 * 17).view(4, 17) % 64
for step in range(1, 100):
    for part in tokens.split(micro_batch)[:PARTS]:
        loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / DIVISOR
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    evaluated = 3.0 + 0.1 * micro_batch  # a small batch seems to do better
    evaluation_loss = evaluated if step % 12 == 0 else None
    autotune.report(tokens=TOKENS, loss=loss.item(), evaluation_loss=evaluation_loss)
"""
EVALUATED = PerplexitySource(kind="evaluation", step=12)
SPACE = """
[techniques]
micro_batch_size = [4, 2, 1]
"""


@pytest.fixture(scope="module")
def searched(tmp_path_factory, one_trial_server):
    """searched(name) returns the trials of a search over a script's micro batches."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("scripts"))

    def search(name, *, divisor="(4 / len(part))", parts="4", tokens="64", **settings):
        text = SCRIPT.replace("DIVISOR", divisor).replace("PARTS", parts).replace("TOKENS", tokens)
        Path("train.py").write_text(text)
        Path("space.toml").write_text(SPACE)
        settings = {
            "space": "space.toml",
            "max_mem": "1GiB",
            "trials": 3,
            "confirm": False,
            **settings,
        }
        workload = {"script": str(Path("train.py").absolute()), "global_batch": 4, "steps": 12}
        result = autotune.search(name=name, **settings, **workload)
        return {trial.config.micro_batch_size: trial for trial in result.trials}

    yield search
    os.chdir(before)


@pytest.mark.slow
def test_micro_batches_of_one_training_share_the_perplexity_of_one_evaluation(searched):
    trials = searched("accumulates")
    assert {trial.perplexity for trial in trials.values()} == {math.exp(3.4)}
    assert trials[4].perplexity_source == EVALUATED
    assert trials[1].perplexity_source == trials[2].perplexity_source == shared_with(0)


def test_several_seeds_repeat_the_training_whose_perplexity_is_shared(searched):
    trials = searched("seeds", parts="1", trials=1, perplexity_seeds=2)
    assert trials[4].perplexity_source == replace(EVALUATED, seeds=2)
    assert str(trials[4].perplexity_source) == "evaluation loss after step 12, mean of 2 seeds"
    assert trials[4].perplexity_spread == 0  # its evaluation is a constant


@pytest.mark.slow
def test_a_script_that_does_not_accumulate_shares_with_no_other_micro_batch(searched):
    """It trains on fewer tokens a step, whatever the size of its gradients."""
    trials = searched("does-not-accumulate", divisor="1", parts="1", tokens="16 * micro_batch")
    assert [trials[size].perplexity_source for size in (4, 2, 1)] == [EVALUATED] * 3


def test_an_evaluation_of_a_time_when_its_order_was_not_checked_stands_for_no_other_trial():
    unchecked = PerplexitySource(kind="unchecked_evaluation", step=12)
    before = record(0, parity="same", perplexity_source=unchecked)
    checked = record(1, parity="same", perplexity_source=EVALUATED)
    assert possible_representatives(before.config, [before], steps=12) == []
    assert possible_representatives(before.config, [before, checked], steps=12) == [checked]
