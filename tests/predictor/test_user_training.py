"""Whether a user's training fits: the prediction is true, and nothing of the user's is changed."""

import contextlib
import json
import random
import sys
import types

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_module
from torch.utils._pytree import tree_flatten

import autotune
from autotune.errors import IllegalConfiguration, InvalidInput, PredictionImpossible
from autotune.predictor import memory_fit
from autotune.predictor.ranks import as_rank
from autotune.predictor.user_training import UserTraining, named_models, optimizers_in
from autotune.shipped.changed_method import Changed
from tests.predictor.measured_steps import measured_peak
from tests.predictor.user_forms import FORMS, Form, LanguageModel, UNet, images, tokens

MIB = 1024**2


def answer_of(form, **settings):
    settings = {"max_mem": "1GiB", "device": "cpu", **settings}
    return autotune.will_it_fit(form.model, form.batch, form.optimizer, step=form.step, **settings)


def state_of(form):
    """All that a prediction might change, as tensors that are copied, and plain values."""
    models = list(named_models(form.model).values())
    models += [one for one in form.besides if isinstance(one, nn.Module)]
    modules = [module for model in models for module in model.modules()]
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizers = optimizers_in(form.optimizer)
    others = [one for one in form.besides if not isinstance(one, nn.Module)]
    state = [
        [model.state_dict() for model in models],
        [(id(p), id(p.grad), p.requires_grad, p._version) for p in parameters],
        [(type(module), module.training, sorted(vars(module))) for module in modules],
        [len(hooks) for m in modules for n, hooks in vars(m).items() if n.endswith("_hooks")],
        [optimizer.state_dict() for optimizer in optimizers],
        [sorted(vars(optimizer)) for optimizer in optimizers],
        [one.state_dict() if hasattr(one, "state_dict") else one for one in others],
        [torch.get_rng_state(), random.getstate(), numpy.random.get_state()],
        [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), sys.stdout, sys.stderr],
        [torch.autograd.backward, torch.autocast.__enter__, torch.cuda.synchronize],
    ]
    leaves, structure = tree_flatten(state)
    copied = [one.clone() if isinstance(one, torch.Tensor) else one for one in leaves]
    return [
        numpy.asarray(one).tolist() if isinstance(one, torch.Tensor | numpy.ndarray) else one
        for one in copied
    ], structure


TAKE_SECONDS = (
    *("a ViT", "a Llama of transformers", "a step that prints and logs"),
    *("accumulation with autocast, a scaler and checkpoints", "a loss that is read in an if"),
)


@pytest.fixture(autouse=True)
def no_ways(monkeypatch):
    """What would make it fit is looked for only where a test is about that."""
    monkeypatch.setattr(memory_fit, "_SECONDS_FOR_WAYS", -1.0)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in TAKE_SECONDS else ()) for name in FORMS
    ],
)
def predicted(request):
    torch.manual_seed(0)
    form = FORMS[request.param]()
    before = state_of(form)
    answer = answer_of(form)
    return request.param, form, answer, before, state_of(form)


def test_the_measured_peak_of_a_step_is_within_the_bounds_of_its_prediction(predicted):
    name, form, answer, _, _ = predicted
    torch.manual_seed(0)
    with contextlib.redirect_stdout(None):
        measured = measured_peak(form, calls=3 if "third" in name else 1)
    prediction = answer.prediction
    assert prediction.lower_bound_bytes <= measured <= prediction.upper_bound_bytes
    assert abs(measured - answer.peak_memory_bytes) <= 64  # nothing here is only estimated


def test_a_prediction_changes_nothing_of_the_training(predicted):
    _, _, _, (before, structure), (after, structure_after) = predicted
    assert structure == structure_after
    assert [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]] == []


def test_the_answer_says_what_holds_the_memory(predicted):
    _, _, answer, _, _ = predicted
    assert sum(answer.bytes_by_category.values()) == answer.peak_memory_bytes
    assert {"parameters", "activations", "inputs"} <= {
        name for name, size in answer.bytes_by_category.items() if size
    }
    assert answer.phase in ("forward", "backward", "step")
    assert answer.holders[0].size_bytes == max(one.size_bytes for one in answer.holders)


# -- what a program may do -------------------------------------------------------------------------


def small(step=None, optimizer=None):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    batch = (torch.randn(16, 64), torch.randint(0, 10, (16,)))
    return Form(model, batch, optimizer or torch.optim.AdamW(model.parameters()), step)


def plain(model, batch, optimizer):
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def test_a_step_that_names_a_gpu_is_predicted_without_one():
    scaler = torch.amp.GradScaler("cpu")

    def step(model, batch, optimizer):
        model.to("cuda")
        optimizer.zero_grad()
        pixels, labels = batch[0].to("cuda", non_blocking=True), batch[1].cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(pixels), labels) + torch.zeros((), device="cuda:0")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.synchronize()

    def here(model, batch, optimizer):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(batch[0]), batch[1]) + torch.zeros(())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    there = answer_of(small(step), device="l4")
    assert there.peak_memory_bytes == answer_of(small(here), device="l4").peak_memory_bytes
    assert any("autocast" in note for note in there.prediction.notes)


@pytest.mark.slow
def test_a_gpu_updates_all_parameters_in_batches_where_nothing_else_is_said():
    of_torch, one_by_one = small(plain), small(plain)
    one_by_one.optimizer.param_groups[0]["foreach"] = False
    batched = small(plain)
    batched.optimizer.param_groups[0]["foreach"] = True
    peaks = [answer_of(one, device="l4").peak_memory_bytes for one in (of_torch, batched)]
    assert peaks[0] == peaks[1] != answer_of(one_by_one, device="l4").peak_memory_bytes


@pytest.mark.slow
def test_a_module_on_the_meta_device_is_predicted_as_one_on_the_cpu():
    with torch.device("meta"):
        form = Form(UNet(), images(), "adamw", lambda model, batch: model(batch).mean())
    here = Form(UNet(), images(), "adamw", form.step)
    assert answer_of(form).peak_memory_bytes == answer_of(here).peak_memory_bytes


def test_an_optimizer_that_has_its_state_is_predicted_as_one_that_has_none():
    form = small(plain)
    before = answer_of(form)
    plain(form.model, form.batch, form.optimizer)
    assert answer_of(form).peak_memory_bytes == before.peak_memory_bytes


def test_a_method_of_a_trainer_object_is_a_step():
    class Trainer:
        def __init__(self):
            self.form = small(plain)
            self.steps = 0

        def training_step(self, batch):
            self.steps += 1
            plain(self.form.model, batch, self.form.optimizer)

    trainer = Trainer()
    form = Form(
        trainer.form.model, trainer.form.batch, trainer.form.optimizer, trainer.training_step
    )
    assert answer_of(form).peak_memory_bytes == answer_of(trainer.form).peak_memory_bytes
    assert trainer.steps == 0


def test_the_training_step_of_lightning_is_a_step():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small().model

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.inner(batch[0]), batch[1])

    module = Module()
    form = Form(module, small().batch, "adamw", module.training_step)
    assert answer_of(form).bytes_by_category["optimizer_state"]


def test_globals_that_a_step_sets_and_makes_are_put_back():
    names = {"steps": 0, "seen": [], "__name__": "notebook"}
    code = """
def step(model, batch, optimizer):
    global steps, latest
    steps += 1
    optimizer.zero_grad()
    latest = model(batch[0]).mean()
    latest.backward()
    optimizer.step()
    seen.append(latest.item())
"""
    exec(compile(code, "<stdin>", "exec"), names)
    assert answer_of(small(names["step"]))
    assert (names["steps"], names["seen"], "latest" in names) == (0, [], False)


def test_a_loss_that_is_asked_for_nan_is_finite():
    def step(model, batch, optimizer):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if torch.isnan(loss) or not torch.isfinite(loss):
            raise ValueError("diverged")
        loss.backward()
        optimizer.step()

    assert answer_of(small(step)).prediction.notes == ()


def test_a_step_that_reaches_the_optimizer_in_no_known_way_changes_nothing():
    form = small()
    hidden = {id(form.optimizer): form.optimizer}.get
    key = id(form.optimizer)

    def step(model, batch):
        model(batch[0]).mean().backward()
        hidden(key).step()

    form.step = step
    before = state_of(form)
    with pytest.raises(PredictionImpossible, match="no copy"):
        answer_of(form)
    assert state_of(form) == before


def test_data_that_a_step_moves_from_the_host_count_on_a_gpu():
    data = torch.randn(4096, 64)

    def step(model, optimizer):
        rows = data[:2048].to("cuda")
        optimizer.zero_grad()
        model(rows).mean().backward()
        optimizer.step()

    def given(model, batch, optimizer):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()

    form = small(step)
    inside = answer_of(form, device="l4").peak_memory_bytes
    form = Form(form.model, torch.randn(2048, 64), form.optimizer, given)
    assert inside == pytest.approx(answer_of(form, device="l4").peak_memory_bytes, abs=16384)


def test_values_of_the_given_batch_decide_shapes():
    def step(model, batch, optimizer):
        optimizer.zero_grad()
        rows = model(batch[0])[batch[1] > 4]
        rows.mean().backward()
        optimizer.step()

    form = small(step)
    assert answer_of(form).prediction.notes == ()
    assert abs(measured_peak(form) - answer_of(form).peak_memory_bytes) <= 64


@pytest.mark.slow
def test_a_model_in_evaluation_mode_is_predicted_as_in_training_with_a_note():
    form = deep()
    form.model.eval()
    answer = answer_of(form)
    assert any("evaluation mode" in note for note in answer.prediction.notes)
    form.model.train()
    assert answer.peak_memory_bytes == answer_of(form).peak_memory_bytes


# -- what cannot be predicted ----------------------------------------------------------------------


def decides_by_loss(model, batch, optimizer):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    if loss.item() > 0.5:
        loss = loss + torch.zeros(1000, 1000).mean()
    loss.backward()
    optimizer.step()


def depends_on_values(model, batch, optimizer):
    model(batch[0]).round().unique().sum().backward()
    optimizer.step()


def selects_by_values(model, batch, optimizer):
    output = model(batch[0])
    output[output > 0].mean().backward()
    optimizer.step()


def does_not_work(model, batch, optimizer):
    model(batch[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "says"),
    [
        (decides_by_loss, "decides how much memory"),
        (depends_on_values, "depends on values"),
        (does_not_work, "the step fails"),
    ],
)
def test_a_step_that_cannot_be_predicted_is_one_sentence_with_file_and_line(step, says):
    with pytest.raises(PredictionImpossible, match=says) as error:
        answer_of(small(step))
    first = step.__code__.co_firstlineno
    lines = [f"line {first + after} of test_user_training.py" for after in (1, 2)]
    assert any(line in error.value.message for line in lines)
    assert "\n" not in error.value.message


def test_a_mask_of_unknown_values_is_a_note_with_file_and_line():
    (note,) = answer_of(small(selects_by_values)).prediction.notes
    assert f"line {selects_by_values.__code__.co_firstlineno + 2} of test_user_training.py" in note


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "gpt"}, "not a torch.nn.Module"),
        ({"optimizer": "adam"}, "Invalid optimizer: 'adam'"),
        ({"optimizer": None}, "none was given"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "other parameters"),
        ({"batch": torch.randn(16, 64)}, "and no loss"),
        ({"step": 3}, "not a function"),
        ({"step": lambda a, b, c, d: None}, "takes 4 parameters"),
        ({"model": [nn.Linear(2, 2), nn.Linear(2, 2)]}, "2 models"),
        ({"model": nn.LazyLinear(3), "optimizer": "adamw"}, "no size before"),
        ({"max_mem": "1G"}, "not a memory size"),
        ({"device": "gpu"}, "not a device"),
    ],
)
def test_what_cannot_be_trained_so_is_one_sentence_with_a_way_out(change, says):
    form = small()
    given = {"model": form.model, "batch": form.batch[0], "optimizer": form.optimizer}
    with pytest.raises(InvalidInput, match=says) as error:
        autotune.will_it_fit(**{**given, "max_mem": "1GiB", "device": "cpu", **change})
    assert error.value.hint


# -- the verdict, and what would make it fit -------------------------------------------------------


def test_an_answer_is_true_only_where_the_training_surely_fits():
    form = small(plain)
    peak = answer_of(form).peak_memory_bytes
    assert answer_of(form, max_mem=2 * peak)
    close = answer_of(form, max_mem=peak)
    assert not close
    assert (close.verdict, "Too close to say" in str(close)) == ("too close to say", True)
    assert answer_of(form, max_mem=peak // 2).verdict == "over the cap"


def test_a_cap_is_the_memory_of_a_gpu_that_is_named():
    assert answer_of(small(plain), max_mem=None, device="l4").cap_bytes == 24 * 10**9


def test_an_answer_is_json():
    answer = answer_of(small(plain), max_mem="64KiB")
    assert json.loads(json.dumps(answer.to_dict()))["fits"] is False


def changed(form, way):
    """The training after a change, to be measured."""
    if way.rows is not None:
        form.batch = tuple(tensor[: way.rows].clone() for tensor in form.batch)
    if way.recomputed_blocks:
        autotune.fit_to(form.model, form.batch, form.optimizer, way.needed_bytes, "cpu")
    if way.optimizer is not None:
        form.optimizer = torch.optim.Adafactor(form.model.parameters(), eps=(2**-23, 1e-3))
    return form


@pytest.mark.slow
def test_what_would_make_it_fit_is_true(monkeypatch):
    monkeypatch.setattr(memory_fit, "_SECONDS_FOR_WAYS", 1e9)
    cap_bytes = round(0.7 * answer_of(deep()).peak_memory_bytes)
    answer = answer_of(deep(), max_mem=cap_bytes)
    assert not answer
    assert {"rows", "recomputed_blocks", "optimizer"} <= {
        name for way in answer.ways for name, value in vars(way).items() if value
    }
    for way in answer.ways:
        measured = measured_peak(changed(deep(), way))
        assert abs(measured - way.peak_memory_bytes) <= 1024
        assert way.fits == (way.needed_bytes <= cap_bytes)


@pytest.mark.slow
def test_a_step_that_counts_on_its_rows_is_not_offered_fewer(monkeypatch):
    monkeypatch.setattr(memory_fit, "_SECONDS_FOR_WAYS", 1e9)
    target = torch.randn(16, 10)

    def step(model, batch):
        return F.mse_loss(model(batch[0]), target)

    form = small(step)
    peak = answer_of(form).peak_memory_bytes
    assert all(way.rows is None for way in answer_of(form, max_mem=peak - 4096).ways)


# -- fit_to ----------------------------------------------------------------------------------------


def deep() -> Form:
    torch.manual_seed(0)
    model = LanguageModel(layers=3)
    return Form(model, (tokens(), tokens()), torch.optim.AdamW(model.parameters()))


@pytest.fixture(scope="module")
def fitted():
    form = deep()
    cap_bytes = round(0.8 * answer_of(form).peak_memory_bytes)
    answer = autotune.fit_to(form.model, form.batch, form.optimizer, cap_bytes, "cpu")
    return form, cap_bytes, answer


@pytest.mark.slow
def test_fit_to_recomputes_as_few_blocks_as_fit(fitted):
    form, cap_bytes, answer = fitted
    changed_blocks = [isinstance(block, Changed) for block in form.model.layers]
    assert answer
    assert 0 < answer.recomputed_blocks == sum(changed_blocks) < answer.blocks == 3
    assert measured_peak(form) <= cap_bytes


def test_fit_to_changes_neither_names_nor_what_is_computed(fitted):
    form, _, _ = fitted
    other = deep()
    other.model.load_state_dict(form.model.state_dict())
    losses = []
    for one in (form, other):
        one.model.eval()
        losses.append(one.model(*form.batch)[1].item())
    assert losses[0] == losses[1]


def test_fit_to_does_nothing_where_it_fits_already():
    form = deep()
    answer = autotune.fit_to(form.model, form.batch, form.optimizer, "1GiB", "cpu")
    assert (bool(answer), answer.recomputed_blocks) == (True, 0)
    assert not any(isinstance(module, Changed) for module in form.model.modules())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "says"), [(deep, "every block"), (small, "no list of alike blocks")]
)
def test_fit_to_leaves_a_model_as_it_is_where_blocks_are_not_enough(form, says):
    one = form()
    with pytest.raises(IllegalConfiguration, match=says) as error:
        autotune.fit_to(
            one.model, one.batch, one.optimizer, "64KiB", "cpu", None if form is deep else _mean
        )
    assert "\n" not in error.value.message
    assert not any(isinstance(module, Changed) for module in one.model.modules())


def _mean(model, batch):
    return model(batch[0]).mean()


def test_importing_autotune_and_naming_these_functions_loads_no_torch():
    assert isinstance(autotune.will_it_fit, types.FunctionType)
    assert isinstance(autotune.fit_to, types.FunctionType)


# -- several devices -------------------------------------------------------------------------------


def divided(model):
    mesh = init_device_mesh("cpu", (2,))
    return fully_shard(model, mesh=mesh)


def in_a_list(model):
    return [nn.Linear(2, 2), nn.Sequential(nn.parallel.DistributedDataParallel(model))]


def with_divided_weights(model):
    mesh = init_device_mesh("cpu", (2,))
    return distribute_module(model, mesh)


@pytest.mark.parametrize(
    ("wrapped", "name"),
    [
        (nn.parallel.DistributedDataParallel, "DistributedDataParallel"),
        (in_a_list, "DistributedDataParallel"),
        (divided, "FSDPLinear"),
        (with_divided_weights, "DTensor"),
    ],
)
def test_a_model_of_several_devices_is_refused_by_name(wrapped, name):
    with as_rank(0, of=2):
        model = wrapped(nn.Linear(4, 4))
        with pytest.raises(InvalidInput, match=f"^{name} trains with several devices"):
            UserTraining(
                model=model, batch=torch.ones(2, 4), optimizer="adamw", step=lambda *_: None
            )


def test_an_optimizer_of_several_devices_is_refused_by_name():
    with as_rank(0, of=2):
        model = nn.Linear(4, 4)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        with pytest.raises(InvalidInput, match=r"^ZeroRedundancyOptimizer trains with several"):
            UserTraining(model=model, batch=torch.ones(2, 4), optimizer=optimizer)
