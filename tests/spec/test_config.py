import dataclasses
import itertools
import re

import pytest

from autotune.errors import IllegalConfiguration, InvalidInput
from autotune.shipped.segments import segment_bounds
from autotune.spec.config import (
    CHOICES,
    FIELD_ORDER,
    KEEPS_PRODUCTS,
    RULES,
    SEARCHED,
    LegalityContext,
    TrainingConfig,
    baseline_of,
    check_legal,
    check_value,
    configuration_of,
    reverted,
    rule_violations,
)

GLOBAL_BATCH = 8
PLAIN = LegalityContext(global_batch=GLOBAL_BATCH)
FUSED = {"adapter": "lora", "adapter_kernels": "fused"}
FROZEN = {"adapter": "lora", "offload": "frozen"}
GRAPHS = {"compile": "model", "compile_mode": "reduce-overhead"}
SUMS = {"precision": "bf16-true", "gradient_accumulation_dtype": "fp32"}
IN_EIGHT_BITS = {"adapter": "lora", "precision": "bf16-mixed", "base_weights": "int8"}

# For each rule, in their order, a configuration that breaks this one and no other.
BREAKING = (
    {"precision": "fp64"},
    {"optimizer_fusion": "as-is"},
    {"micro_batch_size": 3},
    {"memory_budget": 0.5},
    {"compile_mode": "max-autotune-no-cudagraphs"},
    {**GRAPHS, "compile": "block"},
    {**GRAPHS, "micro_batch_size": 4},
    {**GRAPHS, "devices": 2, "sharding": "ddp", "micro_batch_size": 4},
    {**GRAPHS, "activation_offload": "cpu"},
    {**GRAPHS, "offload": "all"},
    {"memory_budget": 0.25, "checkpointing": "block", "compile": "block"},
    {"activation_budget": "1GiB", "checkpointing": "block"},
    {"activation_budget": "1GiB", "compile": "block"},
    {"activation_budget": "1GiB", "activation_offload": "cpu"},
    {"activation_budget": "1GiB", "engine": "deepspeed"},
    {"optimizer": "adafactor", "optimizer_fusion": "kernel"},
    {"precision": "fp16-mixed", "optimizer_fusion": "backward"},
    {"optimizer_fusion": "backward", "micro_batch_size": 4},
    {"optimizer_fusion": "backward", "clips_gradients": True},
    {"precision": "bf16-stochastic", "optimizer_fusion": "foreach"},
    {"precision": "bf16-stochastic", "optimizer": "adamw-8bit"},
    {"gradient_accumulation_dtype": "fp32", "micro_batch_size": 4},
    SUMS,
    {**SUMS, "devices": 2, "sharding": "ddp", "micro_batch_size": 2},
    {**SUMS, "offload": "all", "micro_batch_size": 4},
    {"precision": "tf32", "attention": "flash"},
    {"precision": "fp8", "micro_batch_size": 4, "sequence_length": 6},
    {"precision": "int8-mixed", "checkpointing": "selective"},
    {"kernels": "liger", "compile": "block"},
    {"kernels": "liger", "devices": 2, "tensor_parallel": 2},
    {"precision": "fp8", "adapter": "lora"},
    {"adapter_rank": 16},
    {"adapter_targets": "attention"},
    {"adapter": "dora", "adapter_targets": "experts"},
    {"adapter": "lora", "adapter_targets": "experts", "drops_inputs_of_adapters": True},
    {"adapter": "lora", "adapter_targets": "experts", "adapters_begin_as_weights": True},
    {"adapter": "dora", "adapter_kernels": "fused"},
    {**FUSED, "drops_inputs_of_adapters": True},
    {
        "precision": "bf16-mixed",
        "adapter": "lora",
        "base_weights": "nf4",
        "adapters_begin_as_weights": True,
    },
    {**FUSED, "checkpointing": "selective"},
    {**FUSED, "engine": "deepspeed", "devices": 2, "sharding": "zero3", "micro_batch_size": 4},
    {"precision": "bf16-mixed", "base_weights": "bf16"},
    {"precision": "bf16-true", "adapter": "lora", "base_weights": "bf16"},
    {"precision": "bf16-mixed", "adapter": "lora", "base_weights": "fp16"},
    {"precision": "tf32", "adapter": "dora", "base_weights": "nf4"},
    {"devices": 4, "sharding": "ddp", "micro_batch_size": 4},
    {"sharding": "ddp"},
    {"devices": 2, "sharding": "none", "micro_batch_size": 4},
    {"devices": 2, "sharding": "ddp", "tensor_parallel": 2},
    {"devices": 4, "sharding": "ddp", "tensor_parallel": 3, "micro_batch_size": 1},
    {"devices": 2, "sharding": "ddp", "sharding_group": 2, "micro_batch_size": 4},
    {"devices": 2, "sharding": "hsdp", "micro_batch_size": 4},
    {
        "devices": 8,
        "sharding": "hsdp",
        "sharding_group": 2,
        "tensor_parallel": 2,
        "micro_batch_size": 2,
    },
    {"devices": 2, "tensor_parallel": 2, "precision": "fp16-mixed"},
    {"devices": 2, "tensor_parallel": 2, "precision": "fp8"},
    {"devices": 2, "tensor_parallel": 2, "precision": "bf16-stochastic"},
    {"devices": 2, "tensor_parallel": 2, "optimizer": "adafactor"},
    {"devices": 2, "tensor_parallel": 2, "adapter": "lora"},
    {"devices": 2, "tensor_parallel": 2, "gradient_reduction": "bf16"},
    {"devices": 2, "sharding": "zero1", "optimizer_fusion": "backward", "micro_batch_size": 4},
    {"devices": 2, "sharding": "ddp", "offload": "optimizer", "micro_batch_size": 4},
    {"devices": 2, "sharding": "ddp", "offload": "all", "micro_batch_size": 4},
    {"offload": "optimizer", "clips_gradients": True},
    {"offload": "all", "precision": "fp16-mixed"},
    {"offload": "optimizer", "precision": "bf16-stochastic"},
    {"offload": "optimizer", "optimizer": "adamw-8bit"},
    {"offload": "all", "optimizer": "adafactor"},
    {"offload": "all", "optimizer_fusion": "backward"},
    {"offload": "all", **IN_EIGHT_BITS},
    {"offload": "frozen"},
    {**FROZEN, "devices": 2, "sharding": "ddp", "micro_batch_size": 4},
    {**FROZEN, "compile": "model"},
    {**FROZEN, "engine": "deepspeed"},
    {"devices": 2, "sharding": "zero3", "optimizer": "adafactor", "micro_batch_size": 4},
    {"devices": 2, "sharding": "zero2", "precision": "bf16-stochastic", "micro_batch_size": 4},
    {"devices": 2, "sharding": "zero3", "micro_batch_size": 4, **IN_EIGHT_BITS},
    {"engine": "deepspeed", "precision": "bf16-true"},
    {"engine": "deepspeed", "optimizer": "adafactor"},
    {"engine": "deepspeed", "compile": "block"},
    {"engine": "deepspeed", "optimizer_fusion": "backward"},
    {"engine": "deepspeed", "activation_offload": "cpu"},
    {"engine": "deepspeed", **IN_EIGHT_BITS},
    {
        "devices": 4,
        "engine": "deepspeed",
        "sharding": "hsdp",
        "sharding_group": 2,
        "micro_batch_size": 2,
    },
    {
        "devices": 4,
        "engine": "deepspeed",
        "sharding": "ddp",
        "tensor_parallel": 2,
        "micro_batch_size": 4,
    },
    {
        "devices": 2,
        "engine": "deepspeed",
        "sharding": "ddp",
        "offload": "optimizer",
        "micro_batch_size": 4,
    },
    {
        "devices": 2,
        "engine": "deepspeed",
        "sharding": "zero2",
        "offload": "all",
        "micro_batch_size": 4,
    },
)
EVERY_RULE = pytest.mark.parametrize(
    ("rule", "example"),
    [
        pytest.param(rule, example, id=str(example))
        for rule, example in zip(RULES, BREAKING, strict=True)
    ],
)


@pytest.mark.parametrize("checkpointing", KEEPS_PRODUCTS)
def test_kept_products_exclude_kernels_that_add_to_them_in_place(checkpointing):
    config = TrainingConfig(micro_batch_size=GLOBAL_BATCH, **FUSED).to_dict()
    (reason,) = rule_violations({**config, "checkpointing": checkpointing}, PLAIN)
    assert reason.startswith(f"checkpointing {checkpointing} keeps the results of products")


def breaking_config(example):
    choices = {name: value for name, value in example.items() if name in FIELD_ORDER}
    return TrainingConfig(**{"micro_batch_size": GLOBAL_BATCH, **choices})


def legality_context(example):
    at = {name: value for name, value in example.items() if name not in FIELD_ORDER}
    return LegalityContext(**{"global_batch": GLOBAL_BATCH, **at})


def reason_of(config, at=PLAIN):
    with pytest.raises(IllegalConfiguration) as raised:
        check_legal(config, at)
    return raised.value


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("precision", "fp128"),
        ("precision", "FP32"),
        ("precision", None),
        ("precision", ["fp32"]),
        ("checkpointing", "every-3"),
        ("checkpointing", False),
        ("compile", True),
        ("compile", ""),
        ("optimizer", "adam"),
        ("optimizer_fusion", "fused"),
        ("allocator", 1),
        ("memory_budget", -0.01),
        ("memory_budget", 1.01),
        ("memory_budget", float("nan")),
        ("memory_budget", float("inf")),
        ("memory_budget", "0.5"),
        ("memory_budget", True),
        ("memory_budget", None),
        ("micro_batch_size", 0),
        ("micro_batch_size", -4),
        ("micro_batch_size", 2.0),
        ("micro_batch_size", "2"),
        ("micro_batch_size", True),
    ],
)
def test_an_impossible_value_is_rejected_by_the_name_of_its_field(field, value):
    with pytest.raises(InvalidInput) as raised:
        TrainingConfig(**{field: value})
    assert f"Invalid {field}: {value!r}" in raised.value.message


def test_a_rejected_choice_comes_with_every_value_that_can_be_searched():
    for field, choices in SEARCHED.items():
        with pytest.raises(InvalidInput) as raised:
            check_value(field, "no such value")
        assert [value for value in choices if value not in raised.value.hint] == [], field


def test_every_listed_choice_is_accepted():
    for field, choices in CHOICES.items():
        accepted = [getattr(TrainingConfig(**{field: value}), field) for value in choices]
        assert accepted == list(choices), field


@pytest.mark.parametrize("value", [0, 0.0, 0.3, 1, 1.0])
def test_a_memory_budget_from_0_to_1_is_accepted(value):
    assert TrainingConfig(memory_budget=value).memory_budget == value


def test_an_unknown_technique_is_rejected_with_those_that_exist():
    with pytest.raises(InvalidInput, match="teleportation") as raised:
        check_value("teleportation", "on")
    assert all(field in raised.value.hint for field in FIELD_ORDER)


def test_every_technique_is_decided_exactly_once():
    assert sorted(FIELD_ORDER) == sorted(field.name for field in dataclasses.fields(TrainingConfig))


# -- identity --------------------------------------------------------------------------------------


def test_equal_configurations_have_equal_fingerprints():
    assert (
        TrainingConfig(compile="block").fingerprint == TrainingConfig(compile="block").fingerprint
    )


@pytest.mark.parametrize(("whole", "decimal"), [(1, 1.0), (0, 0.0), (-0.0, 0.0)])
def test_a_memory_budget_written_another_way_has_the_same_fingerprint(whole, decimal):
    one = TrainingConfig(compile="block", memory_budget=whole)
    other = TrainingConfig(compile="block", memory_budget=decimal)
    assert one == other
    assert one.fingerprint == other.fingerprint


def test_a_change_of_any_field_changes_the_fingerprint():
    changes = [{field: value} for field in CHOICES for value in CHOICES[field]]
    changes += [{"memory_budget": 0.5}, {"memory_budget": 0.4}, {"micro_batch_size": 2}]
    changes += [{"adapter_rank": 16}]
    configs = {TrainingConfig(**change) for change in changes}
    assert len({config.fingerprint for config in configs}) == len(configs)


@pytest.mark.parametrize(
    ("config", "fingerprint"),
    [
        ({"micro_batch_size": 8}, "51f4542580e3"),
        (
            {
                "precision": "bf16-mixed",
                "compile": "block",
                "memory_budget": 0.4,
                "optimizer_fusion": "kernel",
            },
            "219553ff4c07",
        ),
    ],
)
def test_a_configuration_of_the_first_studies_keeps_its_fingerprint(config, fingerprint):
    """Databases have fingerprints from before attention, loss, offload and adapters."""
    assert TrainingConfig(**config).fingerprint == fingerprint


def test_a_configuration_stored_before_a_technique_existed_is_without_that_technique():
    stored = TrainingConfig(compile="block").to_dict()
    for field in ("attention", "loss", "activation_offload"):
        del stored[field]
    assert TrainingConfig(**stored) == TrainingConfig(compile="block")


def test_a_fingerprint_is_twelve_hexadecimal_digits():
    assert re.fullmatch("[0-9a-f]{12}", TrainingConfig().fingerprint)


def test_a_configuration_is_the_same_after_a_trip_through_its_dictionary():
    config = TrainingConfig(
        precision="bf16-true", compile="model", memory_budget=0.3, micro_batch_size=4
    )
    assert TrainingConfig(**config.to_dict()) == config


@pytest.mark.parametrize(
    "field",
    ["checkpointing", "optimizer_fusion", "allocator", "attention", "loss", "activation_offload"],
)
def test_a_technique_that_only_moves_memory_does_not_change_the_numbers(field):
    classes = {TrainingConfig(**{field: value}).numerics_class for value in CHOICES[field]}
    assert len(classes) == 1


@pytest.mark.parametrize(
    "other", [{"micro_batch_size": 4}, {"compile": "block", "memory_budget": 0.5}]
)
def test_micro_batch_and_budget_do_not_change_the_numbers(other):
    assert TrainingConfig(**other).numerics_class == TrainingConfig().numerics_class


@pytest.mark.parametrize("field", ["precision", "optimizer"])
def test_every_precision_and_optimizer_computes_its_own_numbers(field):
    classes = {TrainingConfig(**{field: value}).numerics_class for value in CHOICES[field]}
    assert len(classes) == len(CHOICES[field])


def test_every_adapter_over_every_base_computes_its_own_numbers():
    adapted = TrainingConfig(precision="bf16-mixed", adapter="lora")
    others = [
        {"adapter": "none"},
        {"adapter": "dora"},
        {"adapter_rank": 16},
        {"adapter_targets": "attention"},
        {"base_weights": "bf16"},
        {"base_weights": "nf4"},
    ]
    configs = [adapted, *(dataclasses.replace(adapted, **other) for other in others)]
    assert len({config.numerics_class for config in configs}) == len(configs)


def test_without_its_technique_a_field_that_refines_it_is_at_its_default():
    plain = TrainingConfig(precision="bf16-mixed")
    qlora = dataclasses.replace(plain, adapter="lora", adapter_rank=64, base_weights="nf4")
    assert reverted(qlora, "adapter", plain=plain) == plain
    budget = dataclasses.replace(plain, compile="block", memory_budget=0.5)
    assert reverted(budget, "compile", plain=plain) == plain


@pytest.mark.parametrize(
    ("precision", "classes"),
    [
        ("fp64", 1),
        ("fp32", 1),
        ("tf32", 1),
        ("bf16-mixed", 2),
        ("bf16-true", 2),
        ("fp16-mixed", 2),
        ("as-is", 2),
    ],
)
def test_compiled_and_eager_are_two_classes_only_in_16_bit(precision, classes):
    configs = [TrainingConfig(precision=precision, compile=scope) for scope in CHOICES["compile"]]
    assert len({config.numerics_class for config in configs}) == classes


def compiled_classes(field, *, scope):
    configs = [TrainingConfig(compile=scope, **{field: value}) for value in CHOICES[field]]
    return {config.compiled_class for config in configs}


@pytest.mark.parametrize("field", ["optimizer", "optimizer_fusion", "allocator"])
@pytest.mark.parametrize("scope", ["block", "model"])
def test_another_update_or_allocator_compiles_the_same_code(field, scope):
    assert len(compiled_classes(field, scope=scope)) == 1


@pytest.mark.parametrize(("scope", "classes"), [("block", 1), ("model", 2)])
def test_the_loss_is_compiled_only_with_the_whole_model(scope, classes):
    assert len(compiled_classes("loss", scope=scope)) == classes


@pytest.mark.parametrize(
    "field", ["precision", "checkpointing", "attention", "activation_offload", "compile_mode"]
)
def test_every_other_technique_compiles_its_own_code(field):
    assert len(compiled_classes(field, scope="block")) == len(CHOICES[field])


def test_without_torch_compile_there_is_no_compiled_class():
    assert TrainingConfig(compile="none").compiled_class is None


# -- rules: a contract of every one ----------------------------------------------------------------


@EVERY_RULE
def test_a_rule_is_broken_by_its_example_and_no_other_rule_is(rule, example):
    config = breaking_config(example)
    at = legality_context(example)
    assert [other for other in RULES if other.broken(config.to_dict(), at)] == [rule]


@EVERY_RULE
def test_a_rule_names_the_values_that_do_not_go_together(rule, example):
    reason = reason_of(breaking_config(example), legality_context(example))
    named = [
        str(example[field])
        for field in rule.fields
        if field in example and example[field] != GLOBAL_BATCH
    ]
    assert named
    assert all(value.lower() in reason.message.lower() for value in named)


@EVERY_RULE
def test_a_rule_says_what_to_change(rule, example):
    reason = reason_of(breaking_config(example), legality_context(example))
    assert re.match("(use|set) ", reason.hint)


@EVERY_RULE
def test_a_sentence_has_no_blank_left_to_fill(rule, example):
    config = breaking_config(example)
    assert not any(
        "{" in sentence for sentence in rule_violations(config.to_dict(), legality_context(example))
    )


@EVERY_RULE
def test_a_rule_waits_until_all_its_fields_are_chosen(rule, example):
    chosen = breaking_config(example).to_dict()
    del chosen[rule.fields[-1]]
    assert rule_violations(chosen, legality_context(example)) == []


@EVERY_RULE
def test_a_rule_reads_only_the_fields_it_names(rule, example):
    config = breaking_config(example)
    at = legality_context(example)
    assert rule.broken({field: getattr(config, field) for field in rule.fields}, at)


def test_the_micro_batch_error_names_the_global_batch():
    assert str(GLOBAL_BATCH) in reason_of(TrainingConfig(micro_batch_size=3)).message


def test_the_fp8_error_says_how_many_tokens_there_are():
    at = LegalityContext(global_batch=GLOBAL_BATCH, sequence_length=30)
    reason = reason_of(TrainingConfig(precision="fp8", micro_batch_size=4), at)
    assert "4 has sequences of 30 tokens" in reason.message
    assert "sequence length that is a multiple of 16" in reason.hint


def test_every_broken_rule_has_its_sentence():
    chosen = TrainingConfig(memory_budget=0.5, checkpointing="block", micro_batch_size=3).to_dict()
    assert len(rule_violations(chosen, PLAIN)) == 3


@pytest.mark.parametrize(
    "legal",
    [
        {},
        {"compile": "model", "memory_budget": 0.05},
        {"compile": "block", "checkpointing": "block"},
        {"optimizer": "adafactor", "optimizer_fusion": "foreach"},
        {"optimizer": "adafactor-fixed-rate"},
        {
            "optimizer": "adafactor-fixed-rate",
            "optimizer_fusion": "backward",
            "micro_batch_size": GLOBAL_BATCH,
        },
        {"optimizer_fusion": "backward", "micro_batch_size": GLOBAL_BATCH},
        {"optimizer_fusion": "kernel", "micro_batch_size": 2, "precision": "fp16-mixed"},
    ],
)
def test_a_legal_configuration_is_let_through(legal):
    check_legal(TrainingConfig(**legal), PLAIN)


@pytest.mark.parametrize(
    ("optimizer", "global_batch"), list(itertools.product(CHOICES["optimizer"], [1, GLOBAL_BATCH]))
)
def test_the_baseline_is_always_legal(optimizer, global_batch):
    at = LegalityContext(global_batch=global_batch)
    check_legal(baseline_of(optimizer=optimizer, at=at), at)


def test_the_baseline_uses_no_technique():
    plain = TrainingConfig(optimizer="sgd", micro_batch_size=GLOBAL_BATCH)
    assert baseline_of(optimizer="sgd", at=PLAIN) == plain


# -- several devices -------------------------------------------------------------------------------

FOUR_DEVICES = LegalityContext(global_batch=16, devices=4)


def test_the_baseline_of_several_devices_is_data_parallel():
    expected = TrainingConfig(sharding="ddp", micro_batch_size=4)
    assert baseline_of(optimizer="adamw", at=FOUR_DEVICES) == expected
    check_legal(expected, FOUR_DEVICES)


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"sharding": "none"}, "nothing adds up the gradients of 4 devices"),
        ({"sharding": "zero3", "micro_batch_size": 8}, "do not add up to the global batch of 16"),
        (
            {"sharding": "ddp", "optimizer_fusion": "backward", "micro_batch_size": 4},
            "before sharding ddp adds up those of all",
        ),
        ({"sharding": "hsdp"}, "sharding hsdp needs groups of several devices"),
        ({"sharding": "hsdp", "sharding_group": 4}, "sharding hsdp needs groups"),
        ({"sharding": "zero3", "sharding_group": 2}, "is a group of sharding hsdp"),
        ({"sharding": "ddp", "tensor_parallel": 3}, "tensor_parallel 3 does not divide"),
        ({"sharding": "ddp", "tensor_parallel": 4}, "leaves none for sharding ddp"),
        (
            {"sharding": "none", "tensor_parallel": 4, "gradient_reduction": "bf16"},
            "is how devices add up gradients",
        ),
    ],
)
def test_what_cannot_be_divided_among_devices_is_illegal(choices, sentence):
    config = TrainingConfig(**{"micro_batch_size": 1, **choices})
    with pytest.raises(IllegalConfiguration, match=re.escape(sentence)):
        check_legal(config, FOUR_DEVICES)


@pytest.mark.parametrize("sharding", [value for value in CHOICES["sharding"] if value != "none"])
def test_one_device_has_nothing_to_share_out(sharding):
    config = TrainingConfig(sharding=sharding, micro_batch_size=1)
    with pytest.raises(IllegalConfiguration, match="divides a training among devices"):
        check_legal(config, PLAIN)


@pytest.mark.parametrize(
    "choices",
    [
        {"sharding": "hsdp", "sharding_group": 2},
        {"sharding": "zero3", "optimizer_fusion": "backward", "micro_batch_size": 4},
        {"sharding": "zero3", "optimizer_fusion": "backward", "micro_batch_size": 8}
        | {"tensor_parallel": 2},
        {"sharding": "none", "tensor_parallel": 4, "micro_batch_size": 16},
    ],
)
def test_what_can_be_divided_among_devices_is_legal(choices):
    check_legal(TrainingConfig(**choices), FOUR_DEVICES)


def test_choices_for_several_devices_are_data_parallel_unless_they_say_otherwise():
    assert configuration_of({}, FOUR_DEVICES).sharding == "ddp"
    assert configuration_of({"tensor_parallel": 4}, FOUR_DEVICES).sharding == "none"
    assert configuration_of({"sharding": "zero1"}, FOUR_DEVICES).sharding == "zero1"


# -- in words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "fp32, micro-batch 1"),
        ({"precision": "bf16-mixed", "micro_batch_size": 4}, "bf16-mixed, micro-batch 4"),
        ({"checkpointing": "every-2"}, "fp32, checkpointing every-2, micro-batch 1"),
        (
            {"compile": "block", "memory_budget": 0.4},
            "fp32, compile block, memory-budget 0.4, micro-batch 1",
        ),
        ({"optimizer_fusion": "backward"}, "fp32, optimizer-fusion backward, micro-batch 1"),
        ({"allocator": "expandable"}, "fp32, allocator expandable, micro-batch 1"),
    ],
)
def test_a_description_holds_what_differs_from_a_plain_training(config, words):
    assert TrainingConfig(**config).describe() == words


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 6, 7, 12, 48, 100])
def test_sqrt_cuts_all_blocks_into_about_sqrt_segments_of_nearly_equal_length(layers):
    bounds = segment_bounds(layers)
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(lengths)) == (0, layers, round(layers**0.5))
    assert max(lengths) - min(lengths) <= 1
