"""Notes on what a trainer's files cannot express of a workload."""

import shlex

import pytest

from autotune.exporters import TARGETS
from autotune.spec.config import TrainingConfig
from tests.exporters.recipes import recipe

READ_BY_THE_TRAINER = ("trl", "axolotl", "transformers")
USER_LOOPS = ("accelerate", "deepspeed", "lightning")


def said(target, **workload):
    return " ".join(exported(target, **workload).notes)


def exported(target, config=None, **workload):
    return TARGETS[target].write(
        recipe(config or TrainingConfig(micro_batch_size=4), **workload), version(target)
    )


def version(target):
    return TARGETS[target].versions[0]


@pytest.fixture
def script(tmp_path):
    (tmp_path / "own.py").write_text("import autotune\n")
    return {"model": "script", "script": str(tmp_path / "own.py")}


@pytest.mark.parametrize("target", sorted(set(TARGETS) - {"pytorch"}))
def test_a_users_script_has_its_optimizer_and_data(target, script):
    assert "own.py, which defines model, optimizer, learning rate, loss and data itself" in said(
        target, **script
    )
    assert "which defines model, optimizer" not in said(target)


def test_what_only_a_script_knows_has_no_value(script):
    values = {one.setting: one.value for one in exported("pytorch", **script).unsupported}
    assert {name for name, value in values.items() if value is not None} == {
        "steps",
        "seed",
        "global_batch",
    }
    assert values["learning_rate"] is None


@pytest.mark.parametrize(
    ("allocator", "launcher"), [("default", []), ("expandable", ["autotune_launch.py"])]
)
def test_a_script_is_launched_with_its_allocator_which_apply_could_not_set(
    allocator, launcher, script
):
    export = exported("pytorch", TrainingConfig(micro_batch_size=4, allocator=allocator), **script)
    environment, python, *started = shlex.split(export.command)
    assert (environment, python) == ("AUTOTUNE_CONFIG=autotune_config.json", "python")
    assert started == [*launcher, script["script"]]
    assert set(launcher) <= set(export.files)


@pytest.mark.parametrize("target", USER_LOOPS)
def test_the_loss_of_padded_texts_is_no_mean_of_means(target):
    assert "labels of all 2 of a step" in said(target, packing="padded")
    assert "mean of means" not in said(target)


@pytest.mark.parametrize("target", READ_BY_THE_TRAINER)
def test_a_tokenizer_that_the_files_do_not_have_is_named(target):
    assert "a BPE of 300 trained on its text" in said(target, tokenizer="bpe", vocab_size=300)


@pytest.mark.parametrize("target", READ_BY_THE_TRAINER)
def test_a_note_tells_that_a_streamed_text_is_read_whole(target):
    assert "streamed its text" in said(target, dataset="somebody/text", streaming=True)
    assert "streamed" not in said(target, dataset="somebody/text")


def test_the_script_for_pytorch_reads_as_much_as_the_study():
    assert "no more text than 20 steps use" in said(
        "pytorch", dataset="somebody/text", streaming=True
    )
