"""Every target, with every value of every technique: in its files, or listed as not expressed.

A target's reader takes an export and says what a trainer that loads its files does: {setting:
value} in our words for all that is not left to the user's own code. It parses the files by the
trainer's own package where that is installed.
"""

import dataclasses

import pytest
import torch

from autotune.exporters import TARGETS
from autotune.exporters.recipe import SETTINGS
from autotune.shipped.adafactor_fixed_rate import WEIGHT_DECAY
from autotune.spec import config as config_module
from autotune.spec.config import CHOICES, TrainingConfig
from autotune.spec.optimizers import OPTIMIZERS, OptimizerFacts, Rates
from autotune.techniques.optimizer import make_optimizer
from tests.exporters.readers.imported import as_read
from tests.exporters.readers.registry import READERS
from tests.exporters.recipes import (
    ON_SEVERAL_DEVICES,
    configurations,
    recipe,
    recipe_on_devices,
)

CONFIGURATIONS = configurations()
READ_BY_IMPORTERS = {
    *(("axolotl", "0.19"), ("trl", "1.16"), ("llamafactory", "0.9")),
    *(("torchtitan", "0.2"), ("lightning", "2")),
}
WORKLOADS = {
    "plain": {},
    "cosine": {"schedule": "cosine", "learning_rate_warmup_steps": 3},
    "clipped": {"gradient_clipping": 1.0},
    "seeded": {"seed": 7, "sequence_length": 64},
}


def versions():
    return [(name, version) for name, target in TARGETS.items() for version in target.versions]


def check(name, version, asked):
    export = TARGETS[name].write(asked, version)
    wanted = asked.settings()
    refused = {entry.setting: entry for entry in export.unsupported}
    done = READERS[name](export, version)
    expected = {
        setting: refused[setting].instead if setting in refused else wanted[setting]
        for setting in SETTINGS
        if setting not in refused or refused[setting].instead is not None
    }
    if (name, version) in READ_BY_IMPORTERS:
        expected = as_read(name, expected)
    assert {setting: done.get(setting, "not read") for setting in expected} == expected
    assert all(entry.value == wanted[entry.setting] for entry in export.unsupported)
    assert all(entry.instead != entry.value for entry in export.unsupported)


def difference(name, version, asked):
    """Returns what this version writes in other words than the first version of the target."""

    def lines_of(version):
        export = TARGETS[name].write(asked, version)
        written = {(file, line) for file, text in export.files.items() for line in text.split("\n")}
        return written | {*export.unsupported, export.command}

    first, other = lines_of(TARGETS[name].versions[0]), lines_of(version)
    return first - other, other - first


def is_first_or_says_more(name, version, asked):
    """Whether no earlier check of the value has seen what this version writes of it."""
    if version == TARGETS[name].versions[0]:
        return True
    plain = recipe(TrainingConfig(micro_batch_size=asked.config.micro_batch_size))
    return difference(name, version, asked) != difference(name, version, plain)


def check_all(name, version, recipes):
    """Checks each, and says all that fail."""
    failures = {}
    for case, asked in recipes.items():
        try:
            check(name, version, asked)
        except Exception as failure:
            failures[case] = failure
    assert failures == {}


def of_techniques():
    return {case: recipe(config) for case, config in CONFIGURATIONS.items()}


@pytest.mark.parametrize(("name", "version"), versions())
def test_a_value_of_a_technique_is_in_the_files_or_listed_as_not_expressed(name, version):
    recipes = {
        case: asked
        for case, asked in of_techniques().items()
        if is_first_or_says_more(name, version, asked)
    }
    check_all(name, version, recipes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "version"), versions())
def test_every_version_has_every_value_in_the_files_or_listed_as_not_expressed(name, version):
    check_all(name, version, of_techniques())


BESIDE_ADAPTERS = {
    "float32": {},
    "over bf16": {"precision": "bf16-mixed", "base_weights": "bf16"},
    "over nf4": {"precision": "bf16-mixed", "base_weights": "nf4"},
}


@pytest.mark.parametrize("saved_dtype", ["adapter", "base"])
@pytest.mark.parametrize(("name", "version"), versions())
def test_what_is_beside_adapters_is_in_the_files_or_listed_as_not_expressed(
    name, version, saved_dtype
):
    of_model = ("embedding", "head") if name == "pytorch" else ("embed_tokens", "lm_head")
    beside = {
        "adapter_dropout": 0.05,
        "adapter_alpha": 32,
        "modules_to_save": of_model,
        "modules_to_save_dtype": saved_dtype,
    }
    recipes = {
        case: recipe(TrainingConfig(adapter="lora", micro_batch_size=8, **choices), **beside)
        for case, choices in BESIDE_ADAPTERS.items()
    }
    check_all(name, version, recipes)


@pytest.mark.parametrize(
    "said",
    [
        {"adapter_scaling": "rslora"},
        {"adapter_init": "pissa"},
        {"adapter_rank_pattern": {"out": 4}, "adapter_alpha_pattern": {"out": 8}},
    ],
    ids=["rsLoRA", "PiSSA", "patterns"],
)
@pytest.mark.parametrize(("name", "version"), versions())
def test_how_adapters_are_scaled_and_begin_is_in_the_files_or_listed_as_not_expressed(
    name, version, said
):
    recipes = {
        case: recipe(TrainingConfig(adapter="lora", micro_batch_size=8, **choices), **said)
        for case, choices in BESIDE_ADAPTERS.items()
        if choices.get("base_weights") != "nf4"
    }
    check_all(name, version, recipes)


def test_a_full_training_has_nothing_beside_adapters():
    asked = recipe(adapter_dropout=0.05, modules_to_save=("head",))
    for name, target in TARGETS.items():
        check(name, target.versions[0], asked)


def unheard_of(technique, monkeypatch):
    """Declares a value that no exporter knows, and returns the recipe of a trial with it."""
    known = config_module._CHOICES[technique]
    monkeypatch.setitem(config_module._CHOICES, technique, known | {"unheard-of"})
    asked = recipe()
    config = dataclasses.replace(asked.config, **{technique: "unheard-of"})
    return dataclasses.replace(asked, config=config)


@pytest.mark.parametrize("technique", [name for name in CHOICES if name != "optimizer"])
@pytest.mark.parametrize(("name", "version"), versions())
def test_a_value_that_no_exporter_knows_is_listed_as_not_expressed(
    name, version, technique, monkeypatch
):
    asked = unheard_of(technique, monkeypatch)
    check(name, version, asked)
    refused = {entry.setting: entry for entry in TARGETS[name].write(asked, version).unsupported}
    assert refused[technique].value == "unheard-of"


@pytest.mark.parametrize("kin", ["adamw", "an algorithm of its own"])
@pytest.mark.parametrize(("name", "version"), versions())
def test_an_optimizer_that_no_exporter_knows_is_made_by_its_class_or_not_expressed(
    name, version, kin, monkeypatch
):
    rates = kin
    if kin != "adamw":
        rates = Rates(from_scratch=1e-4, from_scratch_on_cuda=1e-4, fine_tuning=1e-5)
    facts = OptimizerFacts(
        class_path="package.Unheard",
        settings={"weight_decay": 0.25, "eps": 1e-7},
        rates=rates,
        state=1.0,
    )
    monkeypatch.setitem(OPTIMIZERS, "unheard-of", facts)
    asked = unheard_of("optimizer", monkeypatch)
    export = TARGETS[name].write(asked, version)
    refused = {entry.setting: entry for entry in export.unsupported}
    if "optimizer" not in refused:
        assert any("Unheard" in text for text in export.files.values())
        return
    assert refused["optimizer"].value == "unheard-of"
    if refused["optimizer"].instead is not None:
        check(name, version, asked)
    else:
        assert "package.Unheard" in refused["optimizer"].why


@pytest.mark.parametrize(("name", "version"), versions())
def test_what_devices_share_out_is_in_the_files_or_listed_as_not_expressed(name, version):
    check_all(name, version, {case: recipe_on_devices(case) for case in ON_SEVERAL_DEVICES})


@pytest.mark.parametrize("name", ["pytorch", "transformers", "accelerate", "lightning"])
def test_what_devices_share_out_on_a_cpu_is_in_the_files_or_listed_as_not_expressed(name):
    cases = ("ddp", "zero2", "DeepSpeed, on the host")
    recipes = {case: recipe_on_devices(case, device_type="cpu") for case in cases}
    check_all(name, TARGETS[name].versions[0], recipes)


@pytest.mark.parametrize(("name", "version"), versions())
def test_a_setting_of_the_workload_is_in_the_files_or_listed_as_not_expressed(name, version):
    check_all(name, version, {case: recipe(**given) for case, given in WORKLOADS.items()})


@pytest.mark.parametrize(("name", "version"), versions())
def test_an_export_says_where_it_comes_from_and_how_it_is_used(name, version):
    export = TARGETS[name].write(recipe(), version)
    assert any("study tour, trial 12" in text for text in export.files.values())
    assert any(file.removesuffix(".py") in export.command for file in export.files)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_has_a_reader(name):
    assert name in READERS


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_declared_settings_are_those_of_the_class(optimizer):
    facts = OPTIMIZERS[optimizer]
    if facts.package:
        pytest.importorskip(facts.package)
    made = make_optimizer(
        [torch.nn.Parameter(torch.ones(2, 2))], optimizer, fusion="none", learning_rate=0.1
    )
    known = {
        **made.defaults,
        **({"weight_decay": WEIGHT_DECAY} if facts.has_settings_in_code else {}),
    }
    assert {name: known[name] for name in facts.settings} == dict(facts.settings)
