"""An exported configuration trains with LightningCLI: effects of the file and the callback."""

import os
from typing import Any

import pytest
import torch
import torch._functorch.config

from autotune.exporters import TARGETS
from autotune.exporters.lightning_cli import FILE
from autotune.spec.config import TrainingConfig
from tests.exporters.own_training import (
    count_labels,
    distance,
    gives_logits,
    global_batches,
    script_loss,
    small_model,
    trained,
)
from tests.exporters.readers.lightning_reader import provide_shipped
from tests.exporters.recipes import recipe

lightning: Any = pytest.importorskip("lightning", reason="lightning is not installed")
pytest.importorskip("jsonargparse", reason="jsonargparse is not installed")

STEPS = 3
WORKLOAD = {
    "layers": 4,
    "width": 32,
    "heads": 2,
    "sequence_length": 16,
    "learning_rate_warmup_steps": 4,
}


@pytest.fixture(autouse=True)
def _settings_of_the_process():
    """Undo after each test what the callback sets for the whole process."""
    yield
    torch._functorch.config.activation_memory_budget = 1.0
    torch.set_float32_matmul_precision("highest")
    for name in ("flash", "mem_efficient", "cudnn", "math"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)


def fit(asked, folder, **trainer):
    """Run `LightningCLI(...)` with the file, as `python main.py fit -c lightning.yaml` would."""
    from lightning.pytorch.cli import LightningCLI

    provide_shipped()
    (folder / FILE).write_text(TARGETS["lightning"].write(asked, "2").files[FILE])
    workload = asked.workload
    labels_of_step = count_labels(global_batches(workload, 1)[0])  # of every step

    class Data(lightning.LightningDataModule):
        def train_dataloader(self):
            sequences = global_batches(workload, workload.steps).flatten(0, 1)
            return torch.utils.data.DataLoader(sequences, batch_size=asked.config.micro_batch_size)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = gives_logits(small_model(workload))
            self.seen = []

        def training_step(self, sequences, index):
            loss = script_loss(self.network, asked, sequences, labels_of_step=labels_of_step)
            self.log("loss", loss)
            return loss

        def on_before_optimizer_step(self, optimizer):
            self.seen.append({"rate": float(optimizer.param_groups[0]["lr"])})

    quiet = [
        f"--trainer.max_steps={STEPS}",
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
    ]
    quiet += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    return LightningCLI(
        Module, Data, args=["fit", "-c", str(folder / FILE), *quiet], save_config_callback=None
    )


def a_recipe(settings=None, **config):
    config = TrainingConfig(**{"micro_batch_size": 8, **config})
    return recipe(config, device_type="cpu", **{**WORKLOAD, **(settings or {})})


CASES = {
    "fp32": ({"micro_batch_size": 2, "optimizer_fusion": "kernel"}, {"gradient_clipping": 0.5}),
    "bf16-mixed": (
        {"precision": "bf16-mixed", "optimizer_fusion": "kernel"},
        {"gradient_clipping": 0.5},
    ),
    "cosine": (
        {"micro_batch_size": 4},
        {"schedule": "cosine", "learning_rate_warmup_steps": 1, "steps": 12},
    ),
    "adafactor-fixed-rate": ({"optimizer": "adafactor-fixed-rate"}, {}),
    "padded": ({}, {"packing": "padded"}),
    "padded, accumulated": ({"micro_batch_size": 2}, {"packing": "padded"}),
    "conversations, accumulated": ({"micro_batch_size": 2}, {"chat_column": "messages"}),
    "sgd": ({"optimizer": "sgd", "optimizer_fusion": "foreach", "checkpointing": "every-2"}, {}),
}


@pytest.mark.parametrize(("config", "settings"), CASES.values(), ids=CASES)
def test_lightning_arrives_at_the_weights_of_the_trial(tmp_path, config, settings, capsys):
    asked = a_recipe(settings, **config)
    cli = fit(asked, tmp_path)
    assert cli.trainer.global_step == STEPS
    assert f"{STEPS} steps beside study tour, trial 12" in capsys.readouterr().err
    start = small_model(asked.workload)
    assert distance(cli.model.network, trained(asked, steps=STEPS), start) < 1e-5


def test_pure_bf16_trains_in_bf16(tmp_path):
    cli = fit(a_recipe(precision="bf16-true", optimizer_fusion="foreach"), tmp_path)
    optimizer = cli.trainer.optimizers[0]
    assert {parameter.dtype for parameter in cli.model.parameters()} == {torch.bfloat16}
    assert {t.dtype for s in optimizer.state.values() for t in s.values() if t.dim()} == {
        torch.bfloat16
    }


@pytest.mark.slow
@pytest.mark.parametrize("compile_scope", ["none", "block", "model"])
def test_what_the_trial_compiled_is_handed_to_the_compiler(tmp_path, compile_scope):
    with torch.compiler.set_stance("force_eager"):  # marked as compiled, and run as it is
        module = fit(a_recipe(checkpointing="every-2", compile=compile_scope), tmp_path).model
    blocks = module.network.blocks
    assert [hasattr(type(block), "_before") for block in blocks] == [
        True,
        False,
        True,
        False,
    ]
    assert {block._compiled_call_impl is not None for block in blocks} == {compile_scope == "block"}
    assert hasattr(module.training_step, "_torchdynamo_orig_callable") == (compile_scope == "model")


def test_the_memory_budget_is_set_before_anything_is_compiled(tmp_path):
    with torch.compiler.set_stance("force_eager"):
        fit(a_recipe(compile="block", memory_budget=0.5), tmp_path)
    assert torch._functorch.config.activation_memory_budget == 0.5


@pytest.mark.slow
def test_the_partitioner_sees_the_memory_budget(tmp_path, monkeypatch):
    import torch._functorch.partitioners as partitioners

    seen, choose = [], partitioners.choose_saved_values_set

    def spy(*arguments, **settings):
        seen.append(settings.get("memory_budget"))
        return choose(*arguments, **settings)

    monkeypatch.setattr(partitioners, "choose_saved_values_set", spy)
    monkeypatch.setitem(os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    torch._dynamo.reset()
    fit(a_recipe(compile="block", memory_budget=0.5), tmp_path)
    assert 0.5 in seen


@pytest.mark.slow
def test_a_training_step_that_logs_is_compiled_and_trains_as_the_trial(tmp_path):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    asked = a_recipe(compile="model")
    cli = fit(asked, tmp_path)
    assert counters["stats"]["unique_graphs"] >= 1
    assert (
        distance(cli.model.network, trained(asked, steps=STEPS), small_model(asked.workload)) < 1e-2
    )


def test_attention_and_float32_products_are_set_for_the_process(tmp_path):
    fit(a_recipe(precision="tf32", attention="math"), tmp_path)
    assert torch.get_float32_matmul_precision() == "high"
    assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()
