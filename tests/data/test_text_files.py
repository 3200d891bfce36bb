"""Text is read in pieces, so that no file or line is too large; too long records are rejected."""

import tracemalloc

import pytest

from autotune.data import text_files
from autotune.data.sources import read_documents
from autotune.data.text_files import PIECE_CHARACTERS, TextFiles
from autotune.errors import InvalidDataset
from autotune.shipped.text_parts import PASSAGE_CHARACTERS, passages
from autotune.spec.workload import make_workload

MEBIBYTE = 2**20


@pytest.fixture
def read(tmp_path):
    def read(name, **settings):
        workload = make_workload("cpu", {"dataset": str(tmp_path / name), **settings})
        return read_documents(workload, cache_folder=tmp_path / "cache").train

    return read


def test_passages_are_the_same_however_a_file_is_read(tmp_path):
    text = "ü" * (PIECE_CHARACTERS + PASSAGE_CHARACTERS + 5)
    (tmp_path / "book.txt").write_text(text)
    files = TextFiles(files=[tmp_path / "book.txt"], dataset="book")
    assert list(passages(files)) == list(passages([text]))


def test_a_line_of_any_length_is_read_in_bounded_memory(read, tmp_path):
    with (tmp_path / "line.txt").open("wb") as file:
        for _ in range(64):
            file.write(b"x" * MEBIBYTE)
    tracemalloc.start()
    characters = sum(len(passage) for passage in passages(read("line.txt")))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert characters == 64 * MEBIBYTE
    assert peak_bytes < 32 * MEBIBYTE


def test_of_padded_text_a_file_is_one_document(read, tmp_path):
    (tmp_path / "book.txt").write_text("x" * (PIECE_CHARACTERS + 1))
    assert len(list(read("book.txt", packing="padded"))) == 1


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.csv"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_record_too_long_for_memory_is_rejected_by_its_file(
    read, tmp_path, monkeypatch, name, streaming
):
    monkeypatch.setattr(text_files, "LARGEST_LINE_BYTES", 1000)
    (tmp_path / name).write_text("text\n" + "x" * 1001 + "\nend\n")
    with pytest.raises(InvalidDataset, match=f"line of more than 1000 B in {name}"):
        read(name, streaming=streaming)


@pytest.mark.parametrize("length", [999, 1000])
def test_a_line_as_long_as_may_be_is_read(tmp_path, monkeypatch, length):
    monkeypatch.setattr(text_files, "LARGEST_LINE_BYTES", 1000)
    (tmp_path / "data.jsonl").write_text("\n".join(["x" * length] * 5))
    text_files.check_lines([tmp_path / "data.jsonl"], dataset="data", streaming=False)


def test_a_file_with_null_bytes_is_rejected(read, tmp_path):
    (tmp_path / "zeros.txt").write_bytes(bytes(5000))
    with pytest.raises(InvalidDataset, match=r"null bytes.*zeros\.txt"):
        list(read("zeros.txt"))
