import dataclasses
import itertools
import json
import math
import random
from collections import Counter

import pytest

from autotune.errors import InvalidSpace
from autotune.spec import search_space
from autotune.spec.config import (
    CHOICES,
    FIELD_ORDER,
    OF_SCRIPTS,
    SEARCHED,
    LegalityContext,
    TrainingConfig,
    rule_violations,
)
from autotune.spec.reading import parse
from autotune.spec.search_space import Condition, SearchSpace, bind_space
from autotune.spec.space_content import named_spaces
from autotune.spec.space_file import load_space
from autotune.spec.workload import make_workload
from tests.building.results import bound

EVERY_VALUE = {
    **SEARCHED,
    "memory_budget": (1.0, 0.5, 0.0),
    "activation_budget": ("none", "1GiB"),
    "micro_batch_size": (8, 4, 2, 1),
    "adapter_rank": (8, 16, 64),
    "sharding_group": (1, 2, 4),
    "tensor_parallel": (1, 2, 4),
}
"""A few values of the techniques with numbers, and all of the others."""

BUDGETS = """
[techniques]
compile = ["none", "block"]
memory_budget = [0.5]
checkpointing = ["none", "block"]
"""

CONDITIONS = """
[techniques]
precision = ["fp32", "bf16-mixed"]
compile = ["none", "block", "model"]
memory_budget = { from = 0.2, to = 1.0, step = 0.4 }
checkpointing = ["none", "selective", "block"]
optimizer = ["adamw", "adafactor"]
optimizer_fusion = ["foreach", "kernel", "backward"]
micro_batch_size = "divisors"

[[conditions]]
if = { compile = ["model"] }
then = { checkpointing = ["none"], micro_batch_size = [4, 8] }

[[conditions]]
if = { precision = ["fp32"], compile = ["none"] }
then = { optimizer_fusion = ["backward"] }
"""


@pytest.fixture
def write(tmp_path):
    def write_space(text, name="space.toml"):
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        return file

    return write_space


def error_of(name_or_file):
    with pytest.raises(InvalidSpace) as raised:
        load_space(str(name_or_file))
    return raised.value


# -- shipped files ---------------------------------------------------------------------------------

EVERY_SHIPPED_SPACE = pytest.mark.parametrize("name", named_spaces())


def bound_as_meant(name):
    """Returns a shipped space, bound to as many devices as it is for."""
    return bound(name, devices=4 if name == "multi_gpu" else 1)


def test_the_spaces_of_the_documentation_are_shipped():
    assert {"default", "quick", "peak_memory"} <= set(named_spaces())


@EVERY_SHIPPED_SPACE
def test_a_shipped_space_is_the_same_after_a_trip_through_json(name):
    space = load_space(name)
    assert parse(SearchSpace, json.loads(json.dumps(space.to_dict()))) == space


@EVERY_SHIPPED_SPACE
def test_a_shipped_space_says_in_one_line_what_it_is_for(name):
    description = load_space(name).description
    assert description
    assert "\n" not in description


def test_the_space_of_everything_holds_every_value_of_every_technique():
    techniques = load_space("everything").techniques
    assert techniques.keys() == set(FIELD_ORDER)
    listed = {field: sorted(values) for field, values in techniques.items() if field in SEARCHED}
    assert listed == {field: sorted(values) for field, values in SEARCHED.items()}


def test_the_space_of_everything_holds_some_values_of_techniques_with_numbers():
    techniques = load_space("everything").techniques
    assert techniques["micro_batch_size"] == "divisors"
    numbers = set(FIELD_ORDER) - {*SEARCHED, "micro_batch_size"}
    for field in numbers:
        assert getattr(TrainingConfig(), field) in techniques[field]
        assert len(techniques[field]) > 2


@pytest.mark.parametrize("devices", [1, 4])
def test_the_space_of_everything_needs_no_list(devices):
    legal = bound("everything", devices=devices, global_batch=16)
    assert legal.count() > 100_000_000
    assert len(set(itertools.islice(legal.shuffled(0), 100))) == 100


@EVERY_SHIPPED_SPACE
def test_every_named_configuration_of_a_shipped_space_is_legal(name):
    space = load_space(name)
    assert list(bound_as_meant(name).named) == [
        configuration["name"] for configuration in space.configurations
    ]


@EVERY_SHIPPED_SPACE
def test_nothing_of_a_shipped_space_is_excluded_on_a_device_that_can_do_everything(name):
    assert bound_as_meant(name).excluded == ()


def test_a_space_with_conditions_is_the_same_after_a_trip_through_json(write):
    space = load_space(str(write(CONDITIONS)))
    assert parse(SearchSpace, json.loads(json.dumps(space.to_dict()))) == space


# precision, checkpointing, optimizer fusion, compile, memory budget
REFERENCE_TABLE = {
    "control": ("fp32", "none", "none", "none", 1.0),
    "bfloat16": ("bf16-true", "none", "backward", "none", 1.0),
    "checkpoint": ("fp32", "block", "none", "none", 1.0),
    "compile": ("fp32", "none", "none", "model", 1.0),
    "fused": ("fp32", "none", "backward", "none", 1.0),
    "fused_checkpoint": ("fp32", "block", "backward", "none", 1.0),
    "bf16_fused_chkpt": ("bf16-true", "block", "backward", "none", 1.0),
    "memory_budget_05": ("fp32", "none", "none", "model", 0.05),
    "memory_budget_60": ("fp32", "none", "none", "model", 0.60),
    "fused_memory_budget_05": ("fp32", "none", "backward", "model", 0.05),
    "bf16_budget_60": ("bf16-true", "none", "none", "model", 0.60),
}


def test_the_reference_space_has_the_eleven_rows_of_the_table_in_order():
    assert list(bound("peak_memory", global_batch=4).named) == list(REFERENCE_TABLE)


@pytest.mark.parametrize("name", REFERENCE_TABLE)
def test_a_row_of_the_reference_table_is_configured_as_there(name):
    precision, checkpointing, fusion, scope, budget = REFERENCE_TABLE[name]
    assert bound("peak_memory", global_batch=4).named[name] == TrainingConfig(
        precision=precision,
        checkpointing=checkpointing,
        optimizer_fusion=fusion,
        compile=scope,
        memory_budget=budget,
        optimizer="adafactor-fixed-rate",
        micro_batch_size=4,
    )


def test_the_reference_space_holds_nothing_but_its_rows():
    assert list(bound("peak_memory", global_batch=4).configurations()) == []


def test_every_row_of_the_reference_space_has_published_figures():
    reference = load_space("peak_memory").reference
    assert list(reference.rows) == list(REFERENCE_TABLE)
    assert all(None not in dataclasses.astuple(row) for row in reference.rows.values())


@pytest.mark.parametrize("scale", [None, *load_space("peak_memory").scales])
def test_the_reference_space_trains_the_steps_and_batch_of_the_table_at_every_scale(scale):
    workload = make_workload("cuda", load_space("peak_memory").at_scale(scale).workload)
    assert (workload.model, workload.steps, workload.global_batch, workload.seed) == (
        "deep-one",
        100,
        4,
        42,
    )
    assert workload.packing == "padded"


@pytest.mark.parametrize("scale", [None, *load_space("peak_memory").scales])
def test_at_every_scale_updates_relative_to_weights_are_as_in_the_table(scale):
    workload = make_workload("cuda", load_space("peak_memory").at_scale(scale).workload)
    beside_a_weight = workload.learning_rate_of("adafactor-fixed-rate") * workload.width**0.5
    assert beside_a_weight == pytest.approx(2e-4 * 2048**0.5, rel=0.01)


@pytest.mark.parametrize(("scale", "share"), [("full", 1), ("small", 1 / 4), ("tiny", 1 / 1024)])
def test_a_scale_keeps_the_proportions_of_the_table(scale, share):
    """Activations and weights of a layer shrink alike, so savings can be compared across scales."""
    full, scaled = (
        make_workload("cuda", load_space("peak_memory").at_scale(s).workload)
        for s in ("full", scale)
    )

    def kept(w):
        tokens, inner = w.global_batch * w.sequence_length, 5400 / 2048 * w.width
        return w.layers * (
            8 * tokens * w.width + 4 * tokens * inner + w.heads * w.sequence_length**2
        )

    def weights(w):
        return w.layers * (4 + 3 * 5400 / 2048) * w.width**2

    assert (kept(scaled) / kept(full), weights(scaled) / weights(full)) == pytest.approx(
        (share, share)
    )


def test_the_space_that_searches_begins_with_the_rows_of_the_table():
    assert list(bound("peak_memory_search", global_batch=4).named) == list(REFERENCE_TABLE)


# -- broken files ----------------------------------------------------------------------------------

TECHNIQUES = '[techniques]\nprecision = ["fp32", "bf16-mixed"]\ncompile = ["none", "block"]\n'
CONDITION = TECHNIQUES + "[[conditions]]\n"
NAMED = '[[configurations]]\nname = "a"\n'

# What is wrong, the text, and what the error must name.
BROKEN = [
    # keys
    (
        "top-level key",
        'descripton = "x"\n' + TECHNIQUES,
        ["'descripton'", "did you mean 'description'"],
    ),
    ("unlike any key", "zzz = 1\n" + TECHNIQUES, ["'zzz'", "techniques", "workload"]),
    (
        "technique",
        '[techniques]\nprecison = ["fp32"]',
        ["'precison'", "techniques", "did you mean 'precision'"],
    ),
    (
        "default",
        TECHNIQUES + '[defaults]\noptimiser = "sgd"',
        ["'optimiser'", "defaults", "mean 'optimizer'"],
    ),
    (
        "configuration key",
        NAMED + 'compil = "block"',
        ["'compil'", "configurations[0]", "did you mean 'compile'"],
    ),
    (
        "workload key",
        TECHNIQUES + "[workload]\nstep = 20",
        ["'step'", "workload", "did you mean 'steps'"],
    ),
    (
        "the text's hash",
        TECHNIQUES + '[workload]\ntext_sha256 = "0"',
        ["'text_sha256'", "workload"],
    ),
    ("condition key", CONDITION + 'when = { compile = "none" }', ["'when'", "conditions[0]"]),
    (
        "range key",
        "[techniques]\nmemory_budget = { form = 0.1, to = 1.0, step = 0.1 }",
        ["'form'", "mean 'from'"],
    ),
    # tables and lists
    ("techniques as a number", "techniques = 3", ["techniques = 3", "not a table"]),
    ("techniques as a list", 'techniques = ["fp32"]', ["techniques", "not a table"]),
    ("defaults as a text", 'defaults = "sgd"\n' + TECHNIQUES, ["defaults = 'sgd'", "not a table"]),
    ("workload as a list", "workload = [1]\n" + TECHNIQUES, ["workload = [1]", "not a table"]),
    (
        "conditions as a table",
        TECHNIQUES + "[conditions]\nif = 1",
        ["conditions", "not a list of tables"],
    ),
    (
        "conditions as numbers",
        "conditions = [1]\n" + TECHNIQUES,
        ["conditions", "not a list of tables"],
    ),
    (
        "configurations as a table",
        '[configurations]\nname = "a"',
        ["configurations", "not a list of tables"],
    ),
    (
        "description as a number",
        "description = 3\n" + TECHNIQUES,
        ["description = 3", "not a string"],
    ),
    ("nothing at all", "", ["neither techniques nor configurations"]),
    ("no technique", "[techniques]\n", ["neither techniques nor configurations"]),
    # values
    (
        "a bare value",
        '[techniques]\nprecision = "fp32"',
        ["techniques.precision = 'fp32'", "['fp32']"],
    ),
    ("an empty list", "[techniques]\nprecision = []", ["techniques.precision", "empty"]),
    (
        "an impossible value",
        '[techniques]\nprecision = ["fp23"]',
        ["techniques.precision", "'fp23'", "fp32"],
    ),
    ("a value of another type", "[techniques]\nprecision = [32]", ["techniques.precision", "32"]),
    (
        "a list in a list",
        '[techniques]\nprecision = [["fp32"]]',
        ["techniques.precision", "['fp32']"],
    ),
    ("a value twice", '[techniques]\ncompile = ["none", "none"]', ["techniques.compile", "twice"]),
    (
        "a budget twice",
        "[techniques]\nmemory_budget = [1, 1.0]",
        ["techniques.memory_budget", "twice"],
    ),
    (
        "a budget above one",
        "[techniques]\nmemory_budget = [1.5]",
        ["techniques.memory_budget", "1.5", "0.0 to 1.0"],
    ),
    (
        "a budget that is no number",
        "[techniques]\nmemory_budget = [nan]",
        ["techniques.memory_budget", "nan"],
    ),
    (
        "a budget that is a truth",
        "[techniques]\nmemory_budget = [true]",
        ["techniques.memory_budget", "True"],
    ),
    (
        "a micro batch of zero",
        "[techniques]\nmicro_batch_size = [0]",
        ["techniques.micro_batch_size", "0"],
    ),
    (
        "half a sequence",
        "[techniques]\nmicro_batch_size = [1.5]",
        ["techniques.micro_batch_size", "1.5"],
    ),
    (
        "another word",
        '[techniques]\nmicro_batch_size = "divisor"',
        ["techniques.micro_batch_size", "'divisor'"],
    ),
    (
        "divisors of a precision",
        '[techniques]\nprecision = "divisors"',
        ["techniques.precision", "'divisors'"],
    ),
    (
        "an impossible default",
        TECHNIQUES + '[defaults]\noptimizer = "adam"',
        ["defaults.optimizer", "'adam'"],
    ),
    (
        "a list as a default",
        TECHNIQUES + '[defaults]\noptimizer = ["sgd"]',
        ["defaults.optimizer", "['sgd']"],
    ),
    (
        "an impossible named value",
        NAMED + 'compile = "all"',
        ["configurations[0].compile", "'all'", "model"],
    ),
    # ranges
    (
        "a range of precisions",
        "[techniques]\nprecision = { from = 1, to = 2, step = 1 }",
        ["techniques.precision"],
    ),
    (
        "a range without a step",
        "[techniques]\nmemory_budget = { from = 0.1, to = 1.0 }",
        ["memory_budget", "range"],
    ),
    (
        "a range of texts",
        '[techniques]\nmemory_budget = { from = "0", to = 1, step = 1 }',
        ["memory_budget", "range"],
    ),
    (
        "a range of truths",
        "[techniques]\nmemory_budget = { from = false, to = true, step = 1 }",
        ["memory_budget"],
    ),
    (
        "a step of zero",
        "[techniques]\nmemory_budget = { from = 0.1, to = 1.0, step = 0 }",
        ["memory_budget", "step"],
    ),
    (
        "a step down",
        "[techniques]\nmemory_budget = { from = 0.1, to = 1.0, step = -0.1 }",
        ["memory_budget", "step"],
    ),
    (
        "a range upside down",
        "[techniques]\nmemory_budget = { from = 1.0, to = 0.1, step = 0.1 }",
        ["memory_budget"],
    ),
    (
        "a range beyond one",
        "[techniques]\nmemory_budget = { from = 0.5, to = 1.5, step = 0.5 }",
        ["memory_budget"],
    ),
    (
        "a range without end",
        "[techniques]\nmemory_budget = { from = 0.1, to = inf, step = 0.1 }",
        ["memory_budget"],
    ),
    (
        "a step that is no number",
        "[techniques]\nmemory_budget = { from = 0, to = 1, step = nan }",
        ["memory_budget"],
    ),
    (
        "a start that is no number",
        "[techniques]\nmemory_budget = { from = nan, to = 1, step = 0.1 }",
        ["memory_budget"],
    ),
    (
        "a step of half a sequence",
        "[techniques]\nmicro_batch_size = { from = 1, to = 2, step = 0.5 }",
        ["micro_batch"],
    ),
    (
        "from half a sequence",
        "[techniques]\nmicro_batch_size = { from = 1.5, to = 4, step = 1 }",
        ["micro_batch_size"],
    ),
    # conditions
    (
        "a condition without if",
        CONDITION + 'then = { compile = "none" }',
        ["conditions[0].if", "missing"],
    ),
    (
        "a condition without then",
        CONDITION + 'if = { compile = "none" }',
        ["conditions[0].then", "missing"],
    ),
    ("an empty if", CONDITION + 'if = {}\nthen = { compile = "none" }', ["conditions[0].if"]),
    ("if as a text", CONDITION + 'if = "model"\nthen = { compile = "none" }', ["conditions[0].if"]),
    (
        "an unlisted value in if",
        CONDITION + 'if = { compile = ["model"] }\nthen = { precision = ["fp32"] }',
        ["conditions[0].if.compile", "'model'", "none, block"],
    ),
    (
        "an unlisted value in then",
        CONDITION + 'if = { compile = ["block"] }\nthen = { precision = ["tf32"] }',
        ["conditions[0].then.precision", "'tf32'", "fp32, bf16-mixed"],
    ),
    (
        "an impossible value in then",
        CONDITION + 'if = { compile = ["block"] }\nthen = { precision = ["fp23"] }',
        ["conditions[0].then.precision", "'fp23'"],
    ),
    (
        "no value in then",
        CONDITION + 'if = { compile = ["block"] }\nthen = { precision = [] }',
        ["conditions[0].then.precision", "empty"],
    ),
    (
        "a technique the space does not vary",
        CONDITION + 'if = { optimizer = "sgd" }\nthen = { precision = "fp32" }',
        ["conditions[0].if.optimizer", "does not vary"],
    ),
    (
        "a misspelt technique in then",
        CONDITION + 'if = { compile = "block" }\nthen = { precison = "fp32" }',
        ["'precison'", "conditions[0].then", "did you mean 'precision'"],
    ),
    (
        "the second condition",
        CONDITION
        + 'if = { compile = "block" }\nthen = { precision = "fp32" }\n'
        + '[[conditions]]\nif = { compile = "none" }',
        ["conditions[1].then"],
    ),
    # names
    (
        "a configuration without a name",
        '[[configurations]]\ncompile = "block"',
        ["configurations[0]", "no name"],
    ),
    ("an empty name", '[[configurations]]\nname = ""', ["configurations[0]", "no name"]),
    ("a number as a name", "[[configurations]]\nname = 7", ["configurations[0]", "no name"]),
    ("a name twice", NAMED + NAMED, ["two configurations", "'a'"]),
    # workload
    ("steps as a text", TECHNIQUES + '[workload]\nsteps = "40"', ["steps", "'40'"]),
    ("steps as a list", TECHNIQUES + "[workload]\nsteps = [40]", ["steps", "[40]"]),
    ("a negative seed", TECHNIQUES + "[workload]\nseed = -1", ["seed", "-1"]),
    ("a dataset as a number", TECHNIQUES + "[workload]\ndataset = 3", ["dataset", "3"]),
    ("a dataset as a date", TECHNIQUES + "[workload]\ndataset = 2020-01-01", ["dataset"]),
    (
        "one learning rate",
        TECHNIQUES + "[workload]\nlearning_rates = 0.1",
        ["learning_rates", "0.1"],
    ),
    (
        "an unknown optimizer",
        TECHNIQUES + "[workload]\nlearning_rates = { adam = 0.1 }",
        ["'adam'"],
    ),
    ("a learning rate of zero", TECHNIQUES + "[workload]\nlearning_rates = { sgd = 0 }", ["sgd"]),
    (
        "an unknown schedule",
        TECHNIQUES + '[workload]\nschedule = "linear"',
        ["schedule", "'linear'"],
    ),
    # not TOML
    ("no TOML", "techniques = [", ["not valid TOML"]),
    ("a key twice", TECHNIQUES + 'compile = ["none"]', ["not valid TOML"]),
]
EVERY_BROKEN_FILE = pytest.mark.parametrize(
    ("text", "named"), [case[1:] for case in BROKEN], ids=[c[0] for c in BROKEN]
)


@EVERY_BROKEN_FILE
def test_a_broken_file_is_rejected_by_its_name_and_what_is_wrong_in_it(write, text, named):
    file = write(text)
    error = error_of(file)
    said = f"{error.message} - {error.hint}"
    assert str(file) in error.message
    assert [words for words in named if words not in said] == []


@EVERY_BROKEN_FILE
def test_a_broken_file_is_rejected_with_a_hint(write, text, named):
    assert error_of(write(text)).hint


def test_the_hint_for_a_misspelt_divisors_names_the_word(write):
    assert '"divisors"' in error_of(write('[techniques]\nmicro_batch_size = "divisor"')).hint


def test_a_file_that_is_not_utf_8_is_rejected_by_its_name(tmp_path):
    file = tmp_path / "latin.toml"
    file.write_bytes('description = "é"\n'.encode("latin-1"))
    assert str(file) in error_of(file).message


def test_a_folder_in_place_of_a_file_is_rejected_by_its_name(tmp_path):
    assert str(tmp_path) in error_of(tmp_path).message


def test_a_missing_file_is_rejected_with_the_spaces_that_exist(tmp_path):
    error = error_of(tmp_path / "nowhere.toml")
    assert "nowhere.toml" in error.message
    assert all(name in error.hint for name in named_spaces())


@pytest.mark.parametrize("name", ["", "Quick", "quick.tml", "x" * 5000, "a\0b"])
def test_a_name_that_no_space_has_is_rejected(name):
    assert "no search space" in error_of(name).message


# -- what a file may say ---------------------------------------------------------------------------


def test_a_range_holds_both_its_ends(write):
    file = write("[techniques]\nmemory_budget = { from = 0.1, to = 1.0, step = 0.1 }")
    assert load_space(str(file)).techniques["memory_budget"] == (
        0.1,
        0.2,
        0.3,
        0.4,
        0.5,
        0.6,
        0.7,
        0.8,
        0.9,
        1.0,
    )


def test_a_range_of_micro_batches_holds_whole_numbers(write):
    values = load_space(
        str(write("[techniques]\nmicro_batch_size = { from = 2, to = 6, step = 2 }"))
    ).techniques
    assert values["micro_batch_size"] == (2, 4, 6)


def test_a_budget_always_can_be_one(write):
    assert load_space(str(write(BUDGETS))).techniques["memory_budget"] == (1.0, 0.5)


def test_a_condition_takes_one_value_without_a_list(write):
    file = write(CONDITION + 'if = { compile = "block" }\nthen = { precision = "fp32" }')
    assert load_space(str(file)).conditions[0].when == {"compile": ("block",)}


def test_a_file_is_named_for_itself(write):
    assert load_space(str(write(TECHNIQUES, name="mine.toml"))).name == "mine"


def test_a_technique_that_is_left_out_keeps_its_default(write):
    legal = bound(write(TECHNIQUES + '[defaults]\noptimizer = "sgd"'))
    assert {(config.optimizer, config.checkpointing) for config in legal.configurations()} == {
        ("sgd", "none")
    }


def test_a_micro_batch_that_is_left_out_is_the_whole_batch(write):
    assert {config.micro_batch_size for config in bound(write(TECHNIQUES)).configurations()} == {8}


def test_a_named_configuration_goes_before_the_defaults(write):
    legal = bound(write('[defaults]\noptimizer = "sgd"\n' + NAMED + 'optimizer = "adafactor"'))
    assert legal.named["a"].optimizer == "adafactor"


ADAPTERS = """
[techniques]
precision = ["bf16-mixed"]
adapter = ["none", "lora"]
adapter_rank = [16, 64]
adapter_targets = ["attention"]
base_weights = ["nf4"]
"""


def test_a_choice_about_adapters_leaves_training_without_one_possible(write):
    configs = list(bound(write(ADAPTERS)).configurations())
    kinds = {
        (config.adapter, config.adapter_rank, config.adapter_targets, config.base_weights)
        for config in configs
    }
    assert kinds == {
        ("none", 8, "all-linear", "trained"),
        ("lora", 16, "attention", "nf4"),
        ("lora", 64, "attention", "nf4"),
    }


def test_a_range_of_ranks_holds_whole_numbers(write):
    text = "[techniques]\nadapter = ['lora']\nadapter_rank = { from = 8, to = 24, step = 8 }"
    assert load_space(str(write(text))).techniques["adapter_rank"] == (8, 16, 24)
    assert "whole numbers" in str(error_of(write(text.replace("8 }", "8.5 }"))))


def test_divisors_are_all_divisors_of_the_global_batch(write):
    legal = bound(write('[techniques]\nmicro_batch_size = "divisors"'), global_batch=12)
    assert legal.values["micro_batch_size"] == (12, 6, 4, 3, 2, 1)


# -- legality --------------------------------------------------------------------------------------


@pytest.fixture(
    params=["quick", "peak_memory", BUDGETS, CONDITIONS, ADAPTERS],
    ids=["quick", "peak_memory", "budgets", "rules", "adapters"],
)
def legal(request, write):
    shipped = request.param in named_spaces()
    return bound(request.param if shipped else write(request.param))


def brute_force(legal):
    """Every combination of the values that no rule and no condition forbids."""
    if not legal.values:
        return set()
    return {
        TrainingConfig(**choice)
        for choice in combined(legal)
        if not rule_violations(choice, LegalityContext(global_batch=legal.at.global_batch))
        and all(kept(condition, choice) for condition in legal.conditions)
    }


def kept(condition, choice):
    applies = all(choice[field] in values for field, values in condition.when.items())
    return not applies or all(choice[field] in values for field, values in condition.then.items())


def test_the_legal_configurations_are_all_that_no_rule_and_no_condition_forbids(legal):
    assert set(legal.configurations()) == brute_force(legal)


def test_a_legal_configuration_is_listed_once(legal):
    configs = list(legal.configurations())
    assert len(set(configs)) == len(configs)


def test_the_legal_configurations_are_counted_without_making_them(legal):
    assert legal.count() == len(list(legal.configurations()))


def combined(legal):
    """Every combination of the values, in the order of the fields."""
    for values in itertools.product(*(legal.values[field] for field in FIELD_ORDER)):
        yield dict(zip(FIELD_ORDER, values, strict=True))


def part_of_every_space(seed, *, devices, most):
    """A space of at most `most` combinations of values drawn from all techniques.

    Training without any technique is one of them.
    """
    rng = random.Random(seed)
    techniques = {field: [getattr(TrainingConfig(), field)] for field in FIELD_ORDER}
    techniques["sharding"] = ["none" if devices == 1 else "ddp"]
    while True:
        field = rng.choice(list(techniques))
        left = [value for value in EVERY_VALUE[field] if value not in techniques[field]]
        longer = {**techniques, field: [*techniques[field], *rng.sample(left, min(1, len(left)))]}
        if math.prod(map(len, longer.values())) > most:
            break
        techniques = longer
    rows = [rng.sample(list(techniques), 2) for _ in range(3)]
    conditions = [
        Condition(
            when={one: tuple(techniques[one][:1])}, then={other: tuple(techniques[other][:1])}
        )
        for one, other in rows
    ]
    return SearchSpace(
        name="part",
        techniques={field: tuple(values) for field, values in techniques.items()},
        conditions=tuple(conditions[: seed % 3]),
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_space_of_any_techniques_lists_what_no_rule_and_no_condition_forbids(seed):
    devices = (1, 4)[seed % 2]
    at = LegalityContext(
        global_batch=8,
        sequence_length=40,
        devices=devices,
        clips_gradients=seed % 3 == 0,
        drops_inputs_of_adapters=seed % 5 == 0,
    )
    space = part_of_every_space(seed, devices=devices, most=300)
    legal = bind_space(space, at, unavailable={})
    allowed = [
        TrainingConfig(**choice)
        for choice in combined(legal)
        if not rule_violations(choice, at)
        and all(kept(condition, choice) for condition in legal.conditions)
    ]
    assert list(legal.configurations()) == allowed


def test_shuffled_configurations_are_all_of_them_once(legal):
    shuffled = list(legal.shuffled(1))
    assert len(shuffled) == legal.count()
    assert set(shuffled) == set(legal.configurations())


def test_each_legal_configuration_is_as_likely_to_be_drawn():
    """Chi-square over draws of the first one: its mean is the number of configurations less one."""
    legal = bound("quick")
    counts = Counter(next(legal.shuffled(seed)) for seed in range(20 * legal.count()))
    chi_square = sum((counts[config] - 20) ** 2 / 20 for config in legal.configurations())
    degrees = legal.count() - 1
    assert abs(chi_square - degrees) < 4 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_space_of_a_hundred_million_configurations_is_counted_and_drawn_from(devices):
    at = LegalityContext(global_batch=32, sequence_length=1024, devices=devices)
    space = SearchSpace(name="all", techniques=EVERY_VALUE)
    legal = bind_space(space, at, unavailable={})
    assert legal.count() > 100_000_000
    drawn = list(itertools.islice(legal.shuffled(0), 200))
    assert len(set(drawn)) == 200
    assert all(not rule_violations(config.to_dict(), at) for config in drawn)
    assert all(config in legal for config in drawn)


def test_a_space_too_large_to_be_listed_is_sampled(monkeypatch):
    legal = bound("quick")
    assert legal.sample() == list(legal.configurations()) == legal.listed()
    monkeypatch.setattr(search_space, "MOST_LISTED", 50)
    assert len(set(legal.sample())) == 50
    assert set(legal.sample()) < set(legal.configurations())


def test_what_needs_the_whole_list_of_a_large_space_says_what_to_shorten(monkeypatch):
    monkeypatch.setattr(search_space, "MOST_LISTED", 50)
    with pytest.raises(InvalidSpace) as caught:
        bound("quick").listed()
    assert "216 legal configurations, and at most 50" in caught.value.message
    assert "micro_batch_size has 4 values" in caught.value.hint


def test_a_space_holds_exactly_the_configurations_it_lists(legal):
    combinations = (
        itertools.product(*(legal.values[field] for field in FIELD_ORDER)) if legal.values else ()
    )
    everything = [
        TrainingConfig(**dict(zip(FIELD_ORDER, values, strict=True))) for values in combinations
    ]
    assert {config for config in everything if config in legal} == set(legal.configurations())


def test_a_configuration_of_another_space_is_not_in_it(legal):
    assert TrainingConfig(precision="fp16-mixed", micro_batch_size=8) not in legal


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("text", [BUDGETS, CONDITIONS], ids=["budgets", "rules"])
def test_no_walk_through_the_legal_values_ends_in_a_dead_end(write, text, seed):
    legal, draw = bound(write(text)), random.Random(seed)
    for _ in range(40):
        chosen = {}
        for field in FIELD_ORDER:
            chosen[field] = draw.choice(legal.legal_values(field, chosen))
        assert TrainingConfig(**chosen) in legal


def test_the_legal_values_leave_nothing_out(write):
    legal = bound(write(CONDITIONS))

    def reachable(chosen):
        if len(chosen) == len(FIELD_ORDER):
            return {TrainingConfig(**chosen)}
        field = FIELD_ORDER[len(chosen)]
        return set().union(
            *(reachable({**chosen, field: value}) for value in legal.legal_values(field, chosen))
        )

    assert reachable({}) == set(legal.configurations())


# -- what a device cannot do -----------------------------------------------------------------------


def test_a_value_the_device_cannot_do_is_in_no_configuration():
    legal = bound("quick", unavailable={"precision": {"tf32": "no tensor cores"}})
    assert {config.precision for config in legal.configurations()} == {"fp32", "bf16-mixed"}


def test_a_value_the_device_cannot_do_is_excluded_with_one_line():
    legal = bound("quick", unavailable={"precision": {"tf32": "no tensor cores"}})
    assert legal.excluded == ("precision tf32: no tensor cores",)


def test_a_named_configuration_the_device_cannot_do_is_excluded_with_one_line():
    legal = bound("peak_memory", global_batch=4, unavailable={"compile": {"model": "no compiler"}})
    excluded = [name for name, row in REFERENCE_TABLE.items() if row[3] == "model"]
    assert legal.excluded == tuple(
        f"configuration {name!r}: compile model: no compiler" for name in excluded
    )


def test_a_value_outside_the_space_is_not_listed_as_excluded():
    assert bound("quick", unavailable={"optimizer": {"sgd": "broken"}}).excluded == ()


def test_a_budget_the_device_cannot_do_is_excluded(write):
    legal = bound(write(BUDGETS), unavailable={"memory_budget": {"0.5": "too old"}})
    assert {config.memory_budget for config in legal.configurations()} == {1.0}


def test_a_micro_batch_that_does_not_divide_the_batch_is_excluded_with_one_line(write):
    legal = bound(write("[techniques]\nmicro_batch_size = [8, 3]"))
    assert legal.excluded == ("micro_batch_size 3: it does not divide the global batch of 8",)


def test_an_illegal_named_configuration_is_excluded_with_the_reason(write):
    legal = bound(write(TECHNIQUES + NAMED + "memory_budget = 0.5"))
    assert legal.named == {}
    assert len(legal.excluded) == 1
    assert "'a': memory_budget 0.5 needs torch.compile" in legal.excluded[0]


def test_fp8_is_sampled_only_with_micro_batches_whose_tokens_it_can_multiply(write):
    space = load_space(
        str(write('[techniques]\nprecision = ["fp32", "fp8"]\nmicro_batch_size = "divisors"'))
    )

    def sizes_for_fp8(**at):
        legal = bind_space(space, LegalityContext(global_batch=4, **at), unavailable={})
        return [
            config.micro_batch_size
            for config in legal.configurations()
            if config.precision == "fp8"
        ]

    assert sizes_for_fp8(sequence_length=8) == [4, 2]
    assert sizes_for_fp8(sequence_length=7) == []
    assert sizes_for_fp8() == [4, 2, 1]


def test_a_space_without_a_legal_configuration_is_rejected_with_the_reason():
    space = load_space("quick")
    with pytest.raises(InvalidSpace, match="no tensor cores") as raised:
        bind_space(
            space,
            LegalityContext(global_batch=8),
            unavailable={
                "precision": dict.fromkeys(space.techniques["precision"], "no tensor cores")
            },
        )
    assert "quick" in raised.value.message
    assert raised.value.hint


def test_a_space_of_names_that_are_all_illegal_is_rejected():
    everything = {"optimizer": {"adafactor-fixed-rate": "not built in"}}
    with pytest.raises(InvalidSpace, match="not built in"):
        bound("peak_memory", unavailable=everything)


def test_conditions_that_contradict_each_other_are_rejected(write):
    conditions = [
        '[[conditions]]\nif = { compile = ["none", "block"] }\n'
        f'then = {{ precision = "{precision}" }}\n'
        for precision in ("fp32", "bf16-mixed")
    ]
    with pytest.raises(InvalidSpace, match="contradict"):
        bound(write(TECHNIQUES + "".join(conditions)))


def test_a_space_of_legal_names_is_enough(write):
    file = write('[techniques]\nprecision = ["tf32"]\n' + NAMED)
    legal = bound(file, unavailable={"precision": {"tf32": "no tensor cores"}})
    assert (list(legal.named), list(legal.configurations())) == (["a"], [])


def test_a_space_that_breaks_a_rule_throughout_is_rejected_by_that_rule(write):
    with pytest.raises(InvalidSpace, match="divides a training among devices") as raised:
        bound(write('[techniques]\nsharding = ["zero3"]\n'))
    assert raised.value.hint == "widen the space"


def test_where_no_space_has_a_legal_configuration_none_is_asked_for(write):
    reason = {"optimizer_fusion": {"none": "it has no update"}}
    with pytest.raises(InvalidSpace, match="it has no update") as raised:
        bound(write('[techniques]\noptimizer_fusion = ["none"]\n'), unavailable=reason)
    assert raised.value.hint == (
        "no search space has a legal configuration here, because of optimizer_fusion none"
    )


# -- a script's own precision ----------------------------------------------------------------------


def space_with(precisions):
    return SearchSpace(
        name="space",
        techniques={"precision": precisions},
        configurations=({"name": "plain"}, {"name": "mixed", "precision": "bf16-mixed"}),
    )


@pytest.mark.parametrize("own", CHOICES["precision"])
def test_what_a_script_brings_is_the_baseline_and_a_value_of_a_space_that_has_fp32(own):
    at = LegalityContext(global_batch=8, own_precision=own)
    space = space_with(("fp32", "bf16-mixed"))
    legal = bind_space(space, at, unavailable={})
    assert space.baseline_config(at).precision == legal.named["plain"].precision == own
    assert space.baseline_config(at) in legal
    assert set(legal.values["precision"]) == {own, "fp32", "bf16-mixed"}
    chosen = bind_space(space_with(("bf16-mixed",)), at, unavailable={})
    assert chosen.values["precision"] == ("bf16-mixed",)


@pytest.mark.parametrize("own", ["none", "foreach", "kernel", "as-is"])
def test_the_update_that_a_script_brings_is_the_baselines_and_that_of_what_names_none(own):
    at = LegalityContext(global_batch=8, own_fusion=own)
    space = SearchSpace(
        name="any",
        techniques={"optimizer_fusion": ("none", "backward")},
        configurations=({"name": "plain"}, {"name": "batched", "optimizer_fusion": "foreach"}),
    )
    legal = bind_space(space, at, unavailable={})
    assert space.baseline_config(at) in legal
    plain = legal.named["plain"]
    assert space.baseline_config(at).optimizer_fusion == plain.optimizer_fusion == own
    assert legal.named["batched"].optimizer_fusion == "foreach"
    assert set(legal.values["optimizer_fusion"]) == {own, "none", "backward"}
    others = dataclasses.replace(space, techniques={"optimizer_fusion": ("backward",)})
    assert bind_space(others, at, unavailable={}).values["optimizer_fusion"] == ("backward",)
    unnamed = dataclasses.replace(space, techniques={"compile": ("none", "block")})
    assert bind_space(unnamed, at, unavailable={}).values["optimizer_fusion"] == (own,)


@pytest.mark.parametrize("optimizer", CHOICES["optimizer"])
def test_the_update_that_a_script_brings_is_legal_whatever_the_space_calls_its_optimizer(optimizer):
    at = LegalityContext(global_batch=8, own_fusion="foreach")
    space = SearchSpace(name="any", techniques={"optimizer": (optimizer,)})
    assert space.baseline_config(at) in bind_space(space, at, unavailable={})


def test_where_precision_cannot_be_cast_every_trial_is_as_the_script_brings_it():
    at = LegalityContext(global_batch=8, own_precision="as-is")
    unavailable = {"precision": dict.fromkeys(("fp32", "bf16-mixed"), "of several formats")}
    legal = bind_space(space_with(("fp32", "bf16-mixed")), at, unavailable=unavailable)
    assert {config.precision for config in legal.configurations()} == {"as-is"}
    assert list(legal.named) == ["plain"]
    assert [line for line in legal.excluded if "of several formats" in line] == [
        "precision fp32: of several formats",
        "precision bf16-mixed: of several formats",
        "configuration 'mixed': precision bf16-mixed: of several formats",
    ]


@pytest.mark.parametrize("precision", OF_SCRIPTS["precision"])
def test_formats_that_only_a_script_brings_are_legal_for_that_script_alone(precision):
    space = space_with(("fp32", precision))
    legal = bind_space(space, LegalityContext(global_batch=8), unavailable={})
    assert precision not in {config.precision for config in legal.configurations()}
