"""An exported configuration trains with `accelerate launch`: effects of file, launcher, command."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.exporters import TARGETS
from autotune.exporters.accelerate_config import FILE
from autotune.shipped.autotune_blocks import prepare_blocks
from autotune.spec.config import TrainingConfig
from tests.exporters.own_training import small_model
from tests.exporters.recipes import recipe

pytest.importorskip("accelerate", reason="accelerate is not installed")

SCRIPT = """
import json, math, os, sys
import torch
import autotune_blocks
from accelerate import Accelerator
sys.path.append(sys.argv[1])
from tests.exporters.own_training import (
    count_labels, distance, gives_logits, global_batches, script_loss, small_model, trained,
)
from tests.exporters.recipes import recipe
from autotune.spec.config import TrainingConfig

def train(data):
    config = TrainingConfig(**json.loads(sys.argv[2]))
    asked = recipe(config, device_type="cpu", **json.loads(sys.argv[3]), **data)
    workload, config = asked.workload, asked.config
    accelerator = Accelerator()
    model = gives_logits(small_model(workload))
    autotune_blocks.prepare_blocks(model, checkpointing="block")
    names = {"torch": torch, "math": math, "model": model}
    optimizer = eval(os.environ["OPTIMIZER_LINE"], names)
    schedule = eval(os.environ["SCHEDULE_LINE"], names | {"optimizer": optimizer})
    batches = global_batches(workload, 3)
    loader = torch.utils.data.DataLoader(batches.flatten(0, 1), batch_size=config.micro_batch_size)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    steps = 0
    labels_of_step = count_labels(batches[0])
    with torch.compiler.set_stance("force_eager"):  # marked as compiled, and run as it is
        for sequences in loader:
            with accelerator.accumulate(model):
                loss = script_loss(model, asked, sequences, labels_of_step=labels_of_step)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    steps += 1
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    by_trial = trained(asked, steps=3)
    return accelerator, model, steps, distance(model, by_trial, small_model(workload))


distances = {}
for data in json.loads(sys.argv[4]):
    accelerator, model, steps, distances[json.dumps(data)] = train(data)
classes = {name: type(module).__name__ for name, module in model.named_modules()}
compiled = [name for name, kind in classes.items() if kind == "OptimizedModule"]
recomputed = [one for one in model.modules() if isinstance(one, autotune_blocks.Changed)]
print(json.dumps({
    "mixed_precision": accelerator.mixed_precision,
    "autocast": accelerator.native_amp,
    "weights": str(next(model.parameters()).dtype),
    "compiled_blocks": sum(name.startswith("blocks.") for name in compiled),
    "recomputed": len(recomputed),
    "steps": steps,
    "accumulation": accelerator.gradient_accumulation_steps,
    "flash": torch.backends.cuda.flash_sdp_enabled(),
    "distances": distances,
}))
"""
CONFIG = {
    "micro_batch_size": 2,
    "precision": "bf16-mixed",
    "compile": "block",
    "checkpointing": "block",
    "attention": "math",
}
SMALL = {"layers": 4, "width": 32, "heads": 2, "sequence_length": 16}
WORKLOAD = {
    **SMALL,
    "schedule": "cosine",
    "learning_rate_warmup_steps": 2,
    "gradient_clipping": 1.0,
}

DATA = ({}, {"packing": "padded"}, {"chat_column": "messages"})
"""Full sequences, padded texts and conversations, whose labels are not in every position."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    asked = recipe(TrainingConfig(**CONFIG), device_type="cpu", **WORKLOAD)
    export = TARGETS["accelerate"].write(asked, "1")
    for name, text in export.files.items():
        (folder / name).write_text(text)
    (folder / "train.py").write_text(SCRIPT)
    return launched(export, folder)


def launched(export, folder):
    from autotune.exporters.bundle import BLOCKS, shipped_text

    (folder / BLOCKS).write_text(shipped_text(BLOCKS))
    lines = {entry.setting: entry.why.partition("write ")[2] for entry in export.unsupported}
    arguments = [str(Path(__file__).parents[2]), *map(json.dumps, (CONFIG, WORKLOAD, DATA))]
    command = f"{export.command} {shlex.join(arguments)}".replace(
        "accelerate launch", f"{sys.executable} -m accelerate.commands.launch"
    )
    environment = {
        "OPTIMIZER_LINE": lines["optimizer"],
        "SCHEDULE_LINE": lines["schedule"],
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_precision_is_autocast_over_float32_weights(run):
    assert (run["mixed_precision"], run["autocast"], run["weights"]) == (
        "bf16",
        True,
        "torch.float32",
    )


def test_each_block_is_compiled_on_its_own_and_recomputed(run):
    assert (run["compiled_blocks"], run["recomputed"]) == (4, 4)


def test_the_command_accumulates_micro_batches(run):
    assert (run["accumulation"], run["steps"]) == (4, 3)


@pytest.mark.parametrize("data", DATA, ids=json.dumps)
def test_a_script_with_the_lines_of_the_export_arrives_at_the_weights_of_the_trial(run, data):
    assert run["distances"][json.dumps(data)] < 1e-5


def test_the_launcher_has_left_one_attention_kernel(run):
    assert not run["flash"]


@pytest.mark.parametrize("granularity", ["every-2", "every-4", "sqrt"])
def test_blocks_that_are_not_all_alike_are_compiled_by_the_script(granularity):
    config = TrainingConfig(micro_batch_size=8, checkpointing=granularity, compile="block")
    export = TARGETS["accelerate"].write(recipe(config), "1")
    (entry,) = (entry for entry in export.unsupported if entry.setting == "compile")
    line = f'prepare_blocks(model, checkpointing="{granularity}", compiled=True)'
    assert line in entry.why
    assert "dynamo_config" not in export.files[FILE]


def test_regional_compilation_needs_blocks_of_one_class():
    from accelerate.utils.other import has_repeated_blocks

    model = small_model(recipe(**SMALL).workload)
    assert has_repeated_blocks(model)
    prepare_blocks(model, checkpointing="every-2")
    assert not has_repeated_blocks(model)
