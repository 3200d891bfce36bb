"""Optuna's samplers while trials run."""

import optuna
import pytest

from autotune.spec.study import SAMPLERS
from autotune.study.sampler.optuna_samplers import OptunaStudy
from autotune.study.sampler.optuna_values import ObjectiveEncoder
from tests.building.results import record
from tests.building.studies import definition

DEFINITION = definition()
LEGAL = DEFINITION.legal_space()
ALL = list(LEGAL.configurations())


def study(sampler, *, told=14):
    made = OptunaStudy(legal=LEGAL, sampler=sampler, seed=0)
    encoder = ObjectiveEncoder(cap_bytes=DEFINITION.cap_bytes, vocab_size=256)
    for number, one in enumerate(ALL[:told]):
        values = encoder.to_optuna_values(
            record(number, config=one, peak_memory_bytes=2**25 + number, tokens_per_second=100.0)
        )
        made.tell(one, values)
    return made


@pytest.mark.parametrize("sampler", [one for one in SAMPLERS if one not in ("gp", "grid")])
def test_no_trial_is_left_running_in_optunas_study(sampler):
    made = study(sampler)
    made.ask(in_flight=ALL[20:23])
    states = {trial.state for trial in made._study.get_trials(deepcopy=False)}
    assert optuna.trial.TrialState.RUNNING not in states


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random"])
def test_a_suggestion_after_one_with_trials_in_flight_is_as_without(sampler):
    made = study(sampler)
    made.ask(in_flight=ALL[20:23])
    assert made.ask() == study(sampler).ask()


def test_tpe_avoids_what_is_running():
    suggested = study("tpe").ask()
    assert study("tpe").ask(in_flight=[suggested] * 8) != suggested
