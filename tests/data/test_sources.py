"""Text from local files and from the hub; unreadable datasets raise an error with a hint."""

import json
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from autotune.data.sources import read_documents
from autotune.errors import InvalidDataset
from autotune.shipped import python_docs
from autotune.shipped.dataset_files import READERS
from autotune.spec.workload import make_workload

TEXTS = ["first, with a comma", "second\n\nin two paragraphs", "third: ünï¢ödé"]


def quoted(text):
    return '"' + text.replace("\n", "\\n") + '"'


def write_parquet(file):
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), file)


WRITERS = {
    ".jsonl": lambda file: file.write_text(
        "\n".join(f'{{"text": {quoted(text)}}}' for text in TEXTS)
    ),
    ".json": lambda file: file.write_text(
        "[" + ", ".join(f'{{"text": {quoted(text)}}}' for text in TEXTS) + "]"
    ),
    ".csv": lambda file: file.write_text("text\n" + "\n".join(f'"{text}"' for text in TEXTS)),
    ".parquet": write_parquet,
}


@pytest.fixture
def read(tmp_path):
    """Function that reads a dataset as a search does."""

    def read(dataset, **settings):
        workload = make_workload("cpu", {"dataset": str(dataset), **settings})
        return list(read_documents(workload, cache_folder=tmp_path / "cache").train)

    return read


@pytest.fixture
def error_for(read):
    def error_for(dataset, **settings):
        with pytest.raises(InvalidDataset) as raised:
            read(dataset, **settings)
        return raised.value

    return error_for


# -- what can be read ------------------------------------------------------------------------------


def test_the_default_is_the_python_documentation(read):
    assert read("python-docs") == python_docs.standard_library_texts()


@pytest.mark.parametrize(
    "suffix", [suffix for suffix, reader in READERS.items() if reader == "text"]
)
def test_a_text_file_is_one_document(read, tmp_path, suffix):
    (tmp_path / f"book{suffix}").write_text("one\n\ntwo\n")
    assert read(tmp_path / f"book{suffix}") == ["one\n\ntwo\n"]


@pytest.mark.parametrize(
    "suffix", [suffix for suffix, reader in READERS.items() if reader != "text"]
)
def test_a_file_of_records_is_a_document_a_record(read, tmp_path, suffix):
    WRITERS[suffix](tmp_path / f"data{suffix}")
    assert read(tmp_path / f"data{suffix}") == TEXTS


def test_a_folder_is_its_files_in_alphabetical_order(read, tmp_path):
    (tmp_path / "texts" / "below").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "below/c.txt"):
        (tmp_path / "texts" / name).write_text(name)
    assert read(tmp_path / "texts") == ["a.txt", "b.txt", "below/c.txt"]


def test_files_of_another_kind_in_a_folder_of_texts_are_passed_over(read, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    (tmp_path / "texts" / "picture.png").write_bytes(b"\x89PNG")
    assert read(tmp_path / "texts") == ["text"]


@pytest.mark.parametrize("name", ["[draft] 1.txt", "a b*.txt", "ünï¢ödé.txt", "100%.txt"])
def test_a_file_with_an_odd_name_can_be_read(read, tmp_path, name):
    (tmp_path / name).write_text("text")
    assert read(tmp_path / name) == ["text"]


def test_a_path_may_begin_at_home(read, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "book.txt").write_text("text")
    assert read("~/book.txt") == ["text"]


def test_records_without_text_are_passed_over(read, tmp_path):
    (tmp_path / "data.jsonl").write_text(
        '{"text": "a"}\n{"text": null}\n{"text": ""}\n{"text": "b"}\n'
    )
    assert read(tmp_path / "data.jsonl") == ["a", "b"]


def test_a_change_of_the_file_is_seen(read, tmp_path):
    (tmp_path / "book.txt").write_text("before")
    assert read(tmp_path / "book.txt") == ["before"]
    (tmp_path / "book.txt").write_text("behind")
    assert read(tmp_path / "book.txt") == ["behind"]


# -- the column of text ----------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path):
    (tmp_path / "table.csv").write_text("title,body,year\nA,one,1999\nB,two,2001\n")
    return tmp_path / "table.csv"


def test_the_only_column_of_text_is_found(read, tmp_path):
    (tmp_path / "data.csv").write_text("year,body\n1999,one\n2001,two\n")
    assert read(tmp_path / "data.csv") == ["one", "two"]


def test_a_column_called_text_is_taken_before_others(read, tmp_path):
    (tmp_path / "data.csv").write_text("title,text\nA,one\nB,two\n")
    assert read(tmp_path / "data.csv") == ["one", "two"]


def test_a_column_can_be_named(read, table):
    assert read(table, text_column="body") == ["one", "two"]


def test_a_missing_column_is_rejected_with_those_that_exist(error_for, table):
    error = error_for(table, text_column="nope")
    assert "'nope'" in error.message
    assert "title, body" in error.hint


def test_an_ambiguous_column_is_rejected_with_the_option_that_decides(error_for, table):
    error = error_for(table)
    assert str(table) in error.message
    assert "--text-column" in error.hint
    assert "title, body" in error.hint


def test_a_column_of_numbers_is_not_text(error_for, table):
    assert "values in year" in error_for(table, text_column="year").message


# -- rows of which one column is not what is to be learned -----------------------------------------

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
NOT_ONE_TEXT = {
    "an instruction with its context": (
        {"instruction": "a", "context": "", "response": "b"},
        "instruction and response",
    ),
    "a question and its answer": ({"question": "a", "answer": "b"}, "half of what"),
    "messages on both sides": (
        {"question": MESSAGES[:1], "answer": MESSAGES[1:]},
        "question and answer",
    ),
    "preferences of text": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences"),
    "preferences of messages": ({"chosen": MESSAGES, "rejected": MESSAGES}, "preferences"),
    "conversations as JSON": ({"messages": json.dumps(MESSAGES)}, "as text, whose JSON"),
    "tokens under another name": ({"tokens": [1, 2, 3]}, "no single text column"),
    "a file of records beside its version": (
        {"version": "1", "data": [{"text": "a"}]},
        "no single text column",
    ),
    "text that is a number": ({"text": 0}, "values in text that are not text"),
    "tokens with fractions": ({"input_ids": [1.5, 2.0]}, "(such as 1.5)"),
    "tokens that are flags": ({"input_ids": [True, False]}, "(such as True)"),
}


@pytest.mark.parametrize(("row", "said"), NOT_ONE_TEXT.values(), ids=NOT_ONE_TEXT)
def test_a_row_whose_meaning_is_in_several_columns_is_not_learned_in_part(
    row, said, error_for, tmp_path
):
    lines = "".join(json.dumps(row) + "\n" for _ in range(3))
    (tmp_path / "data.jsonl").write_text(lines)
    assert said in error_for(tmp_path / "data.jsonl").message


def test_the_hint_names_the_columns_that_could_be_renamed(error_for, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"tokens": [1, 2]}\n')
    assert "tokens: rename" in error_for(tmp_path / "data.jsonl").hint
    (tmp_path / "whole.json").write_text('{"version": 1, "data": [{"text": "a"}]}')
    assert "each record" in error_for(tmp_path / "whole.json").hint


def test_a_hint_leads_to_no_half_of_a_row(error_for, tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"problem": "a", "solution": "b"}) + "\n")
    assert "without the others" in error_for(tmp_path / "data.jsonl").hint
    row = {"prompt": MESSAGES[:1], "chosen": MESSAGES[1:], "rejected": MESSAGES[1:]}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    assert "a prompt in a column of its own" in error_for(tmp_path / "data.jsonl").hint
    row = {"question": MESSAGES[:1], "answer": MESSAGES[1:]}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    assert "join the messages" in error_for(tmp_path / "data.jsonl").hint


def test_a_named_column_of_tokens_is_not_called_conversations(error_for, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"ids": [1, 2]}\n')
    error = error_for(tmp_path / "data.jsonl", text_column="ids")
    assert "lists of numbers in ids" in error.message
    assert "rename" in error.hint


def test_a_named_column_is_learned_even_if_it_is_one_of_a_pair(read, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert read(tmp_path / "data.jsonl", text_column="completion") == ["b"]


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_a_table_with_another_separator_is_not_one_column_of_text(separator, error_for, tmp_path):
    (tmp_path / "data.csv").write_text(f"text{separator}label\none two{separator}1\n")
    assert f"separated by {separator!r}" in error_for(tmp_path / "data.csv").message
    (tmp_path / "data.csv").write_text(f'text{separator}"a, b"\none two{separator}1\n')
    assert f"separated by {separator!r}" in error_for(tmp_path / "data.csv").message


def test_a_separator_in_a_quoted_name_is_none(read, tmp_path):
    (tmp_path / "data.csv").write_text('text,"a;b"\none two,1\n')
    assert read(tmp_path / "data.csv") == ["one two"]


# -- what cannot be read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["missing.txt", "./missing", "/nowhere/missing", "missing.parquet", "a/b/c"]
)
def test_a_missing_file_is_rejected_without_asking_the_hub(error_for, name):
    assert error_for(name).message == f"there is no file or folder {name!r}"


def test_a_folder_of_several_kinds_is_rejected_with_the_kinds(error_for, tmp_path):
    for suffix in (".csv", ".parquet"):
        WRITERS[suffix](tmp_path / f"data{suffix}")
    assert "csv, parquet" in error_for(tmp_path).message


def test_an_empty_folder_is_rejected_by_name(error_for, tmp_path):
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in error_for(tmp_path / "empty").message


def test_an_empty_text_file_is_rejected_by_name(error_for, tmp_path):
    (tmp_path / "empty.txt").touch()
    assert f"{str(tmp_path / 'empty.txt')!r} is empty" in error_for(tmp_path / "empty.txt").message


BROKEN = {
    "empty.jsonl": b"",
    "empty.csv": b"",
    "empty.parquet": b"",
    "cut.jsonl": b'{"text": "one"}\n{"text": "tw',
    "cut.json": b'[{"text": "one"}, {"text": "tw',
    "binary.txt": bytes(range(256)),
    "binary.jsonl": bytes(range(256)),
    "binary.csv": bytes(range(128, 256)),
    "binary.parquet": bytes(range(256)),
    "unknown.bin": bytes(range(256)),
    "unknown": b"text without a suffix",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_rejected_in_one_sentence_with_its_name(error_for, tmp_path, name):
    (tmp_path / name).write_bytes(BROKEN[name])
    error = error_for(tmp_path / name)
    assert name in error.message
    assert "\n" not in error.message
    assert error.hint


def test_an_empty_file_of_records_is_called_empty(error_for, tmp_path):
    (tmp_path / "data.jsonl").touch()
    assert "empty" in error_for(tmp_path / "data.jsonl").message.replace(str(tmp_path), "")


# -- the hub ---------------------------------------------------------------------------------------

READ_FROM_THE_HUB = """
import pathlib, sys
from autotune.data.sources import read_documents
from autotune.errors import InvalidDataset
from autotune.spec.workload import make_workload
try:
    workload = make_workload("cpu", {"dataset": sys.argv[1]})
    read_documents(workload, cache_folder=pathlib.Path(sys.argv[2]))
except InvalidDataset as error:
    print(error.message, error.hint, sep="\\n")
"""


def hub_error(name, folder, *, seconds, **environment):
    """Returns the lines of the error from a new process, as the hub reads settings at import."""
    settings = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    ended = subprocess.run(
        [sys.executable, "-c", READ_FROM_THE_HUB, name, str(folder)],
        env={**settings, "HF_HOME": str(folder / "home"), **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=True,
    )
    return ended.stdout.splitlines()


@pytest.mark.slow
def test_a_hub_name_is_rejected_in_one_sentence_where_the_hub_is_switched_off(tmp_path):
    message, hint = hub_error("nobody/nothing-here", tmp_path, seconds=10, HF_HUB_OFFLINE="1")
    assert "'nobody/nothing-here'" in message
    assert "local text" in hint


def test_a_hub_name_that_is_not_there_is_rejected_within_ten_seconds(tmp_path):
    """Also where the hub cannot be reached at all."""
    message, _ = hub_error("nobody/nothing-here", tmp_path, seconds=10)
    assert "'nobody/nothing-here'" in message


def test_a_dataset_is_read_in_a_folder_with_a_long_name_that_is_not_ascii(tmp_path, monkeypatch):
    folder = tmp_path / ("語" * 60) / ("ö" * 60)
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    (folder / "data.jsonl").write_text('{"text": "a line"}\n' * 20)
    workload = make_workload("cpu", {"dataset": "data.jsonl"})
    parts = read_documents(workload, cache_folder=folder / "studies" / "datasets")
    assert set(parts.train) == {"a line"}
