"""Users' names and paths, however odd, stay text in every file of every target."""

import ast
import dataclasses
import json
import shlex
import tomllib

import pytest
import yaml

from autotune.exporters import TARGETS
from autotune.exporters.pytorch.script import FILE as SCRIPT
from autotune.printable import printable
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import model_name
from tests.exporters.recipes import recipe

HOSTILE = (
    'a"""\nimport os\n"""b',
    "a''' b\\",
    "back\\slashes \\N{no} \\u12 \\x",
    "{braces} {{twice}} {0} %s %(prog)s",
    "two\nlines: yes\n- [x]\n#",
    "\u2028\x85\x1b[31m tab\t end\x7f",
    "\N{PILE OF POO} \N{LATIN SMALL LETTER E WITH ACUTE}",
    "$(touch x) `y` ; & | > *",
    "\udc80 no UTF-8",
    "\u202egnp.exe\u2066 \x1b]52;c;aGk=\x07 \x9b31m \ufeff\N{TAG LATIN SMALL LETTER A}",
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 300,
}
CONFIG = TrainingConfig(
    micro_batch_size=8, compile="block", memory_budget=0.5, allocator="expandable"
)
"""With a launcher where there is one."""


def versions():
    return [(name, version) for name, target in TARGETS.items() for version in target.versions]


def asked(text, config):
    named = {
        "model": model_name(LLAMA),
        "model_config": LLAMA,
        "pretrained": True,
        "model_source": text,
        "layers": 2,
        "width": 32,
        "heads": 2,
        "vocab_size": 300,
    }
    words = {
        "dataset": text,
        "dataset_config": text,
        "text_column": text,
        "tokenizer": text,
        "dataset_split": text,
    }
    return dataclasses.replace(
        recipe(config, **named, **words, held_out_split=text), origin=f"study {text}, trial 1"
    )


def shape_of(name, text):
    """What there is in a file, whatever the names in it; fails where it cannot be read."""
    text.encode("utf-8", errors="strict")
    if name.endswith(".py"):
        return [
            type(node).__name__ for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)
        ]
    if name.endswith(".toml"):
        return tomllib.loads(text)
    if name.endswith(".json"):
        content = json.loads(text)
        return [list(one) for one in content] if isinstance(content, list) else list(content)
    if name == "autotune.yaml":  # a template: its comment must be one line
        return text.splitlines()[1:]
    return list(yaml.safe_load(text))


@pytest.mark.parametrize(("name", "version"), versions())
def test_every_file_can_be_read_and_says_the_same_as_with_plain_names(name, version):
    plain = TARGETS[name].write(asked("plain", CONFIG), version)
    shape = {file: shape_of(file, content) for file, content in plain.files.items()}
    for text in HOSTILE:
        export = TARGETS[name].write(asked(text, CONFIG), version)
        assert export.command == plain.command
        assert {file: shape_of(file, content) for file, content in export.files.items()} == shape


@pytest.mark.parametrize(("name", "version"), versions())
def test_every_file_shows_each_character_of_a_name(name, version):
    for text in HOSTILE:
        export = TARGETS[name].write(asked(text, CONFIG), version)
        for content in export.files.values():
            assert printable(content, keep_lines=True) == content


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_the_script_names_the_very_text(text):
    export = TARGETS["pytorch"].write(asked(text, None), "2")
    assigned = {
        statement.targets[0].id: statement.value
        for statement in ast.parse(export.files[SCRIPT]).body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    assert ast.literal_eval(assigned["TEXT"]) == text


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_axolotl_and_trl_name_the_very_text(text):
    said = yaml.safe_load(TARGETS["axolotl"].write(asked(text, None), "0.19").files["axolotl.yaml"])
    assert (said["base_model"], said["datasets"][0]["path"], said["datasets"][0]["field"]) == (
        text,
        text,
        text,
    )
    said = yaml.safe_load(TARGETS["trl"].write(asked(text, None), "1.16").files["sft.yaml"])
    assert (said["model_name_or_path"], said["dataset_name"], said["dataset_text_field"]) == (
        text,
        text,
        text,
    )


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_path_of_ones_own_code_stays_one_word(text, tmp_path):
    folder = tmp_path / f"my {text.replace('/', '')}"
    folder.mkdir()
    (folder / "own.py").write_text("import autotune\n\ndef make(): ...\n")
    script = str(folder / "own.py")
    export = TARGETS["pytorch"].write(recipe(model="script", script=script), "2")
    assert shlex.split(export.command)[-1] == script
    module = ast.parse(TARGETS["pytorch"].write(recipe(model=f"{script}:make"), "2").files[SCRIPT])
    places = [
        ast.literal_eval(statement.value)
        for statement in module.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement).startswith("MODEL =")
    ]
    assert places == [script]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_llamafactory_and_ms_swift_name_the_very_text(text):
    files = TARGETS["llamafactory"].write(asked(text, None), "0.9").files
    [entry] = json.loads(files["dataset_info.json"]).values()
    said = yaml.safe_load(files["llamafactory.yaml"])
    assert (said["model_name_or_path"], entry["hf_hub_url"], entry["columns"]) == (
        text,
        text,
        {"prompt": text},
    )
    files = TARGETS["ms-swift"].write(asked(text, None), "4.6").files
    [entry] = json.loads(files["dataset_info.json"])
    said = yaml.safe_load(files["ms_swift.yaml"])
    assert (said["model"], entry["hf_dataset_id"], said["columns"]) == (
        text,
        text,
        {text: "response"},
    )
