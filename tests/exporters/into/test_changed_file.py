"""The configuration of a trial in every trainer's own file: read back it is the trial's.

What is checked holds for every case of `files.py`, with six configurations of the whole legal
space, each different from the file's in one to four techniques.
"""

import dataclasses
import difflib
import random
from functools import cache
from pathlib import Path

import pytest

from autotune.exporters import TARGETS
from autotune.exporters.into.changes import changed_file, read_file_of_trainer
from autotune.exporters.into.comparison import remarks
from autotune.exporters.into.dialects import DIALECTS
from autotune.exporters.into.edited import REMOVED
from autotune.exporters.launch import PROCESS_SETTINGS
from autotune.importers.registry import TRAINERS
from autotune.spec.config import (
    FIELD_ORDER,
    OF_SEVERAL_DEVICES,
    SEARCHED,
    TECHNIQUES,
    LegalityContext,
    rule_violations,
)
from autotune.system.allocator_settings import assignments
from tests.exporters.into.files import FILES
from tests.exporters.recipes import recipe

CONFIGURATIONS = 6
WORKLOAD = recipe(sequence_length=512).workload


def file_of(case, text=None):
    name, original, _ = FILES[case]
    return read_file_of_trainer(Path(name), (text or original).encode(), WORKLOAD)


def recipe_for(file, **choices):
    config = dataclasses.replace(file.config, **choices)
    batch = file.training.workload["global_batch"]
    return recipe(config, sequence_length=512, global_batch=batch)


@cache
def recipes(case):
    """Returns recipes that differ from the file of the case in a few techniques."""
    file, chance = file_of(case), random.Random(case)
    batch = file.training.workload["global_batch"]
    values = {
        **{name: values for name, values in SEARCHED.items() if name not in OF_SEVERAL_DEVICES},
        "micro_batch_size": [size for size in (1, 2, 4, 8) if batch % size == 0],
        "adapter_rank": [8, 64],
        "memory_budget": [1.0, 0.5],
    }
    made = []
    while len(made) < CONFIGURATIONS:
        names = chance.sample([name for name in values if values[name]], chance.randint(1, 4))
        choices = {name: chance.choice(list(values[name])) for name in names}
        config = dataclasses.replace(file.config, **choices)
        if not rule_violations(config.to_dict(), LegalityContext(global_batch=batch)):
            made.append(recipe_for(file, **choices))
    return made


@cache
def changed(case):
    """Returns [(recipe, the changed file)] of a case."""
    return [(made, changed_file(file_of(case), made)) for made in recipes(case)]


cases = pytest.mark.parametrize(
    "case", [case for case, (_, _, target) in FILES.items() if target in TARGETS]
)


def test_every_trainer_that_is_read_is_written_into():
    assert DIALECTS.keys() == TRAINERS.keys()


@cases
def test_the_changed_file_is_read_as_the_trial_or_says_where_it_is_not(case):
    for made, change in changed(case):
        lacking = {entry.setting for entry in change.unsupported}
        if change.not_read is not None:
            continue
        says = file_of(case, change.text).config
        differs = {
            name
            for name in FIELD_ORDER
            if getattr(says, name) != getattr(made.config, name)
            and name not in PROCESS_SETTINGS
            and TECHNIQUES[name].refines not in lacking
        }
        assert differs <= lacking, made.config.describe()


@cases
def test_a_step_keeps_its_sequences(case):
    batch = file_of(case).training.workload["global_batch"]
    batches = {
        file_of(case, change.text).training.workload["global_batch"]
        for _, change in changed(case)
        if change.not_read is None
    }
    assert batches == {batch}


@cases
def test_a_second_time_nothing_changes(case):
    for made, change in changed(case):
        if change.not_read is None:
            assert changed_file(file_of(case, change.text), made).changes == ()


@cases
def test_lines_of_other_keys_stay_as_they_are(case):
    original = FILES[case][1]
    for made, change in changed(case):
        keys = {name for each in change.changes for name in each.path}
        if "&" in original:
            # A value that is written out at the first place that shares it.
            keys |= {"per_device_eval_batch_size", "activation_checkpointing_kwargs"}
        found = difflib.ndiff(original.splitlines(), change.text.splitlines())
        others = [
            line[2:]
            for line in found
            if line[0] == "-" and not any(key in line for key in (*keys, *_WITHIN))
        ]
        assert others == [], made.config.describe()


_WITHIN = ("use_reentrant", "- all-linear", "# all of them", "\t},")
"""Lines within the values of keys that are taken out whole."""


@cases
def test_the_configuration_that_a_file_has_changes_nothing(case):
    file = file_of(case)
    assert changed_file(file, recipe_for(file)).text == file.text


@cases
def test_each_change_names_the_techniques_that_it_is_for(case):
    for made, change in changed(case):
        unnamed = [each.name for each in change.changes if not each.techniques]
        assert unnamed == [], made.config.describe()


# -- single trainers -------------------------------------------------------------------------------


def keys_of(case, **choices):
    file = file_of(case)
    made = changed_file(file, recipe_for(file, **choices))
    return {each.name: each.after for each in made.changes}, made


def test_keys_of_earlier_versions_keep_their_names():
    keys, _ = keys_of("trl", checkpointing="none", precision="fp32")
    assert keys == {"activation_checkpointing": False, "torch_dtype": "float32", "bf16": False}


def test_flags_of_the_attention_are_exchanged():
    keys, _ = keys_of("axolotl", attention="auto")
    assert keys == {"flash_attention": False, "sdp_attention": True}


def test_other_plugins_stay_where_kernels_are_taken_out_or_put_in():
    keys, _ = keys_of("axolotl", kernels="none")
    assert keys == {"liger_rms_norm": REMOVED}
    keys, made = keys_of("axolotl, all weights", kernels="liger")
    assert keys["plugins"] == ["axolotl.integrations.liger.LigerPlugin"]
    assert made.unsupported == ()


def test_kernels_that_a_file_has_by_saying_nothing_are_turned_off():
    keys, made = keys_of("axolotl", adapter_kernels="none")
    assert keys == dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    assert made.unsupported == ()


def test_a_plugin_that_is_there_makes_the_loss_in_chunks():
    keys, made = keys_of("axolotl", loss="full")
    assert keys == {"liger_fused_linear_cross_entropy": False}
    assert made.unsupported == ()


def test_the_sequences_of_a_step_are_written_where_they_follow_from_the_micro_batch():
    keys, _ = keys_of("torchtitan", micro_batch_size=2)
    assert keys == {"training.local_batch_size": 2, "training.global_batch_size": 4}


def test_a_number_of_sequences_that_a_step_has_already_is_not_written_again():
    keys, _ = keys_of("axolotl, all weights", micro_batch_size=4)
    assert keys == {"micro_batch_size": 4}


def test_the_batch_of_data_is_that_of_the_users_class():
    keys, _ = keys_of("lightning", micro_batch_size=8, precision="bf16-mixed")
    assert keys == {
        "data.init_args.batch_size": 8,
        "trainer.accumulate_grad_batches": 1,
        "trainer.precision": "bf16-mixed",
    }


def test_a_compiler_that_is_named_is_taken_out_with_the_compilation():
    # transformers compiles wherever torch_compile_backend is given.
    keys, made = keys_of("arguments with tabs", compile="none")
    assert keys.keys() == {"torch_compile", "torch_compile_backend"}
    assert "inductor" not in made.text


def test_what_is_a_setting_of_the_process_is_in_the_command():
    _, made = keys_of("trl", allocator="expandable")
    assert made.changes == ()
    assert made.command.startswith(f"{assignments(expandable=True)} trl sft")


def test_a_kernel_without_a_key_is_chosen_by_the_launcher():
    _, made = keys_of("trl", attention="efficient")
    assert list(made.files) == ["autotune_launch.py"]
    assert "autotune_launch.py" in made.command
    assert made.unsupported == ()


def test_what_a_file_cannot_say_is_listed_with_the_exporters_reason():
    _, made = keys_of("trl", loss="full")
    [entry] = made.unsupported
    assert (entry.setting, entry.value, entry.instead) == ("loss", "full", "chunked")


def test_a_file_with_other_dropout_than_the_study_keeps_it_and_is_remarked():
    name, original, _ = FILES["axolotl"]
    file = file_of("axolotl", original + "lora_dropout: 0.1\nlora_modules_to_save: [lm_head]\n")
    asked = recipe_for(file, adapter_rank=64)
    made = changed_file(file, asked)
    assert [change.name for change in made.changes] == ["lora_r"]
    said = [line for line in remarks(asked.workload, asked.config, file) if "keeps its own" in line]
    assert [line.partition(": ")[0] for line in said] == [
        f"{name} has adapter dropout 0.1, the study 0.0",
        f"{name} has adapter alpha 32, the study 16",
        f"{name} has modules to save lm_head, the study none",
        f"{name} has modules to save dtype base, the study adapter",
    ]
