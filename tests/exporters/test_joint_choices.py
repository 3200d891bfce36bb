"""What a trainer does instead of some choices of a trial excludes none of its others."""

import random
from functools import cache
from typing import Any

import hypothesis
import pytest

from autotune.exporters import TARGETS
from autotune.spec.config import CHOICES, TrainingConfig, rule_violations
from tests.exporters.recipes import any_recipe, recipe

RECIPES = 2 * hypothesis.settings.default.max_examples
OF_OTHER_FORMS = {
    "deepspeed": ("engine", "offload"),  # its stages take what those of trials do not
    "llamafactory": ("base_weights",),  # in the number format of the files, whatever it computes in
}
"""{target: techniques that its files have in a form that no trial has}."""


@cache
def recipes():
    chance = random.Random("joint choices")
    return [any_recipe(chance.choice) for _ in range(RECIPES)]


def violations(name, asked):
    """Returns the rules that the files break, of choices that trials have as well."""
    unsupported = TARGETS[name].write(asked, TARGETS[name].versions[0]).unsupported
    instead = {one.setting: one.instead for one in unsupported}
    workload = asked.workload
    devices = instead.get("devices_per_trial") or workload.devices_per_trial
    if devices != workload.devices_per_trial:
        workload = workload.on_devices(devices)
    choices = {
        technique: value
        for technique, value in {**asked.config.to_dict(), **instead}.items()
        if value is not None
        and value in CHOICES.get(technique, (value,))
        and technique not in OF_OTHER_FORMS.get(name, ())
    }
    return rule_violations(choices, workload.legality_context)


FROM_THE_HOST = {"adapter": "lora", "offload": "frozen"}
PAIRS: dict[str, tuple[int, dict[str, Any]]] = {
    "frozen weights between compiled blocks": (1, {**FROM_THE_HOST, "compile": "block"}),
    "a kernel of 16 bits": (1, {"precision": "fp16-mixed", "attention": "flash"}),
    "CUDA graphs": (1, {"compile": "model", "compile_mode": "max-autotune"}),
    "steps in backward": (2, {"sharding": "zero2", "optimizer_fusion": "backward"}),
    "rounding of whole weights": (2, {"sharding": "zero1", "precision": "bf16-stochastic"}),
}
"""{what one choice excludes: (devices, choices of which trainers replace one)}."""


@pytest.mark.parametrize("name", TARGETS)
def test_what_replaces_a_choice_does_not_exclude_another_one(name):
    asked = {
        case: recipe(
            TrainingConfig(micro_batch_size=8, **choices),
            global_batch=8 * devices,
            devices_per_trial=devices,
        )
        for case, (devices, choices) in PAIRS.items()
    }
    broken = {case: violations(name, one) for case, one in asked.items()}
    assert {case: rules for case, rules in broken.items() if rules} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_what_files_do_instead_of_a_choice_goes_with_the_other_choices(name):
    broken = {asked.config.describe(): violations(name, asked) for asked in recipes()}
    assert {config: rules for config, rules in broken.items() if rules} == {}
