"""The baseline of a script updates as the script itself does, and so does what names no fusion.

The contract runs over each way in which a script can bring its optimizer, and each form of script.
"""

import dataclasses
import json
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import autotune
from autotune.spec.config import baseline_of
from autotune.spec.training_request import TrainingRequest, unwatched
from autotune.spec.workload import make_workload
from autotune.techniques.user_optimizer import own_fusion
from autotune.training.script import interface
from autotune.training.script.run import ScriptEnd, _ScriptTrace
from autotune.training.script.trainer import _Examination

ROWS = torch.linspace(-1, 1, 16 * 8).view(16, 8)
BROUGHT = {
    "torch's default": ({}, "none"),  # on a CPU
    "off": ({"foreach": False, "fused": False}, "none"),
    "foreach": ({"foreach": True}, "foreach"),
    "fused": ({"fused": True}, "kernel"),
    "fused, not foreach": ({"foreach": False, "fused": True}, "kernel"),
}


FUSION_OF = {"_fused_adamw_": "kernel", "_foreach_addcdiv_": "foreach", "addcdiv_": "none"}
"""{operation of an update of AdamW: the fusion that runs it}."""


class Network(nn.Module):
    """forward(inputs, labels=None) -> outputs, with the loss as transformers' models give it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, inputs, labels=None):
        outputs = self.layers(inputs)
        return outputs if labels is None else {"loss": loss_of(outputs), "outputs": outputs}


def loss_of(outputs):
    return outputs.square().mean()


class Updates(TorchDispatchMode):
    """Notes which fusions the updates of AdamW have."""

    def __init__(self):
        super().__init__()
        self.fusions = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in FUSION_OF:
            self.fusions.add(FUSION_OF[name])
        return function(*args, **(kwargs or {}))


def train_in_a_loop(network, optimizers, tmp_path):
    network, optimizers = autotune.apply(network, optimizers)
    several = optimizers if isinstance(optimizers, list) else [optimizers]
    for _ in range(2):
        loss_of(network(ROWS)).backward()
        for optimizer in several:
            optimizer.step()
            optimizer.zero_grad()


def train_with_trainer(network, optimizer, tmp_path):
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
        **({"optim": optimizer} if isinstance(optimizer, str) else {}),
    )
    trainer = transformers.Trainer(
        network,
        args,
        train_dataset=[{"inputs": row, "labels": row} for row in ROWS],
        callbacks=[autotune.TrainerCallback(args)],
        optimizers=(None if isinstance(optimizer, str) else optimizer, None),
    )
    trainer.train()


def train_with_lightning(network, optimizer, tmp_path):
    from lightning.pytorch import LightningModule, Trainer  # takes seconds

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network

        def training_step(self, rows, index):
            return loss_of(self.network(rows))

        def configure_optimizers(self):
            return optimizer

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


FORMS = [
    train_in_a_loop,
    pytest.param(train_with_trainer, id="Trainer", marks=pytest.mark.slow),
    pytest.param(
        train_with_lightning,
        id="Lightning",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is missing"),
        ],
    ),
]


@pytest.fixture
def workload(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    yield make_workload("cpu", {"script": str(script), "global_batch": 16})
    interface._running.clear()


def examined(train, optimizers, workload, *, network, tmp_path):
    """Returns the workload as a search knows it after it has examined the script."""
    examination = _Examination(workload, {"optimizer_fusion": ["none", "foreach", "kernel"]})
    interface.begin(examination)
    with pytest.raises(ScriptEnd):
        train(network, optimizers, tmp_path)
    return dataclasses.replace(workload, own_fusion=examination.result().own_fusion)


def updates_of_the_baseline(train, optimizers, workload, *, network, tmp_path):
    config = baseline_of(optimizer="adamw", at=workload.legality_context)
    request = TrainingRequest(
        workload=workload,
        config=config,
        folder=tmp_path,
        device="cpu",
        cap_bytes=2**40,
        requested_at=0.0,
    )
    interface.begin(_ScriptTrace(request, dropout=True, progress=unwatched))
    with Updates() as updates:
        train(network, optimizers, tmp_path)
    return config.optimizer_fusion, updates.fusions


@pytest.mark.slow
@pytest.mark.parametrize("train", FORMS)
@pytest.mark.parametrize("brought", BROUGHT)
def test_the_baseline_updates_as_the_script_does(train, brought, workload, tmp_path):
    flags, fusion = BROUGHT[brought]
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), **flags)
    found = examined(train, optimizer, workload, network=network, tmp_path=tmp_path)
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), **flags)
    updates = updates_of_the_baseline(train, optimizer, found, network=network, tmp_path=tmp_path)
    assert updates == (fusion, {fusion})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fusion"), [("adamw_torch", "none"), ("adamw_torch_fused", "kernel")]
)
def test_the_baseline_has_the_optimizer_that_a_trainer_makes(name, fusion, workload, tmp_path):
    found = examined(train_with_trainer, name, workload, network=Network(), tmp_path=tmp_path)
    updates = updates_of_the_baseline(
        train_with_trainer, name, found, network=Network(), tmp_path=tmp_path
    )
    assert updates == (fusion, {fusion})


def flags_of(optimizers):
    return [
        {name: group.get(name) for name in ("foreach", "fused")}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def two_that_differ(network):
    first, second = network.layers
    return [
        torch.optim.AdamW(first.parameters(), fused=True),
        torch.optim.AdamW(second.parameters(), foreach=True),
    ]


def two_groups_that_differ(network):
    first, second = network.layers
    groups = [
        {"params": list(first.parameters()), "fused": True},
        {"params": list(second.parameters()), "foreach": True},
    ]
    return [torch.optim.AdamW(groups)]


@pytest.mark.slow
@pytest.mark.parametrize("make", [two_that_differ, two_groups_that_differ])
def test_a_baseline_that_updates_in_several_ways_keeps_each(make, workload, tmp_path):
    network = Network()
    optimizers = make(network)
    found = examined(train_in_a_loop, optimizers, workload, network=network, tmp_path=tmp_path)
    network = Network()
    optimizers = make(network)
    before = flags_of(optimizers)
    updates = updates_of_the_baseline(
        train_in_a_loop, optimizers, found, network=network, tmp_path=tmp_path
    )
    assert updates == ("as-is", {"kernel", "foreach"})
    assert flags_of(optimizers) == before


def test_an_optimizer_without_flags_leaves_the_fusion_to_the_others():
    network = Network()
    matrices = [parameter for parameter in network.parameters() if parameter.ndim == 2]
    adam = torch.optim.AdamW(network.parameters(), fused=True)
    assert own_fusion([torch.optim.Muon(matrices), adam]) == "kernel"
    assert own_fusion([torch.optim.Muon(matrices)]) == "none"
    assert own_fusion([torch.optim.Adafactor(matrices), adam]) == "kernel"  # it has no fused update


class BreaksItsSettings(torch.optim.AdamW):
    def step(self, closure=None):
        if self.param_groups[0]["params"][0].shape == (2, 2):
            raise ValueError("parameters of another shape")
        return super().step(closure)


def test_the_updates_of_an_optimizer_that_cannot_be_tried_stay_as_they_are():
    optimizer = BreaksItsSettings(Network().parameters(), fused=True)
    assert own_fusion([optimizer]) == "as-is"


@pytest.mark.parametrize("train", FORMS)
@pytest.mark.parametrize("brought", BROUGHT)
def test_a_file_without_a_fusion_leaves_the_optimizer_as_it_is(
    train, brought, tmp_path, monkeypatch
):
    file = tmp_path / "autotune_config.json"
    file.write_text(json.dumps({"micro_batch_size": 16}))
    monkeypatch.setenv("AUTOTUNE_CONFIG", str(file))
    flags, fusion = BROUGHT[brought]
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), **flags)
    before = flags_of([optimizer])
    with Updates() as updates:
        train(network, optimizer, tmp_path)
    assert updates.fusions == {fusion}
    assert flags_of([optimizer]) == before
