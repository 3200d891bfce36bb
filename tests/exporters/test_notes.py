"""Notes on what a trainer's files cannot express of a workload."""

import dataclasses
import shlex
from pathlib import Path

import pytest

from autotune.errors import InvalidInput
from autotune.exporters import TARGETS
from autotune.exporters.script_lines import loss_line
from autotune.exporters.written import WrittenExport, write_export
from autotune.spec.config import OF_SCRIPTS, TrainingConfig
from autotune.spec.user_code import script_sha256
from autotune.training.script.interface import load_config
from tests.building.results import record, study_result
from tests.exporters.recipes import recipe

READ_BY_THE_TRAINER = ("trl", "axolotl", "transformers", "llamafactory", "ms-swift", "unsloth")
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
    assert "own.py, which defines model, optimizer, learning rate, sequence length, loss" in said(
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


@pytest.mark.parametrize("found_here", [True, False])
def test_the_command_runs_a_script_where_the_search_ran_it(found_here, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/own.py").write_text("import autotune\n")
    monkeypatch.chdir(tmp_path / "here")
    arguments = {"script": "own.py", "script_arguments": ("a/b.py",)}
    workload = recipe(model="script", **arguments).workload
    if not found_here:
        monkeypatch.chdir(tmp_path)
    result = dataclasses.replace(study_result([record(0)]), workload=workload)
    written = write_export(result, result.trial(0), "pytorch", folder=Path("out"))
    starts = f"cd {tmp_path / 'here'} && " if found_here else ""
    file = f"AUTOTUNE_CONFIG={Path.cwd() / 'out/autotune_config.json'}"
    script = tmp_path / "here/own.py" if found_here else "own.py"
    assert written.content.command == f"{starts}{file} python {script} a/b.py"
    assert ("Use it:" in str(written)) == found_here
    assert ("in the folder of the search" in str(written)) != found_here


def test_another_script_of_the_same_name_is_not_taken_for_that_of_the_study(tmp_path, monkeypatch):
    """As where studies of one name in two databases ran a train.py each."""
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(f"# {folder}\nimport autotune\n")
    monkeypatch.chdir(tmp_path / "one")
    workload = recipe(model="script", script="own.py").workload
    workload = dataclasses.replace(workload, model_sha256=script_sha256("own.py"))
    result = dataclasses.replace(study_result([record(0)]), workload=workload)
    commands = []
    for folder in ("one", "other"):
        monkeypatch.chdir(tmp_path / folder)
        written = write_export(result, result.trial(0), "pytorch", folder=Path("out"))
        commands.append(written.content.command)
    assert commands[0].startswith(f"cd {tmp_path / 'one'} && ")
    assert commands[1].endswith("python own.py")
    assert "or was edited: start it in the folder of the search" in str(written)


@pytest.mark.parametrize("target", ["transformers", "accelerate", "deepspeed", "lightning"])
def test_no_file_asks_for_what_only_the_script_has(target, script, tmp_path):
    workload = recipe(**script).workload
    result = dataclasses.replace(study_result([record(0)]), workload=workload)
    written = write_export(result, result.trial(0), target, folder=tmp_path / "out")
    assert "sequence_length 128" not in str(written)
    assert "MODEL>" not in "".join(written.content.files.values())


def of_a_script(script, *, precision, own_precision):
    workload = recipe(**script, own_precision=own_precision).workload
    config = TrainingConfig(precision=precision, micro_batch_size=4)
    return dataclasses.replace(study_result([record(0, config=config)]), workload=workload)


@pytest.mark.parametrize(
    ("technique", "value"),
    [(technique, value) for technique, values in OF_SCRIPTS.items() for value in values],
)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_what_only_the_script_brings_is_exported_to_the_script_alone(
    target, technique, value, script, tmp_path
):
    config = TrainingConfig(**{technique: value, "micro_batch_size": 4})
    own = {"own_precision": config.precision, "own_fusion": config.optimizer_fusion}
    result = dataclasses.replace(
        study_result([record(0, config=config)]), workload=recipe(**script, **own).workload
    )
    if target == "pytorch":
        written = write_export(result, result.trial(0), target, folder=tmp_path / "out")
        assert getattr(load_config(written.files[0]), technique) == value
        return
    with pytest.raises(InvalidInput, match=f"has {technique} {value}, .* which its script brings"):
        write_export(result, result.trial(0), target, folder=tmp_path / "out")


@pytest.mark.parametrize("target", USER_LOOPS)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16-mixed"])
@pytest.mark.parametrize("own_precision", ["fp32", "bf16-true", "fp64"])
def test_where_the_trial_has_cast_weights_the_users_code_is_told_to(
    target, precision, own_precision, script, tmp_path
):
    result = of_a_script(script, precision=precision, own_precision=own_precision)
    written = write_export(result, result.trial(0), target, folder=tmp_path / "out")
    told = "weight.data = weight.data.to(torch.float32)" in str(written)
    assert told == (own_precision != "fp32")


@pytest.mark.parametrize("data", [{"packing": "padded"}, {"chat_column": "messages"}], ids=str)
@pytest.mark.parametrize("target", USER_LOOPS)
def test_a_loop_of_the_user_gets_the_line_of_a_loss_with_missing_labels(target, data):
    config = TrainingConfig(micro_batch_size=4)
    assert f"write {loss_line(recipe(config, **data))}, where" in said(target, **data)
    assert "labels_of_step" not in said(target)


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


@pytest.mark.parametrize(
    ("target", "lines"),
    [
        ("transformers", ["replace <MODEL> and <TEXT FILE> in train.py"]),
        ("trl", ["replace <DATASET> and <MODEL> in sft.yaml"]),
        ("axolotl", ["replace PUT-YOUR-MODEL-HERE and PUT-YOUR-TEXT-HERE in axolotl.yaml"]),
        (
            "llamafactory",
            [
                "replace PUT-YOUR-MODEL-HERE in llamafactory.yaml",
                "replace PUT-YOUR-TEXT-HERE in dataset_info.json",
            ],
        ),
        ("ms-swift", ["replace PUT-YOUR-MODEL-HERE and PUT-YOUR-TEXT-HERE in ms_swift.yaml"]),
        ("unsloth", ["replace PUT-YOUR-MODEL-HERE and PUT-YOUR-TEXT-HERE in unsloth_train.py"]),
        ("pytorch", None),
    ],
)
def test_what_is_to_be_replaced_in_the_files_comes_before_the_command(target, lines):
    content = TARGETS[target].write(recipe(), version(target))
    written = WrittenExport(
        target=target,
        target_version=version(target),
        record=record(0),
        folder=Path("out"),
        content=content,
    )
    assert dict(written.sections()).get("Before you use it") == lines
