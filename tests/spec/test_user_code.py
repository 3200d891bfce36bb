"""Plain mistakes in a user's Python are found before any process starts."""

import pytest

from autotune.errors import InvalidInput, InvalidSpace
from autotune.spec.space_file import load_space
from autotune.spec.workload import make_workload


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def make(layers): ...\ndef take_all(**sizes): ...\n")
    return file


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("gone.py:make", "gone.py cannot be read"),
        ("a b:make", "does not name a function"),
        ("mine:1", "does not name a function"),
        (":make", "does not name a function"),
        ("s3://box/model:make", "is an address, from which no model is read"),
    ],
)
def test_a_text_that_names_no_function_is_rejected(model, named):
    with pytest.raises(InvalidInput, match=named) as raised:
        make_workload("cpu", {"model": model})
    assert raised.value.hint


def test_a_file_that_is_no_python_is_rejected_with_its_line(file):
    file.write_text("x = 1\ndef make(:\n")
    with pytest.raises(InvalidInput, match=r"not valid Python: .* in line 2"):
        make_workload("cpu", {"model": f"{file}:make"})


def test_a_file_without_a_function_is_told_how_to_name_one(file):
    with pytest.raises(InvalidInput, match="which function") as raised:
        make_workload("cpu", {"model": str(file)})
    assert f"{file}:function" in raised.value.hint


def test_a_size_that_the_function_does_not_take_is_rejected(file):
    with pytest.raises(InvalidInput, match="takes no width"):
        make_workload("cpu", {"model": f"{file}:make", "width": 8})
    assert make_workload("cpu", {"model": f"{file}:make", "layers": 3}).layers == 3
    assert make_workload("cpu", {"model": f"{file}:take_all", "width": 8}).width == 8


def test_its_name_can_be_part_of_a_files_name(file):
    workload = make_workload("cpu", {"model": f"{file}:make"})
    assert (workload.model_name, workload.describe_model()) == ("mine-make", f"{file}:make")


def test_a_search_space_cannot_name_code_to_run(file, tmp_path):
    space = tmp_path / "space.toml"
    space.write_text(f'[techniques]\nprecision = ["fp32"]\n[workload]\nmodel = "{file}:make"\n')
    with pytest.raises(InvalidSpace, match="would run code") as raised:
        load_space(str(space))
    assert "--model" in raised.value.hint
