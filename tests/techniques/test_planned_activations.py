"""The technique `activation_budget`: the plan of a prediction is what a training does."""

import dataclasses
import re
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autotune.errors import BudgetTooSmall, PredictionImpossible
from autotune.execution.process import answers
from autotune.execution.process.failures import measurement_of_exception
from autotune.execution.process.preparation import prepare
from autotune.execution.server.forked import run_in_fork
from autotune.execution.tasks import Predict, Prepare
from autotune.exporters.pytorch.techniques import _kept
from autotune.predictor import predict
from autotune.shipped.checkpointing import recompute
from autotune.shipped.selective import contexts_keeping
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast, KeptOfBlock, Prediction, PredictionRequest
from autotune.spec.reading import parse
from autotune.spec.result import Measurement
from autotune.spec.training_request import TrainingRequest
from autotune.storage.rows import measurement_from_values, measurement_values
from autotune.techniques.checkpointing import in_words, kept_by
from autotune.training.trainer import Trainer
from autotune.units import parse_size
from tests.techniques.families import FAMILIES, GLOBAL_BATCH, workload_of

PLAIN = TrainingConfig(micro_batch_size=GLOBAL_BATCH)
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def _predictions_are_kept_here(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def predicted(workload, config):
    request = PredictionRequest(workload=workload, config=config, device="cpu")
    found = run_in_fork(lambda: answers.predict(Predict(request=request)))
    return parse(Prediction, found)


def request_of(workload, config, folder, **settings):
    return TrainingRequest(
        workload=workload,
        config=config,
        folder=folder,
        device="cpu",
        cap_bytes=2**40,
        requested_at=time.monotonic(),
        **settings,
    )


class Within:
    """A family's training as it is, and within a budget in the middle of what is possible."""

    def __init__(self, family, folder, **choices):
        self.workload = workload_of(family, folder)
        self.folder = folder / family
        prepare(Prepare(workload=self.workload, folder=self.folder))
        self.plain = dataclasses.replace(PLAIN, **choices)
        self.whole = predicted(self.workload, self.plain)
        block = dataclasses.replace(self.plain, checkpointing="block")
        least = predicted(self.workload, block).peak_memory_bytes
        self.budget_bytes = (self.whole.peak_memory_bytes + least) // 2
        self.config = dataclasses.replace(self.plain, activation_budget=str(self.budget_bytes))
        self.prediction = predicted(self.workload, self.config)

    def trainer(self, config, **settings):
        return Trainer(request_of(self.workload, config, self.folder, **settings))

    def check(self):
        """Checks peak, losses and plan."""
        planned = answers._planned(request_of(self.workload, self.config, self.folder))
        assert planned.kept == self.prediction.kept
        assert any(kept != KeptOfBlock() for kept in planned.kept)
        trainers = [self.trainer(self.plain), self.trainer(self.config, kept=planned.kept)]
        losses = []
        for trainer in trainers:
            batches = trainer.batches()
            losses.append([trainer.step(step, next(batches)) for step in range(STEPS)])
        assert losses[0] == losses[1]
        measuring = self.trainer(self.config, kept=planned.kept)
        peak = measuring._measure_memory(measuring.batches()).peak_memory_bytes
        assert peak == self.prediction.peak_memory_bytes <= self.budget_bytes


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    return Within("gpt", tmp_path_factory.mktemp("gpt"))


def test_a_training_has_the_predicted_peak_within_the_budget_and_the_losses_without_it(gpt):
    gpt.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        {"feed_forward": "tiled", "micro_batch_size": 2},
        {"adapter": "lora", "adapter_kernels": "fused"},
        {"precision": "bf16-mixed", "loss": "chunked"},
        {"optimizer_fusion": "backward"},
    ],
    ids=str,
)
def test_the_same_with_techniques_beside_it(choices, tmp_path):
    Within("gpt", tmp_path, **choices).check()


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt"])
def test_the_same_for_every_family(family, tmp_path):
    within = Within(family, tmp_path)
    peak = within.prediction.peak_memory_bytes
    assert peak <= within.budget_bytes
    planned = within.trainer(within.config, kept=within.prediction.kept)
    plain = within.trainer(within.plain)
    losses = []
    for trainer in (planned, plain):
        batches = trainer.batches()
        losses.append([trainer.step(step, next(batches)) for step in range(STEPS)])
    assert losses[0] == losses[1]


def test_a_budget_for_everything_is_the_program_without_a_budget(gpt):
    enough = dataclasses.replace(gpt.plain, activation_budget="1TiB")
    prediction = predicted(gpt.workload, enough)
    assert set(prediction.kept) == {KeptOfBlock()}
    assert prediction.peak_memory_bytes == gpt.whole.peak_memory_bytes
    plans = [
        Forecast(config=config, prediction=found).plan
        for config, found in (
            (gpt.plain, gpt.whole),
            (enough, prediction),
            (gpt.config, gpt.prediction),
        )
    ]
    assert plans[0] == plans[1] != plans[2]


def test_a_budget_that_cannot_be_met_is_infeasible_and_names_the_least(gpt):
    config = dataclasses.replace(gpt.plain, activation_budget="1KiB")
    with pytest.raises(PredictionImpossible, match=r"of 1\.00 KiB is less than the") as error:
        predicted(gpt.workload, config)
    [least] = re.findall(r"than the (\S+ \S+) that", str(error.value))
    enough = dataclasses.replace(gpt.plain, activation_budget=str(parse_size(least)))
    assert predicted(gpt.workload, enough).peak_memory_bytes <= parse_size(least)
    too_small = BudgetTooSmall("a budget of 1.00 KiB is less than the 2.00 MiB")
    ended = measurement_of_exception(too_small, device_type="cpu")
    assert (ended.outcome, ended.message) == ("predicted_over_cap", too_small.message)


def test_the_least_budget_is_worked_out_once(gpt, monkeypatch):
    def predicted_within(budget):
        predicted(gpt.workload, dataclasses.replace(gpt.plain, activation_budget=budget))

    with pytest.raises(PredictionImpossible) as first:
        predicted_within("2KiB")

    def predicted_again(*_, **__):
        raise AssertionError("it was predicted again")

    monkeypatch.setattr(predict, "predict", predicted_again)
    with pytest.raises(PredictionImpossible) as second:
        predicted_within("3KiB")
    assert str(second.value) == str(first.value).replace("2.00 KiB", "3.00 KiB")


def test_two_blocks_keep_what_the_blocks_of_the_whole_model_do(gpt):
    shallow = dataclasses.replace(gpt.workload, layers=2)
    request = request_of(shallow, gpt.config, gpt.folder, planned_for=gpt.workload)
    kept = answers._planned(request).kept
    assert len(kept) == 2
    assert set(kept) <= set(gpt.prediction.kept)
    assert kept[0] != KeptOfBlock()


KEPT = (KeptOfBlock(), KeptOfBlock(operators=()), KeptOfBlock(recomputed_parts=("mlp",)))


@pytest.mark.parametrize("kept", [*KEPT, KeptOfBlock(operators=("aten.mm 0", "attention 1"))])
def test_a_plan_is_the_same_after_it_was_stored_and_in_an_exported_file(kept):
    assert in_words(kept_by(kept)) == kept
    assert eval(_kept(kept)) == kept_by(kept)
    stored = measurement_values(Measurement(outcome="ok", kept=(kept,)))
    assert measurement_from_values(stored).kept == (kept,)


# -- what keeps the results ------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        first = x @ self.weight
        second = torch.tanh(first) @ self.weight
        return (second.topk(2).values * first.sum()).exp()


KEPT_CALLS = frozenset({("aten.mm", 1), ("aten.topk", 0)})


def gradients(block):
    block.weight.grad = None
    x = torch.arange(9.0).reshape(3, 3).div(20).requires_grad_()
    block(x).sum().backward()
    return block.weight.grad, x.grad


def test_kept_results_give_the_same_gradients_as_everything():
    plain, ours = Block(), Block()
    recompute(ours, context_fn=contexts_keeping(KEPT_CALLS))
    for expected, found in zip(gradients(plain), gradients(ours), strict=True):
        assert torch.equal(expected, found)


def test_a_kept_result_is_not_computed_again():
    def region(x):
        return (x @ x) @ x

    def products(kept):
        x = torch.eye(3, requires_grad=True)
        contexts = getattr(contexts_keeping(frozenset(kept)), "in_eager")  # noqa: B009
        output = checkpoint(region, x, use_reentrant=False, context_fn=contexts)
        with torch.profiler.profile() as seen:
            output.sum().backward()
        return sum(event.count for event in seen.key_averages() if event.key == "aten::mm")

    assert products(()) == products({("aten.mm", 0)}) + 1


def test_a_kept_result_that_is_changed_in_place_is_an_error():
    block = Block()
    recompute(block, context_fn=contexts_keeping(frozenset({("aten.exp", 0)})))
    output = block(torch.ones(3, 3, requires_grad=True))
    with torch.no_grad():
        output.mul_(2)
    with pytest.raises(RuntimeError):
        output.sum().backward()
