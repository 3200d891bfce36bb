import itertools
import json
import subprocess
import sys
from contextlib import nullcontext

import pytest

from autotune.data import validation
from autotune.data.sources import MOST_FILES, files_below
from autotune.data.text_files import (
    DEEPEST_JSON,
    LONGEST_CHECKED_LINE_BYTES,
    check_depth,
    depth_of_json,
)
from autotune.data.validation import check_data, read_data
from autotune.errors import InvalidDataset, InvalidInput
from autotune.spec.setting import options_of
from autotune.spec.workload import Workload, make_workload
from tests.building import chat
from tests.cli.mistaken_files import DATASETS, dataset_options, write_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    write_files(folder)
    return folder


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_that_cannot_be_used_has_a_sentence_and_a_hint(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    fields = {option.flag: field for field, option in options_of(Workload).items()}
    words = [*dataset_options(name), ""]
    settings = {}
    for word, following in itertools.pairwise(words):
        if word.startswith("--"):
            settings[fields[word]] = int(following) if following.isdigit() else following or True
    with pytest.raises(InvalidInput) as rejected:
        read_data(make_workload("cpu", settings, {}))
    assert rejected.value.hint


@pytest.mark.slow
def test_a_dataset_that_ends_its_reader_does_not_end_the_command(tmp_path):
    depth, padding = 2000, " " * LONGEST_CHECKED_LINE_BYTES
    deep = f'{{"text": "hello", "deep": {padding} {"[" * depth}{"]" * depth}}}\n'
    (tmp_path / "deep.jsonl").write_text(deep)
    command = f"{sys.executable} -m autotune search --trials 1 --dataset deep.jsonl"
    ended = subprocess.run(
        # A small stack, so that a small file overflows it.
        ["/bin/sh", "-c", f"ulimit -s 1024; exec {command}"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "ended the process that reads it: SIGSEGV" in ended.stderr


@pytest.mark.slow
def test_a_tokenizer_that_does_not_end_is_ended(tmp_path, monkeypatch):
    (tmp_path / "text.jsonl").write_text('{"text": "éééééééé"}\n' * 100)
    twice = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    vocabulary = {"<unk>": 0, "a": 1}
    content = {
        "version": "1.0",
        # Each makes two letters of one.
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [twice] * 60},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    settings = {
        "dataset": str(tmp_path / "text.jsonl"),
        "tokenizer": str(tmp_path / "tokenizer.json"),
    }
    workload = make_workload("cpu", settings, {})
    monkeypatch.setattr(validation, "_LONGEST_SECONDS", 3.0)
    with pytest.raises(InvalidDataset, match=r"took more than 3 s"):
        check_data(workload)


@pytest.mark.slow
def test_a_chat_template_that_does_not_end_is_ended(tmp_path, monkeypatch):
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    chat.write_tokenizer(tmp_path, template=endless)
    file = chat.write_rows(tmp_path / "chat.jsonl", chat.conversations(9))
    settings = {"dataset": str(file), "tokenizer": str(tmp_path), "vocab_size": 999}
    monkeypatch.setattr(validation, "_LONGEST_SECONDS", 3.0)
    with pytest.raises(InvalidDataset, match=r"took more than 3 s"):
        check_data(make_workload("cpu", settings, {}))


@pytest.mark.slow
def test_an_error_of_the_process_that_reads_comes_back(tmp_path):
    (tmp_path / "numbers.jsonl").write_text('{"n": 1}\n')
    with pytest.raises(InvalidDataset, match="no single text column"):
        check_data(make_workload("cpu", {"dataset": str(tmp_path / "numbers.jsonl")}, {}))


def test_nested_values_are_counted_without_the_brackets_in_texts():
    brackets = "[{" * DEEPEST_JSON
    flat = {"text": f'{brackets} \\" {brackets}', "lists": [[1], [2, [3]]] * DEEPEST_JSON}
    assert depth_of_json(json.dumps(flat).encode()) == 4


def test_a_deep_value_is_found(tmp_path):
    deep = "[" * 5000 + "]" * 5000
    assert depth_of_json(f'{{"text": "a", "deep": {deep}}}'.encode()) == 5001


@pytest.mark.parametrize("line", [b'"\\' * 2**19, b'"' * 2**20])
def test_the_depth_of_a_text_of_quotes_takes_a_time_in_proportion_to_it(line):
    assert depth_of_json(line + b"[" * 1000) <= 1000


@pytest.mark.parametrize(("files", "is_found"), [(1, True), (8, False)])
def test_of_many_files_no_more_is_looked_at_than_of_one(files, is_found, tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.data.text_files.DEPTH_CHECKED_BYTES", 1000)
    deep = f'{{"deep": {"[" * 200}{"]" * 200}}}\n'
    paths = [tmp_path / f"{number}.jsonl" for number in range(files)]
    for path in paths:
        path.write_text('{"text": "flat"}\n' * 20 + deep)
    expected = pytest.raises(InvalidDataset, match="nested") if is_found else nullcontext()
    with expected:
        check_depth(paths, dataset="deep")


def test_a_folder_with_links_in_a_circle_has_its_own_files_only(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "itself.txt").symlink_to("itself.txt")
    assert list(files_below(tmp_path)) == [tmp_path / "a.txt"]


def test_a_folder_as_large_as_a_disk_is_not_searched_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.data.sources.MOST_FILES", 3)
    for number in range(4):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(InvalidDataset, match="more than 3 files"):
        list(files_below(tmp_path))
    assert MOST_FILES > 10_000
