"""Which configurations are predicted in addition to the explained one."""

from dataclasses import replace

import pytest

from autotune.analysis.variants import Explained, Variant
from autotune.spec.config import (
    CHOICES,
    FIELD_ORDER,
    LegalityContext,
    TrainingConfig,
    rule_violations,
)
from autotune.spec.prediction import CATEGORIES, Prediction
from autotune.study.explain.alternatives import (
    unavailable_on,
    wanted_pairs,
    wanted_variants,
    without_technique,
)

BATCH = 8
PLAIN = TrainingConfig(micro_batch_size=BATCH)


def prediction(peak=100, **sizes):
    return Prediction(
        device="cpu",
        fake_device="cpu",
        parameters=1000,
        peak_memory_bytes=peak,
        upper_bound_bytes=peak,
        lower_bound_bytes=peak,
        phase="backward",
        module="blocks.0",
        operator="aten.mm",
        bytes_by_category=dict.fromkeys(CATEGORIES, 0) | {"optimizer_state": 40} | sizes,
        holders=(),
    )


def wanted(config=PLAIN, *, unavailable=None, **sizes):
    return wanted_variants(
        config,
        prediction(**sizes),
        at=LegalityContext(global_batch=BATCH),
        unavailable=unavailable or {},
    )


def values(found, technique):
    return [
        one.value for one in found.variants if one.technique == technique and not one.is_removal
    ]


CONFIGS = [
    PLAIN,
    replace(PLAIN, micro_batch_size=2, precision="tf32"),
    replace(PLAIN, optimizer_fusion="backward", checkpointing="block"),
    replace(PLAIN, compile="model", memory_budget=0.05, optimizer="adafactor-fixed-rate"),
    replace(
        PLAIN,
        precision="fp16-mixed",
        checkpointing="sqrt",
        optimizer_fusion="kernel",
        optimizer="sgd",
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=TrainingConfig.describe)
def test_every_variant_is_legal_and_another_configuration(config):
    found = [one.config for one in wanted(config).variants]
    assert [
        c
        for c in found
        if rule_violations(c.to_dict(), LegalityContext(global_batch=BATCH)) or c == config
    ] == []
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("config", CONFIGS, ids=TrainingConfig.describe)
def test_a_variant_changes_its_technique_and_a_removal_may_take_the_budget_along(config):
    for one in wanted(config).variants:
        changed = {f for f in FIELD_ORDER if getattr(one.config, f) != getattr(config, f)}
        assert changed in ({one.technique}, {"compile", "memory_budget"})
        assert one.technique in changed


@pytest.mark.parametrize("config", CONFIGS, ids=TrainingConfig.describe)
def test_there_are_a_handful_a_technique_and_none_of_the_allocator(config):
    found = wanted(config)
    assert max(len(values(found, technique)) for technique in CHOICES) <= 5
    assert values(found, "allocator") == []


def test_every_technique_in_use_is_taken_out_once():
    config = replace(
        PLAIN, checkpointing="block", optimizer_fusion="backward", precision="bf16-mixed"
    )
    removed = [one.technique for one in wanted(config).variants if one.is_removal]
    assert removed == ["precision", "checkpointing", "optimizer_fusion"]


def test_a_budget_without_half_of_the_activations_is_a_variant_unless_something_is_recomputed():
    [budget] = values(wanted(PLAIN), "activation_budget")
    assert budget.endswith("iB")
    recomputed = wanted(replace(PLAIN, checkpointing="block"))
    assert values(recomputed, "activation_budget") == []
    assert "both decide" in recomputed.impossible["activation_budget"]


def test_taking_compilation_out_takes_its_budget_with_it():
    config = replace(PLAIN, compile="model", memory_budget=0.5)
    assert without_technique(config, "compile", LegalityContext(global_batch=BATCH)) == PLAIN


def test_what_does_not_work_on_the_device_is_not_wanted():
    found = wanted(unavailable={"compile": {"block": "no compiler", "model": "no compiler"}})
    assert values(found, "compile") == []
    assert found.impossible["compile"] == "compile block does not work on this device: no compiler"


def test_fp16_stands_in_where_bf16_does_not_work():
    unavailable = {"precision": {"bf16-mixed": "no", "bf16-true": "no"}}
    assert values(wanted(unavailable=unavailable), "precision") == ["fp16-mixed"]


def test_a_budget_without_compilation_is_not_possible_and_says_what_to_change():
    assert "set compile to block or model" in wanted().impossible["memory_budget"]


@pytest.mark.parametrize(("share", "is_wanted"), [(0.9, True), (0.1, False), (None, False)])
def test_codes_of_experts_are_predicted_where_layers_are_few_of_the_weights(share, is_wanted):
    qlora = replace(PLAIN, precision="bf16-mixed", adapter="lora", base_weights="nf4")
    predicted = replace(prediction(), unquantized_share=share)
    at = LegalityContext(global_batch=BATCH)
    found = wanted_variants(qlora, predicted, at=at, unavailable={})
    assert ("nf4-experts" in values(found, "base_weights")) == is_wanted


def test_optimizers_are_left_alone_where_their_state_is_nothing_at_the_peak():
    found = wanted(optimizer_state=0)
    assert values(found, "optimizer") == []
    assert "no other optimizer saves anything" in found.impossible["optimizer"]


def test_a_compiled_model_is_compiled_again_only_a_few_times():
    found = wanted(
        replace(PLAIN, compile="model", memory_budget=0.05, optimizer_fusion="backward"),
        optimizer_state=0,
    )
    assert sum(one.config.compile == "model" for one in found.variants) <= 9


# -- pairs -----------------------------------------------------------------------------------------

CHECKPOINTING = Variant(
    technique="checkpointing",
    value="block",
    config=replace(PLAIN, checkpointing="block"),
    prediction=prediction(60),
)
FUSION = Variant(
    technique="optimizer_fusion",
    value="backward",
    config=replace(PLAIN, optimizer_fusion="backward"),
    prediction=prediction(100),
)
BY_BLOCK = Variant(
    technique="compile",
    value="block",
    config=replace(PLAIN, compile="block"),
    prediction=prediction(90),
)


def pairs(variants, config=PLAIN, unavailable=None):
    given = Explained(
        config=config, prediction=prediction(), at=LegalityContext(global_batch=BATCH)
    )
    return wanted_pairs(given, variants, unavailable=unavailable or {})


def test_what_saves_nothing_is_combined_with_what_saves_most():
    (pair,) = pairs([CHECKPOINTING, FUSION])
    assert (pair.alone, pair.together) == (
        CHECKPOINTING.config,
        replace(PLAIN, checkpointing="block", optimizer_fusion="backward"),
    )


def test_what_is_in_use_and_saves_nothing_is_removed_from_what_saves_most():
    config = FUSION.config
    without = Variant(
        technique="optimizer_fusion",
        value="none",
        config=PLAIN,
        is_removal=True,
        prediction=prediction(),
    )
    both = replace(config, checkpointing="block")
    (pair,) = pairs([without, replace(CHECKPOINTING, config=both)], config=config)
    assert (pair.value, pair.alone, pair.together) == ("backward", CHECKPOINTING.config, both)


def test_a_pair_is_legal():
    fewer = Variant(
        technique="micro_batch_size",
        value=4,
        config=replace(PLAIN, micro_batch_size=4),
        prediction=prediction(50),
    )
    assert pairs([fewer, FUSION]) == []


def test_with_a_compiled_model_fusion_is_tried_with_each_block_compiled():
    config = replace(PLAIN, compile="model")
    fusion = replace(FUSION, config=replace(config, optimizer_fusion="backward"))
    checkpointed = replace(CHECKPOINTING, config=replace(config, checkpointing="block"))
    (pair,) = pairs([checkpointed, BY_BLOCK, fusion], config=config)
    assert pair.partner is BY_BLOCK


def test_a_budget_is_tried_with_the_compilation_it_needs():
    (pair,) = pairs([BY_BLOCK])
    assert pair.together == replace(PLAIN, compile="block", memory_budget=0.0)


def test_a_budget_that_does_not_work_is_not_tried():
    assert pairs([BY_BLOCK], unavailable={"memory_budget": {"0.0": "no"}}) == []


def test_a_cpu_is_not_told_what_moving_memory_to_the_host_would_save():
    found = wanted(unavailable=unavailable_on("cpu", {}))
    assert values(found, "offload") == values(found, "activation_offload") == []
    assert "in the host's memory already" in found.impossible["activation_offload"]
    assert "in the host's memory already" in found.impossible["offload"]
    assert values(wanted(unavailable=unavailable_on("cuda", {})), "offload") == ["optimizer", "all"]


def test_of_the_smaller_micro_batches_the_next_one_and_the_smallest_are_predicted():
    assert values(wanted(), "micro_batch_size") == [4, 1]


def test_a_compiled_model_has_fewer_checkpointings_to_predict():
    of_eager = values(wanted(), "checkpointing")
    of_compiled = values(wanted(replace(PLAIN, compile="model")), "checkpointing")
    assert len(of_compiled) < len(of_eager)
    assert {*of_compiled} < {*of_eager}


def test_optimizers_are_left_alone_where_there_is_no_state_at_the_peak():
    nothing = Prediction(**vars(prediction()) | {"bytes_by_category": {"activations": 100}})
    at = LegalityContext(global_batch=BATCH)
    found = wanted_variants(PLAIN, nothing, at=at, unavailable={})
    assert values(found, "optimizer") == []
