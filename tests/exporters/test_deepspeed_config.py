"""DeepSpeed without training: `ds_config_auto.json` in transformers, and the scheduler."""

import json
import os

import pytest
import torch

from autotune.exporters import TARGETS
from autotune.exporters.deepspeed_config import AUTO_FILE, FILE
from autotune.spec.config import TrainingConfig
from tests.exporters.readers.deepspeed_reader import rates
from tests.exporters.readers.rates import trial_rates
from tests.exporters.recipes import recipe

pytest.importorskip("deepspeed", reason="deepspeed is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
CONFIG = TrainingConfig(micro_batch_size=2, precision="bf16-mixed")


@pytest.fixture(autouse=True)
def _state_of_the_process():
    """Undo that TrainingArguments tell the whole process that DeepSpeed is used."""
    before = dict(os.environ)
    yield
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(before)
    assert not torch.distributed.is_initialized()


def exported():
    return (
        TARGETS["deepspeed"]
        .write(recipe(CONFIG, device_type="cpu", gradient_clipping=0.5), "0.19")
        .files
    )


def filled(tmp_path, **settings):
    """Returns the file after TrainingArguments has replaced `auto` by its values."""
    (tmp_path / AUTO_FILE).write_text(exported()[AUTO_FILE])
    return transformers.TrainingArguments(
        output_dir=str(tmp_path),
        deepspeed=str(tmp_path / AUTO_FILE),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_grad_norm=0.5,
        use_cpu=True,
        **settings,
    )


def test_transformers_fills_in_the_numbers_of_the_other_file(tmp_path):
    from deepspeed.runtime.config import DeepSpeedConfig

    arguments = filled(tmp_path)
    arguments.hf_deepspeed_config.trainer_config_finalize(arguments, None, 20)
    filled_in = DeepSpeedConfig(arguments.hf_deepspeed_config.config)
    numbers = DeepSpeedConfig(json.loads(exported()[FILE]))
    for name in (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ):
        assert getattr(filled_in, name) == getattr(numbers, name)
    assert filled_in.torch_autocast_dtype == numbers.torch_autocast_dtype
    assert filled_in.optimizer_name is None  # the trainer's own


def test_bf16_of_the_trainer_would_turn_on_deepspeeds_own(tmp_path):
    """This is why a note of the export tells users to leave it off."""
    switched_on = {}
    for bf16 in (False, True):
        plugin = filled(tmp_path, bf16=bf16).deepspeed_plugin
        plugin.set_mixed_precision("bf16" if bf16 else "no")
        switched_on[bf16] = plugin.deepspeed_config["bf16"]["enabled"]
    assert switched_on == {False: False, True: True}


@pytest.mark.parametrize("warmup", [1, 2, 3, 5, 20])
def test_the_scheduler_gives_the_rates_of_the_trial(warmup):
    asked = recipe(CONFIG, learning_rate_warmup_steps=warmup)
    text = TARGETS["deepspeed"].write(asked, "0.19").files[FILE]
    assert rates(text) == pytest.approx(trial_rates(asked.workload))


def test_a_cosine_of_deepspeed_is_another_schedule():
    """This is why it is not expressed."""
    text = (
        TARGETS["deepspeed"].write(recipe(CONFIG, learning_rate_warmup_steps=1), "0.19").files[FILE]
    )
    params = {
        "total_num_steps": 20,
        "warmup_num_steps": 2,
        "cos_min_ratio": 0.1,
        "warmup_type": "linear",
    }
    settings = json.loads(text) | {"scheduler": {"type": "WarmupCosineLR", "params": params}}
    own = trial_rates(recipe(CONFIG, schedule="cosine", learning_rate_warmup_steps=2).workload)
    theirs = rates(json.dumps(settings))
    assert theirs[0] == 0
    assert theirs != pytest.approx(own, rel=0.01)
