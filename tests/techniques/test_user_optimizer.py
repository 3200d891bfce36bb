"""A script's optimizers stay what they are, whichever way of updating is applied to them."""

import io
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import autotune
from autotune.errors import IllegalConfiguration, InvalidInput
from autotune.spec.config import CHOICES, SEARCHED, TrainingConfig
from autotune.techniques.optimizer import make_optimizer
from autotune.techniques.user_optimizer import check_fusion, held_optimizers, set_fusion
from autotune.techniques.user_training import apply_to_user_training, missing_in_user_model

FUSIONS = CHOICES["optimizer_fusion"]
FLAGS = {"foreach": "foreach", "kernel": "fused"}


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, as scripts write it: it lets another optimizer update."""

    def __init__(self, params, base, rho=0.05, **settings):
        super().__init__(params, {"rho": rho, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.base_optimizer.step()


class FillsItsState(torch.optim.Optimizer):
    """Has state before its first step, and arguments that are no settings of its groups."""

    def __init__(self, params, lr, factor):
        super().__init__(params, {"lr": lr})
        self.factor = factor
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["first"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * self.factor * parameter.grad)
                    parameter.lerp_(self.state[parameter]["first"], 0.1)


def of_torch():
    """Every optimizer of torch.optim, with a learning rate at which its steps show."""
    for name, kind in vars(torch.optim).items():
        is_optimizer = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if is_optimizer and kind is not torch.optim.Optimizer and name != "SparseAdam":
            settings = {"max_iter": 2} if name == "LBFGS" else {}  # it calls the closure so often
            yield pytest.param(
                lambda params, kind=kind, settings=settings: kind(params, lr=0.01, **settings),
                id=name,
            )


def of_bitsandbytes(name, **settings):
    def make(params):
        import bitsandbytes  # takes seconds

        return getattr(bitsandbytes.optim, name)(params, lr=0.01, **settings)

    missing = find_spec("bitsandbytes") is None
    return pytest.param(
        make,
        id=" ".join(["bitsandbytes", name, *map(str, settings)]),
        marks=pytest.mark.skipif(missing, reason="bitsandbytes is missing"),
    )


OPTIMIZERS = [
    *of_torch(),
    pytest.param(
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True), id="SGD, fused"
    ),
    pytest.param(
        lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True, foreach=True),
        id="AdamW, foreach",
    ),
    pytest.param(
        lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)), id="AdamW, tensor as rate"
    ),
    pytest.param(lambda params: SAM(params, torch.optim.AdamW, lr=0.01), id="SAM"),
    pytest.param(lambda params: FillsItsState(params, lr=0.1, factor=3.0), id="state at once"),
    of_bitsandbytes("AdamW8bit"),
    of_bitsandbytes("PagedAdamW8bit"),
    of_bitsandbytes("AdamW", optim_bits=8),
    of_bitsandbytes("AdamW", is_paged=True),
    of_bitsandbytes("Lion", optim_bits=8),
]


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 4, bias=False))


def train(model, optimizer, *, steps=3, schedule=None):
    inputs = torch.linspace(-1, 1, 4 * 64).view(4, 64)

    def closure():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        if type(optimizer).__name__ == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if schedule is not None:
            schedule.step()


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def state_bytes(optimizer):
    tensors = []
    for part in (optimizer, *held_optimizers(optimizer)):
        for state in part.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_supported(optimizer, fusion):
    try:
        check_fusion([optimizer], fusion)
    except IllegalConfiguration:
        return False
    return True


def own_attributes(optimizer):
    """Everything but what the step in backward adds, the flags, and what holds the groups."""
    added = {"_single", "_group_index", "param_groups", "defaults", "_step_supports_amp_scaling"}
    added |= {"_zero_grad_profile_name"}
    hooks = {name for name in vars(optimizer) if name.endswith("_hooks")}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in added | hooks and name != "state"
    }


def settings(optimizer):
    """The settings of its groups and the defaults of later ones, without the two flags."""
    flags = set(FLAGS.values())
    return [
        {name: value for name, value in group.items() if name not in flags}
        for group in (*optimizer.param_groups, optimizer.defaults)
    ]


@pytest.fixture(params=OPTIMIZERS)
def make(request):
    return request.param


@pytest.mark.parametrize("fusion", SEARCHED["optimizer_fusion"])
def test_the_optimizer_stays_the_object_that_it_is(make, fusion):
    """Its class, attributes and settings; a GradScaler's attribute goes with its fused kernel."""
    optimizer = make(small_model().parameters())
    if not is_supported(optimizer, fusion):
        assert fusion != "none"
        return
    kind, attributes, before = type(optimizer), own_attributes(optimizer), settings(optimizer)
    set_fusion([optimizer], fusion)
    assert isinstance(optimizer, kind)
    assert own_attributes(optimizer) == attributes
    assert settings(optimizer) == before
    for part in (optimizer, *held_optimizers(optimizer)):
        for group in (*part.param_groups, part.defaults):
            for value, flag in FLAGS.items():
                assert group.get(flag, False) in (fusion == value, False)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_every_way_of_updating_takes_the_plain_steps_with_the_plain_state(make, fusion):
    plain, model = small_model(), small_model()
    by_hand = make(plain.parameters())
    optimizer = make(model.parameters())
    if not is_supported(optimizer, fusion):
        return
    set_fusion([optimizer], fusion)
    train(plain, by_hand)
    train(model, optimizer)
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)
    assert state_bytes(optimizer) == state_bytes(by_hand)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_hooks_run_once_a_step_and_schedules_of_any_time_change_the_rate(make, fusion):
    def trained(change, *, schedules_before):
        model = small_model()
        optimizer = make(model.parameters())
        called = []

        def clamp(*_):
            called.append("post")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.05, 0.05)

        def make_schedule():
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

        optimizer.register_step_post_hook(clamp)
        schedule = make_schedule() if schedules_before else None
        change(optimizer)
        schedule = schedule or make_schedule()
        train(model, optimizer, schedule=schedule)
        assert called == ["post"] * 3
        assert float(schedule.get_last_lr()[0]) < 0.1
        return weights(model)

    if not is_supported(make(small_model().parameters()), fusion):
        return
    plain = trained(lambda optimizer: None, schedules_before=True)
    for schedules_before in (True, False):
        changed = trained(
            lambda optimizer: set_fusion([optimizer], fusion), schedules_before=schedules_before
        )
        torch.testing.assert_close(changed, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_checkpoints_load_in_both_directions_and_keep_the_way_of_updating(make, fusion):
    if not is_supported(make(small_model().parameters()), fusion):
        return

    def change(optimizer):
        set_fusion([optimizer], fusion)

    def leave(optimizer):
        pass

    whole = small_model()
    train(whole, make(whole.parameters()), steps=4)
    for saved_by, loaded_by in ((change, leave), (leave, change)):
        first, second = small_model(), small_model()
        optimizer = make(first.parameters())
        saved_by(optimizer)
        train(first, optimizer, steps=2)
        file = io.BytesIO()
        torch.save([first.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        model_state, state = torch.load(file, weights_only=False)
        second.load_state_dict(model_state)
        resumed = make(second.parameters())
        loaded_by(resumed)
        groups = (held_optimizers(resumed) or [resumed])[0].param_groups
        flags = [group.get(FLAGS.get(fusion)) for group in groups]
        resumed.load_state_dict(state)
        train(second, resumed, steps=2)
        if not isinstance(resumed, SAM):  # whose own checkpoint lacks the state of the other one
            torch.testing.assert_close(weights(second), weights(whole), rtol=1e-4, atol=1e-6)
        if loaded_by is change:
            groups = (held_optimizers(resumed) or [resumed])[0].param_groups
            assert [group.get(FLAGS.get(fusion)) for group in groups] == flags


# -- several optimizers, and sparse gradients ------------------------------------------------------


def muon_and_adam(model):
    return [
        torch.optim.Muon(model[0].parameters(), lr=0.1),
        torch.optim.AdamW(model[2].parameters(), lr=0.01),
    ]


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("fusion", SEARCHED["optimizer_fusion"])
def test_several_optimizers_are_applied_together(kind, fusion):
    plain, model = small_model(), small_model()
    by_hand, optimizers = muon_and_adam(plain), kind(muon_and_adam(model))
    applied, returned = autotune.apply(
        model, optimizers, config=TrainingConfig(optimizer_fusion=fusion)
    )
    assert applied is model
    assert returned is optimizers
    for trained, several in ((plain, by_hand), (model, returned)):
        for _ in range(3):
            trained(torch.ones(2, 64)).square().mean().backward()
            for optimizer in several:
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)
    flags = (returned[1].param_groups[0]["foreach"], returned[1].param_groups[0]["fused"])
    assert flags == (fusion == "foreach", fusion == "kernel")


def test_one_of_several_that_cannot_step_in_backward_is_named():
    model = small_model()
    lbfgs = torch.optim.LBFGS(model[0].parameters())
    adam = torch.optim.AdamW(model[2].parameters())
    with pytest.raises(IllegalConfiguration, match="LBFGS cannot step in the backward pass"):
        set_fusion([adam, lbfgs], "backward")
    assert type(adam) is torch.optim.AdamW


@pytest.mark.parametrize("optimizers", [[], "adamw", {"adam": None}, [None]], ids=repr)
def test_what_is_no_optimizer_is_rejected(optimizers):
    with pytest.raises(InvalidInput, match=r"autotune\.apply (needs|was given)"):
        autotune.apply(small_model(), optimizers, config=TrainingConfig())


def test_a_second_call_changes_only_the_other_optimizer():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = TrainingConfig(precision="bf16-mixed", optimizer_fusion="foreach")
    first, second = (torch.optim.AdamW(part.parameters()) for part in model)
    autotune.apply(model, first, config=config)
    kind = type(model)
    autotune.apply(model, second, config=config)
    assert type(model) is kind
    assert second.param_groups[0]["foreach"]
    with pytest.raises(IllegalConfiguration, match="already has another configuration"):
        autotune.apply(model, second, config=TrainingConfig())


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "SparseAdam"])
@pytest.mark.filterwarnings("ignore:the configuration was measured")
def test_sparse_gradients_are_updated_as_plainly_or_rejected_with_the_reason(name, fusion):
    def trained(change):
        torch.manual_seed(0)
        model = nn.EmbeddingBag(20, 4, sparse=True, mode="sum")
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        change(model, optimizer)
        for _ in range(3):
            model(torch.tensor([[1, 2, 2], [1, 7, 9]])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    def change(model, optimizer):
        autotune.apply(model, optimizer, config=TrainingConfig(optimizer_fusion=fusion))

    if fusion == "kernel" or (name, fusion) == ("SparseAdam", "foreach"):
        with pytest.raises(IllegalConfiguration, match=r"sparse|SparseAdam has no"):
            trained(change)
    else:
        torch.testing.assert_close(trained(change), trained(lambda *_: None))


# -- what cannot step in the backward pass ---------------------------------------------------------


class LimitsItsNorm(torch.optim.SGD):
    """Limits the norm of all gradients together, as some implementations of LAMB do."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        return super().step()


class CountsInItsGroups(torch.optim.SGD):
    """As schedule-free optimizers and apex's do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["updates"] = group.get("updates", 0) + 1
        return super().step(closure)


class CountsInItself(torch.optim.SGD):
    updates = 0

    def step(self, closure=None):
        self.updates += 1
        return super().step(closure)


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_hook_before_step(model):
    optimizer = plain_sgd(model)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def with_another_step(model):
    optimizer = plain_sgd(model)
    step = optimizer.step
    optimizer.step = lambda: step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda model: LimitsItsNorm(model.parameters()),
            "depends on the other parameters",
        ),
        (
            lambda model: CountsInItsGroups(model.parameters()),
            "CountsInItsGroups keeps updates in its parameter groups",
        ),
        (
            lambda model: CountsInItself(model.parameters(), lr=0.1),
            "it changes updates at each step",
        ),
        (lambda model: torch.optim.LBFGS(model.parameters()), "missing .* 'closure'"),
        (with_hook_before_step, "its step pre-hooks would run after the updates"),
        (with_another_step, "its step was replaced by another function"),
    ],
    ids=["norm", "groups", "attribute", "closure", "hook", "step"],
)
def test_what_needs_all_gradients_at_once_does_not_step_in_backward(make, reason):
    optimizer = make(small_model())
    with pytest.raises(IllegalConfiguration, match=reason):
        set_fusion([optimizer], "backward")
    assert not hasattr(optimizer, "_single")


def test_hooks_on_all_optimizers_run_once_a_step_or_the_step_in_backward_is_rejected():
    called = []
    handle = register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        model = small_model()
        optimizer = plain_sgd(model)
        with pytest.raises(IllegalConfiguration, match="hooks on the steps of all optimizers"):
            set_fusion([optimizer], "backward")
        set_fusion([optimizer], "kernel")
        assert called == []
        train(model, optimizer, steps=1)
        assert called == [1]
    finally:
        handle.remove()


def test_two_optimizers_of_one_parameter_do_not_step_in_backward():
    model = small_model()
    with pytest.raises(IllegalConfiguration, match="two optimizers update the same parameter"):
        set_fusion([plain_sgd(model), plain_sgd(model)], "backward")


def test_a_group_without_parameters_is_supported():
    groups = [{"params": []}, {"params": small_model().parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    set_fusion([optimizer], "backward")
    assert len(optimizer.param_groups) == 2


def test_trying_an_optimizer_draws_no_random_numbers_of_the_training():
    class Noisy(torch.optim.SGD):
        def step(self, closure=None):
            torch.rand(1)
            return super().step(closure)

    before = torch.get_rng_state()
    check_fusion([Noisy(small_model().parameters(), lr=0.1)], "backward")
    assert torch.equal(torch.get_rng_state(), before)


# -- state that fits the fusion --------------------------------------------------------------------


@pytest.mark.parametrize("to", FUSIONS)
@pytest.mark.parametrize("made_with", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_an_optimizer_that_has_stepped_goes_on(made_with, to):
    def trained(change):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **made_with)
        train(model, optimizer, steps=2)
        change(optimizer)
        train(model, optimizer, steps=2)
        return weights(model)

    changed = trained(lambda optimizer: set_fusion([optimizer], to))
    torch.testing.assert_close(changed, trained(lambda _: None), rtol=1e-5, atol=1e-6)


def test_state_from_before_the_first_step_is_cast_with_the_weights():
    model = small_model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    assert missing_in_user_model(
        model, optimizer, {"optimizer_fusion": FUSIONS, "precision": CHOICES["precision"]}
    ).keys() == {"precision"}
    model = small_model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    apply_to_user_training(
        TrainingConfig(precision="bf16-true", optimizer_fusion="kernel"), model, optimizer
    )
    assert {state["sum"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
    model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("fusion", ["none", "foreach", "kernel"])
@pytest.mark.parametrize("made_with", [{}, {"fused": True}], ids=str)
def test_a_loss_scale_is_taken_out_with_every_fusion(made_with, fusion):
    def trained(change):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, **made_with)
        change(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(3):
            scaler.scale(model(torch.ones(2, 64)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return weights(model)

    changed = trained(lambda optimizer: set_fusion([optimizer], fusion))
    torch.testing.assert_close(changed, trained(lambda _: None), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is missing")
@pytest.mark.parametrize(("name", "bits"), [("paged-adamw", 32), ("paged-adamw-8bit", 8)])
def test_a_paged_optimizer_has_the_bits_of_its_name(name, bits):
    weight = torch.nn.Parameter(torch.zeros(8))
    made = make_optimizer([weight], name=name, fusion="none", learning_rate=0.1)
    assert vars(made)["is_paged"]
    assert vars(made)["args"].optim_bits == bits
