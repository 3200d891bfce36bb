import dataclasses
import json

import pytest

from autotune.errors import InvalidInput
from autotune.spec.model_choice import with_model_config
from autotune.spec.model_file import (
    largest_sequence_length,
    model_name,
    read_model_config,
    sizes_of,
    with_defaults,
    with_layers,
)
from autotune.spec.workload import Workload, make_workload

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 16,  # heads of an odd size: allowed here
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 3,
    "n_embd": 48,
    "n_head": 4,
    "vocab_size": 300,
    "n_positions": 512,
}
MAMBA = {"model_type": "mamba", "num_hidden_layers": 3, "hidden_size": 48, "vocab_size": 300}
"""A state-space model, which has no heads."""
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "layers_block_type": ["mamba", "attention"],
    "hidden_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 300,
}
"""Its number of layers is the length of a list."""
GEMMA3 = {"model_type": "gemma3", "text_config": {**LLAMA, "layer_types": ["a", "b", "b"]}}


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    return file


# -- reading ---------------------------------------------------------------------------------------


def test_a_file_and_its_folder_are_the_same_model(file):
    assert read_model_config(str(file)) == read_model_config(str(file.parent)) == LLAMA


@pytest.mark.parametrize("content", [LLAMA, GPT2])
def test_sizes_are_found_under_the_names_of_each_family(content):
    assert sizes_of(content) == {
        "layers": 3,
        "width": 48,
        "heads": 16 if content is LLAMA else 4,
        "vocab_size": 300,
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not valid JSON"),
        ('{"model_type": "llama", "rope_theta": NaN}', "NaN"),
        ("[]", "does not say which model"),
        ("{}", "does not say which model"),
        ('{"model_type": "../llama"}', "does not say which model"),
        ('{"model_type": 3}', "does not say which model"),
        (json.dumps({**LLAMA, "hidden_size": "48"}), 'hidden_size = "48"'),
        (json.dumps({**LLAMA, "vocab_size": 0}), "vocab_size = 0"),
        (json.dumps({**GEMMA3, "text_config": {"vocab_size": -1}}), "vocab_size = -1"),
    ],
)
def test_a_file_that_describes_no_model_is_rejected(text, named, file):
    file.write_text(text)
    with pytest.raises(InvalidInput, match=named) as raised:
        read_model_config(str(file))
    assert raised.value.hint


@pytest.mark.parametrize(
    "path", ["", "nope", "missing/config.json", "x" * 5000, "a\0b", "~nobody-of-that-name/x"]
)
def test_a_path_to_nothing_is_rejected_with_the_models_that_exist(path):
    with pytest.raises(InvalidInput, match="there is no model") as raised:
        make_workload("cpu", {"model": path})
    assert "deep-one" in raised.value.hint


def test_a_folder_without_the_file_is_rejected(tmp_path):
    with pytest.raises(InvalidInput, match="No such file"):
        make_workload("cpu", {"model": str(tmp_path)})


def test_bytes_that_are_not_text_are_rejected(file):
    file.write_bytes(bytes(range(256)))
    with pytest.raises(InvalidInput, match="not valid JSON"):
        read_model_config(str(file))


@pytest.mark.parametrize(
    ("content", "sizes"),
    [
        (MAMBA, {"layers": 3, "width": 48, "heads": None}),
        (NEMOTRON_H, {"layers": None, "width": 48, "heads": 4}),
        ({**LLAMA, "num_attention_heads": [4, 2, 4]}, {"layers": 3, "width": 48, "heads": None}),
        ({**LLAMA, "hidden_size": None}, {"layers": 3, "width": None, "heads": 16}),
        (GEMMA3, {"layers": 3, "width": 48, "heads": 16}),
    ],
)
def test_a_size_that_the_config_does_not_specify_is_not_demanded(content, sizes):
    assert sizes_of(content) == {**sizes, "vocab_size": 300}


def test_without_a_vocabulary_no_text_can_be_checked():
    with pytest.raises(InvalidInput, match="has no vocab_size"):
        sizes_of({"model_type": "mamba", "num_hidden_layers": 3})


def test_the_positions_of_a_text_part_are_those_of_the_model():
    assert largest_sequence_length(GEMMA3) == 512
    assert largest_sequence_length({**MAMBA, "max_position_embeddings": -1}) is None


def test_defaults_add_only_sizes_that_are_missing():
    defaults = {**LLAMA, "hidden_size": 4096, "rope_theta": 5, "text_config": {"vocab_size": 9}}
    content = {"model_type": "llama", "hidden_size": 48, "vocab_size": 300}
    assert with_defaults(content, defaults) == {**LLAMA, "text_config": {"vocab_size": 9}}


# -- layers ----------------------------------------------------------------------------------------


def test_lists_of_one_entry_a_layer_follow_the_number_of_layers():
    content = {**LLAMA, "layer_types": ["a", "b", "b"], "eos_token_id": [1, 2]}
    assert with_layers(content, 2) == {**content, "num_hidden_layers": 2, "layer_types": ["a", "b"]}
    assert with_layers(content, 5)["layer_types"] == ["a", "b", "b", "a", "b"]


def test_the_layers_of_a_text_part_are_set_there():
    changed = with_layers(GEMMA3, 2)
    assert changed == {**GEMMA3, "text_config": with_layers(GEMMA3["text_config"], 2)}
    assert changed["text_config"]["layer_types"] == ["a", "b"]


def test_a_config_without_a_number_of_layers_stays_as_it_is():
    assert with_layers(NEMOTRON_H, None) == with_layers(NEMOTRON_H, 2) == NEMOTRON_H


def test_as_many_layers_as_it_says_change_nothing():
    assert with_layers(LLAMA, 3) == LLAMA


# -- the workload ----------------------------------------------------------------------------------


def test_a_workload_takes_its_sizes_from_the_file(file):
    workload = make_workload("cpu", {"width": 64, "steps": 30}, {"model": str(file)})
    assert (workload.layers, workload.width, workload.heads, workload.vocab_size) == (
        3,
        48,
        16,
        300,
    )
    assert (workload.model_config, workload.steps) == (LLAMA, 30)


def test_the_layers_can_be_changed(file):
    assert make_workload("cpu", {"model": str(file), "layers": 2}).layers == 2


@pytest.mark.parametrize(("field", "value"), [("width", 64), ("heads", 8), ("vocab_size", 256)])
def test_a_size_that_contradicts_the_file_is_rejected(field, value, file):
    with pytest.raises(InvalidInput, match=f"{field} = {value} contradicts") as raised:
        make_workload("cpu", {"model": str(file), field: value})
    assert f"--{field.replace('_', '-')}" in raised.value.hint


def test_a_size_that_agrees_with_the_file_is_let_through(file):
    assert make_workload("cpu", {"model": str(file), "width": 48}).width == 48


def test_the_inner_size_of_the_feed_forward_is_the_files(file):
    with pytest.raises(InvalidInput, match="feed_forward_width = 64"):
        make_workload("cpu", {"model": str(file), "feed_forward_width": 64})


def test_a_sequence_longer_than_the_positions_is_rejected(file):
    with pytest.raises(InvalidInput, match=r"1024 .* 512 positions"):
        make_workload("cpu", {"model": str(file), "sequence_length": 1024})


def test_a_vocabulary_smaller_than_the_bytes_is_rejected(file):
    file.write_text(json.dumps({**LLAMA, "vocab_size": 100}))
    with pytest.raises(InvalidInput, match="vocab_size = 100") as raised:
        make_workload("cpu", {"model": str(file)})
    assert "--vocab-size" not in raised.value.hint


@pytest.mark.parametrize("content", [MAMBA, NEMOTRON_H])
def test_a_workload_without_a_size_can_be_stored_and_described(content):
    workload = make_workload("cpu", {"model": model_name(content), "model_config": content})
    assert Workload(**json.loads(json.dumps(workload.to_dict()))) == workload
    assert "None" not in workload.describe()


@pytest.mark.parametrize(("field", "content"), [("heads", MAMBA), ("layers", NEMOTRON_H)])
def test_a_size_that_the_config_does_not_specify_cannot_be_given(field, content):
    named = {"model": model_name(content), "model_config": content}
    with pytest.raises(InvalidInput, match=f"{field} = 4 contradicts .* does not specify it"):
        make_workload("cpu", {**named, field: 4})


@pytest.mark.parametrize("field", ["layers", "width", "heads"])
def test_a_built_in_model_needs_every_size(field):
    with pytest.raises(InvalidInput, match=f"Invalid {field}: None"):
        dataclasses.replace(make_workload("cpu"), **{field: None})


def test_a_later_built_in_model_overrides_the_config(file):
    workload = make_workload("cpu", {"model": str(file)}, {"model": "gpt", "heads": 4})
    assert (workload.model, workload.model_config) == ("gpt", None)


# -- identity --------------------------------------------------------------------------------------


def test_two_files_of_equal_content_are_one_workload(file, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(dict(reversed(LLAMA.items())), indent=4))
    one, two = (make_workload("cpu", {"model": str(path)}) for path in (file, other))
    assert one == two
    assert one.fingerprint == two.fingerprint


def test_another_content_is_another_workload(file):
    before = make_workload("cpu", {"model": str(file)})
    file.write_text(json.dumps({**LLAMA, "rope_theta": 5000}))
    after = make_workload("cpu", {"model": str(file)})
    assert before.model != after.model
    assert before.fingerprint != after.fingerprint


def test_a_stored_workload_does_not_need_the_file(file):
    workload = make_workload("cpu", {"model": str(file)})
    file.unlink()
    assert Workload(**json.loads(json.dumps(workload.to_dict()))) == workload


def test_a_workload_stored_before_there_were_config_files_still_loads():
    stored = make_workload("cpu").to_dict()
    del stored["model_config"]
    assert Workload(**stored) == make_workload("cpu")


def test_naming_the_file_again_changes_nothing(file):
    said = with_model_config({"model": str(file), "layers": None})
    assert said == {"model": model_name(LLAMA), "model_config": LLAMA, "layers": None}
    assert with_model_config(said) == said


def test_a_number_that_is_not_finite_is_rejected_with_its_key(file):
    text = json.dumps({**LLAMA, "rope_parameters": {"factors": [1.0], "rope_theta": 1.5}})
    file.write_text(text.replace("1.5", "1e999"))
    with pytest.raises(InvalidInput, match=r"config\.json has rope_theta = inf"):
        make_workload("cpu", {"model": str(file)})


def test_a_content_under_another_name_is_rejected(file):
    workload = make_workload("cpu", {"model": str(file)})
    with pytest.raises(InvalidInput, match="belong together"):
        dataclasses.replace(workload, model="gpt")
