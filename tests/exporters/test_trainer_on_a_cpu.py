"""A trial on a CPU, exported to transformers and trl, which reject or drop precisions there."""

import pytest
import yaml
from transformers import HfArgumentParser, TrainingArguments

from autotune.exporters import transformers, trl
from autotune.spec.config import TrainingConfig
from tests.exporters.readers.hugging_face import FOLDER, imported
from tests.exporters.recipes import recipe

TARGETS = {"transformers": transformers.TARGET, "trl": trl.TARGET}


def exported(target, precision, device_type="cpu"):
    asked = recipe(TrainingConfig(micro_batch_size=8, precision=precision), device_type=device_type)
    return TARGETS[target].write(asked, TARGETS[target].versions[0])


def test_the_trainers_arguments_are_made_with_nothing_added():
    with imported(exported("transformers", "bf16-mixed").files["autotune_trainer.py"]) as module:
        args = module.training_arguments(FOLDER)
    assert (args.bf16, args.device.type) == (True, "cpu")


@pytest.mark.parametrize(
    ("target", "file"), [("transformers", "training_args.json"), ("trl", "sft.yaml")]
)
def test_the_files_alone_are_taken_with_nothing_added(target, file):
    known = {field.name for field in TrainingArguments.__dataclass_fields__.values()}
    keys = yaml.safe_load(exported(target, "bf16-mixed").files[file])
    shared = {key: value for key, value in keys.items() if key in known}
    [args] = HfArgumentParser(TrainingArguments).parse_dict({**shared, "output_dir": FOLDER})
    assert (args.bf16, args.use_cpu) == (True, True)


@pytest.mark.parametrize("target", TARGETS)
def test_fp16_which_is_dropped_on_a_cpu_is_not_expressed(target):
    unsupported = {one.setting: one.instead for one in exported(target, "fp16-mixed").unsupported}
    assert unsupported["precision"] == "fp32"


@pytest.mark.parametrize("target", TARGETS)
def test_on_a_gpu_fp16_is_as_in_the_trial(target):
    export = exported(target, "fp16-mixed", "cuda")
    assert "precision" not in {one.setting for one in export.unsupported}
    assert "use_cpu" not in "".join(export.files.values())
