"""How long a trial is expected to take, from how long others took."""

from dataclasses import replace

from autotune.spec.config import TrainingConfig
from autotune.study.sampler.trial_seconds import USUAL_COMPILE_SECONDS, TrialSeconds
from tests.building.ranking import record

EAGER = TrainingConfig(micro_batch_size=8)
BLOCK, MODEL = replace(EAGER, compile="block"), replace(EAGER, compile="model")
OTHER_BLOCK = replace(BLOCK, checkpointing="block")


def took(config, *, seconds, compile_seconds=None):
    return replace(record(config, compile_seconds=compile_seconds), seconds=seconds)


def test_a_compiled_trial_takes_what_an_eager_one_takes_and_its_compilation():
    seconds = TrialSeconds([took(BLOCK, seconds=20.0, compile_seconds=12.0)], device_type="cuda")
    assert seconds.of(EAGER) == 8.0
    assert seconds.of(OTHER_BLOCK) == 20.0


def test_code_that_is_compiled_already_takes_a_fraction():
    seconds = TrialSeconds([took(BLOCK, seconds=20.0, compile_seconds=12.0)], device_type="cuda")
    assert seconds.of(EAGER) < seconds.of(replace(BLOCK, optimizer_fusion="kernel")) < 12.0


def test_a_kind_of_compilation_that_was_not_measured_is_as_much_slower_as_the_other():
    twice = 2 * USUAL_COMPILE_SECONDS["block"]
    measured = [took(EAGER, seconds=5.0), took(BLOCK, seconds=twice + 5.0, compile_seconds=twice)]
    seconds = TrialSeconds(measured, device_type="cuda")
    assert seconds.of(MODEL) == 5.0 + 2 * USUAL_COMPILE_SECONDS["model"]


def test_on_a_cpu_nothing_is_known_of_compiling_before_it_is_measured():
    seconds = TrialSeconds([took(EAGER, seconds=5.0)], device_type="cpu")
    assert seconds.of(MODEL) == seconds.of(EAGER) == 5.0
