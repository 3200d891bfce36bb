"""Spaces that extend other spaces, and spaces with scales."""

import pytest

from autotune.errors import InvalidInput, InvalidSpace
from autotune.spec.space_file import load_space

BASE = """
description = "the base"
[techniques]
precision = ["fp32"]
compile = ["none", "block"]
[workload]
steps = 20
layers = 6
[[configurations]]
name = "first"
[scales.tiny]
layers = 2
"""


@pytest.fixture
def load(tmp_path):
    def write_and_load(text, **others):
        for name, other in {"base": BASE, **others}.items():
            (tmp_path / f"{name}.toml").write_text(other)
        file = tmp_path / "space.toml"
        file.write_text(text)
        return load_space(str(file))

    return write_and_load


def test_a_space_inherits_from_the_one_it_extends(load):
    space, base = load('extends = "base.toml"'), load(BASE)
    assert {**space.to_dict(), "name": ""} == {**base.to_dict(), "name": ""}


def test_a_space_is_called_by_its_own_file(load):
    assert load('extends = "base.toml"').name == "space"


def test_a_key_of_the_file_overrides_the_inherited_one(load):
    space = load(
        'extends = "base.toml"\n[techniques]\nprecision = ["bf16-true"]\n[workload]\nsteps = 30'
    )
    assert (space.techniques["precision"], space.workload) == (
        ("bf16-true",),
        {"steps": 30, "layers": 6},
    )


def test_an_inherited_technique_stays(load):
    space = load('extends = "base.toml"\n[techniques]\nprecision = ["bf16-true"]')
    assert space.techniques["compile"] == ("none", "block")


def test_named_configurations_come_after_the_inherited(load):
    space = load('extends = "base.toml"\n[[configurations]]\nname = "second"')
    assert [one["name"] for one in space.configurations] == ["first", "second"]


def test_an_inherited_name_cannot_be_used_again(load):
    with pytest.raises(InvalidSpace, match="'first'"):
        load('extends = "base.toml"\n[[configurations]]\nname = "first"')


def test_a_shipped_space_is_extended_by_its_name(load):
    assert load('extends = "quick"').techniques == load_space("quick").techniques


def test_what_extends_can_extend_again(load):
    assert load('extends = "middle.toml"', middle='extends = "base.toml"').workload == {
        "steps": 20,
        "layers": 6,
    }


def test_another_dataset_drops_the_splits_of_the_inherited_one(load):
    base = BASE.replace(
        "steps = 20", 'dataset = "one/hub"\nheld_out_split = "test"\ntext_column = "story"'
    )
    space = load('extends = "base.toml"\n[workload]\ndataset = "two.txt"', base=base)
    assert space.workload == {"dataset": "two.txt", "layers": 6}


def test_inherited_learning_rates_of_other_optimizers_stay(load):
    base = BASE.replace("steps = 20", "learning_rates = { sgd = 0.1, adamw = 0.2 }")
    space = load('extends = "base.toml"\n[workload]\nlearning_rates = { adamw = 0.3 }', base=base)
    assert space.workload["learning_rates"] == {"sgd": 0.1, "adamw": 0.3}


def test_a_misspelled_extends_gets_a_suggestion(load):
    with pytest.raises(InvalidSpace) as raised:
        load('extend = "base.toml"')
    assert "'extends'" in raised.value.hint


def test_a_circular_extends_is_rejected(load):
    with pytest.raises(InvalidSpace, match="extends"):
        load('extends = "other.toml"', other='extends = "space.toml"')


def test_a_long_chain_of_extends_is_allowed(load):
    chain = {f"link{number}": f'extends = "link{number - 1}.toml"' for number in range(1, 20)}
    assert load('extends = "link19.toml"', link0=BASE, **chain).workload == {
        "steps": 20,
        "layers": 6,
    }


@pytest.mark.parametrize("base", ["7", '""', '"nowhere.toml"'])
def test_what_cannot_be_extended_is_rejected_with_a_hint(load, base):
    with pytest.raises(InvalidSpace) as raised:
        load(f"extends = {base}")
    assert raised.value.hint


# -- scales ----------------------------------------------------------------------------------------


def test_a_scale_overrides_the_workload(load):
    assert load(BASE).at_scale("tiny").workload == {"steps": 20, "layers": 2}


def test_a_scale_overrides_as_the_command_line_does(load):
    workload = 'dataset = "one/hub"\nheld_out_split = "test"\nlearning_rates = { sgd = 0.1 }'
    own = 'layers = 2\ndataset = "two/hub"\nlearning_rates = { adamw = 0.3 }'
    space = load(BASE.replace("steps = 20", workload).replace("layers = 2", own)).at_scale("tiny")
    assert space.workload == {
        "dataset": "two/hub",
        "layers": 2,
        "learning_rates": {"sgd": 0.1, "adamw": 0.3},
    }


def test_no_scale_is_the_workload_as_it_is(load):
    assert load(BASE).at_scale(None) == load(BASE)


@pytest.mark.parametrize(("text", "said"), [(BASE, "tiny"), ('extends = "quick"', "it has none")])
def test_an_unknown_scale_is_rejected_with_those_that_exist(load, text, said):
    with pytest.raises(InvalidInput, match="'huge'") as raised:
        load(text).at_scale("huge")
    assert said in raised.value.hint


def test_a_setting_of_a_scale_is_checked_where_it_is_written(load):
    with pytest.raises(InvalidSpace, match=r"scales\.wrong\.layers"):
        load(BASE + "[scales.wrong]\nlayers = 0")


def test_an_unknown_setting_of_a_scale_is_rejected(load):
    with pytest.raises(InvalidSpace, match=r"scales\.wrong"):
        load(BASE + "[scales.wrong]\nlayer = 2")


def test_a_space_is_a_scale_of_itself_only(load):
    tiny, other = load(BASE).at_scale("tiny"), load(BASE.replace("layers = 2", "layers = 3"))
    assert (
        tiny.is_a_scale_of(load(BASE)),
        tiny.is_a_scale_of(other),
        tiny.is_a_scale_of(load_space("quick")),
    ) == (
        True,
        False,
        False,
    )


def test_a_space_with_another_description_makes_the_same_trials(load):
    assert load(BASE) == load(BASE.replace("the base", "The base of all"))
