import dataclasses

import pytest

from autotune.errors import InvalidInput
from autotune.spec.learning_rates import FROM_SCRATCH
from autotune.spec.workload import (
    DEFAULTS_BY_DEVICE,
    MEMORY_STEPS,
    MINIMUM_TIMED_STEPS,
    Workload,
    make_workload,
)

EVERY_DEVICE = pytest.mark.parametrize("device_type", DEFAULTS_BY_DEVICE)
POSITIVE_FIELDS = (
    "layers",
    "width",
    "heads",
    "feed_forward_width",
    "vocab_size",
    "sequence_length",
    "global_batch",
    "steps",
    "warmup_steps",
    "evaluation_sequences",
    "learning_rate_warmup_steps",
)


@EVERY_DEVICE
def test_a_device_has_its_own_defaults(device_type):
    workload = make_workload(device_type).to_dict()
    assert {name: workload[name] for name in DEFAULTS_BY_DEVICE[device_type]} == DEFAULTS_BY_DEVICE[
        device_type
    ]


@EVERY_DEVICE
def test_every_optimizer_has_a_learning_rate_by_default(device_type):
    assert set(make_workload(device_type).learning_rates) == set(FROM_SCRATCH)


def test_a_later_setting_overrides_an_earlier_one():
    assert make_workload("cpu", {"steps": 30, "seed": 3}, {"steps": 50}).steps == 50


def test_an_earlier_setting_stays_if_a_later_one_is_missing():
    assert make_workload("cpu", {"steps": 30}, {"seed": 3}).steps == 30


def test_a_setting_of_none_overrides_nothing():
    assert make_workload("cpu", {"steps": 30}, {"steps": None, "learning_rates": None}).steps == 30


def test_learning_rates_are_merged_optimizer_by_optimizer():
    workload = make_workload(
        "cpu", {"learning_rates": {"sgd": 0.5}}, {"learning_rates": {"adamw": 0.1}}
    )
    assert workload.learning_rates == {**FROM_SCRATCH, "sgd": 0.5, "adamw": 0.1}


def test_another_dataset_drops_the_splits_and_columns_of_the_earlier_one():
    of_one = {
        "dataset": "one",
        "dataset_config": "en",
        "held_out_split": "test",
        "text_column": "story",
    }
    workload = make_workload("cpu", of_one, {"dataset": "two.txt", "dataset_split": "all"})
    assert (workload.dataset_config, workload.held_out_split, workload.text_column) == (
        None,
        None,
        None,
    )
    assert (workload.dataset, workload.dataset_split) == ("two.txt", "all")


def test_naming_the_default_dataset_changes_nothing():
    workload = make_workload("cpu", {"text_column": "story"}, {"dataset": "python-docs"})
    assert workload.text_column == "story"


def test_the_same_dataset_keeps_its_splits():
    assert (
        make_workload(
            "cpu", {"dataset": "one", "held_out_split": "test"}, {"dataset": "one"}
        ).held_out_split
        == "test"
    )


@EVERY_DEVICE
def test_merging_leaves_the_defaults_as_they_were(device_type):
    before = make_workload(device_type).to_dict()
    make_workload(device_type, {"learning_rates": {"sgd": 0.5}})
    assert make_workload(device_type).to_dict() == before


def test_the_given_settings_are_left_as_they_were():
    given = {"learning_rates": {"sgd": 0.5}}
    make_workload("cpu", given, {"learning_rates": {"sgd": 0.7}})
    assert given == {"learning_rates": {"sgd": 0.5}}


def test_tokens_per_step_are_those_of_the_global_batch():
    assert make_workload("cpu", {"global_batch": 4, "sequence_length": 32}).tokens_per_step == 128


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POSITIVE_FIELDS)
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, [8]])
def test_a_size_that_is_not_a_whole_number_above_zero_is_rejected_by_name(name, value):
    with pytest.raises(InvalidInput) as raised:
        make_workload("cpu", {name: value})
    assert f"Invalid {name}: {value!r}" in raised.value.message
    assert raised.value.hint


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5, "0", True])
def test_a_seed_torch_cannot_take_is_rejected(seed):
    with pytest.raises(InvalidInput, match="seed"):
        make_workload("cpu", {"seed": seed})


@pytest.mark.parametrize("schedule", ["linear", "", 1])
def test_an_unknown_schedule_is_rejected_with_those_that_exist(schedule):
    with pytest.raises(InvalidInput, match="schedule") as raised:
        make_workload("cpu", {"schedule": schedule})
    assert "cosine" in raised.value.hint


@pytest.mark.parametrize(
    ("name", "value"), [("packing", "loose"), ("packing", 1), ("streaming", 1), ("streaming", "")]
)
def test_an_unknown_way_to_read_the_text_is_rejected_by_name(name, value):
    with pytest.raises(InvalidInput, match=f"Invalid {name}: {value!r}"):
        make_workload("cpu", {name: value})


def test_the_models_tokenizer_is_rejected_where_the_model_has_no_files():
    with pytest.raises(InvalidInput, match="tokenizer = 'model'"):
        make_workload("cpu", {"tokenizer": "model"})


def test_a_trained_tokenizer_needs_room_for_more_than_the_bytes():
    with pytest.raises(InvalidInput, match="vocab_size = 257 is smaller than the 258"):
        make_workload("cpu", {"tokenizer": "bpe", "vocab_size": 257})


def test_too_few_steps_are_rejected_with_the_number_it_takes():
    least = 4 + MEMORY_STEPS + MINIMUM_TIMED_STEPS
    with pytest.raises(InvalidInput, match=f"steps = {least - 1}") as raised:
        make_workload("cpu", {"steps": least - 1, "warmup_steps": 4})
    assert str(least) in raised.value.hint


def test_the_least_number_of_steps_is_accepted():
    least = 4 + MEMORY_STEPS + MINIMUM_TIMED_STEPS
    assert make_workload("cpu", {"steps": least, "warmup_steps": 4}).steps == least


@pytest.mark.parametrize(("width", "heads"), [(128, 3), (12, 4), (4, 8)])
def test_a_width_that_its_heads_cannot_share_is_rejected(width, heads):
    with pytest.raises(InvalidInput, match=f"width {width} .* {heads} heads"):
        make_workload("cpu", {"width": width, "heads": heads})


def test_only_a_model_with_rotary_positions_needs_heads_of_an_even_size():
    assert make_workload("cpu", {"model": "deep-one", "width": 12, "heads": 4}).width == 12


def test_a_vocabulary_smaller_than_the_bytes_is_rejected():
    with pytest.raises(InvalidInput, match="vocab_size = 255"):
        make_workload("cpu", {"vocab_size": 255})


def test_a_learning_rate_of_an_unknown_optimizer_is_rejected_with_those_that_exist():
    with pytest.raises(InvalidInput, match="adam2") as raised:
        make_workload("cpu", {"learning_rates": {"adam2": 0.1}})
    assert "adafactor" in raised.value.hint


@pytest.mark.parametrize("rate", [0, -0.1, float("nan"), float("inf"), "0.1", True, None])
def test_an_impossible_learning_rate_is_rejected_by_its_optimizer(rate):
    with pytest.raises(InvalidInput, match="sgd"):
        make_workload("cpu", {"learning_rates": {"sgd": rate}})


@pytest.mark.parametrize("rates", [0.1, "sgd", ["sgd"]])
def test_learning_rates_that_are_not_by_optimizer_are_rejected(rates):
    with pytest.raises(InvalidInput, match="learning"):
        make_workload("cpu", {"learning_rates": rates})


@pytest.mark.parametrize(
    "name",
    [
        "model",
        "dataset",
        "dataset_config",
        "dataset_split",
        "text_column",
        "prompt_format",
        "held_out_split",
        "tokenizer",
    ],
)
def test_a_name_that_is_not_a_text_is_rejected(name):
    with pytest.raises(InvalidInput, match=name):
        make_workload("cpu", {name: 7})


def test_an_unknown_setting_is_rejected_with_those_that_exist():
    with pytest.raises(InvalidInput, match="'step'") as raised:
        make_workload("cpu", {"step": 20})
    assert "steps" in raised.value.hint


# -- identity --------------------------------------------------------------------------------------


def test_equal_workloads_have_equal_fingerprints():
    assert (
        make_workload("cpu", {"steps": 30}).fingerprint
        == make_workload("cpu", {"steps": 30}).fingerprint
    )


def test_the_order_of_learning_rates_does_not_change_the_fingerprint():
    rates = make_workload("cpu").learning_rates
    turned = dict(reversed(rates.items()))
    changed = dataclasses.replace(make_workload("cpu"), learning_rates=turned)
    assert changed.fingerprint == make_workload("cpu").fingerprint


def test_a_learning_rate_written_as_a_whole_number_has_the_same_fingerprint():
    one, other = (make_workload("cpu", {"learning_rates": {"sgd": rate}}) for rate in (1, 1.0))
    assert one == other
    assert one.fingerprint == other.fingerprint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers", 7),
        ("width", 256),
        ("heads", 2),
        ("feed_forward_width", 64),
        ("vocab_size", 300),
        ("dataset", "other.txt"),
        ("dataset_config", "other"),
        ("dataset_split", "validation"),
        ("text_column", "body"),
        ("prompt_format", "alpaca"),
        ("text_sha256", "0" * 64),
        ("tokenizer", "other"),
        ("packing", "padded"),
        ("held_out_split", "validation"),
        ("streaming", True),
        ("sequence_length", 64),
        ("global_batch", 16),
        ("steps", 41),
        ("warmup_steps", 5),
        ("evaluation_sequences", 32),
        ("seed", 1),
        ("learning_rates", {"sgd": 0.2}),
        ("schedule", "cosine"),
        ("learning_rate_warmup_steps", 11),
    ],
)
def test_a_change_of_any_setting_changes_the_fingerprint(name, value):
    assert make_workload("cpu", {name: value}).fingerprint != make_workload("cpu").fingerprint


def test_a_workload_is_the_same_after_a_trip_through_its_dictionary():
    workload = make_workload("cuda", {"learning_rates": {"sgd": 0.2}})
    assert Workload(**workload.to_dict()) == workload


@pytest.mark.parametrize("name", ["feed_forward_width", "packing", "held_out_split", "streaming"])
def test_a_workload_stored_before_there_was_a_setting_still_loads(name):
    stored = make_workload("cpu").to_dict()
    del stored[name]
    assert Workload(**stored) == make_workload("cpu")


def test_the_length_of_a_scripts_sequences_decides_nothing(tmp_path):
    """A script makes its own sequences, whose length is unknown."""
    assert make_workload("cpu", {"sequence_length": 24}).legality_context.sequence_length == 24
    (tmp_path / "train.py").touch()
    script = make_workload("cpu", {"model": "script", "script": str(tmp_path / "train.py")})
    assert script.legality_context.sequence_length is None
