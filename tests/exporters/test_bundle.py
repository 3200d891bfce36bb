"""Exported files are put together from whole modules, and define every name once."""

import ast

import pytest

from autotune.exporters import TARGETS
from autotune.exporters.bundle import code, joined, shipped
from tests.exporters.recipes import configurations, recipe


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


@pytest.mark.parametrize("target", ["pytorch", "transformers"])
def test_no_name_is_defined_twice_in_an_exported_script(target):
    for config in configurations().values():
        export = TARGETS[target].write(recipe(config), TARGETS[target].versions[0])
        for file, text in export.files.items():
            if file in ("train.py", "autotune_trainer.py"):
                names = defined_names(text)
                assert sorted(names) == sorted(set(names))


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
