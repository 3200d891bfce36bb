"""Reuse of results with real trainings: what is trained, told, counted and reported."""

from pathlib import Path

import pytest

import autotune
from autotune.cli.show import ShowCommand, show
from autotune.errors import StudyMismatch
from autotune.study.events import StudyOpened, TrialBegan
from tests.building.results import shared_with, trial

SPACE = """
[techniques]
checkpointing = ["none", "block"]

[defaults]
micro_batch_size = 4

[workload]
layers = 2
width = 32
heads = 2
sequence_length = 32
global_batch = 4
steps = 9
warmup_steps = 2
evaluation_sequences = 4
"""
WIDER = SPACE.replace('"block"]', '"block", "sqrt", "every-2"]')
STORAGE = "sqlite:///studies/autotune.db"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_trial_server):
    folder = tmp_path_factory.mktemp("reuse")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        # Whatever else this machine does meanwhile.
        patched.setattr("autotune.study.opening.reuse.NOISY_SPREAD", float("inf"))
        Path("space.toml").write_text(SPACE)
        Path("wider.toml").write_text(WIDER)
        yield folder


@pytest.fixture(scope="module")
def first(folder):
    """A study of two trials."""
    return autotune.search(
        name="first", space="space.toml", max_mem="1GiB", trials=2, confirm=False
    )


@pytest.fixture(scope="module")
def events():
    return []


@pytest.fixture(scope="module")
def second(first, events):
    """Another study of a wider space under another cap, with one trial."""
    return autotune.search(
        name="second",
        space="wider.toml",
        max_mem="2GiB",
        trials=1,
        sampler="grid",
        confirm=False,
        listener=events.append,
    )


def test_what_an_earlier_study_measured_is_not_trained_again(second, events):
    began = [event.number for event in events if isinstance(event, TrialBegan)]
    assert ([trial.number for trial in second.trials], began) == ([0, 1, 2], [2])


def test_a_reused_trial_has_what_was_measured_and_its_source(first, second):
    for ours in second.trials[:2]:
        theirs = next(trial for trial in first.trials if trial.config == ours.config)
        assert ours.reused_from == trial(theirs.number, "first")
        assert (ours.peak_memory_bytes, ours.tokens_per_second, ours.perplexity) == (
            theirs.peak_memory_bytes,
            theirs.tokens_per_second,
            theirs.perplexity,
        )
        assert ours.predicted_peak_memory_bytes == theirs.predicted_peak_memory_bytes
        assert (ours.feasible, ours.seconds) == (True, None)


def test_a_reused_trial_is_the_representative_of_its_numerics_class(second):
    assert (second.trials[2].reused_from, second.trials[2].perplexity_source) == (
        None,
        shared_with(0),
    )


def test_optuna_is_told_of_reused_results(second):
    loaded = autotune.optuna_study("second")
    told = [trial.user_attrs["autotune_number"] for trial in loaded.get_trials(deepcopy=False)]
    assert sorted(told) == [0, 1, 2]


def test_the_search_reports_in_a_line_what_it_reuses(second, events):
    (opened,) = [event for event in events if isinstance(event, StudyOpened)]
    assert opened.is_new
    assert "Reused    2 results: 2 of study first; --fresh measures them again" in opened.lines


def test_show_says_of_each_trial_where_it_was_measured(second, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    show(ShowCommand(study="second"))
    printed = " ".join(capsys.readouterr().out.split())
    assert all(f"trial {number} of study 'first'" in printed for number in (0, 1))


@pytest.mark.slow
def test_the_number_of_trials_does_not_count_the_reused_ones(second):
    again = autotune.search(name="second", trials=2, confirm=False)
    assert [trial.reused_from is None for trial in again.trials] == [False, False, True, True]


def test_fresh_does_not_continue_a_study_that_took_something_over(second):
    with pytest.raises(StudyMismatch, match="2 results of earlier studies") as raised:
        autotune.search(name="second", fresh=True)
    assert "--name second-fresh" in raised.value.hint
