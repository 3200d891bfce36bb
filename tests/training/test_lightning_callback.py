"""The callback for Lightning's Trainer: its configuration, its optimizer, its reports."""

import copy
import json
import pickle
import sys
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import autotune
from autotune.errors import IllegalConfiguration, InvalidInput
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import make_workload
from autotune.training.script import interface
from autotune.training.script.run import ScriptEnd

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is missing")
ROWS = torch.arange(32 * 9).view(32, 9) % 61


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def make_module(**settings):
    from lightning.pytorch import LightningModule  # takes seconds

    class Module(LightningModule):
        def __init__(self, *, calls_parts=False):
            super().__init__()
            torch.manual_seed(0)
            self.network = Network()
            self.calls_parts = calls_parts
            self.dtypes = set()
            self.losses = []

        def loss(self, rows):
            if self.calls_parts:
                logits = self.network.head(self.network.embedding(rows[:, :-1]))
            else:
                logits = self.network(rows[:, :-1])
            self.dtypes.add(logits.dtype)
            return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

        def training_step(self, rows, index):
            loss = self.loss(rows)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, rows, index):
            self.log("val_loss", self.loss(rows))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module(**settings)


@pytest.fixture
def fit(tmp_path):
    """fit(callback) trains on 8 sequences a step, for 4 steps; returns the module and Trainer."""

    from lightning.pytorch import Trainer

    def run(callback, *, module=None, batch_size=8, max_steps=4, ckpt_path=None, **settings):
        module = module or make_module()
        callbacks = [] if callback is None else [callback]
        if callback is not None:
            batch_size = callback.micro_batch_size
            settings = {"accumulate_grad_batches": callback.accumulate_grad_batches, **settings}
        trainer = Trainer(
            max_steps=max_steps,
            accelerator="cpu",
            devices=1,
            callbacks=callbacks,
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **settings,
        )
        trainer.fit(
            module, DataLoader(ROWS, batch_size), DataLoader(ROWS[:8], 4), ckpt_path=ckpt_path
        )
        return module, trainer

    return run


@pytest.fixture
def configured(tmp_path, monkeypatch):
    def name(**fields):
        file = tmp_path / "config.json"
        measured = {"trial": "study tour, trial 12", "tokens_per_second": 1.0}
        file.write_text(json.dumps({"config": fields, "measured": measured}))
        monkeypatch.setenv("AUTOTUNE_CONFIG", str(file))

    return name


class Recorder:
    """A run that notes what is reported and ends with the workload's last step."""

    def __init__(self, workload, config):
        self.workload, self.config = workload, config
        self.reports = []

    def apply(self, model, optimizer):
        return model, optimizer

    def report(self, **values):
        self.reports.append(values)
        if len(self.reports) == self.workload.steps:
            raise ScriptEnd


@pytest.fixture
def recorder(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    settings = {"script": str(script), "global_batch": 8, "steps": 8, "warmup_steps": 1}
    run = Recorder(make_workload("cpu", settings), TrainingConfig(micro_batch_size=4))
    interface.begin(run)
    yield run
    interface._running.clear()


def weights_of(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_without_a_configuration_nothing_changes(fit):
    plain, _ = fit(None, batch_size=4, accumulate_grad_batches=2, precision="bf16-mixed")
    callback = autotune.LightningCallback(global_batch=8, micro_batch_size=4)
    module, _ = fit(callback, precision="bf16-mixed")
    assert torch.equal(weights_of(module), weights_of(plain))


@pytest.mark.parametrize(
    "fields",
    [{"micro_batch_size": 2, "optimizer_fusion": "foreach"}, {"optimizer_fusion": "backward"}],
    ids=["foreach", "backward"],
)
def test_a_configuration_trains_the_same_at_the_same_learning_rates(
    fields, fit, configured, recwarn
):
    plain, expected = fit(None)
    configured(**fields)
    module, trainer = fit(autotune.LightningCallback(global_batch=8))
    torch.testing.assert_close(weights_of(module), weights_of(plain), rtol=1e-4, atol=1e-5)
    rates = [one.lr_scheduler_configs[0].scheduler.get_last_lr() for one in (trainer, expected)]
    assert rates[0] == rates[1] != [1e-2]
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_the_configuration_decides_the_precision_of_the_trainer(fit, configured, capsys):
    configured(precision="fp32")
    module, trainer = fit(autotune.LightningCallback(global_batch=8), precision="bf16-true")
    assert f"{trainer.global_step} steps beside study tour" in capsys.readouterr().err
    assert module.dtypes == {torch.float32}
    assert weights_of(module).dtype == torch.float32


@pytest.mark.parametrize("saved_by", [None, {"checkpointing": "block"}])
@pytest.mark.parametrize("resumed_by", [None, {"checkpointing": "block"}])
def test_a_checkpoint_is_resumed_by_any_configuration(
    saved_by, resumed_by, fit, configured, monkeypatch, tmp_path
):
    def callback(fields):
        monkeypatch.delenv("AUTOTUNE_CONFIG", raising=False)
        if fields is not None:
            configured(micro_batch_size=8, **fields)
        return autotune.LightningCallback(global_batch=8)

    unbroken, _ = fit(None, max_steps=8)
    _, trainer = fit(callback(saved_by), max_steps=4)  # an epoch
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fit(callback(resumed_by), max_steps=8, ckpt_path=tmp_path / "half.ckpt")
    torch.testing.assert_close(weights_of(resumed), weights_of(unbroken))


def test_a_network_is_pickled_and_copied_without_the_callback(fit, configured):
    configured(micro_batch_size=8, checkpointing="block", precision="bf16-mixed")
    module, _ = fit(autotune.LightningCallback(global_batch=8))
    assert b"autotune" not in pickle.dumps(module.network)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        module.network.head.weight.zero_()
    assert copied.network(ROWS[:1, :-1]).abs().sum() > 0


def test_clipping_is_preserved(fit, configured):
    plain, _ = fit(None, gradient_clip_val=1e-3)
    configured(micro_batch_size=8)
    module, _ = fit(autotune.LightningCallback(global_batch=8), gradient_clip_val=1e-3)
    torch.testing.assert_close(weights_of(module), weights_of(plain))


def test_a_trial_reports_each_step_and_validates_after_the_last(fit, recorder, tmp_path):
    callback = autotune.LightningCallback(global_batch=8)
    module = make_module()
    with pytest.raises(ScriptEnd):
        fit(callback, module=module, val_check_interval=1, max_steps=20)
    assert [report["tokens"] for report in recorder.reports] == [8 * 9] * 8
    means = [sum(module.losses[i : i + 2]) / 2 for i in range(0, 16, 2)]
    assert [report["loss"].item() for report in recorder.reports] == pytest.approx(means)
    *earlier, last = [report["evaluation_loss"] for report in recorder.reports]
    assert earlier == [None] * 7
    with torch.no_grad():
        assert last.item() == pytest.approx(module.loss(ROWS[:8]).item())


def test_a_script_with_another_global_batch_than_its_search_is_rejected(recorder):
    with pytest.raises(InvalidInput, match="trains on 16 sequences") as found:
        autotune.LightningCallback(global_batch=16)
    assert found.value.hint == "search with --global-batch 16"


def test_a_trainer_that_accumulates_otherwise_is_rejected(fit, configured):
    configured(micro_batch_size=2)
    with pytest.raises(InvalidInput, match="accumulates 1 batches, and the configuration 4"):
        fit(autotune.LightningCallback(global_batch=8), accumulate_grad_batches=1)


def test_a_step_in_backward_is_rejected_where_gradients_are_clipped(fit, configured):
    configured(optimizer_fusion="backward")
    with pytest.raises(IllegalConfiguration, match="optimizer_fusion backward"):
        fit(autotune.LightningCallback(global_batch=8), gradient_clip_val=1.0)


def test_a_training_step_that_does_not_call_the_model_is_rejected(fit, configured):
    configured(precision="bf16-mixed")
    with pytest.raises(InvalidInput, match="training_step does not call the model as a whole"):
        fit(autotune.LightningCallback(global_batch=8), module=make_module(calls_parts=True))


# -- what is rejected without a search, too --------------------------------------------------------


@pytest.mark.parametrize("size", [3, 32])
def test_a_micro_batch_that_does_not_divide_the_step_is_rejected(size):
    with pytest.raises(InvalidInput, match=f"a micro batch of {size} does not divide the 16"):
        autotune.LightningCallback(global_batch=16, micro_batch_size=size)


def test_the_older_package_is_used_where_only_that_is_installed(monkeypatch):
    from autotune.training.script import lightning as module  # takes seconds

    for loaded in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    monkeypatch.setattr(module, "import_module", lambda name: name)
    assert module._loaded_package() == "lightning.pytorch"
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "lightning" else name)
    assert module._loaded_package() == "pytorch_lightning"


def test_the_network_is_a_modules_only_child_unless_it_trains_weights_of_its_own():
    callback = autotune.LightningCallback(global_batch=8)
    module = make_module()
    assert callback._network_of(module) is module.network
    module.scale = nn.Parameter(torch.ones(1))
    assert callback._network_of(module) is module
