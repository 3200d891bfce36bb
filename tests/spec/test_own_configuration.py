"""What a trainer's file trains with: the baseline, and the values that nobody chose."""

import pytest

from autotune.spec.config import (
    CHOICES,
    FIELD_ORDER,
    LegalityContext,
    TrainingConfig,
    baseline_of,
    configuration_of,
    rule_violations,
)
from autotune.spec.search_space import bind_space
from autotune.spec.space_file import load_space
from autotune.spec.workload import make_workload

OWN = TrainingConfig(
    precision="bf16-mixed",
    checkpointing="block",
    optimizer="adamw-8bit",
    micro_batch_size=2,
    loss="chunked",
    adapter="lora",
    adapter_rank=32,
    base_weights="nf4",
)
AT = LegalityContext(global_batch=8, clips_gradients=True, own=OWN)


def test_it_is_the_baseline_whatever_the_space():
    for name in ("default", "quick", "finetune", "adapters"):
        assert load_space(name).baseline_config(AT) == OWN


@pytest.mark.parametrize("field", FIELD_ORDER)
def test_a_technique_that_nobody_chose_has_its_value(field):
    assert getattr(configuration_of({}, AT), field) == getattr(OWN, field)
    assert AT.default_of(field) == getattr(OWN, field)


def test_without_an_adapter_nothing_of_one_is_left():
    config = configuration_of({"adapter": "none"}, AT)
    assert (config.adapter, config.adapter_rank, config.base_weights) == ("none", 8, "trained")
    assert not rule_violations(config.to_dict(), AT)


@pytest.mark.parametrize("name", ["default", "quick", "adapters"])
def test_every_trial_trains_what_the_file_does_where_the_space_searches_nothing_else(name):
    space = load_space(name)
    legal = bind_space(space, AT, unavailable={})
    some = [config for config, _ in zip(legal.configurations(), range(500), strict=False)]
    for config in (*some, *legal.named.values()):
        for field in FIELD_ORDER:
            # A space may also state a default of its own.
            if field not in {*space.techniques, *space.defaults}:
                named = {one[field] for one in space.configurations if field in one}
                assert getattr(config, field) in {getattr(OWN, field), *named}, field


@pytest.mark.parametrize("name", ["default", "quick", "adapters"])
def test_the_space_has_the_values_of_the_file_and_names_only_what_its_optimizer_can(name):
    legal = bind_space(load_space(name), AT, unavailable={})
    assert OWN in legal
    assert not [line for line in legal.excluded if "has no optimizer_fusion" in line]


def test_a_named_configuration_has_of_the_file_only_what_the_space_does_not_search():
    named = bind_space(load_space("default"), AT, unavailable={}).named
    config = named["bf16 autocast, compiled"]
    assert (config.checkpointing, config.loss, config.micro_batch_size) == ("none", "full", 8)
    assert (config.adapter, config.adapter_rank) == ("lora", 32)


def test_a_workload_with_it_is_another_workload_and_one_without_keeps_its_identity():
    plain = make_workload("cpu", {})
    owned = make_workload("cpu", {"own_config": OWN.to_dict(), "own_file": "sft.yaml"})
    assert plain.fingerprint != owned.fingerprint
    assert "own_config" not in plain.identity()
    assert owned.legality_context.own == OWN
    assert baseline_of(optimizer="adamw", at=plain.legality_context) != OWN


def test_the_space_beside_adapters_has_known_values():
    for field, values in load_space("adapters").techniques.items():
        assert values == "divisors" or set(values) <= set(CHOICES[field])
