"""`train.py` of the transformers export: names that the workload knows are filled in, and stay text."""

import ast

import pytest
from readers.hugging_face import tiny_llama
from recipes import recipe

from autotune.exporters import transformers, trl
from autotune.exporters.training_script import MODEL_CONFIG_FILE, training_script
from autotune.model_file import model_name

CONFIG = {**tiny_llama().config.to_dict(), "model_type": "llama", "vocab_size": 256}
NAMED = {"model": model_name(CONFIG), "model_config": CONFIG}


def script(**workload):
    text = training_script(recipe(**workload))["train.py"]
    ast.parse(text)
    return text


def test_what_only_the_user_knows_is_left_to_fill_in():
    text = script()
    assert text.count('"<MODEL>"') == 2
    assert '"<TEXT FILE>"' in text


def test_a_config_json_goes_along_with_a_model_of_random_weights():
    files = training_script(recipe(**NAMED, layers=2))
    assert "<MODEL>" not in files["train.py"]
    assert '"num_hidden_layers": 2' in files[MODEL_CONFIG_FILE]


def test_pretrained_weights_are_named_and_no_config_is_written():
    files = training_script(recipe(**NAMED, pretrained=True, model_source="somebody/model"))
    assert "from_pretrained('somebody/model', **model_kwargs())" in files["train.py"]
    assert list(files) == ["train.py"]


@pytest.mark.parametrize(
    ("workload", "loaded"),
    [
        ({"dataset": "my.jsonl"}, "load_dataset(\"json\", data_files='my.jsonl', split=\"train\")['text']"),
        ({"dataset": "a/b", "dataset_config": "c"}, "load_dataset('a/b', 'c', split='train')['text']"),
        ({"dataset": "a/b", "text_column": "body"}, "load_dataset('a/b', split='train')['body']"),
    ],
)
def test_the_workloads_text_is_loaded(workload, loaded):
    assert loaded in script(**workload)


@pytest.mark.parametrize("name", ["'); print('run", '"""\nprint(1)\n"""', "line\nprint(1)"])
@pytest.mark.parametrize("setting", ["dataset", "text_column", "tokenizer", "dataset_config"])
def test_hostile_names_stay_text(setting, name):
    calls = [node for node in ast.walk(ast.parse(script(**{setting: name}))) if isinstance(node, ast.Call)]
    assert "print" not in {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def test_the_name_of_a_script_of_ones_own_stays_a_comment(tmp_path):
    file = tmp_path / "my\nprint(1)\n.py"
    file.write_text("import autotune\n")
    text = script(model="script", script=str(file))
    assert "\nprint(1)" not in text


def test_what_a_script_of_ones_own_decided_is_left_to_the_user_in_a_note(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import autotune\n")
    asked = recipe(model="script", script=str(file))
    for target in (transformers.TARGET, trl.TARGET):
        assert any("own.py, whose optimizer" in note for note in target.write(asked, target.versions[0]).notes)
