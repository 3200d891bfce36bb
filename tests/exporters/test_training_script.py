"""`train.py` of the transformers export: names of the workload are filled in and stay text."""

import ast
import types
from typing import Any

import pytest

from autotune.exporters import transformers, trl
from autotune.exporters.transformers.training_script import MODEL_CONFIG_FILE, training_script
from autotune.spec.model_file import model_name
from tests.exporters.readers.hugging_face import tiny_llama
from tests.exporters.recipes import recipe

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
        ({"dataset": "my.jsonl"}, [("json",), {"data_files": "my.jsonl", "split": "train"}]),
        ({"dataset": "MY.MD"}, [("text",), {"data_files": "MY.MD", "split": "train"}]),
        (
            {"dataset": "my.csv", "dataset_split": "train[:9]"},
            [("csv",), {"data_files": "my.csv", "split": "train[:9]"}],
        ),
        ({"dataset": "a/b", "dataset_config": "c"}, [("a/b", "c"), {"split": "train"}]),
    ],
)
def test_the_workloads_text_is_loaded(workload, loaded):
    calls = [node for node in ast.walk(ast.parse(script(**workload))) if isinstance(node, ast.Call)]
    [call] = (node for node in calls if is_call_of(node, "load_dataset"))
    words = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert [tuple(map(ast.literal_eval, call.args)), words] == loaded


def is_call_of(node, name):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


class Rows(dict):
    """As much of a dataset as the script uses."""

    def __init__(self, **columns):
        super().__init__(columns)
        self.column_names = list(columns)
        kinds = {
            name: "string" if isinstance(values[0], str) else "int64"
            for name, values in columns.items()
        }
        self.features = {name: types.SimpleNamespace(dtype=kind) for name, kind in kinds.items()}


@pytest.mark.parametrize(
    ("named", "rows"),
    [
        (None, Rows(label=[0, 1], story=["one", ""])),
        (None, Rows(title=["three", "four"], text=["one", ""])),
        ("body", Rows(text=["three", "four"], body=["one", ""])),
    ],
    ids=["the only one of strings", "text", "named"],
)
def test_the_texts_are_those_of_the_column_that_a_study_takes(named, rows):
    column = {} if named is None else {"text_column": named}
    assert texts_of(script(dataset="a/b", **column), rows) == ["one"]


def texts_of(text, rows):
    """`texts`, by the lines from the one that loads rows on to the one that makes them."""
    body = ast.parse(text).body
    first, last = (
        next(index for index, line in enumerate(body) if ast.unparse(line).startswith(f"{name} = "))
        for name in ("rows", "texts")
    )
    lines = body[first : last + 1]
    names = {"load_dataset": lambda *_, **__: rows}
    exec(compile(ast.Module(lines, []), "train.py", "exec"), names)
    return names["texts"]


def test_a_tokenized_dataset_is_not_taken_for_text():
    with pytest.raises(SystemExit, match="tokenized"):
        texts_of(script(dataset="a/b"), Rows(input_ids=[1, 2], text=["one", "two"]))


@pytest.mark.parametrize(("packing", "tokens"), [("packed", [7, 8, 2]), ("padded", [1, 7, 8])])
def test_special_tokens_stand_where_a_study_puts_them(packing, tokens):
    class Tokenizer:
        bos_token_id, eos_token_id = 1, 2

        def __call__(self, text, *, add_special_tokens):
            assert not add_special_tokens
            return {"input_ids": [7, 8]}

    body = ast.parse(script(tokenizer="somebody/tokenizer", packing=packing)).body
    made = [line for line in body if ast.unparse(line).startswith(("special", "def encode"))]
    names = {"tokenizer": Tokenizer()}
    exec(compile(ast.Module(made, []), "train.py", "exec"), names)
    encode: Any = names["encode"]
    assert encode("a text") == tokens


@pytest.mark.parametrize("name", ["'); print('run", '"""\nprint(1)\n"""', "line\nprint(1)"])
@pytest.mark.parametrize("setting", ["dataset", "text_column", "tokenizer", "dataset_config"])
def test_hostile_names_stay_text(setting, name):
    calls = [
        node
        for node in ast.walk(ast.parse(script(**{setting: name})))
        if isinstance(node, ast.Call)
    ]
    assert "print" not in {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def test_the_name_of_a_users_script_stays_a_comment(tmp_path):
    file = tmp_path / "my\nprint(1)\n.py"
    file.write_text("import autotune\n")
    text = script(model="script", script=str(file))
    assert "\nprint(1)" not in text


def test_a_note_leaves_to_the_user_what_a_users_script_decided(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import autotune\n")
    asked = recipe(model="script", script=str(file))
    for target in (transformers.TARGET, trl.TARGET):
        assert any(
            "own.py, which defines model" in note
            for note in target.write(asked, target.versions[0]).notes
        )
