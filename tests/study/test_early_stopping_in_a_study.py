"""Which trials may end another one early."""

from autotune.spec.config import TrainingConfig
from autotune.spec.provenance import TrialReference
from autotune.study.running.trial_runner import possible_rivals
from tests.building.ranking import record

CONFIG = TrainingConfig(micro_batch_size=8, checkpointing="block")
PLAIN = TrainingConfig(micro_batch_size=8)
SAME = {"parity": "same"}


def numbers(*records):
    return [rival.number for rival in possible_rivals(CONFIG, records)]


def test_a_feasible_trial_of_the_same_numerics_is_one():
    assert numbers(record(PLAIN, number=4, **SAME)) == [4]


def test_a_trial_of_other_numerics_is_none():
    assert numbers(record(TrainingConfig(precision="bf16-true"), **SAME)) == []


def test_a_trial_over_the_cap_is_none():
    assert numbers(record(PLAIN, outcome="over_cap", **SAME)) == []


def test_a_trial_whose_first_steps_were_not_compared_is_none():
    assert numbers(record(PLAIN, parity="not compared")) == []


def test_a_trial_of_an_earlier_study_is_none():
    assert numbers(record(PLAIN, reused_from=TrialReference(number=1, study="a"), **SAME)) == []


def test_a_trial_of_another_micro_batch_is_one_where_it_is_the_same_training():
    assert numbers(record(TrainingConfig(micro_batch_size=4), number=2, **SAME)) == [2]
