"""The lines that exports give for the user's script do what the trial did."""

import dataclasses
import json
import math

import pytest
import torch
import yaml

from autotune.exporters import TARGETS
from autotune.exporters.script_lines import model_and_data_note, optimizer_line, write_schedule
from autotune.spec.config import LegalityContext, TrainingConfig, rule_violations
from autotune.spec.workload import make_workload
from tests.exporters.readers.rates import trial_rates
from tests.exporters.recipes import recipe

SCHEDULES = [(schedule, warmup) for schedule in ("constant", "cosine") for warmup in (1, 2, 5, 20)]


@pytest.mark.parametrize(("schedule", "warmup"), SCHEDULES)
def test_the_line_of_the_schedule_gives_the_rates_of_the_trial(schedule, warmup):
    workload = make_workload(
        "cpu", {"steps": 20, "schedule": schedule, "learning_rate_warmup_steps": warmup}
    )
    optimizer = torch.optim.AdamW(
        [torch.nn.Parameter(torch.ones(1))], lr=workload.learning_rate_of("adamw")
    )
    line = write_schedule(workload).partition("write ")[2]
    scheduler = eval(line, {"torch": torch, "math": math, "optimizer": optimizer})
    rates = []
    for _ in range(workload.steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(trial_rates(workload))


def optimizers():
    for optimizer in ("adamw", "adafactor", "sgd"):
        for fusion in ("none", "foreach", "kernel"):
            config = TrainingConfig(
                optimizer=optimizer, optimizer_fusion=fusion, micro_batch_size=8
            )
            if not rule_violations(config.to_dict(), LegalityContext(global_batch=8)):
                yield config


@pytest.mark.parametrize("config", list(optimizers()), ids=lambda config: config.describe())
def test_the_line_of_the_optimizer_makes_that_of_the_trial(config):
    from autotune.techniques.optimizer import make_optimizer

    model, asked = torch.nn.Linear(2, 2), recipe(config)
    made = eval(optimizer_line(asked), {"torch": torch, "model": model})
    rate = asked.workload.learning_rate_of(config.optimizer)
    own = make_optimizer(
        model.parameters(), config.optimizer, fusion=config.optimizer_fusion, learning_rate=rate
    )
    assert type(made) is type(own)
    assert made.defaults == own.defaults


@pytest.mark.parametrize("target", ["accelerate", "deepspeed"])
def test_a_line_that_needs_a_file_comes_with_it(target):
    config = TrainingConfig(
        micro_batch_size=8, checkpointing="block", optimizer="adafactor-fixed-rate"
    )
    export = TARGETS[target].write(recipe(config), TARGETS[target].versions[0])
    assert {"autotune_blocks.py", "adafactor_fixed_rate.py"} <= set(export.files)
    plain = TARGETS[target].write(recipe(), TARGETS[target].versions[0])
    assert not {"autotune_blocks.py", "adafactor_fixed_rate.py"} & set(plain.files)


@pytest.mark.parametrize("target", ["accelerate", "lightning"])
def test_fp16_is_not_expressed_on_a_cpu_where_the_trainer_computes_something_else(target):
    config = TrainingConfig(micro_batch_size=8, precision="fp16-mixed")
    export = TARGETS[target].write(recipe(config, device_type="cpu"), TARGETS[target].versions[0])
    assert [entry.instead for entry in export.unsupported if entry.setting == "precision"] == [
        "fp32"
    ]


def test_a_note_names_what_was_trained():
    assert model_and_data_note(recipe()).startswith(
        "The trial trained gpt of 6 layers, width 128 on python-docs"
    )


@pytest.mark.parametrize("target", ["accelerate", "deepspeed", "lightning"])
def test_an_origin_of_several_lines_stays_a_comment_or_a_text(target):
    hostile = dataclasses.replace(recipe(), origin='study a\nmixed_precision: fp16\n"}, trial 1')
    file, text = next(
        iter(TARGETS[target].write(hostile, TARGETS[target].versions[0]).files.items())
    )
    plain = next(iter(TARGETS[target].write(recipe(), TARGETS[target].versions[0]).files.values()))
    read = json.loads if file.endswith(".json") else yaml.safe_load
    assert without_origin(read(text)) == without_origin(read(plain))


def without_origin(content):
    content.pop("autotune", None)
    for callback in content.get("trainer", {}).get("callbacks", []):
        callback["init_args"].get("trial", {}).pop("trial", None)
    return content
