"""What the first steps of a real training say of it, and that a training which is another one is stopped."""

import math

import pytest
import torch

from autotune.config import CHOICES, broken_rules
from autotune.parity import PARITY_STEPS
from autotune.parity_watch import ParityFailed, ParityWatch


def watched(trainer, *, reference=None):
    """The trainer with its first steps watched as for a comparison."""
    trainer.parity = ParityWatch(
        trainer.training.parameters_by_block,
        device=torch.device("cpu"),
        precision="fp32",
        reference=reference,
        is_trace=True,
    )
    return trainer


def trace_of(trainer, *, reference=None):
    watched(trainer, reference=reference)
    batches = trainer.batches()
    for step in range(PARITY_STEPS):
        trainer.take_step(step, next(batches))
    return trainer.parity.trace()


@pytest.mark.parametrize("fusion", CHOICES["optimizer_fusion"])
@pytest.mark.parametrize("optimizer", CHOICES["optimizer"])
def test_however_it_updates_the_gradients_are_those_of_every_block(fusion, optimizer, make_trainer, workload):
    if broken_rules({"optimizer": optimizer, "optimizer_fusion": fusion}, global_batch=1):
        pytest.skip("an illegal configuration")
    plain = trace_of(make_trainer()).gradient_norms
    norms = trace_of(make_trainer(optimizer=optimizer, optimizer_fusion=fusion)).gradient_norms
    assert set(norms) == {f"block {index}" for index in range(workload.layers)} | {"rest"}
    assert norms == pytest.approx(plain, rel=1e-5)


def test_a_loss_scale_is_no_part_of_a_gradient_norm(make_trainer):
    plain = trace_of(make_trainer()).gradient_norms
    for fusion in ("none", "kernel"):
        norms = trace_of(make_trainer(precision="fp16-mixed", optimizer_fusion=fusion)).gradient_norms
        assert norms == pytest.approx(plain, rel=0.02)


def test_gradients_accumulate_before_their_norm_is_taken(make_trainer):
    plain = trace_of(make_trainer()).gradient_norms
    assert trace_of(make_trainer(micro_batch_size=1)).gradient_norms == pytest.approx(plain, rel=1e-5)


def test_the_norm_is_that_of_the_gradient_itself(make_trainer):
    trainer = make_trainer()
    batch = next(trainer.batches())
    trainer.training.updater.step = lambda: None  # leaves the gradients for us to read
    trainer.step(0, batch)
    block = trainer.training.parameters_by_block["block 2"]
    expected = math.sqrt(sum(p.grad.square().sum().item() for p in block))
    assert trace_of(make_trainer()).gradient_norms["block 2"] == pytest.approx(expected, rel=1e-6)


def test_a_model_without_dropout_draws_no_random_numbers(make_trainer):
    assert not trace_of(make_trainer(checkpointing="block")).draws_random_numbers


def test_drawing_random_numbers_is_seen():
    watch = ParityWatch({}, device=torch.device("cpu"), precision="fp32", reference=None, is_trace=True)
    with watch.first_step():
        torch.rand(1)
    assert watch.trace().draws_random_numbers


def test_a_training_that_is_another_one_is_stopped_with_the_step_and_the_difference(make_trainer):
    reference = trace_of(make_trainer())
    trainer = make_trainer()
    torch.nn.init.zeros_(trainer.training.parts.head.weight)
    with pytest.raises(ParityFailed, match=r"of step \d|at step 1"):
        trace_of(trainer, reference=reference)


def test_projections_estimate_how_far_two_gradients_are_apart():
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(70_000))  # more than one piece

    def sketch(gradient):
        watch = ParityWatch(
            {"rest": [parameter]}, device=torch.device("cpu"), precision="fp32", reference=None, is_trace=True
        )
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        parameter.grad = gradient
        with watch.first_step():
            optimizer.step()
        return watch.trace()

    gradient, error = torch.randn(70_000), torch.randn(70_000)
    found = sketch(gradient + 0.1 * error).gradient_difference(sketch(gradient), "rest")
    assert found == pytest.approx(0.1, rel=0.5)
    assert sketch(gradient).gradient_difference(sketch(gradient), "rest") == 0.0


def test_where_nothing_is_compared_no_gradient_is_read(make_trainer):
    trainer = make_trainer()
    trainer.take_step(0, next(trainer.batches()))
    assert trainer.parity.trace().gradient_norms == {}


def test_a_sparse_gradient_is_left_out():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    watch = ParityWatch(
        {"rest": embedding.parameters()}, device=torch.device("cpu"), precision="fp32", reference=None, is_trace=True
    )
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    with watch.first_step():
        optimizer.step()
    assert watch.trace().gradient_norms == {}
