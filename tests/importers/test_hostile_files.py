"""A file that is no trainer's, or that means harm, is one sentence."""

import json

import pytest

from autotune.errors import InvalidInput
from autotune.importers.registry import TRAINERS, import_file
from tests.importers.examples import OPTIONS, SMALLEST, text_of, written

_MULTIPLYING = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
_MERGING = "m0: &m0 {k: 1}\n" + "".join(
    f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 10)}]}}\n" for n in range(1, 12)
)
YAML = {
    "anchors that multiply": _MULTIPLYING,
    "merge keys that multiply": _MERGING,
    "an anchor within itself": "base_model: &a [*a]\n",
    "a tag that runs code": "base_model: !!python/object/apply:os.system ['true']\n",
    "a set in place of a text": "base_model: !!set {a, b}\n",
    "a tag of its own": "base_model: !mine x\n",
    "a key twice": "base_model: a\nbase_model: b\n",
    "a key twice within": "base_model: a\nfsdp_config: {version: 1, version: 2}\n",
    "a key that is a list": "? [a, b]\n: 1\n",
    "Jinja": "base_model: '{{ model }}'\n",
    "a block of Jinja": 'base_model: "{% if a %}b{% endif %}"\n',
    "a variable": "base_model: ${MODEL}\n",
    "a variable of the shell": "base_model: $MODEL\n",
    "deep nesting": "base_model: " + "[" * 2_000 + "]" * 2_000 + "\n",
    "nesting that would end the process": "base_model: " + "[" * 120_000,
    "lists in lists": "- " * 120_000,
    "a hundred thousand beginnings of variables": "base_model: '" + "${" * 100_000 + "'\n",
    "deep tables": "".join(f"{' ' * n}a:\n" for n in range(500)),
    "nothing": "",
    "a comment alone": "# nothing\n",
    "null": "null\n",
    "a list": "- a\n- b\n",
    "a text": "just a text\n",
    "a number": "3\n",
    "two documents": "base_model: a\n---\nbase_model: b\n",
    "a tab": "base_model:\n\tx: 1\n",
    "an open quote": "base_model: 'x\n",
    "an anchor that is not there": "base_model: *a\n",
    "a number of a million digits": "base_model: a\nseed: " + "9" * 100_000 + "\n",
    "a date that is none": "base_model: a\nmicro_batch_size: 2026-99-99\n",
    "keys of nobody": "a: 1\nb: 2\n",
}
JSON = {
    "a key twice": '{"output_dir": "a", "output_dir": "b"}',
    "deep nesting": '{"output_dir": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "Infinity": '{"output_dir": Infinity}',
    "a list": "[]",
    "a text": '"x"',
    "nothing": "",
    "an end that is missing": '{"output_dir": ',
    "many keys": json.dumps({f"k{number}": 1 for number in range(15_000)}),
    "a comment": '{"output_dir": 1} // x',
    "a variable": '{"output_dir": "x", "model_name_or_path": "${MODEL}"}',
    "a number of many digits": '{"output_dir": "x", "seed": ' + "9" * 100_000 + "}",
}
TOML = {
    "a key twice": "[model]\nname = 'a'\nname = 'b'\n",
    "a table twice": "[model]\nname = 'a'\n[model]\nflavor = 'b'\n",
    "a key of many parts": ".".join(["a"] * 20_000) + " = 1\n",
    "deep nesting": "model = " + "[" * 5_000 + "]" * 5_000 + "\n",
    "a value in place of a table": "model = 3\n",
    "nothing": "",
    "an open text": "[model]\nname = 'a\n",
    "a variable": "[training]\ndataset = '${DATA}'\n",
}
CASES = [
    *((".yaml", name, text) for name, text in YAML.items()),
    *((".json", name, text) for name, text in JSON.items()),
    *((".toml", name, text) for name, text in TOML.items()),
]


def _error(file):
    with pytest.raises(InvalidInput) as error:
        import_file(file)
    message, hint = error.value.args[0], error.value.hint
    assert "\n" not in f"{message}{hint}"
    assert len(message) < 600
    assert hint
    return message


@pytest.mark.parametrize(("suffix", "name", "text"), CASES, ids=[f"{s}: {n}" for s, n, _ in CASES])
def test_a_hostile_file_is_one_sentence_that_names_it(suffix, name, text, tmp_path):
    file = tmp_path / f"file{suffix}"
    file.write_text(text)
    assert file.name in _error(file)


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".toml"])
@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00\x01", b"base_model: \x80\n", bytes(range(256)), "model: é".encode("latin-1")],
    ids=["UTF-16", "half a character", "every byte", "Latin-1"],
)
def test_what_is_no_utf_8_is_one_sentence(suffix, content, tmp_path):
    file = tmp_path / f"file{suffix}"
    file.write_bytes(content)
    assert file.name in _error(file)


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".toml"])
def test_a_file_of_50_mb_is_one_sentence(suffix, tmp_path):
    file = tmp_path / f"file{suffix}"
    with file.open("wb") as opened:
        opened.truncate(50 * 2**20)
    assert "too large" in _error(file)


@pytest.mark.parametrize("name", ["file", "file.py", "file.txt", "file.yaml.bak"])
def test_a_file_of_another_ending_is_one_sentence(name, tmp_path):
    file = tmp_path / name
    file.write_text("base_model: a\n")
    assert name in _error(file)


def test_a_folder_and_a_file_that_is_not_there_are_one_sentence(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    assert "folder.yaml" in _error(tmp_path / "folder.yaml")
    assert "missing.yaml" in _error(tmp_path / "missing.yaml")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_line_ends_of_windows_and_a_byte_order_mark_change_nothing(trainer, tmp_path):
    file = written(trainer, SMALLEST[trainer], tmp_path)
    expected = import_file(file, OPTIONS.get(trainer))
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    found = import_file(file, OPTIONS.get(trainer))
    assert (found.workload, found.config) == (expected.workload, expected.config)


def test_a_template_of_a_chat_is_text_that_is_not_filled_in(tmp_path):
    content = {**SMALLEST["trl"], "chat_template": "{% for m in messages %}{{ m }}{% endfor %}"}
    file = tmp_path / "sft.yaml"
    file.write_text(text_of(content, ".yaml"))
    assert "chat_template" in import_file(file).without_effect


def test_a_small_anchor_and_a_merge_key_are_read(tmp_path):
    file = tmp_path / "axolotl.yaml"
    file.write_text(
        "base_model: owner/name\nmicro_batch_size: &two 2\ngradient_accumulation_steps: *two\n"
        "datasets:\n- &first {path: a/b, type: completion}\n- {<<: *first, path: c/d}\n"
    )
    found = import_file(file)
    assert found.workload["global_batch"] == 4
    assert found.workload["dataset"] == "a/b"


def test_a_file_beside_is_read_as_carefully(tmp_path):
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}, "x": "${STAGE}"}')
    file = tmp_path / "arguments.json"
    file.write_text(json.dumps({**SMALLEST["transformers"], "deepspeed": "zero.json"}))
    assert "zero.json" in _error(file)
