"""A technique is one declaration, from which lists and options are derived."""

import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest

from autotune.errors import InvalidInput
from autotune.spec.config import (
    CHOICES,
    DEPENDENT_FIELDS,
    FIELD_ORDER,
    OF_SCRIPTS,
    SEARCHED,
    TECHNIQUES,
    LegalityContext,
    TrainingConfig,
    check_legal,
    check_value,
    reverted,
)
from autotune.spec.optimizers import OPTIMIZERS, Optimizer
from autotune.spec.setting import options_of

FINGERPRINTS = json.loads((Path(__file__).parent / "fingerprints.json").read_text())


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TrainingConfig)])
def test_a_technique_says_what_it_is_and_which_values_it_has(field):
    assert TECHNIQUES[field].help.endswith(".")
    has_range = options_of(TrainingConfig)[field].format.range is not None
    assert [field in CHOICES, has_range, field == "activation_budget"].count(True) == 1
    check_value(field, getattr(TrainingConfig(), field))


@pytest.mark.parametrize("field", TECHNIQUES)
def test_what_is_said_of_a_value_is_said_of_a_value_that_exists(field):
    technique = TECHNIQUES[field]
    for value in (*technique.of_scripts, *technique.held_by_the_host, *technique.packages):
        check_value(field, value)
    assert technique.refines in ("", *TECHNIQUES)


def test_the_command_line_has_an_option_for_every_technique():
    options = options_of(TrainingConfig)
    assert list(options) == list(TECHNIQUES)
    assert {name: option.choices for name, option in options.items() if option.choices} == SEARCHED
    assert options["micro_batch_size"].flag == "--micro-batch"
    assert options["activation_offload"].flag == "--activation-offload"


def test_a_value_of_a_script_is_no_choice_of_a_search():
    for field, values in OF_SCRIPTS.items():
        assert set(SEARCHED[field]) == set(CHOICES[field]) - set(values)


def test_a_field_that_refines_a_technique_is_decided_after_it():
    for technique, fields in DEPENDENT_FIELDS.items():
        order = [FIELD_ORDER.index(field) for field in (technique, *fields)]
        assert order == sorted(order)


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("memory_budget", 1.5, "use a number from 0.0 to 1.0"),
        ("micro_batch_size", 0, "use a whole number from 1 to 2147483647"),
        ("adapter_rank", 2**16 + 1, "use a whole number from 1 to 65536"),
    ],
)
def test_a_number_out_of_its_range_is_rejected_with_the_range(field, value, hint):
    with pytest.raises(InvalidInput) as rejected:
        check_value(field, value)
    assert rejected.value.hint == hint


@pytest.mark.parametrize("given", ["1.5GiB", "1536MiB", "1610612736", 1610612736, "1536 MiB"])
def test_a_size_has_one_form_however_it_is_written(given):
    config = TrainingConfig(activation_budget=given)
    assert config == TrainingConfig(activation_budget="1.5GiB")
    assert config.describe() == "fp32, activation-budget 1536MiB, micro-batch 1"


@pytest.mark.parametrize("given", ["much", "-1GiB", "0", 0, True, 1.5, "1G", ""])
def test_what_is_no_size_is_rejected(given):
    with pytest.raises(InvalidInput, match="activation_budget") as rejected:
        TrainingConfig(activation_budget=given)
    assert rejected.value.hint


def test_every_optimizer_is_declared():
    assert get_args(Optimizer) == tuple(OPTIMIZERS)


@pytest.mark.parametrize("field", FINGERPRINTS)
def test_a_configuration_keeps_the_fingerprint_that_databases_have(field):
    read = str if field in CHOICES else type(getattr(TrainingConfig(), field))
    found = {
        value: TrainingConfig(**{field: read(value)}).fingerprint for value in FINGERPRINTS[field]
    }
    assert found == FINGERPRINTS[field]


def test_another_sharding_leaves_the_groups_of_hsdp():
    config = TrainingConfig(sharding="hsdp", sharding_group=2, micro_batch_size=1)
    changed = reverted(config, "sharding", plain=TrainingConfig(sharding="ddp"))
    assert (changed.sharding, changed.sharding_group) == ("ddp", 1)
    check_legal(changed, LegalityContext(global_batch=8, devices=4))
