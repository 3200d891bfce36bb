"""The compressed files of studies' results: `studies/compressed.py`."""

from studies.compressed import append_row, read_json, read_rows, write_json, write_rows


def test_rows_that_are_added_come_after_those_before_them(tmp_path):
    file = tmp_path / "rows.jsonl.xz"
    assert read_rows(file) == []
    write_rows(file, [{"row": 0}, {"row": 1}])
    append_row(file, {"row": 2})
    assert read_rows(file) == [{"row": 0}, {"row": 1}, {"row": 2}]


def test_equal_rows_make_equal_files(tmp_path):
    for name in ("one", "other"):
        write_rows(tmp_path / name, [{"row": 0}])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_a_document_is_read_as_it_was_written(tmp_path):
    write_json(tmp_path / "document.json.xz", {"pairs": [1, 2.5, "ü"]})
    assert read_json(tmp_path / "document.json.xz") == {"pairs": [1, 2.5, "ü"]}
