"""A script's weights decide its own precision; every precision is what its name says of them.

The contract runs over each precision that a script can have, over each format that its weights can
come in, and over each form of script.
"""

import dataclasses
import json
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import autotune
from autotune.errors import IllegalConfiguration, StudyMismatch
from autotune.spec.config import SEARCHED, TrainingConfig
from autotune.spec.training_request import TrainingRequest, unwatched
from autotune.spec.workload import make_workload
from autotune.techniques.own_precision import cast_state, cast_weights, own_precision
from autotune.techniques.precision import compute_dtype, weights_dtype
from autotune.techniques.user_training import _NO_PRECISION
from autotune.training.script import interface
from autotune.training.script.run import ScriptEnd, WatchedRun
from autotune.training.script.trainer import _Examination

ROWS = torch.arange(16 * 9).view(16, 9) % 61
BROUGHT = ("fp32", "bf16-true", "fp16-true", "fp64", "as-is")
SEARCHED = [precision for precision in SEARCHED["precision"] if precision not in _NO_PRECISION]
COMBINATIONS = [
    (brought, precision)
    for brought in BROUGHT
    for precision in dict.fromkeys((brought, *SEARCHED))
    if brought != "as-is" or precision == "as-is"
]


class Network(nn.Module):
    """forward(input_ids, labels=None) -> logits, or loss and logits as transformers' models."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.register_buffer("scale", torch.full((16,), 0.5))

    def forward(self, input_ids, labels=None):
        x = self.embedding(input_ids)
        x = x * self.scale.to(x.dtype)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(self.norm(x).to(self.head.weight.dtype))
        if labels is None:
            return logits
        return {"loss": loss_of(logits, labels), "logits": logits}


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def network_in(brought):
    torch.manual_seed(0)
    network = Network()
    if brought == "as-is":
        network.bfloat16().norm.float()
        return network
    return network.to(weights_dtype(brought))


class MatrixProducts(TorchDispatchMode):
    """Notes the formats of the matrices that are multiplied."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.dtypes |= {tensor.dtype for tensor in args if isinstance(tensor, torch.Tensor)}
        return function(*args, **(kwargs or {}))


def train_in_a_loop(network, tmp_path):
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, eps=1e-4)
    network, optimizer = autotune.apply(network, optimizer)
    for _ in range(2):
        loss_of(network(ROWS[:, :-1]), ROWS[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def train_with_trainer(network, tmp_path):
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(
        str(tmp_path / "out"),
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=16,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        report_to=[],
    )
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in ROWS]
    callback = autotune.TrainerCallback(args)
    trainer = transformers.Trainer(network, args, train_dataset=rows, callbacks=[callback])
    trainer.train()
    return trainer.optimizer


def train_with_lightning(network, tmp_path):
    from lightning.pytorch import LightningModule, Trainer  # takes seconds

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network

        def training_step(self, rows, index):
            return loss_of(self.network(rows[:, :-1]), rows[:, 1:])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = Trainer(
        max_steps=2,
        accelerator="cpu",
        callbacks=[autotune.LightningCallback(global_batch=16)],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(ROWS, 16))
    return trainer.optimizers[0]


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """configured(precision) is as an export: a file that AUTOTUNE_CONFIG names."""

    def name(**fields):
        file = tmp_path / "autotune_config.json"
        file.write_text(json.dumps({"config": {"micro_batch_size": 16, **fields}}))
        monkeypatch.setenv("AUTOTUNE_CONFIG", str(file))

    return name


def tensors_of(optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if value.ndim)


def check_that_formats_are_those_of(precision, train, brought, *, tmp_path):
    network = network_in(brought)
    with MatrixProducts() as products:
        optimizer = train(network, tmp_path)
    weights = {parameter.dtype for parameter in network.parameters()}
    state = {tensor.dtype for tensor in tensors_of(optimizer)}
    if precision == "as-is":
        assert weights == state == {torch.bfloat16, torch.float32}
        assert products.dtypes == {torch.bfloat16}
        return
    assert weights == state == {weights_dtype(precision)}
    assert products.dtypes == {compute_dtype(precision)}
    if brought != "fp32":  # a buffer in float32 is not there for its format
        assert network.scale.dtype == weights_dtype(precision)


EVERY_COMBINATION = pytest.mark.parametrize(("brought", "precision"), COMBINATIONS)


@EVERY_COMBINATION
def test_weights_products_and_state_have_the_formats_of_the_precision(
    brought, precision, configured, tmp_path
):
    configured(precision=precision)
    check_that_formats_are_those_of(precision, train_in_a_loop, brought, tmp_path=tmp_path)


WITH_A_TRAINER = [
    pytest.param(train_with_trainer, id="Trainer"),
    pytest.param(
        train_with_lightning,
        id="Lightning",
        marks=pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is missing"),
    ),
]


@pytest.mark.parametrize("train", WITH_A_TRAINER)
def test_a_callback_casts_weights_up(train, configured, tmp_path):
    configured(precision="fp32")
    check_that_formats_are_those_of("fp32", train, "bf16-true", tmp_path=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("train", WITH_A_TRAINER)
@EVERY_COMBINATION
def test_formats_are_those_of_the_precision_with_a_callback(
    train, brought, precision, configured, tmp_path
):
    configured(precision=precision)
    check_that_formats_are_those_of(precision, train, brought, tmp_path=tmp_path)


@pytest.mark.parametrize("brought", BROUGHT)
@pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])
def test_its_own_precision_changes_nothing(brought, is_named, configured, tmp_path):
    plain, own = network_in(brought), network_in(brought)
    train_in_a_loop(plain, tmp_path)
    configured(**({"precision": brought} if is_named else {}))
    train_in_a_loop(own, tmp_path)
    for name, tensor in own.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name])


@pytest.mark.parametrize("brought", BROUGHT)
def test_the_precision_of_a_model_is_known_from_its_weights(brought):
    assert own_precision(network_in(brought)) == brought


class PackedLinear(nn.Module):
    """A quantized layer, whose weight is a buffer of packed numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("packed", torch.zeros(16, 8, dtype=torch.uint8))


def with_packed_weights(network):
    network.blocks[0] = PackedLinear()


def with_an_adapter(network):
    network.bfloat16().requires_grad_(False)
    network.blocks[0].adapter = nn.Linear(16, 2)


def with_whole_numbers(network):
    network.head.weight = nn.Parameter(torch.zeros(64, 16, dtype=torch.int8), requires_grad=False)


def with_eight_bits(network):
    network.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "change", [with_packed_weights, with_an_adapter, with_whole_numbers, with_eight_bits]
)
def test_weights_in_formats_without_a_common_name_are_never_cast(change):
    network = Network()
    change(network)
    assert own_precision(network) == "as-is"
    before = [parameter.dtype for parameter in network.parameters()]
    config = TrainingConfig(precision="bf16-mixed", micro_batch_size=16)
    with pytest.raises(IllegalConfiguration, match=r"the weights are in .* is not known"):
        autotune.apply(network, config)
    assert [parameter.dtype for parameter in network.parameters()] == before


def test_state_that_an_optimizer_makes_before_its_first_step_follows_the_weights():
    network = network_in("bf16-true")
    optimizer = torch.optim.Adagrad(network.parameters())
    for parameter, state in optimizer.state.items():
        state["copy"] = torch.zeros_like(parameter, dtype=torch.float64)
    formats = {parameter: parameter.dtype for parameter in optimizer.state}
    cast_state(optimizer, formats)
    assert {state["sum"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
    cast_weights(network, torch.float32)
    cast_state(optimizer, formats)
    for state in optimizer.state.values():
        assert state["sum"].dtype == state["step"].dtype == torch.float32
        assert state["copy"].dtype == torch.float64


def test_positions_and_masks_that_are_parameters_are_no_weights():
    network = network_in("bf16-true")
    network.positions = nn.Parameter(torch.arange(8), requires_grad=False)
    assert own_precision(network) == "bf16-true"
    cast_weights(network, torch.float32)
    assert network.positions.dtype == torch.int64
    assert own_precision(network) == "fp32"


# -- what a search finds out -----------------------------------------------------------------------


@pytest.fixture
def examined(tmp_path):
    """The run that examines a script, and ends where its model is used."""
    script = tmp_path / "train.py"
    script.touch()
    workload = make_workload("cpu", {"script": str(script), "global_batch": 16})
    run = _Examination(workload, {"precision": ["fp32", "bf16-mixed"]})
    interface.begin(run)
    yield run
    interface._running.clear()
    if run.missing is not None:
        run.result()  # it watches the script until then


def train_by_parts(network, tmp_path):
    network, optimizer = autotune.apply(network, torch.optim.SGD(network.parameters()))
    hidden = network.embedding(ROWS[:, :-1])
    loss_of(network.head(hidden), ROWS[:, 1:]).backward()
    optimizer.step()
    autotune.report(tokens=128, loss=1.0)


def train_without_products(network, tmp_path):
    network, optimizer = autotune.apply(network, torch.optim.SGD(network.parameters()))
    network.head.weight.sum().backward()
    optimizer.step()
    raise AssertionError("the optimizer has stepped")


def train_by_functions(network, tmp_path):
    network, optimizer = autotune.apply(network, torch.optim.SGD(network.parameters()))
    hidden = network.embedding.weight[ROWS[:, :-1]]
    loss_of(hidden @ network.head.weight.t(), ROWS[:, 1:]).backward()
    optimizer.step()
    raise AssertionError("the optimizer has stepped")


FORMS = [
    pytest.param(train_in_a_loop, id="loop"),
    pytest.param(train_by_parts, id="parts"),
    pytest.param(train_by_functions, id="functions"),
    pytest.param(train_without_products, id="no products"),
    *WITH_A_TRAINER,
]


@pytest.mark.slow
@pytest.mark.parametrize("train", FORMS)
def test_a_script_of_any_form_is_examined_before_its_first_update(train, examined, tmp_path):
    network = network_in("bf16-true")
    with pytest.raises(ScriptEnd):
        train(network, tmp_path)
    found = examined.result()
    assert found.own_precision == "bf16-true"
    calls_its_model = train not in (train_by_parts, train_by_functions)
    assert ("precision" not in found.unavailable) == calls_its_model
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, network_in("bf16-true").state_dict()[name])


@pytest.mark.parametrize("brought", BROUGHT)
def test_a_search_knows_in_which_precision_a_script_comes(brought, examined, tmp_path):
    with pytest.raises(ScriptEnd):
        train_in_a_loop(network_in(brought), tmp_path)
    found = examined.result()
    assert found.own_precision == brought
    reasons = found.unavailable.get("precision", {})
    if brought != "as-is":
        assert not reasons
        return
    assert list(reasons) == ["fp32", "bf16-mixed"]
    assert all("in bfloat16 and float32" in reason for reason in reasons.values())


def autocast_around_it(network):
    forward = network.forward

    def within(*args, **kwargs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward(*args, **kwargs)

    network.forward = within


def autocast_in_its_blocks(network):
    autocast_around_it(network.blocks[0])


@pytest.mark.parametrize("change", [autocast_around_it, autocast_in_its_blocks])
def test_a_script_under_its_own_autocast_is_as_it_is(change, examined, tmp_path):
    network = network_in("fp32")
    change(network)
    with pytest.raises(ScriptEnd):
        train_in_a_loop(network, tmp_path)
    found = examined.result()
    assert found.own_precision == "as-is"
    assert "under autocast to bfloat16" in found.unavailable["precision"]["fp32"]


def test_a_script_whose_weights_have_changed_since_its_study_began_is_rejected(examined, tmp_path):
    workload = dataclasses.replace(examined.workload, own_precision="bf16-true")
    request = TrainingRequest(
        workload=workload,
        config=TrainingConfig(precision="bf16-true", micro_batch_size=16),
        folder=tmp_path,
        device="cpu",
        cap_bytes=2**40,
        requested_at=0.0,
    )
    run = WatchedRun(request, progress=unwatched)
    network = network_in("fp32")
    with pytest.raises(ScriptEnd) as raised:
        run.apply_and_watch(network, torch.optim.SGD(network.parameters()))
    assert isinstance(raised.value.reason, StudyMismatch)
    assert "are those of precision fp32" in str(raised.value.reason)
