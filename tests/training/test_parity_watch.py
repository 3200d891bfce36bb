"""Parity in the first steps of a real training: what is read, and that differences end it."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

from autotune.models.parts import ModelParts
from autotune.shipped.step_in_backward import step_in_backward
from autotune.spec.config import SEARCHED, LegalityContext, rule_violations
from autotune.spec.optimizers import OPTIMIZERS
from autotune.spec.parity import PARITY_STEPS, UPDATE_STEPS, largest_difference
from autotune.training.parity import ParityFailed, ParityWatch, UpdateWatch, _averages_of_weights
from autotune.training.step import Diverged
from tests.conftest import GLOBAL_BATCH


def watched(trainer, *, reference=None):
    """The trainer with its first steps watched as for a comparison."""
    trainer.parity = ParityWatch(
        trainer.training.parameters_by_block,
        device=torch.device("cpu"),
        precision="fp32",
        reference=reference,
        is_trace=True,
        updater=trainer.training.updater,
        micro_batches=trainer._workload.global_batch // trainer._config.micro_batch_size,
        sums_in_fp32=trainer._config.gradient_accumulation_dtype == "fp32",
    )
    return trainer


def trace_of(trainer, *, reference=None):
    watched(trainer, reference=reference)
    batches = trainer.batches()
    for step in range(PARITY_STEPS):
        trainer.take_step(step, next(batches))
    return trainer.parity.trace()


@pytest.mark.slow
@pytest.mark.parametrize("fusion", SEARCHED["optimizer_fusion"])
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=[pytest.mark.slow] * facts.compiles_update)
        for name, facts in OPTIMIZERS.items()
    ],
)
def test_gradients_of_every_block_are_read_with_every_kind_of_update(
    fusion, optimizer, make_trainer, workload
):
    if rule_violations(
        {"optimizer": optimizer, "optimizer_fusion": fusion}, LegalityContext(global_batch=1)
    ):
        pytest.skip("an illegal configuration")
    plain = trace_of(make_trainer()).gradient_norms
    norms = trace_of(make_trainer(optimizer=optimizer, optimizer_fusion=fusion)).gradient_norms
    assert set(norms) == {f"block {index}" for index in range(workload.layers)} | {"rest"}
    assert norms == pytest.approx(plain, rel=1e-5)


def test_a_loss_scale_is_no_part_of_a_gradient_norm(make_trainer):
    plain = trace_of(make_trainer()).gradient_norms
    for fusion in ("none", "kernel"):
        norms = trace_of(
            make_trainer(precision="fp16-mixed", optimizer_fusion=fusion)
        ).gradient_norms
        assert norms == pytest.approx(plain, rel=0.02)


def test_gradients_accumulate_before_their_norm_is_taken(make_trainer):
    plain = trace_of(make_trainer()).gradient_norms
    assert trace_of(make_trainer(micro_batch_size=1)).gradient_norms == pytest.approx(
        plain, rel=1e-5
    )


def test_the_norm_is_that_of_the_gradient_itself(make_trainer):
    trainer = make_trainer()
    batch = next(trainer.batches())
    trainer.training.updater.step = lambda: None  # leaves the gradients for this test to read
    trainer.step(0, batch)
    block = trainer.training.parameters_by_block["block 2"]
    expected = math.sqrt(sum(p.grad.square().sum().item() for p in block))
    assert trace_of(make_trainer()).gradient_norms["block 2"] == pytest.approx(expected, rel=1e-6)


def test_a_model_without_dropout_draws_no_random_numbers(make_trainer):
    assert not trace_of(make_trainer(checkpointing="block")).draws_random_numbers


def test_drawing_random_numbers_is_detected():
    watch = ParityWatch(
        {}, device=torch.device("cpu"), precision="fp32", reference=None, is_trace=True
    )
    with watch.step():
        torch.rand(1)
    assert watch.trace().draws_random_numbers


def test_a_different_training_is_stopped_with_the_step_and_the_difference(make_trainer):
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
            {"rest": [parameter]},
            device=torch.device("cpu"),
            precision="fp32",
            reference=None,
            is_trace=True,
        )
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        parameter.grad = gradient
        with watch.step():
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


def sketch_of_one_step(model, optimizer, run):
    watch = ParityWatch(
        {"rest": model.parameters()},
        device=torch.device("cpu"),
        precision="fp32",
        reference=None,
        is_trace=True,
    )
    with watch.step():
        run(optimizer)
    return watch.trace()


def test_rows_of_a_sparse_gradient_are_compared():
    embedding = torch.nn.Embedding(4, 2, sparse=True)

    def sketch(rows, factor=1.0):
        def run(optimizer):
            (factor * embedding(torch.tensor(rows)).square()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.0)
        return sketch_of_one_step(embedding, optimizer, run)

    whole = sketch([1, 3, 1])
    assert whole.gradient_difference(sketch([1, 1, 3]), "rest") == pytest.approx(0.0, abs=1e-6)
    assert whole.gradient_difference(sketch([1, 3, 1], factor=1.5), "rest") > 0.1


def test_gradients_that_a_closure_computes_are_read():
    model = torch.nn.Linear(4, 4)

    def run(optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0

    plain = sketch_of_one_step(model, torch.optim.SGD(model.parameters(), lr=0.0), run)
    assert plain.gradient_norms["rest"] > 0
    in_it = sketch_of_one_step(model, in_backward(model.parameters(), lr=0.01), run)
    assert in_it.gradient_norms == pytest.approx(plain.gradient_norms)


def test_with_a_loss_scale_that_has_come_down_to_0_no_gradient_is_a_number():
    model = torch.nn.Linear(4, 4)

    def run(optimizer):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(0.0), torch.tensor(1.0)
        (0.0 * model(torch.ones(2, 4)).square().sum()).backward()
        optimizer.step()

    fused = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    trace = sketch_of_one_step(model, fused, run)
    assert math.isnan(trace.gradient_norms["rest"])


def test_an_optimizer_that_lets_another_one_update_is_read_once_and_accepted():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, params):
            self.inner = torch.optim.AdamW(params, lr=0.0)
            super().__init__(self.inner.param_groups, {})

        def step(self, closure=None):
            self.state[self.param_groups[0]["params"][0]]["own"] = 1
            self.inner.step()

    model = torch.nn.Linear(4, 4)

    def run(optimizer):
        model.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()

    plain = sketch_of_one_step(model, torch.optim.SGD(model.parameters(), lr=0.0), run)
    wrapper = Wrapper(model.parameters())
    assert sketch_of_one_step(model, wrapper, run).gradient_norms == plain.gradient_norms
    watch = UpdateWatch(wrapper)
    with watch.step(1):
        run(wrapper)
    assert watch.error == ""


def test_the_rates_of_every_optimizer_are_compared():
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizers = [in_backward(one.parameters(), lr=0.01), in_backward(other.parameters(), lr=0.02)]
    watch = UpdateWatch(*optimizers)
    with watch.step(1):
        other(one(torch.ones(2, 4))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert watch.error == ""
    with watch.step(2):
        other(one(torch.ones(2, 4))).sum().backward()
        optimizers[1].param_groups[0]["lr"] = 0.005
        for optimizer in optimizers:
            optimizer.step()
    assert "used a learning rate of 0.02, and its parameter group has 0.005" in watch.error


# -- what the first steps change -------------------------------------------------------------------


def statistics_of(forwards_in_a_step, *, steps=PARITY_STEPS):
    """The trace of a BatchNorm whose forward runs so often in each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    parts = ModelParts(model=model)
    watch = ParityWatch(
        parts.parameters_by_block(),
        device=torch.device("cpu"),
        precision="fp32",
        reference=None,
        is_trace=True,
        buffers=parts.buffers(),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch.follow(optimizer)
    inputs = torch.randn(8, 4)
    for _ in range(steps):
        with watch.step():
            for _ in range(forwards_in_a_step):
                loss = model(inputs).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        watch.note(loss.item())
    return watch.trace()


def test_buffers_that_forward_updates_twice_are_another_training():
    once, twice = statistics_of(1), statistics_of(2)
    assert once.losses == twice.losses
    assert set(once.buffer_projections) == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    found = largest_difference(twice, once, precision="fp32")
    assert found.is_outside
    assert found.message.startswith("the change of buffer 1.")


def test_a_tensor_in_a_plain_attribute_is_read_as_a_buffer():
    class Counts(torch.nn.Linear):
        seen = None

        def forward(self, inputs):
            self.seen = self.seen + inputs.sum()
            return super().forward(inputs)

    model = Counts(2, 2)
    model.seen = torch.zeros(())
    parts = ModelParts(model=model)
    watch = ParityWatch(
        parts.parameters_by_block(),
        device=torch.device("cpu"),
        precision="fp32",
        reference=None,
        is_trace=True,
        buffers=parts.buffers(),
    )
    for _ in range(UPDATE_STEPS):
        with watch.step():
            model(torch.ones(2))
    assert set(watch.trace().buffer_projections) == {"seen"}


def test_the_norm_that_backward_leaves_is_that_before_clipping(make_trainer):
    plain = trace_of(make_trainer())
    trainer = make_trainer()
    trainer.training.updater._gradient_clipping = 0.01
    clipped = trace_of(trainer)
    assert clipped.backward_norms == pytest.approx(plain.backward_norms, rel=1e-5)
    assert math.hypot(*clipped.gradient_norms.values()) == pytest.approx(0.01, rel=1e-3)


def test_the_projections_of_an_update_are_those_of_the_difference_of_weights():
    parameter = torch.nn.Parameter(torch.randn(70_000))
    watch = ParityWatch(
        {"rest": [parameter]},
        device=torch.device("cpu"),
        precision="fp32",
        reference=None,
        is_trace=True,
    )
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    for _ in range(UPDATE_STEPS):
        with watch.step():
            parameter.grad = torch.ones(70_000)
            optimizer.step()
    update = watch.trace().update_projections["rest"]
    gradient = watch.trace().gradient_projections["rest"]
    assert update == pytest.approx([-2e-3 * value for value in gradient], abs=1e-3)
    assert watch.trace().corrections == {}


def test_each_number_of_every_optimizer_is_noted_at_each_update():
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizers = [
        torch.optim.AdamW(one.parameters(), lr=0.1, betas=(0.8, 0.9)),
        torch.optim.SGD(other.parameters(), lr=0.2),
    ]
    watch = ParityWatch(
        {}, device=torch.device("cpu"), precision="fp32", reference=None, is_trace=True
    )
    watch.follow(*optimizers)
    for _ in range(PARITY_STEPS + 1):
        with watch.step():
            for optimizer in optimizers:
                optimizer.step()
            optimizers[1].param_groups[0]["lr"] /= 2
    settings = watch.trace().group_settings
    assert settings["betas[1] of group 0"] == (0.9,) * PARITY_STEPS
    assert settings["lr of group 1"] == (0.2, 0.1, 0.05)


def test_nothing_is_read_after_the_first_steps():
    """Memory is measured in the steps after them."""
    model = torch.nn.Linear(2, 2)
    watch = ParityWatch(
        {"rest": model.parameters()},
        device=torch.device("cpu"),
        precision="fp32",
        reference=None,
        is_trace=True,
    )
    seconds = []
    for _ in range(PARITY_STEPS):
        with watch.step():
            model(torch.ones(2)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        seconds.append(watch.seconds)
    assert seconds[UPDATE_STEPS - 1] == seconds[-1] > seconds[0]


# -- the learning rates and the state that updates use ---------------------------------------------


class KeepsItsOwnGroups(torch.optim.AdamW):
    """Steps in backward with separate groups and state, ignoring those that the loop changes."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, **settings)
        self.own = torch.optim.AdamW(self.param_groups[0]["params"], **settings)
        for parameter in self.param_groups[0]["params"]:
            parameter.register_post_accumulate_grad_hook(self.update)

    def update(self, parameter):
        own = torch.optim.AdamW([parameter], lr=self.own.param_groups[0]["lr"])
        own.state = self.own.state
        own.step()
        parameter.grad = None
        self.state[parameter] = own.state[parameter]

    def step(self, closure=None):
        pass


def losses_watched(optimizer_class, *, rates=(), steps, change=lambda optimizer: None):
    """Trains with an UpdateWatch; `rates` are (step from 1, rate) to set before its backward."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    watch = ParityWatch({}, device=torch.device("cpu"), precision="fp32", reference=None)
    watch.follow(optimizer)
    change(optimizer)
    for step in range(1, steps + 1):
        for at, rate in rates:
            if at == step:
                optimizer.param_groups[0]["lr"] = rate
        with watch.step():
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        watch.note(loss.item())


def in_backward(parameters, **settings):
    return step_in_backward(torch.optim.AdamW(parameters, **settings))


@pytest.mark.parametrize("changed_at", [2, 20])
def test_an_update_that_ignores_a_changed_learning_rate_is_detected(changed_at):
    with pytest.raises(
        ParityFailed, match=r"used a learning rate of 0\.01, and its parameter group has 0\.005"
    ):
        losses_watched(KeepsItsOwnGroups, rates=[(changed_at, 0.005)], steps=21)


def test_an_update_that_ignores_a_loaded_state_is_detected():
    def load(optimizer):
        state = {
            index: {
                "step": torch.tensor(9.0),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.ones_like(p),
            }
            for index, p in enumerate(optimizer.param_groups[0]["params"])
        }
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    with pytest.raises(ParityFailed, match="used another state than that of the optimizer"):
        losses_watched(KeepsItsOwnGroups, steps=1, change=load)


@pytest.mark.parametrize("optimizer_class", [in_backward, torch.optim.AdamW])
def test_updates_that_follow_their_groups_are_accepted(optimizer_class):
    losses_watched(optimizer_class, rates=[(2, 0.005), (20, 0.001)], steps=21)


def test_a_learning_rate_that_is_set_only_after_the_backward_pass_is_detected():
    model = torch.nn.Linear(4, 4)
    optimizer = in_backward(model.parameters(), lr=0.01)
    watch = ParityWatch({}, device=torch.device("cpu"), precision="fp32", reference=None)
    watch.follow(optimizer)
    with watch.step():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.param_groups[0]["lr"] = 0.005
        optimizer.step()
    with pytest.raises(ParityFailed, match=r"an update of step 1 used a learning rate of 0\.01"):
        watch.note(1.0)


def test_several_updates_in_one_reported_step_are_each_compared_with_the_rate_of_their_time():
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizer = in_backward([*one.parameters(), *other.parameters()], lr=0.01)
    watch = ParityWatch({}, device=torch.device("cpu"), precision="fp32", reference=None)
    watch.follow(optimizer)
    with watch.step():
        for model, rate in ((one, 0.01), (other, 0.005)):
            optimizer.param_groups[0]["lr"] = rate
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    watch.note(1.0)


def test_steps_are_checked_only_until_a_changed_rate_was_detected():
    """A hook on every update of a long training would make its steps slower."""
    before = len(_global_optimizer_pre_hooks)
    model = torch.nn.Linear(4, 4)
    optimizer = in_backward(model.parameters(), lr=0.01)
    watch = UpdateWatch(optimizer)
    hooks = []
    for step in range(1, 8):
        optimizer.param_groups[0]["lr"] = 0.01 if step < 6 else 0.005
        with watch.step(step):
            hooks.append(len(_global_optimizer_pre_hooks) - before)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert hooks == [1, 1, 1, 0, 0, 1, 0]


def test_a_loss_that_only_this_configuration_makes_nan_is_another_training(make_trainer):
    reference = trace_of(make_trainer())
    trainer = watched(make_trainer(), reference=reference)
    with torch.no_grad():
        next(trainer.training.parts.model.parameters()).fill_(math.nan)
    with pytest.raises(ParityFailed, match=r"the loss of step 1 is nan for 5\.5"):
        trainer.take_step(0, next(trainer.batches()))


def test_a_loss_that_plain_training_makes_nan_as_well_has_diverged(make_trainer):
    trainer = watched(make_trainer())
    with torch.no_grad():
        next(trainer.training.parts.model.parameters()).fill_(math.nan)
    with pytest.raises(Diverged, match="the loss became nan at step 1"):
        trainer.take_step(0, next(trainer.batches()))


# -- gradients of micro batches --------------------------------------------------------------------

SUMS = {"micro_batch_size": 1}


def with_backward(trainer, change):
    """The trainer whose backward passes get `change(number, loss)`; None is none."""
    updater, number = trainer.training.updater, itertools.count()
    plain = updater.backward

    def backward(loss):
        changed = change(next(number) % GLOBAL_BATCH, loss)
        if changed is not None:
            plain(changed)

    updater.backward = backward
    return trainer


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
@pytest.mark.parametrize("lost", range(GLOBAL_BATCH))
def test_a_micro_batch_without_a_backward_pass_is_detected(precision, lost, make_trainer):
    trainer = with_backward(
        make_trainer(precision=precision, **SUMS),
        lambda number, loss: None if number == lost else loss,
    )
    with pytest.raises(ParityFailed, match="added to the gradients 3 times in a step of 4"):
        trace_of(trainer)


def test_a_micro_batch_that_counts_twice_is_detected_among_many(make_trainer):
    sums = {"precision": "bf16-true", **SUMS}
    plain = trace_of(make_trainer(**sums))
    twice = trace_of(
        with_backward(make_trainer(**sums), lambda number, loss: loss * (2 if number == 1 else 1))
    )
    many = replace(plain, gradient_norms={}, backward_norms={})  # which one hardly changes
    found = largest_difference(twice, many, precision="bf16-true")
    assert found.is_outside
    assert "the gradient of part 2 of 4 of the micro batches is 1e+02 % off" in found.message


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-true", "fp16-mixed"])
@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_are_compared_with_the_smaller_ones_that_they_are_made_of(
    precision, size, make_trainer
):
    plain = trace_of(make_trainer(precision=precision, **SUMS))
    trace = trace_of(make_trainer(precision=precision, micro_batch_size=size))
    assert len(plain.added_projections) == GLOBAL_BATCH
    assert len(trace.added_projections) == GLOBAL_BATCH // size
    found = largest_difference(trace, plain, precision=precision, strictness=4)
    assert not found.is_outside, found.message


def rounding_sums(trainer):
    """The trainer whose gradients are rounded to bf16 after each micro batch."""

    def round_sum(weight):
        weight.grad.copy_(weight.grad.bfloat16())

    for parameter in trainer.training.parts.model.parameters():
        parameter.register_post_accumulate_grad_hook(round_sum)
    return trainer


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true", "gradient_accumulation_dtype": "fp32"},
    ],
)
def test_sums_in_fewer_bits_than_they_should_have_are_detected(choices, make_trainer):
    trace_of(make_trainer(**SUMS, **choices))
    with pytest.raises(ParityFailed, match="by more than a sum in fp32 does"):
        trace_of(rounding_sums(make_trainer(**SUMS, **choices)))


class LossOf:
    """The updater of a training of tensors without an optimizer."""

    def backward(self, loss):
        loss.backward()


MICRO_BATCHES = 4


def sums_of(weights, losses, *, micro_batches=MICRO_BATCHES, passes=1):
    """The trace of a step whose micro batches have these losses; raises ParityFailed."""
    updater = LossOf()
    watch = ParityWatch(
        {"rest": weights},
        device=torch.device("cpu"),
        precision="fp32",
        reference=None,
        is_trace=True,
        updater=updater,
        micro_batches=micro_batches,
    )
    with watch.step():
        for _ in range(passes):
            for loss in losses:
                updater.backward(loss())
    assert vars(updater) == {}
    watch.note(1.0)
    for weight in weights:
        weight.grad = None
    return watch.trace().added_projections


def weights_of(number):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(9)) for _ in range(number)]


def test_weights_that_no_loss_reaches_are_not_looked_at():
    *unused, head = weights_of(9)
    losses = [lambda index=index: (index * head).sum() for index in range(1, MICRO_BATCHES + 1)]
    added = sums_of([*unused, head], losses)
    assert len(added) == MICRO_BATCHES
    assert added[1] == pytest.approx([2 * value for value in added[0]])


def test_where_nothing_of_the_sample_is_reached_nothing_is_judged():
    unused = weights_of(1)
    assert sums_of(unused, [lambda: torch.ones((), requires_grad=True) * 2] * MICRO_BATCHES) == ()


def test_the_same_weights_are_looked_at_whichever_of_them_is_reached_first():
    first, *others = weights_of(9)

    def of_text():
        return sum(weight.square().sum() for weight in others)

    def of_image():
        return of_text() + first.square().sum()

    small = sums_of([first, *others], [of_text, of_image] * 2)
    whole = sums_of([first, *others], [lambda: of_text() + of_image()] * 2, micro_batches=2)
    for added, *parts in zip(whole, small[::2], small[1::2], strict=True):
        assert added == pytest.approx([sum(pair) for pair in zip(*parts, strict=True)])


def test_a_sample_that_some_micro_batches_do_not_reach_is_judged_by_what_they_reach():
    first, other = weights_of(2)
    losses = [first.sum, other.sum, first.sum, other.sum]
    assert len(sums_of([first, other], losses)) == MICRO_BATCHES


class BackwardWithin(torch.autograd.Function):
    """Adds to the gradient of a weight in a backward pass of its own, as reentrant checkpoints."""

    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.weight = weight
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.weight.sum().backward()
        return gradient, None


class BackwardInForward(torch.autograd.Function):
    """Adds to the gradient of a weight in its forward pass, as some losses do."""

    @staticmethod
    def forward(ctx, inputs, weight):
        with torch.enable_grad():
            weight.sum().backward()
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.parametrize("function", [BackwardWithin, BackwardInForward])
def test_several_additions_in_one_backward_pass_are_one_micro_batch(function):
    (weight,) = weights_of(1)
    added = sums_of([weight], [lambda: function.apply(weight, weight).sum()] * MICRO_BATCHES)
    once = sums_of([weight], [weight.sum] * MICRO_BATCHES)
    assert added == tuple(tuple(2 * value for value in one) for one in once)


def test_a_tied_embedding_whose_logits_a_reentrant_checkpoint_computes_is_accepted():
    embedding = torch.nn.Embedding(5, 3)

    def loss():
        hidden = embedding(torch.tensor([1, 2]))
        logits = checkpoint(lambda inputs: inputs @ embedding.weight.T, hidden, use_reentrant=True)
        return logits.square().sum()

    assert len(sums_of([embedding.weight], [loss] * MICRO_BATCHES)) == MICRO_BATCHES


def test_backward_passes_that_run_twice_are_detected():
    (weight,) = weights_of(1)
    with pytest.raises(ParityFailed, match="added to the gradients 8 times in a step of 4"):
        sums_of([weight], [weight.sum] * MICRO_BATCHES, passes=2)


def test_of_many_micro_batches_some_are_read_together():
    (weight,) = weights_of(1)
    losses = [lambda index=index: (index * weight).sum() for index in range(96)]
    added = sums_of([weight], losses, micro_batches=96)
    thirds = sums_of([weight], losses[:48], micro_batches=48)
    assert (len(added), len(thirds)) == (32, 24)
    assert added[1] == pytest.approx([4 * value for value in added[0]])  # 3 + 4 + 5, 0 + 1 + 2


def test_averages_of_the_weights_are_those_tensors_of_their_form_that_nobody_else_keeps():
    weight = torch.nn.Parameter(torch.ones(11, 13))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    average = weight.detach().clone()
    _, *found = _averages_of_weights([weight], [optimizer])
    assert [tensor.data_ptr() for _, _, tensor in found] == [average.data_ptr()]
