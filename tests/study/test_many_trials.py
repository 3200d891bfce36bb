"""Costs that grow with the trials of a study, counted: thousands cost no more than hundreds."""

import numpy
import pytest

from autotune.analysis.front import TrialIndex
from autotune.analysis.no_worse_than import find_matches
from autotune.analysis.tolerance import Tolerance
from autotune.cli.tables import make_console, print_trials
from autotune.study.records import result_of
from autotune.study.sampler.ehvi_sampler import MOST_CANDIDATES, EhviSampler, Knowledge, Scores
from autotune.study.sampler.optuna_samplers import RESULTS_SEEN, OptunaStudy
from autotune.study.sampler.optuna_values import ObjectiveEncoder
from autotune.study.sampler.surrogate import MOST_SEEN
from autotune.study.sampler.training_subset import MOST_LATEST, MOST_NEAR, TrainingSubset
from tests.building import made_study

TRIALS = 1500


@pytest.fixture(scope="module")
def study():
    return made_study.definition("many")


@pytest.fixture(scope="module")
def made(study):
    return made_study.make(study, trials=TRIALS)


@pytest.fixture(scope="module")
def result(study, made, tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('many')}/autotune.db"
    made_study.write(url, study, made)
    store = made_study.StudyStore(url)
    try:
        return result_of(store, "many")
    finally:
        store.close()


@pytest.fixture
def inverted(monkeypatch):
    """Sizes of the matrices that are factorized while the test runs."""
    sizes = []
    factorize = numpy.linalg.cholesky
    monkeypatch.setattr(numpy.linalg, "cholesky", lambda m: sizes.append(len(m)) or factorize(m))
    return sizes


@pytest.mark.slow
def test_the_surrogate_of_a_choice_sees_no_more_than_some_hundreds_of_trials(study, made, inverted):
    legal = study.legal_space()
    EhviSampler(legal, cap_bytes=study.cap_bytes).choose(
        made.records, made.forecasts, excluded={record.config for record in made.records}, seed=1
    )
    assert max(inverted) == MOST_SEEN


@pytest.mark.slow
def test_scales_are_found_once_a_choice_however_many_configurations_are_looked_at(
    study, made, inverted, monkeypatch
):
    monkeypatch.setattr(
        "autotune.study.sampler.ehvi_sampler.CONVERGED_IMPROVEMENT", float("inf")
    )  # every batch of the space
    legal = study.legal_space()
    all_but_three_batches = {*list(legal.configurations())[3 * MOST_CANDIDATES :]}
    EhviSampler(legal, cap_bytes=study.cap_bytes).choose(
        made.records, (), excluded=all_but_three_batches, seed=1
    )
    assert (
        len(inverted) <= 2 * 128
    )  # two sets of fields that differ, where a batch happens to miss a value


@pytest.mark.slow
def test_nothing_is_chosen_only_after_the_whole_space_was_scored(study, made, monkeypatch):
    looked_at = []

    def no_gain(knowledge, assessed):
        looked_at.extend(config.fingerprint for config in assessed.candidates.configs)
        none = numpy.zeros(len(assessed.candidates.configs))
        return Scores(expected=none, reservation_values=none)

    monkeypatch.setattr(Knowledge, "scores", no_gain)
    legal = study.legal_space()
    tried = {record.config for record in made.records}
    assert (
        EhviSampler(legal, cap_bytes=study.cap_bytes).choose(
            made.records, (), excluded=tried, seed=1
        )
        is None
    )
    assert {*looked_at} == {
        config.fingerprint for config in legal.configurations() if config not in tried
    }


def test_trials_near_the_front_are_selected_however_old(made):
    configs = [record.config for record in made.records]
    near = frozenset(config.fingerprint for config in configs[:20])
    assert {*range(20)} <= {*TrainingSubset(near=near).indices(configs)}


def test_the_latest_trials_are_seen(made):
    indices = TrainingSubset().indices([record.config for record in made.records])
    assert {*range(TRIALS - MOST_LATEST, TRIALS)} <= {*indices}


def test_selected_trials_are_distinct_and_bounded(made):
    configs = [record.config for record in made.records]
    near = frozenset(config.fingerprint for config in configs[:: TRIALS // (2 * MOST_NEAR)])
    indices = TrainingSubset(near=near).indices(configs)
    assert len(indices) == len({*indices}) == MOST_SEEN


def test_a_study_of_usual_size_is_seen_whole(made):
    assert [*TrainingSubset().indices([r.config for r in made.records[:MOST_SEEN]])] == [
        *range(MOST_SEEN)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "trials"), [("nsga2", 400), pytest.param("tpe", 800, marks=pytest.mark.slow)]
)
def test_with_more_results_than_a_sampler_sees_a_continued_study_goes_on_the_same(
    study, made, sampler, trials
):
    observer = ObjectiveEncoder(cap_bytes=study.cap_bytes, vocab_size=study.workload.vocab_size)
    all_through, later = (
        OptunaStudy(legal=study.legal_space(), sampler=sampler, seed=0) for _ in range(2)
    )
    for record in made.records[:trials]:
        for one in (all_through, later):
            one.tell(record.config, observer.to_optuna_values(record))
        if record.number % 50 == 0:
            all_through.ask()
    assert all_through.ask() == later.ask()
    assert len(later._study.trials) - 1 < RESULTS_SEEN[sampler] * 1.25 < trials


@pytest.mark.slow
def test_a_large_study_is_shown_a_line_a_trial(result, tmp_path):
    with (tmp_path / "shown.txt").open("w+") as file:
        print_trials(make_console(file), result, result.trials)
        file.seek(0)
        numbers = [line.split()[0] for line in file if line.split()[0].isdigit()]
    assert numbers == [str(number) for number in range(TRIALS)]


def test_a_study_is_compared_with_itself_without_a_loop_over_all_pairs(result, monkeypatch):
    looked_at = []
    found = TrialIndex.no_worse
    monkeypatch.setattr(
        TrialIndex,
        "no_worse",
        lambda *of, **by: (looked_at.append(one) or one for one in found(*of, **by)),
    )
    matches = find_matches(result, result, tolerance=Tolerance())
    assert len(looked_at) < 10 * len(matches)
