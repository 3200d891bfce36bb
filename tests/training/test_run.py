"""`python -m autotune.run`: a script without a line of ours trains with one configuration."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from autotune.exporters import TARGETS
from autotune.exporters.written import composed_export
from autotune.spec.config import TrainingConfig
from tests.building.light_server import ROOT
from tests.building.results import record, study_result
from tests.exporters.recipes import recipe
from tests.training.test_injected_callback import BEFORE, MADE, TRAINED

SAYS_ITS_CONFIGURATION = """
import os, sys, autotune
config = autotune.current_config(global_batch=8)
allocator = os.environ.get("PYTORCH_ALLOC_CONF")
print(config.precision, config.micro_batch_size, allocator, "torch" in sys.modules, sys.argv[1:])
"""
SAYS_HOW_IT_TRAINS = """
seen = []
model.lm_head.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
trainer.train()
print(args.per_device_train_batch_size, args.gradient_accumulation_steps, *set(seen))
"""


@pytest.fixture
def run(tmp_path):
    """run("train.py", precision="bf16-mixed") runs it with that configuration, and returns it."""

    def start(*command, **choices):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.pop("AUTOTUNE_CONFIG", None)
        if choices:
            (tmp_path / "config.json").write_text(json.dumps(choices))
            environment["AUTOTUNE_CONFIG"] = "config.json"
        return subprocess.run(
            [sys.executable, "-m", "autotune.run", *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return start


@pytest.mark.parametrize("command", [["train.py"], ["-m", "train"]])
def test_a_script_runs_with_its_arguments_and_the_setting_of_the_allocator(command, run, tmp_path):
    (tmp_path / "train.py").write_text(SAYS_ITS_CONFIGURATION)
    ran = run(
        *command, "--lr", "1", precision="bf16-mixed", micro_batch_size=4, allocator="expandable"
    )
    assert ran.stdout == "bf16-mixed 4 expandable_segments:True False ['--lr', '1']\n"
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "choices", "said"),
    [
        ([], {}, "python -m autotune.run train.py --its --arguments"),
        (["train.py"], {}, "error: AUTOTUNE_CONFIG names no configuration\nhint: set it to"),
        (["train.py"], {"precision": "fp33"}, "error: config.json: "),
    ],
)
def test_what_cannot_be_run_ends_with_2_and_the_way_out(command, choices, said, run, tmp_path):
    (tmp_path / "train.py").write_text("raise AssertionError")
    ran = run(*command, **choices)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_script_that_nothing_is_applied_to_is_told_so(run, tmp_path):
    (tmp_path / "train.py").write_text("print('trained')")
    ran = run("train.py", precision="bf16-mixed")
    assert ran.stdout == "trained\n"
    assert ran.stderr.startswith("warning: train.py has made no Trainer that autotune knows")


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="transformers or accelerate is missing",
)
def test_a_trainer_without_a_line_of_ours_trains_with_the_configuration(run, tmp_path):
    (tmp_path / "train.py").write_text(BEFORE + MADE + SAYS_HOW_IT_TRAINS)
    ran = run("train.py", precision="bf16-mixed", micro_batch_size=6)
    assert ran.stdout.splitlines()[-1] == "6 2 torch.bfloat16", ran.stderr


def test_the_export_of_a_study_without_a_line_of_ours_starts_its_script_with_it(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BEFORE + MADE + TRAINED)
    of = recipe(
        TrainingConfig(micro_batch_size=8, allocator="expandable"),
        script="train.py",
        is_injected=True,
        script_arguments=("--lr", "1"),
    )
    export = TARGETS["pytorch"].write(of, "2")
    assert export.command.endswith(" python -m autotune.run train.py --lr 1")
    assert list(export.files) == ["autotune_config.json"]
    assert "callbacks=[autotune.TrainerCallback(args)]" in export.notes[0]


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_export_of_a_script_says_first_how_to_run_it_as_it_is(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    workload = recipe(script="train.py").workload
    trial = record(0, config=TrainingConfig(micro_batch_size=8))
    result = study_result([trial])
    object.__setattr__(result, "workload", workload)
    export = composed_export(result, trial, target)
    first, *_ = export.sections()
    assert first[1][-1].endswith(f"autotune_config.json python {tmp_path / 'train.py'}")
    assert "autotune_config.json" in export.content.files
