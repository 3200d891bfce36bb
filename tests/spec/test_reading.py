"""Dataclasses are read from JSON with their types and ranges checked."""

from dataclasses import dataclass

import pytest

from autotune.spec.config import TrainingConfig
from autotune.spec.limits import Count, Seconds
from autotune.spec.reading import check, fits, parse, possible
from autotune.spec.schema import Schema


@dataclass(frozen=True, kw_only=True)
class Part(Schema):
    name: str
    sizes: tuple[Count, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Whole(Schema):
    seconds: Seconds
    parts: tuple[Part, ...] = ()
    by_name: dict[str, Count] | None = None
    plain: float = 0.0
    config: TrainingConfig | None = None


def test_lists_are_read_as_tuples_and_objects_as_dataclasses():
    read = parse(Whole, {"seconds": 1, "parts": [{"name": "a", "sizes": [1, 2]}]})
    assert read == Whole(seconds=1.0, parts=(Part(name="a", sizes=(1, 2)),))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"seconds": "1"}, "seconds is '1'"),
        ({"seconds": True}, "seconds is True"),
        ({"seconds": -1.0}, "seconds is -1.0"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"plain": float("inf")}, "plain is inf"),
        ({"by_name": {"a": 1.5}}, "by_name.a is 1.5"),
        ({"by_name": {"a": 2**70}}, "by_name.a is 1180591620717411303424"),
        ({"parts": [{"name": "a", "sizes": ["1"]}]}, "parts.0.sizes.0 is '1'"),
        ({"parts": [{}]}, "it has no 'parts.0.name'"),
        ({"more": 1}, "it has 'more', which is not known"),
        ({"config": 5}, "int is given for a TrainingConfig"),
    ],
)
def test_a_value_that_a_field_cannot_have_is_named(wrong, problem):
    with pytest.raises(ValueError, match=problem.replace(".", r"\.")):
        parse(Whole, {"seconds": 1.0, **wrong})


def test_what_a_later_version_added_can_be_left_out_at_every_level():
    stored = {"seconds": 1.0, "more": 1, "parts": [{"name": "a", "more": 1}]}
    assert parse(Whole, stored, ignore_unknown=True).parts == (Part(name="a"),)


def test_an_instance_is_checked_with_all_that_is_in_it():
    with pytest.raises(ValueError, match=r"parts\.0\.name is 3"):
        check(Whole(seconds=1.0, parts=(Part(name=3),)))


def test_a_configuration_checks_its_values_itself():
    read = parse(Whole, {"seconds": 1.0, "config": {"micro_batch_size": 2}})
    assert read.config == TrainingConfig(micro_batch_size=2)


def test_what_is_not_possible_becomes_the_default_of_its_field():
    values = {"seconds": 1.0, "plain": float("nan"), "by_name": {"a": 1, "b": -1}, "parts": None}
    assert possible(Whole, values) == {
        "seconds": 1.0,
        "plain": 0.0,
        "by_name": {"a": 1},
        "parts": (),
    }


def test_a_value_can_be_compared_with_a_type_alone():
    assert [fits(Seconds, value) for value in (0, 2.5, -1, "1")] == [True, True, False, False]
