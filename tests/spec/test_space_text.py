import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.spec.search_space import SearchSpace
from autotune.spec.space_content import named_spaces
from autotune.spec.space_file import load_space
from autotune.spec.space_text import space_text, workload_table
from autotune.spec.workload import make_workload
from tests.building.studies import SPACE


def read_back(space, folder, **settings):
    file = folder / f"{space.name}.toml"
    file.write_text(space_text(space, **settings), encoding="utf-8")
    return load_space(str(file))


@pytest.mark.parametrize(
    "space", [*map(load_space, named_spaces()), SPACE], ids=lambda space: space.name
)
def test_a_space_written_as_a_file_is_read_back_as_it_was(space, tmp_path):
    assert read_back(space, tmp_path).to_dict() == space.to_dict()


def test_the_whole_workload_fits_into_a_file(tmp_path):
    workload = make_workload(
        "cpu", {"steps": 33, "learning_rates": {"sgd": 1e-05}, "gradient_clipping": 0.5}
    )
    space = SearchSpace(
        name="one", techniques={"precision": ("fp32",)}, workload=workload_table(workload)
    )
    assert make_workload("cpu", read_back(space, tmp_path).workload) == workload


@given(st.text())
def test_any_text_is_one_string_of_toml(text):
    space = SearchSpace(
        name="any", techniques={}, configurations=({"name": text},), description=text
    )
    read = tomllib.loads(space_text(space, about=text))
    assert (read.get("description", ""), read["configurations"]) == (text, [{"name": text}])


@given(st.text())
def test_a_file_holds_no_character_that_a_terminal_obeys(text):
    space = SearchSpace(
        name="any", techniques={}, configurations=({"name": text},), description=text
    )
    assert all(letter.isprintable() or letter == "\n" for letter in space_text(space, about=text))
