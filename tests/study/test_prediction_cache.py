"""Predictions in a real search: what is surely over the cap, or the same program, is not run."""

import os
from pathlib import Path

import pytest

import autotune
from autotune.study.events import SameProgram

MIB = 1024**2
SIZES = {
    "layers": 6,
    "width": 64,
    "heads": 2,
    "sequence_length": 128,
    "global_batch": 8,
    "steps": 9,
    "warmup_steps": 2,
    "evaluation_sequences": 4,
}
CAP_BYTES = 26 * MIB
SPACE = """
[techniques]
checkpointing = ["none", "every-4", "block"]

[defaults]
micro_batch_size = 8
optimizer_fusion = "kernel"
"""
BUDGETS = """
[techniques]
memory_budget = [0.9, 0.8]

[defaults]
compile = "block"
micro_batch_size = 2
"""
BRANCHING = """
from torch import nn

class Model(nn.Module):
    def __init__(self, vocab_size=256):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, 16), nn.Linear(16, vocab_size)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for _ in range(1 if x.sum().item() > 0 else 4):
            x = x + x.sigmoid()
        return self.head(x)
"""
"""It looks at values to decide how much runs, and so how much memory it needs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_trial_server):
    before = os.getcwd()
    folder = tmp_path_factory.mktemp("foresight")
    os.chdir(folder)
    Path("space.toml").write_text(SPACE)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def result(folder):
    return autotune.search(
        name="foreseen",
        space="space.toml",
        max_mem=CAP_BYTES,
        trials=4,
        sampler="grid",
        confirm=False,
        **SIZES,
    )


def of(result, checkpointing, fusion="kernel"):
    return next(
        record
        for record in result.trials
        if (record.config.checkpointing, record.config.optimizer_fusion) == (checkpointing, fusion)
    )


def test_what_is_predicted_to_be_over_the_cap_is_recorded_and_not_trained(folder, result):
    record = of(result, "none")
    assert (record.outcome, record.tokens_per_second, record.feasible) == (
        "predicted_over_cap",
        None,
        False,
    )
    assert not list(folder.glob(f"studies/work/*/foreseen/logs/trial-{record.number}.log"))


def test_such_a_record_says_what_was_predicted(result):
    record = of(result, "none")
    assert record.predicted_peak_memory_bytes > CAP_BYTES
    assert "predicted to need" in record.message


def test_the_baseline_is_measured_however_much_it_is_predicted_to_need(result):
    baseline = result.trial(result.baseline)
    assert (baseline.outcome, baseline.peak_memory_bytes > CAP_BYTES) == ("over_cap", True)


def test_the_front_holds_only_what_was_measured(result):
    assert result.front
    assert all(result.trial(number).outcome == "ok" for number in result.front)


def test_every_measured_peak_is_close_to_its_prediction(result):
    measured = [record for record in result.trials if record.peak_memory_bytes]
    assert len(measured) > 1
    for record in measured:
        assert record.predicted_peak_memory_bytes == pytest.approx(
            record.peak_memory_bytes, rel=0.005
        )


def test_optuna_hears_of_a_prediction_over_the_cap(folder, result):
    study = autotune.optuna_study("foreseen")
    told = {
        trial.user_attrs["autotune_number"]: trial for trial in study.get_trials(deepcopy=False)
    }
    assert told[of(result, "none").number].constraints["device_memory"] > 0


def test_show_has_predicted_and_measured_peak_and_their_ratio(result, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    from autotune.cli.show import ShowCommand, show

    show(ShowCommand(study="foreseen"))
    printed = capsys.readouterr().out
    assert ("predicted" in printed, "ratio" in printed, "1.0000" in printed) == (True, True, True)


@pytest.mark.slow
def test_predictions_can_be_turned_off(folder):
    result = autotune.search(
        name="unforeseen",
        space="space.toml",
        max_mem=CAP_BYTES,
        trials=2,
        sampler="grid",
        predict=False,
        fresh=True,
        confirm=False,
        **SIZES,
    )
    over = result.trial(1)
    assert (over.outcome, over.predicted_peak_memory_bytes) == ("over_cap", None)
    assert (over.tokens_per_second, over.peak_memory_bytes > CAP_BYTES) == (
        None,
        True,
    )  # not trained to its end


@pytest.mark.slow
def test_budgets_that_compile_to_one_program_are_measured_once(folder):
    Path("budgets.toml").write_text(BUDGETS)
    events = []
    sizes = {**SIZES, "layers": 2, "sequence_length": 32, "global_batch": 4}
    options = {
        "name": "budgets",
        "space": "budgets.toml",
        "trials": 4,
        "confirm": False,
        "sampler": "tpe",
    }  # ehvi predicts where in doubt
    result = autotune.search(**options, listener=events.append, **sizes)
    same = [event for event in events if isinstance(event, SameProgram)]
    compiled = [record for record in result.trials if record.config.compile == "block"]
    assert (len(compiled), len(same)) == (2, 1)  # 1.0 is in every space
    assert {same[0].config.memory_budget, result.trial(same[0].number).config.memory_budget} == {
        0.9,
        0.8,
    }


@pytest.mark.slow
def test_a_model_that_cannot_be_predicted_is_measured_all_the_same(folder):
    Path("branching.py").write_text(BRANCHING)
    few = {
        "sequence_length": 32,
        "global_batch": 8,
        "steps": 9,
        "warmup_steps": 2,
        "evaluation_sequences": 2,
    }
    result = autotune.search(
        name="branches",
        space="space.toml",
        model=f"{folder}/branching.py:Model",
        trials=1,
        max_mem="1GiB",
        confirm=False,
        **few,
    )
    assert (result.trial(0).outcome, result.trial(0).predicted_peak_memory_bytes) == ("ok", None)
