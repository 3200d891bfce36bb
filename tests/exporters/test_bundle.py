"""Exported files are put together from whole modules, and define every name once."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import autotune.shipped
from autotune.exporters import TARGETS
from autotune.exporters.bundle import code, joined, shipped
from tests.exporters.recipes import (
    ON_SEVERAL_DEVICES,
    configurations,
    recipe,
    recipe_on_devices,
)

RUFF = Path(sys.executable).with_name("ruff")
TEXTS = {
    "a padded file": {"dataset": "/data/my.jsonl", "packing": "padded", "tokenizer": "bpe"},
    "a streamed data set": {"dataset": "org/name", "streaming": True, "tokenizer": "/tok"},
    "packed conversations": {"dataset": "/c.jsonl", "chat_column": "messages", "tokenizer": "/tok"},
    "padded conversations": {
        "dataset": "/c.jsonl",
        "chat_column": "messages",
        "tokenizer": "/tok",
        "packing": "padded",
    },
    "a user's model": {"model": "my_models:make"},
}


def test_a_module_is_in_a_file_once_and_after_those_that_it_imports():
    text = joined([shipped("chunked_loss"), shipped("token_loss", "chunked_loss")])
    assert text.count("def chunked_token_loss") + text.count("chunked_token_loss:") == 1
    assert text.count("def full_token_loss") == 1
    assert text.index("IGNORED_LABEL = ") < text.index("def full_token_loss")
    assert text.index("def full_token_loss") < text.index("chunked_token_loss:")
    assert "autotune" not in text


def test_the_imports_of_all_parts_are_at_the_top_in_one_statement_for_each_module():
    first = code("import math\nfrom torch import nn\n\nA = math.pi")
    second = code("from torch import Tensor\n\nB = Tensor")
    assert joined([first, second]) == (
        "import math\n\nfrom torch import Tensor, nn\n\nA = math.pi\nB = Tensor\n"
    )


def test_a_module_that_is_not_there_is_an_error():
    with pytest.raises(FileNotFoundError, match="no_such_module"):
        joined([shipped("no_such_module")])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["pytorch", "transformers"])
def test_no_name_is_defined_twice_in_an_exported_script(target):
    for config in configurations().values():
        export = TARGETS[target].write(recipe(config), TARGETS[target].versions[0])
        for file, text in export.files.items():
            if file in ("train.py", "autotune_trainer.py"):
                names = defined_names(text)
                assert sorted(names) == sorted(set(names))


SHIPPED = Path(autotune.shipped.__file__).parent
ALTERNATIVES = (
    {"gpt", "deep_one"},  # models
    {"adafactor_fixed_rate", "adamw_bf16"},  # optimizers
    {"autotune_promise", "autotune_lightning_promise"},  # files of their own
)


def test_modules_that_may_be_in_one_file_have_no_name_in_common():
    modules = {}
    for file in SHIPPED.rglob("*.py"):
        for name in set(defined_names(file.read_text())):
            modules.setdefault(name, set()).add(file.relative_to(SHIPPED).with_suffix(""))
    alike = {
        name: of_name
        for name, of_name in modules.items()
        if len(of_name) > 1
        and any(path.parts[0] != "script" for path in of_name)  # these are chosen among
        and {str(path) for path in of_name} not in ALTERNATIVES
    }
    assert alike == {}


@pytest.mark.skipif(not RUFF.exists(), reason="ruff is not installed")
def test_every_name_in_an_exported_python_file_is_defined_and_every_import_is_used(tmp_path):
    recipes = [recipe(config) for config in configurations().values()]
    recipes += [recipe_on_devices(case) for case in ON_SEVERAL_DEVICES]
    recipes += [recipe(**text) for text in TEXTS.values()]
    texts = set()
    for target in TARGETS.values():
        for version in target.versions:
            for asked in recipes:
                files = target.write(asked, version).files
                texts |= {text for file, text in files.items() if file.endswith(".py")}
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.py").write_text(text)
    command = [RUFF, "check", "--isolated", "--select", "F", "--output-format", "concise", tmp_path]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def defined_names(text):
    names = []
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.append(statement.name)
        elif isinstance(statement, ast.Assign):
            names += [target.id for target in statement.targets if isinstance(target, ast.Name)]
        elif isinstance(statement, ast.AnnAssign):
            names.append(statement.target.id)
    return names
